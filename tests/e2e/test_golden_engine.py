"""The real model under the real engine and a real worker process: greedy ids are the reference's, however they came.

Each condition also shows that it happened: two steps in flight, several chunks, a batch, cached tokens, a preemption.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.ops.models.architectures import read_config
from headrace.ops.weights.gguf import GgufFile
from headrace.sched.engine import Engine
from headrace.sched.executors.worker_process import WorkerProcess
from headrace.sched.messages import SamplingParams, StepDeltas, Submit
from headrace.server.config import Settings
from headrace.server.hardware import read_hardware
from headrace.server.launch import engine_options
from headrace.server.sizing import plan_memory

GOLDEN = msgspec.json.decode((Path(__file__).parents[1] / "data" / "smollm2-135m-instruct-q4_1.json").read_bytes())
CASES: list[dict[str, Any]] = GOLDEN["cases"]


class Answers:
    """What came for each handle."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.retractions: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        """Ids a step, by step."""
        self.ended: dict[int, asyncio.Event] = {}
        self.deepest = 0
        self.engine: Engine | None = None

    def sink(self, deltas: StepDeltas) -> None:
        assert self.engine is not None
        self.deepest = max(self.deepest, len(self.engine.in_flight))
        self.steps[deltas.step] = len(deltas.ids)
        for started in deltas.started:
            self.cached[started.request] = started.cached_tokens
        for i, handle in enumerate(deltas.requests.tolist()):
            self.ids[handle].extend(deltas.ids[deltas.offsets[i] : deltas.offsets[i + 1]].tolist())
        for end in deltas.finished:
            assert end.reason == "length", end
            self.retractions[end.request] = end.retractions
            self.ended[end.request].set()

    async def ask(self, cases: Sequence[dict[str, Any]]) -> list[int]:
        """Submit cases at once, wait for all, and compare; their handles."""
        assert self.engine is not None
        handles = []
        for case in cases:
            handle = len(self.ids) + 1
            self.ids[handle], self.ended[handle] = [], asyncio.Event()
            sampling = SamplingParams(max_tokens=len(case["greedy_ids"]), temperature=0.0)
            self.engine.submit(Submit(handle, np.array(case["prompt_ids"], np.int32), sampling))
            handles.append(handle)
        async with asyncio.timeout(120):
            for handle, case in zip(handles, cases):
                await self.ended[handle].wait()
                assert self.ids[handle] == case["greedy_ids"], case["prompt"]
        return handles


@asynccontextmanager
async def engine(model_file: Path, **changed: Any) -> AsyncIterator[Answers]:
    """A float32 engine over a worker process, without warm-up."""
    chosen = {"max_total_tokens": 4096, "context_length": 1024, "max_running_requests": 8} | changed
    settings = Settings(model_path=str(model_file), dtype="float32", skip_server_warmup=True, cpu_threads=1, **chosen)
    file = GgufFile.open(model_file)
    model = read_config(file)
    file.close()
    options = engine_options(settings, model_file, model, plan_memory(model, settings, read_hardware()), b"golden")

    async def connect() -> WorkerProcess:
        return WorkerProcess(options.start.ring, options.start.threads)

    answers = Answers()
    answers.engine = Engine(options, connect, answers.sink)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(answers.engine.run())
        yield answers
        answers.engine.check_integrity()
        running.cancel()


async def test_alone_and_again_all_at_once_from_the_cache_with_overlap(model_file: Path) -> None:
    async with engine(model_file) as answers:
        for case in CASES:
            await answers.ask([case])
        again = await answers.ask(CASES)
        for handle, case in zip(again, CASES):
            assert answers.cached[handle] == (len(case["prompt_ids"]) - 1) // 16 * 16
        assert sum(answers.cached.values()) > 0
        assert max(answers.steps.values()) == len(CASES)
        assert answers.deepest == 2


async def test_without_overlap(model_file: Path) -> None:
    async with engine(model_file, disable_overlap_schedule=True) as answers:
        await answers.ask(CASES)
        assert answers.deepest == 1


@pytest.mark.parametrize("chunk", [5, 16])
async def test_in_chunks(model_file: Path, chunk: int) -> None:
    async with engine(model_file, chunked_prefill_size=chunk) as answers:
        (handle,) = await answers.ask([max(CASES, key=lambda case: len(case["prompt_ids"]))])
        assert answers.engine is not None
        outputs = len(answers.ids[handle])
        assert answers.engine.status().steps >= outputs - 1 + 39 // chunk
        await answers.ask(CASES)


async def test_after_a_preemption(model_file: Path) -> None:
    # 5 requests of up to 103 tokens need 31 pages; there are 16, and admission reserves next to nothing.
    small = {"schedule_conservativeness": 0.1, "max_total_tokens": 256, "context_length": 256}
    async with engine(model_file, **small) as answers:
        handles = await answers.ask(CASES)
        assert sum(answers.retractions[handle] for handle in handles) > 0

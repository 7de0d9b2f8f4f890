"""The real model under the real engine, with a device worker and a grammar worker: requests in, ids and ends out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.ops.models.architectures import read_config
from headrace.ops.weights.gguf import GgufFile
from headrace.ops.wire import I32
from headrace.sched.engine import Engine
from headrace.sched.executors.worker_process import WorkerProcess
from headrace.sched.messages import Finished, SamplingParams, StepDeltas, Submit
from headrace.server.config import Settings
from headrace.server.grammar_process import GrammarProcess
from headrace.server.hardware import read_hardware
from headrace.server.launch import engine_options
from headrace.server.sizing import plan_memory


class Asker:
    """What came for each handle."""

    engine: Engine

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, Finished] = {}
        self.cached: dict[int, int] = {}
        """Tokens of each prompt that were not computed."""
        self.deepest = 0
        self.grammar_workers: list[GrammarProcess] = []
        self._ended: dict[int, asyncio.Event] = {}

    def sink(self, deltas: StepDeltas) -> None:
        self.deepest = max(self.deepest, len(self.engine.in_flight))
        self.cached |= {started.request: started.cached_tokens for started in deltas.started}
        for i, handle in enumerate(deltas.requests.tolist()):
            self.ids[handle].extend(deltas.ids[deltas.offsets[i] : deltas.offsets[i + 1]].tolist())
        for end in deltas.finished:
            self.ends[end.request] = end
            self._ended[end.request].set()

    def submit(self, prompt: I32, sampling: SamplingParams) -> int:
        handle = len(self.ids) + 1
        self.ids[handle], self._ended[handle] = [], asyncio.Event()
        self.engine.submit(Submit(handle, prompt, sampling))
        return handle

    async def outputs(self, prompt: I32, samplings: Sequence[SamplingParams]) -> list[list[int]]:
        """Submit all at once, wait for all; their ids."""
        handles = [self.submit(prompt, sampling) for sampling in samplings]
        return [await self.ended(handle) for handle in handles]

    async def ended(self, handle: int) -> list[int]:
        """Wait for one's end; its ids."""
        async with asyncio.timeout(240):
            await self._ended[handle].wait()
        return self.ids[handle]


@asynccontextmanager
async def asking(model_file: Path, **changed: Any) -> AsyncIterator[Asker]:
    """A float32 engine, without warm-up."""
    chosen = {"max_total_tokens": 4096, "context_length": 1024, "max_running_requests": 16} | changed
    settings = Settings(model_path=str(model_file), dtype="float32", skip_server_warmup=True, cpu_threads=1, **chosen)
    with GgufFile.open(model_file) as file:
        model = read_config(file)
    options = engine_options(settings, model_file, model, plan_memory(model, settings, read_hardware()), b"asking")
    asker = Asker()

    async def connect() -> WorkerProcess:
        return WorkerProcess(options.start.ring, options.start.threads)

    async def connect_grammar() -> GrammarProcess:
        asker.grammar_workers.append(GrammarProcess(model_file))
        return asker.grammar_workers[-1]

    asker.engine = Engine(options, connect, asker.sink, connect_grammar=connect_grammar)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(asker.engine.run())
        yield asker
        asker.engine.check_integrity()
        running.cancel()

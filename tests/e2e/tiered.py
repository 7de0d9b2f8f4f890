"""An engine with all three tiers and real processes, in the test's own: what each request gave, and from which tier."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.kvcache.storage.agent_process import AgentProcess
from headrace.ops.models.architectures import read_config
from headrace.ops.weights.files import open_model_file
from headrace.ops.wire import Start
from headrace.sched.engine import Engine
from headrace.sched.executors.worker_process import WorkerProcess
from headrace.sched.messages import Flushed, SamplingParams, Started, StepDeltas, Submit
from headrace.server.config import Settings
from headrace.server.fingerprint import model_fingerprint
from headrace.server.hardware import read_hardware
from headrace.server.host_pool import HostPool
from headrace.server.launch import engine_options, with_card
from headrace.server.sizing import plan_memory
from headrace.server.tiering import plan_tiers

POOL_TOKENS = 640
UNHURRIED = json.dumps({"prefetch_threshold": 1, "lookup_timeout_s": 10, "transfer_timeout_s": 60})
"""What is measured is whose bytes they are, not how fast they come."""


PATIENCE_S = 240
"""For a start that compiles its kernels, or a long prompt, on a machine that others use too."""


async def until(holds: Callable[[], bool], limit_s: float = 60) -> None:
    """Look every 10 ms, for so long at most: real processes tell no event that a test could wait for."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class TieredEngine:
    """Submits, and keeps what comes."""

    def __init__(self) -> None:
        self.engine: Engine
        self.pids: list[int] = []
        self._ids: dict[int, list[int]] = {}
        self._started: dict[int, Started] = {}
        self._ended: dict[int, asyncio.Event] = {}

    def sink(self, deltas: StepDeltas) -> None:
        for started in deltas.started:
            self._started[started.request] = started
        for i, handle in enumerate(deltas.requests.tolist()):
            self._ids[handle].extend(deltas.ids[deltas.offsets[i] : deltas.offsets[i + 1]].tolist())
        for end in deltas.finished:
            assert end.reason == "length", end
            self._ended[end.request].set()

    async def ask(self, prompt: list[int], outputs: int, salt: str = "") -> tuple[list[int], Started]:
        """Greedy ids, and what the start cost."""
        handle = len(self._ids) + 1
        self._ids[handle], self._ended[handle] = [], asyncio.Event()
        sampling = SamplingParams(max_tokens=outputs, temperature=0.0)
        self.engine.submit(Submit(handle, np.array(prompt, np.int32), sampling, cache_salt=salt))
        async with asyncio.timeout(PATIENCE_S):
            await self._ended[handle].wait()
        return self._ids[handle], self._started[handle]

    async def settled(self) -> None:
        """Everything that was computed has reached storage, and been acknowledged."""
        await until(lambda: not self.engine.writing and self.engine.status().copied_pages > 0)
        status = self.engine.status()
        copied = status.copied_pages + sum(group.copied_pages for group in status.window_groups)
        assert status.stored_pages == copied and not status.unstored_pages + status.skipped_pages

    async def push_out(self) -> None:
        """Use the whole device for something else."""
        await self.ask([7] * (POOL_TOKENS - 1), 1)
        await self.settled()

    def flush(self) -> Flushed:
        return self.engine.flush_cache()


@asynccontextmanager
async def tiered_engine(
    model: Path, directory: Path, worker: Callable[[Start], Start] = lambda start: start, **changed: Any
) -> AsyncIterator[TieredEngine]:
    """A float32 engine over a worker and an agent, both ended when the block ends; `model`: a file or folder. `worker`
    may tell the worker something else than a server would."""
    chosen: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "page_size": 4,
        "max_total_tokens": POOL_TOKENS,
        "context_length": POOL_TOKENS,
        "max_running_requests": 4,
        "hicache_size": 0.2,
        "disk_cache_dir": str(directory),
        "disk_cache_size": "2GB",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": UNHURRIED,
    }
    settings = Settings(model_path=str(model), skip_server_warmup=True, cpu_threads=1, **(chosen | changed))
    hardware, file = with_card(read_hardware(), settings), open_model_file(model)
    try:
        config = read_config(file)
        plan = plan_memory(config, settings, hardware)
        quantization, dot = settings.quantization, hardware.dot
        fingerprint = model_fingerprint(file, plan.layout, plan.dtype, quantization, plan.kernels, dot)
    finally:
        file.close()
    tiers = plan_tiers(settings, plan, hardware, fingerprint)
    options = engine_options(settings, model, config, plan, fingerprint, tiers, dot)
    options = msgspec.structs.replace(options, start=worker(options.start))
    host = HostPool(tiers.host_bytes)
    tiered = TieredEngine()

    async def connect() -> WorkerProcess:
        process = WorkerProcess(options.start.ring, options.start.threads, host.descriptor)
        tiered.pids.append(process.pid)
        return process

    async def connect_storage() -> AgentProcess:
        agent = AgentProcess(host.descriptor)
        tiered.pids.append(agent.pid)
        return agent

    tiered.engine = Engine(options, connect, tiered.sink, connect_storage)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(tiered.engine.run())
            engine = tiered.engine
            await until(lambda: engine.phase == "ready" and engine.status().storage_state == "usable", PATIENCE_S)
            yield tiered
            tiered.engine.check_integrity()
            running.cancel()
    finally:
        host.close()

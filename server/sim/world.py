"""A whole engine in virtual time: the real scheduler and cache, the oracle behind a seeded link, and a judge.

in     a seed, sizes, delays; then submissions, aborts, stop strings, deaths and hangs of the device
out    each request's ids and end; every id is compared with the oracle's as it comes
state  the engine, the current device, what each request has received
owner  one test or one torture run
ready  after `start`, inside `virtual_loop.run`
end    `finish` waits until every request has ended, then checks that nothing is held
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from headrace.kvcache.host import WritePolicy
from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.kvcache.prefetch import PrefetchOptions
from headrace.kvcache.storage.client import StorageLimits
from headrace.kvcache.storage.protocol import OpenStore
from headrace.ops.transport import Transport, TransportClosed
from headrace.ops.wire import (
    Backup,
    BatchRing,
    Command,
    Forward,
    GroupShape,
    HostArea,
    Reply,
    RingGeometry,
    Start,
    StepCost,
    StepDone,
    command_decoder,
    encoder,
)
from headrace.sched.batch import max_batch_bytes
from headrace.sched.copying import MAX_COPY_BYTES
from headrace.sched.device import EngineFailed
from headrace.sched.engine import Engine
from headrace.sched.executors.oracle import OracleDevice
from headrace.sched.messages import SamplingParams, StepDeltas, Submit
from headrace.sched.options import EngineOptions
from headrace.sched.policies import SchedulePolicy
from headrace.server.sim.grammar import SimGrammarWorker
from headrace.server.sim.judge import Watched
from headrace.server.sim.storage import FaultyStore, SimAgent, StorageTimes, StoreFaults
from headrace.server.sim.trace import Trace
from headrace.server.sim.transport import Faults, SimLink, SimServer
from headrace.server.sim.virtual_loop import running_loop

VOCAB: Final = 997
STUCK_S: Final = 20.0
"""With requests to serve, the engine tells something more often: a device that hangs is replaced after 2 to 6 s."""
COPY_NS: Final = 20_000
"""Of a copy to the host, beside its pages."""
STARVED_S: Final = 600.0
"""Of one request, whatever the others do."""


class WorldShape(msgspec.Struct, frozen=True):
    """Sizes and times of a simulated engine."""

    slots: int = 4
    pages: int = 32
    page_tokens: int = 4
    context_tokens: int = 64
    prefill_tokens: int = 16
    overlap: bool = True
    reuse: bool = True
    forward_us: int = 900
    """Of one `Forward`; a random half to one and a half of it."""
    delay_us: int = 50
    """Of one message, at most."""
    start_ms: int = 100
    max_queued_requests: int = 64
    max_queued_tokens: int = 1 << 16
    conservativeness: float = 1.0
    schedule_policy: SchedulePolicy = "least-work"
    preempt_above: int | None = None
    target_itl_ms: float = 0.0
    window_tokens: int = 0
    """Of a window group beside the full one; 0 for none."""
    window_pages: int = 0
    """Device pages of the window group."""
    host_pages: int = 0
    window_host_pages: int = 0
    """Host pages of the window group."""
    write_policy: WritePolicy = "write_through"
    storage_pages: int = 0
    """Capacity of the storage tier, 0 for none; it needs host pages."""
    storage: StorageTimes = StorageTimes()
    store_faults: StoreFaults = StoreFaults()
    prefetch: PrefetchOptions = PrefetchOptions()
    token_us: float = 0.0
    """Of one prefill token, beyond `forward_us`; the engine is told so in its warm-up."""
    step_timeout_s: float = 5.0
    copy_pages: int = 0
    """Of one copy to the host, at most; 0: as many as the engine orders otherwise."""
    copy_page_us: float = 1.0
    """Of a page that is copied to the host, beside the steps; each copy takes 20 more."""
    mask_us: int = 100
    """Of one command to the grammar worker, at most; one in eight takes ten times as long."""


DEFAULT_SHAPE: Final = WorldShape()


class _SimConnection:
    """One life of the oracle behind a link."""

    pid = 0

    def __init__(self, world: World, faults: Faults) -> None:
        shape, rng, loop = world.shape, world.rng, running_loop()
        self._link = SimLink(rng, loop, world._delay_ns, far=faults, trace=world.trace, name=f"device{world.lives}")
        self.ring = BatchRing(bytearray(world.geometry.size_bytes), world.geometry)
        self.server = SimServer(loop, self._link.far, self._cost_ns)
        self._step_ms = 0.0
        """What the last `Forward` took, where the engine was told what to expect."""
        costs = [
            StepCost(1, 0, 0, shape.forward_us / 1e3),
            StepCost(0, 100, 0, (shape.forward_us + 100 * shape.token_us) / 1e3),
        ]
        device = OracleDevice(self.ring, self._reply, VOCAB, costs if shape.token_us else (), world.host_pool)
        self._begun: deque[Command] = deque()
        """Commands that take their time, decoded when they began: one lane, so they end in that order."""
        self.server.serve(lambda message: self._act(self._begun.popleft()))
        self._world, self._device = world, device
        self._copied_ns = 0
        """When the copies to the host that were sent will have been made."""

    @property
    def transport(self) -> Transport:
        return self._link.near

    def kill(self) -> None:
        self._link.far.kill("the device worker ended with SIGKILL")

    def hang(self, duration_ns: int) -> None:
        self._link.far.hang(duration_ns)

    def close(self) -> None:
        self._link.near.close()
        self.server.stop()

    def _reply(self, reply: Reply) -> None:
        if isinstance(reply, StepDone):
            reply = StepDone(reply.step, self._step_ms)
        self.server.reply(encoder.encode(reply))

    def _act(self, command: Command) -> None:
        """At the end of a command, or for a copy where it begins: it delays no step, and is made as late as may be."""
        if not isinstance(command, Backup):
            self._device.handle(command)
            return
        loop, shape = running_loop(), self._world.shape
        cost_ns = COPY_NS + int(len(command.device_pages) * shape.copy_page_us * 1000)
        self._copied_ns = max(loop.time_ns(), self._copied_ns) + cost_ns
        loop.call_at_ns(self._copied_ns, self._copy, command)

    def _copy(self, command: Backup) -> None:
        loop, hung_until_ns = running_loop(), self._link.far.hung_until_ns
        if self.server.stopped:
            return
        if hung_until_ns > loop.time_ns():
            loop.call_at_ns(hung_until_ns, self._copy, command)
            return
        try:
            self._device.handle(command)
        except TransportClosed:
            self.server.stop()

    def _cost_ns(self, message: bytes) -> int:
        shape = self._world.shape
        command = command_decoder.decode(message)
        self._begun.append(command)
        match command:
            case Start():
                return shape.start_ms * 1_000_000
            case Forward() as forward:
                self._world.deepest = max(self._world.deepest, len(self._world.engine.in_flight))
                prefill = self.ring.counts(forward.ring_slot)[1].tokens if shape.token_us else 0
                cost_us = shape.forward_us + prefill * shape.token_us
                cost_ns = int(cost_us * 1000 * (0.5 + self._world.rng.random()))
                self._step_ms = cost_ns / 1e6 if shape.token_us else 0.0
                return cost_ns
            case Backup():
                return 0
            case _:
                return 20_000


class World:
    """An engine, its oracle and its judge."""

    def __init__(self, seed: int, shape: WorldShape = DEFAULT_SHAPE, check_every_step: bool = True) -> None:
        loop = running_loop()
        self.shape = shape
        self.rng = random.Random(seed)
        self.trace = Trace(loop.time_ns)
        self.lives = 0
        self.requests: dict[int, Watched] = {}
        self.unfinished: dict[int, Watched] = {}
        self.moved_s = 0.0
        """When the engine last told anything."""
        self.connection: _SimConnection | None = None
        self.deltas: list[StepDeltas] = []
        self.submitted_s: dict[int, float] = {}
        self.first_ids_s: dict[int, float] = {}
        self.deepest = 0
        """Steps launched and not collected, at most."""
        self._check_every_step = check_every_step
        self._checked = -1
        self._engine_task: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        groups = [LayerGroup("full", 0, (0,), 1, 8, 1)]
        if shape.window_tokens:
            groups.append(LayerGroup("window", shape.window_tokens, (1,), 1, 8, 1))
        self.windows = [group.window_tokens for group in groups[1:]]
        self.layout = KvLayout(shape.page_tokens, tuple(groups))
        chunk = max(shape.prefill_tokens, shape.page_tokens)
        batch_bytes = max_batch_bytes(shape.slots, shape.context_tokens, chunk, shape.page_tokens, len(groups))
        self.geometry = RingGeometry(3, batch_bytes, shape.slots, chunk, VOCAB)
        self.agents = 0
        self.agent: SimAgent | None = None
        self.grammar_lives = 0
        self.grammar_worker: SimGrammarWorker | None = None
        self.store = FaultyStore(shape.storage_pages * 8192, self.rng, shape.store_faults)
        slot_bytes = self.layout.host_slot_bytes(0) if shape.host_pages else 0
        areas = self.areas = [
            HostArea(shape.host_pages * slot_bytes, slot_bytes, shape.window_host_pages) for _ in self.windows
        ]
        host_pages = shape.host_pages + sum(area.pages for area in areas)
        self.host_pool = bytearray(host_pages * slot_bytes) if slot_bytes else None
        start = Start(
            model_path="",
            dtype="float32",
            quantization="none",
            threads=1,
            max_slots=shape.slots,
            max_context_tokens=shape.context_tokens,
            page_tokens=shape.page_tokens,
            ring=self.geometry,
            groups=[GroupShape(one.kind, one.window_tokens, list(one.layers), 1, 8) for one in groups],
            host_slot_bytes=slot_bytes,
            window_areas=areas if slot_bytes else [],
        )
        self.options = EngineOptions(
            layout=self.layout,
            start=start,
            num_pages=[shape.pages, *([shape.window_pages] if self.windows else [])],
            fingerprint=b"oracle",
            max_chunk_tokens=chunk,
            prefill_tokens=shape.prefill_tokens,
            overlap=shape.overlap,
            reuse=shape.reuse,
            max_queued_requests=shape.max_queued_requests,
            max_queued_tokens=shape.max_queued_tokens,
            conservativeness=shape.conservativeness,
            schedule_policy=shape.schedule_policy,
            preempt_above=shape.preempt_above,
            schedule_seed=seed,
            target_itl_ms=shape.target_itl_ms,
            host_pages=shape.host_pages,
            window_host_pages=[area.pages for area in areas],
            storage=self._open_store() if shape.storage_pages else None,
            storage_limits=StorageLimits(lookup_s=0.05, limbo_s=1.0, breaker_s=1.0),
            prefetch=shape.prefetch,
            write_policy=shape.write_policy,
            max_copy_bytes=shape.copy_pages * self.layout.page_bytes(0) if shape.copy_pages else MAX_COPY_BYTES,
            step_timeout_s=shape.step_timeout_s,
        )
        self.engine = Engine(self.options, self._connect, self._sink, self._connect_storage, self._connect_grammar)

    async def __aenter__(self) -> World:
        self._engine_task = running_loop().create_task(self.engine.run(), name="engine")
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        if self._engine_task is None:
            return
        self._engine_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._engine_task

    async def cancel_engine(self, stage: str = "") -> None:
        """Cancel the engine's task, or one of its stages, at whatever await it is. A cancelled engine gives the device
        and the agent back and tells nobody; one that has lost a stage has failed, and tells everybody."""
        task = self._engine_task
        assert task is not None and not task.done()
        victims = [other for other in asyncio.all_tasks() if other.get_name() == stage] if stage else [task]
        self.trace.record("cancel", stage)
        victims[0].cancel()
        async with asyncio.timeout(STUCK_S):
            await asyncio.wait([task])
        self._engine_task = None
        if stage:
            assert isinstance(task.exception(), EngineFailed), f"the {stage} stage is gone and the engine goes on"
            assert self.engine.phase == "failed" and not self.unfinished, "the engine has failed, and nobody was told"
        else:
            assert task.cancelled()
        assert self.connection is None or self.connection.server.stopped, "the device still runs"
        assert self.agent is None or self.agent.stopped, "the storage agent still runs"
        self.engine.check_integrity()

    def submit(
        self, prompt: Sequence[int], max_tokens: int = 8, salt: str = "", priority: int = 0, **sampling: object
    ) -> Watched:
        """Submit a prompt; raises what the engine raises."""
        params = msgspec.convert({"max_tokens": max_tokens, **sampling}, SamplingParams)
        ids = np.array(prompt, np.int32)
        return self.submit_message(Submit(len(self.requests) + 1, ids, params, cache_salt=salt, priority=priority))

    def submit_message(self, submit: Submit) -> Watched:
        """The same for a ready message; its handle must be `len(requests) + 1`."""
        assert submit.request == len(self.requests) + 1
        self.engine.submit(submit)
        watched = Watched(submit, VOCAB, running_loop().time(), self.windows)
        self.unfinished[submit.request] = self.requests[submit.request] = watched
        self.submitted_s[submit.request] = running_loop().time()
        self.trace.record("submit", submit.request, len(submit.prompt_ids), submit.sampling.max_tokens)
        return watched

    def conclude(self, request: int, n_tokens: int) -> None:
        """A stop string is found in a request's first outputs."""
        if (watched := self.requests.get(request)) is not None and watched.finished is None:
            watched.concluded = True
        self.engine.conclude(request, n_tokens)

    def abort(self, watched: Watched) -> None:
        """The client does not want it any more: it must be gone from every list when `abort` returns."""
        self.engine.abort(watched.submit.request)
        stage = self.engine.stage_of(watched.submit.request)
        assert stage.startswith("unknown"), f"request {watched.submit.request} was aborted, and is still {stage}"

    def kill_device(self) -> None:
        """The device's process dies."""
        if self.connection is not None:
            self.trace.record("kill")
            self.connection.kill()

    def hang_device(self, duration_s: float) -> None:
        """The device answers nothing for a while."""
        if self.connection is not None:
            self.trace.record("hang", duration_s)
            self.connection.hang(round(duration_s * 1e9))

    def kill_agent(self) -> None:
        """The storage agent's process dies."""
        if self.agent is not None:
            self.trace.record("kill agent")
            self.agent.kill()

    def hang_agent(self, duration_s: float) -> None:
        """The storage agent answers nothing for a while."""
        if self.agent is not None:
            self.trace.record("hang agent", duration_s)
            self.agent.hang(round(duration_s * 1e9))

    def kill_grammar_worker(self) -> None:
        """The grammar worker's process dies."""
        if self.grammar_worker is not None:
            self.trace.record("kill grammar worker")
            self.grammar_worker.kill()

    def hang_grammar_worker(self, duration_s: float) -> None:
        """The grammar worker answers nothing for a while."""
        if self.grammar_worker is not None:
            self.trace.record("hang grammar worker", duration_s)
            self.grammar_worker.hang(round(duration_s * 1e9))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, looking after every step and every change of the device."""
        while not condition():
            self._moved.clear()
            await self._moved.wait()

    def check_progress(self) -> None:
        """Raise AssertionError if a request is stuck, in virtual time, and say where it stands."""
        now_s = running_loop().time()
        for watched in self.unfinished.values():
            nothing_moves = now_s - max(self.moved_s, watched.began_s) > STUCK_S
            if nothing_moves or now_s - watched.moved_s > STARVED_S:
                name, wanted = watched.submit.request, watched.submit.sampling.max_tokens
                raise AssertionError(
                    f"request {name} is stuck: {self.engine.stage_of(name)}; {len(watched.ids)} ids of {wanted}, "
                    f"nothing for {now_s - watched.moved_s:.0f} s; {self.engine.status()}"
                )

    async def finish(self) -> None:
        """Wait for every request's end; check that nothing is held any more."""
        for watched in self.requests.values():
            while not watched.ended.is_set():
                self.check_progress()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await watched.ended.wait()
        await asyncio.sleep(3.0)
        # Thousands of pages, each a copy of its own where copies are said to be slow, take some seconds more.
        for _ in range(int(STUCK_S)):
            if self.engine.writing:
                await asyncio.sleep(1.0)
        self.engine.check_integrity()
        status = self.engine.status()
        assert (status.running, status.waiting) == (0, 0)
        assert status.pages_free + status.pages_cached == status.pages_total, "pages are still held or fenced"
        assert not self.engine.writing, "pages are still on their way down"
        assert status.integrity_alarms == 0

    def _check(self) -> None:
        """Every page and lease, unless none has changed hands since the last look; every list and slot."""
        if self.engine.cache_changes == self._checked:
            self.engine.check_lists()
            return
        self.engine.check_integrity()
        self._checked = self.engine.cache_changes

    def _open_store(self) -> OpenStore:
        slot_bytes = self.layout.host_slot_bytes(0)
        return OpenStore(
            backend="memory",
            capacity_bytes=self.shape.storage_pages * 8192,
            page_tokens=self.shape.page_tokens,
            slot_bytes=[slot_bytes, *(area.slot_bytes for area in self.areas)],
            host_offsets=[0, *(area.offset for area in self.areas)],
            host_pages=[self.shape.host_pages, *(area.pages for area in self.areas)],
            model=bytes(16),
        )

    async def _connect_storage(self) -> SimAgent:
        self.agents += 1
        await asyncio.sleep(0.01)
        assert self.host_pool is not None
        link = SimLink(self.rng, running_loop(), self._delay_ns, trace=self.trace, name=f"agent{self.agents}")
        slow = self.shape.store_faults.slow
        self.agent = SimAgent(link, self.store, self.host_pool, self.shape.storage, slow)
        return self.agent

    async def _connect_grammar(self) -> SimGrammarWorker:
        self.grammar_lives += 1
        await asyncio.sleep(0.01)
        link = SimLink(self.rng, running_loop(), self._delay_ns, trace=self.trace, name=f"grammar{self.grammar_lives}")
        self.grammar_worker = SimGrammarWorker(link, VOCAB, self.shape.mask_us)
        return self.grammar_worker

    def _delay_ns(self, rng: random.Random) -> int:
        return rng.randrange(1000 * self.shape.delay_us + 1)

    async def _connect(self) -> _SimConnection:
        self.lives += 1
        await asyncio.sleep(0.01)
        self.connection = _SimConnection(self, Faults())
        return self.connection

    def _sink(self, deltas: StepDeltas) -> None:
        self._moved.set()
        self.deltas.append(deltas)
        self.trace.record("step", deltas.step, *deltas.ids.tolist())
        if self._check_every_step and self.engine.phase != "failed":
            self._check()
        now_s = self.moved_s = running_loop().time()
        for started in deltas.started:
            watched = self.requests[started.request]
            assert watched.started is None and not watched.ids
            watched.started = started
            self.first_ids_s[started.request] = running_loop().time()
        for part in deltas.prompt_logprobs:
            watched = self.requests[part.request]
            watched.prompt_logprobs.append(part)
            watched.moved_s = now_s
        ids, offsets = deltas.ids.tolist(), deltas.offsets.tolist()
        for i, handle in enumerate(deltas.requests.tolist()):
            watched = self.requests[handle]
            watched.take(ids[offsets[i] : offsets[i + 1]])
            watched.moved_s = now_s
        for end in deltas.finished:
            self.requests[end.request].end(end)
            self.unfinished.pop(end.request)
            self.trace.record("end", end.request, end.reason, end.n_tokens)

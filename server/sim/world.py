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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from headrace.kvcache.host import WritePolicy
from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.kvcache.prefetch import PrefetchOptions
from headrace.kvcache.storage.client import StorageLimits
from headrace.kvcache.storage.protocol import OpenStore
from headrace.ops.transport import Transport
from headrace.ops.wire import (
    BatchRing,
    Forward,
    GroupShape,
    Reply,
    RingGeometry,
    Start,
    StepCost,
    StepDone,
    command_decoder,
    encoder,
)
from headrace.sched.batch import max_batch_bytes
from headrace.sched.engine import Engine
from headrace.sched.executors.oracle import OracleDevice, expected, prompt_logprob_at
from headrace.sched.messages import Finished, PromptLogprobs, SamplingParams, Started, StepDeltas, Submit
from headrace.sched.options import EngineOptions
from headrace.sched.policies import SchedulePolicy
from headrace.server.sim.grammar import SimGrammarWorker, compile_toy
from headrace.server.sim.storage import LastingStore, SimAgent, StorageTimes
from headrace.server.sim.trace import Trace
from headrace.server.sim.transport import Faults, SimLink, SimServer
from headrace.server.sim.virtual_loop import running_loop

VOCAB: Final = 997


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
    host_pages: int = 0
    write_policy: WritePolicy = "write_through"
    storage_pages: int = 0
    """Capacity of the storage tier, 0 for none; it needs host pages."""
    storage: StorageTimes = StorageTimes()
    prefetch: PrefetchOptions = PrefetchOptions()
    token_us: float = 0.0
    """Of one prefill token, beyond `forward_us`; the engine is told so in its warm-up."""
    step_timeout_s: float = 5.0
    mask_us: int = 100
    """Of one command to the grammar worker, at most; one in eight takes ten times as long."""


DEFAULT_SHAPE: Final = WorldShape()


@dataclass
class Watched:
    """What the world knows of one request."""

    submit: Submit
    ids: list[int] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    concluded: bool = False
    """A stop string was found in it."""

    def expected(self) -> list[int]:
        sampling = self.submit.sampling
        return expected(
            self.submit.prompt_ids.tolist(),
            sampling.max_tokens,
            VOCAB,
            sampling.seed & 0xFFFFFFFFFFFFFFFF,
            sampling.stop_ids,
            sampling.min_tokens,
            None if sampling.grammar is None else compile_toy(sampling.grammar, VOCAB),
        )


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
        self.server.serve(lambda message: device.handle(command_decoder.decode(message)))
        self._world = world

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

    def _cost_ns(self, message: bytes) -> int:
        shape = self._world.shape
        match command_decoder.decode(message):
            case Start():
                return shape.start_ms * 1_000_000
            case Forward() as forward:
                self._world.deepest = max(self._world.deepest, len(self._world.engine.in_flight))
                prefill = self.ring.read(forward.ring_slot).counts.tokens if shape.token_us else 0
                cost_us = shape.forward_us + prefill * shape.token_us
                cost_ns = int(cost_us * 1000 * (0.5 + self._world.rng.random()))
                self._step_ms = cost_ns / 1e6 if shape.token_us else 0.0
                return cost_ns
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
        self.connection: _SimConnection | None = None
        self.deltas: list[StepDeltas] = []
        self.submitted_s: dict[int, float] = {}
        self.first_ids_s: dict[int, float] = {}
        self.deepest = 0
        """Steps launched and not collected, at most."""
        self._check_every_step = check_every_step
        self._engine_task: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self.layout = KvLayout(shape.page_tokens, (LayerGroup("full", 0, (0,), 1, 8, 1),))
        chunk = max(shape.prefill_tokens, shape.page_tokens)
        batch_bytes = max_batch_bytes(shape.slots, shape.context_tokens, chunk, shape.page_tokens, 1)
        self.geometry = RingGeometry(3, batch_bytes, shape.slots, chunk, VOCAB)
        self.agents = 0
        self.agent: SimAgent | None = None
        self.grammar_lives = 0
        self.grammar_worker: SimGrammarWorker | None = None
        self.store = LastingStore(shape.storage_pages * 8192)
        self.host_pool = bytearray(shape.host_pages * self.layout.host_slot_bytes(0)) if shape.host_pages else None
        start = Start(
            model_path="",
            dtype="float32",
            quantization="none",
            threads=1,
            max_slots=shape.slots,
            max_context_tokens=shape.context_tokens,
            page_tokens=shape.page_tokens,
            ring=self.geometry,
            groups=[GroupShape("full", 0, [0], 1, 8)],
            host_slot_bytes=self.layout.host_slot_bytes(0) if shape.host_pages else 0,
        )
        self.options = EngineOptions(
            layout=self.layout,
            start=start,
            num_pages=[shape.pages],
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
            storage=self._open_store() if shape.storage_pages else None,
            storage_limits=StorageLimits(lookup_s=0.05, limbo_s=1.0, breaker_s=1.0),
            prefetch=shape.prefetch,
            write_policy=shape.write_policy,
            step_timeout_s=shape.step_timeout_s,
        )
        self.engine = Engine(self.options, self._connect, self._sink, self._connect_storage, self._connect_grammar)

    async def __aenter__(self) -> World:
        self._engine_task = running_loop().create_task(self.engine.run(), name="engine")
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        assert self._engine_task is not None
        self._engine_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._engine_task

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
        watched = self.requests[submit.request] = Watched(submit)
        self.submitted_s[submit.request] = running_loop().time()
        self.trace.record("submit", submit.request, len(submit.prompt_ids), submit.sampling.max_tokens)
        return watched

    def conclude(self, request: int, n_tokens: int) -> None:
        """A stop string is found in a request's first outputs."""
        if (watched := self.requests.get(request)) is not None and watched.finished is None:
            watched.concluded = True
        self.engine.conclude(request, n_tokens)

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

    async def finish(self) -> None:
        """Wait for every request's end; judge them; check that nothing is held any more."""
        for watched in self.requests.values():
            async with asyncio.timeout(3600):
                await watched.ended.wait()
            self.judge(watched)
        await asyncio.sleep(3.0)
        self.engine.check_integrity()
        status = self.engine.status()
        assert (status.running, status.waiting) == (0, 0)
        assert status.pages_free + status.pages_cached == status.pages_total, "pages are still held or fenced"
        assert not self.engine.writing, "pages are still on their way down"
        assert status.integrity_alarms == 0

    def judge(self, watched: Watched) -> None:
        """Raise AssertionError unless an ended request got what it had to."""
        end, want = watched.finished, watched.expected()
        assert end is not None
        assert watched.ids[: len(want)] == want[: len(watched.ids)]
        assert end.n_tokens <= len(watched.ids) <= len(want)
        if end.reason == "length":
            assert watched.ids == want and len(want) == watched.submit.sampling.max_tokens
        elif end.reason == "stop" and end.matched_stop_id >= 0:
            assert watched.ids == want and want[-1] == end.matched_stop_id
        elif end.reason == "stop" and not watched.concluded:
            assert watched.ids == want and end.n_tokens == len(want)
        if watched.submit.sampling.prompt_logprobs >= 0 and end.reason in ("length", "stop"):
            self._judge_prompt_logprobs(watched)

    def _judge_prompt_logprobs(self, watched: Watched) -> None:
        prompt = watched.submit.prompt_ids.tolist()
        first = watched.submit.sampling.prompt_logprobs_from
        got = {
            part.start + i: float(value) for part in watched.prompt_logprobs for i, value in enumerate(part.logprobs)
        }
        assert got == {position: prompt_logprob_at(prompt, position) for position in range(first, len(prompt))}

    def _open_store(self) -> OpenStore:
        slot_bytes = self.layout.host_slot_bytes(0)
        return OpenStore(
            backend="memory",
            capacity_bytes=self.shape.storage_pages * 8192,
            page_tokens=self.shape.page_tokens,
            slot_bytes=[slot_bytes],
            host_offsets=[0],
            host_pages=[self.shape.host_pages],
            model=bytes(16),
        )

    async def _connect_storage(self) -> SimAgent:
        self.agents += 1
        await asyncio.sleep(0.01)
        assert self.host_pool is not None
        link = SimLink(self.rng, running_loop(), self._delay_ns, trace=self.trace, name=f"agent{self.agents}")
        self.agent = SimAgent(link, self.store, self.host_pool, self.shape.storage)
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
            self.engine.check_integrity()
        for started in deltas.started:
            watched = self.requests[started.request]
            assert watched.started is None and not watched.ids
            watched.started = started
            self.first_ids_s[started.request] = running_loop().time()
        for part in deltas.prompt_logprobs:
            self.requests[part.request].prompt_logprobs.append(part)
        for i, handle in enumerate(deltas.requests.tolist()):
            watched = self.requests[handle]
            assert watched.finished is None, "ids after the end"
            watched.ids.extend(deltas.ids[deltas.offsets[i] : deltas.offsets[i + 1]].tolist())
        for end in deltas.finished:
            watched = self.requests[end.request]
            assert watched.finished is None, "two ends"
            watched.finished = end
            watched.ended.set()
            self.trace.record("end", end.request, end.reason, end.n_tokens)

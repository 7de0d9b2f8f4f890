"""One replay: the real engine over a device and a store that only take time, and a client that never waits.

in     a scenario and its workload
out    `Figures`
state  the engine; per request, when it came and when its last id came; gaps between ids
owner  `replay`
ready  when every request has ended
end    the engine is cancelled; nothing outlives the loop

Requests come when the trace says, whatever the server does. Times are those of the engine's loop: a request's first id
is there when its `StepDeltas` is.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.sched.engine import Engine
from headrace.sched.messages import EngineStatus, NeverFits, Overloaded, SamplingParams, StepDeltas, Submit
from headrace.server.sim.cost_device import CostDevice
from headrace.server.sim.cost_store import CostStore, StoredKeys
from headrace.server.sim.scenario import Scenario
from headrace.server.sim.trace import Trace, fingerprint
from headrace.server.sim.transport import SimLink
from headrace.server.sim.virtual_loop import MAX_VIRTUAL_S, run, running_loop
from headrace.server.sim.workload import Workload

LINK_NS: Final = 20_000
"""Of a message between the server and a child process: 11 µs idle, 75 busy."""
START_S: Final = 1.0
"""Virtual time at which the trace begins: device and store are ready."""
_PROGRESS_STEPS: Final = 256


class Times(msgspec.Struct, frozen=True):
    """A distribution, in ms."""

    mean: float
    p50: float
    p90: float
    p99: float


class HitRatios(msgspec.Struct, frozen=True):
    """Shares of all prompt tokens."""

    device: float
    host: float
    storage: float
    total: float
    theoretical: float
    """Of a cache without bounds."""


class Figures(msgspec.Struct, frozen=True):
    """What a replay found. All but the last five are a function of the scenario and its seed."""

    requests: int
    finished: int
    refused: int
    """By the queue's bound, or because they could never fit."""
    failed: int
    virtual_s: float
    """From the first arrival to the last end."""
    prompt_tokens: int
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Times
    itl_ms: Times
    goodput_rps: float
    """Finished requests a second within both objectives: time to first token, and the mean gap between ids."""
    goodput_share: float
    hit_ratio: HitRatios
    prefetch_wasted_bytes: int
    """Read from storage, and not indexed."""
    prefetch_late_bytes: int
    """Read, and indexed after their request had gone on."""
    prefetch_waited_ms: float
    """In all requests together."""
    copied_bytes: int
    stored_bytes: int
    retractions: int
    storage_restarts: int
    integrity_alarms: int
    device_busy_share: float
    steps: int
    digest: str
    """Of every step's requests and ids, and every end."""
    wall_s: float
    cpu_s: float
    steps_per_s: float
    """Steps of the engine a second of CPU."""


Progress = Callable[[int, int], None]
"""(requests ended, requests)."""


def replay(scenario: Scenario, workload: Workload, progress: Progress = lambda done, total: None) -> Figures:
    """Run a scenario to its end. Raises what a failing engine raises."""
    return run(_replay(scenario, workload, progress), max_virtual_s=MAX_VIRTUAL_S, max_turns=1 << 40)


async def _replay(scenario: Scenario, workload: Workload, progress: Progress) -> Figures:
    one = _Replay(scenario, workload, progress)
    began, cpu = time.perf_counter(), time.process_time()
    try:
        async with asyncio.TaskGroup() as group:
            engine = group.create_task(one.engine.run(), name="engine")
            await one.serve()
            status = one.engine.status()
            engine.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return one.figures(status, time.perf_counter() - began, time.process_time() - cpu)


class _Replay:
    def __init__(self, scenario: Scenario, workload: Workload, progress: Progress) -> None:
        self._scenario = scenario
        self._workload = workload
        self._progress = progress
        self._loop = running_loop()
        self._rng = random.Random(scenario.seed)
        self._trace = Trace(self._loop.time_ns, keep=0)
        self._costs = scenario.step_costs()
        self._stored = StoredKeys(scenario.disk_pages)
        self._devices: list[CostDevice] = []
        options = scenario.engine_options()
        self._geometry = options.start.ring
        self.engine = Engine(options, self._connect, self._sink, self._connect_storage)
        count = len(workload.requests)
        # By handle: a request's number in the trace, from 1.
        self._arrived_ns: NDArray[np.int64] = np.zeros(count + 1, np.int64)
        self._first_ns: NDArray[np.int64] = np.zeros(count + 1, np.int64)
        self._last_ns: NDArray[np.int64] = np.zeros(count + 1, np.int64)
        self._outputs: NDArray[np.int32] = np.zeros(count + 1, np.int32)
        self._finished: NDArray[np.bool_] = np.zeros(count + 1, np.bool_)
        self._gaps: NDArray[np.float32] = np.zeros(1 << 16, np.float32)
        self._num_gaps = 0
        self._came = self._ended = self._refused = self._failed = self._prompt_tokens = 0
        self._began_ns = self._end_ns = 0
        self._all_ended = asyncio.Event()

    async def serve(self) -> None:
        """Begin when everything is ready; done when every request has ended."""
        await asyncio.sleep(START_S)
        assert self.engine.phase == "ready", f"the simulated device is {self.engine.phase}"
        self._began_ns = self._loop.time_ns()
        self._arrive()
        await self._all_ended.wait()

    def _arrive(self) -> None:
        """The next request comes; the one after it is timed."""
        request = self._workload.requests[self._came]
        self._came += 1
        handle = self._came
        self._arrived_ns[handle] = self._loop.time_ns()
        self._prompt_tokens += request.prompt_tokens
        late_ns = round(self._scenario.request_ms * 1e6)
        if late_ns:
            self._loop.call_later_ns(late_ns, self._submit, handle)
        else:
            self._submit(handle)
        if self._came < len(self._workload.requests):
            due_ns = self._began_ns + self._workload.requests[self._came].arrival_ns
            self._loop.call_at_ns(due_ns, self._arrive)

    def _submit(self, handle: int) -> None:
        request = self._workload.requests[handle - 1]
        prompt = self._workload.prompt_ids(request, self._scenario.model.vocab)
        try:
            self.engine.submit(Submit(handle, prompt, SamplingParams(max_tokens=request.output_tokens, temperature=0)))
        except (Overloaded, NeverFits) as refusal:
            self._trace.record("refused", handle, type(refusal).__name__)
            self._refused += 1
            self._end_one()

    def _sink(self, deltas: StepDeltas) -> None:
        now_ns, requests = self._loop.time_ns(), deltas.requests
        self._trace.record("step", deltas.step, fingerprint(requests.tobytes()), fingerprint(deltas.ids.tobytes()))
        last = self._last_ns[requests]
        first = last == 0
        self._first_ns[requests[first]] = now_ns
        self._add_gaps((now_ns - last[~first]) / 1e6)
        self._last_ns[requests] = now_ns
        self._outputs[requests] += np.diff(deltas.offsets)
        for end in deltas.finished:
            self._trace.record("end", end.request, end.reason, end.n_tokens)
            good = end.reason in ("length", "stop")
            self._finished[end.request] = good
            self._failed += not good
            self._end_one()
        if deltas.step % _PROGRESS_STEPS == 0:
            self._progress(self._ended, len(self._workload.requests))

    def _end_one(self) -> None:
        self._ended += 1
        self._end_ns = self._loop.time_ns()
        if self._ended == len(self._workload.requests):
            self._all_ended.set()

    def _add_gaps(self, gaps_ms: NDArray[np.float64]) -> None:
        end = self._num_gaps + len(gaps_ms)
        if end > len(self._gaps):
            self._gaps = np.concatenate((self._gaps, np.zeros(max(len(self._gaps), len(gaps_ms)), np.float32)))
        self._gaps[self._num_gaps : end] = gaps_ms
        self._num_gaps = end

    # ------------------------------------------------------------------------------------------------------------
    # The far sides

    async def _connect(self) -> CostDevice:
        link = SimLink(self._rng, self._loop, lambda rng: LINK_NS, name=f"device{len(self._devices)}")
        scenario = self._scenario
        name = scenario.device if scenario.calibration is None else "calibrated"
        self._devices.append(CostDevice(link, self._geometry, self._costs, scenario.copy_costs(), name))
        return self._devices[-1]

    async def _connect_storage(self) -> CostStore:
        link = SimLink(self._rng, self._loop, lambda rng: LINK_NS, name="agent")
        return CostStore(link, self._stored, self._scenario.store_times(), self._scenario.page_bytes)

    # ------------------------------------------------------------------------------------------------------------
    # What came of it

    def figures(self, status: EngineStatus, wall_s: float, cpu_s: float) -> Figures:
        scenario, finished = self._scenario, self._finished
        virtual_s = max(1e-9, (self._end_ns - self._began_ns) / 1e9)
        begun = self._first_ns > 0
        ttft_ms = (self._first_ns - self._arrived_ns)[begun] / 1e6
        spans_ms = (self._last_ns - self._first_ns) / 1e6 / np.maximum(self._outputs - 1, 1)
        in_time = (self._first_ns - self._arrived_ns) / 1e6 <= scenario.slo_ttft_ms
        good = int(np.count_nonzero(finished & in_time & (spans_ms <= scenario.slo_itl_ms)))
        prompt, count = max(1, self._prompt_tokens), int(np.count_nonzero(finished))
        outputs, page_bytes = int(self._outputs.sum()), scenario.page_bytes
        storage, host = status.cached_storage_tokens, status.cached_host_tokens
        return Figures(
            requests=len(self._workload.requests),
            finished=count,
            refused=self._refused,
            failed=self._failed,
            virtual_s=virtual_s,
            prompt_tokens=self._prompt_tokens,
            output_tokens=outputs,
            prompt_tokens_per_s=self._prompt_tokens / virtual_s,
            output_tokens_per_s=outputs / virtual_s,
            requests_per_s=count / virtual_s,
            ttft_ms=_times(ttft_ms),
            itl_ms=_times(self._gaps[: self._num_gaps]),
            goodput_rps=good / virtual_s,
            goodput_share=good / max(1, len(self._workload.requests)),
            hit_ratio=HitRatios(
                device=(status.cached_tokens - host - storage) / prompt,
                host=host / prompt,
                storage=storage / prompt,
                total=status.cached_tokens / prompt,
                theoretical=self._workload.shared_tokens() / prompt,
            ),
            prefetch_wasted_bytes=status.prefetch_wasted_bytes,
            prefetch_late_bytes=status.prefetch_late_bytes,
            prefetch_waited_ms=status.waited_ms["storage"],
            copied_bytes=status.copied_pages * page_bytes,
            stored_bytes=status.stored_pages * page_bytes,
            retractions=status.retractions,
            storage_restarts=status.storage_restarts,
            integrity_alarms=status.integrity_alarms,
            device_busy_share=sum(device.busy_ns for device in self._devices) / 1e9 / virtual_s,
            steps=status.steps,
            digest=self._trace.digest(),
            wall_s=wall_s,
            cpu_s=cpu_s,
            steps_per_s=status.steps / max(1e-9, cpu_s),
        )


def _times(values_ms: NDArray[np.float64] | NDArray[np.float32]) -> Times:
    if not len(values_ms):
        return Times(0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(values_ms, (50, 90, 99)).tolist()
    return Times(float(values_ms.mean()), p50, p90, p99)

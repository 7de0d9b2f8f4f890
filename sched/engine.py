"""The engine: every decision about requests, steps and pages, made on one event loop.

in     `submit`, `abort`, `conclude`; completed steps
out    one `StepDeltas` a step, to `sink`
state  requests by handle, launched steps (at most two), counters
owner  itself: its stages, in one TaskGroup, and its plain functions, which never await between check and act
ready  a step's ids are known when its `StepDone` is handled, inside the transport's reader callback
end    `run` is cancelled or the engine fails; the device has then been ended and reaped

The stages, and where they live::

    submit ─► waiting ─► prepare ─► launch ─► (device) ─► collect ─► sink
              [scheduler.Scheduler]  [_launch]             [collect.collect]

    Device.serve  connects, waits for the loss of the device, lets the engine clean up, connects again
    _execute      wakes on arrivals and on the launch clock, and launches
    _watch        every second: a hanging device, and the integrity check while idle

A stage that never waits is a function: collect runs inside the reply's callback and launches the next step before
anything else happens, so the device is not kept waiting for a turn of the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.cache import KvCache
from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.storage.client import ConnectStorage, StorageClient, StorageRefused
from headrace.ops.wire import Backup, BackupDone, Forward, MakePools, Ready, StepDone
from headrace.sched.batch import encode
from headrace.sched.budget import TARGET_STEP_MS, CopyPace, CostModel, LaunchClock, StepBudget
from headrace.sched.cache_control import CacheControl
from headrace.sched.collect import LaunchedStep, collect, remember
from headrace.sched.device import Device, EngineFailed
from headrace.sched.executors.protocol import Connect
from headrace.sched.grammar import Grammar
from headrace.sched.masks import SampleStage
from headrace.sched.matching import ConnectGrammar, Matchers
from headrace.sched.messages import (
    WAIT_CAUSES,
    EngineStatus,
    Finished,
    FinishReason,
    Flushed,
    NeverFits,
    Overloaded,
    Phase,
    StepDeltas,
    Submit,
    WaitCause,
)
from headrace.sched.options import EngineOptions
from headrace.sched.request import Request
from headrace.sched.scheduler import Scheduler

log = logging.getLogger(__name__)

WATCH_PERIOD_S: Final = 1.0
ALARM_SLACK_S: Final = 1e-6
"""A launch that is due so soon is due."""


class Engine:
    """One model on one device. Implements the server's view of a scheduler."""

    def __init__(
        self,
        options: EngineOptions,
        connect: Connect,
        sink: Callable[[StepDeltas], None],
        connect_storage: ConnectStorage | None = None,
        connect_grammar: ConnectGrammar | None = None,
    ) -> None:
        """`connect_storage` starts the agent of the storage tier, if `options.storage` asks for one; `connect_grammar`
        the worker that computes masks, when the first grammar comes."""
        self.sink = sink
        self._options = options
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        start = options.start
        self._cache = KvCache(
            options.layout,
            options.num_pages,
            options.reuse,
            options.host_pages,
            options.write_policy,
            options.page_hash,
        )
        self._copy_pace = CopyPace(self._cache.page_bytes)
        self._cache.copy_pages = self._copy_pace.pages
        self._scheduler = Scheduler(
            self._cache,
            start.ring,
            start.max_context_tokens,
            options.conservativeness,
            lambda tokens, context: self._costs.prefill_ms(tokens, context),
            options.schedule_policy,
            options.preempt_above,
            options.schedule_seed,
        )
        self._requests: dict[int, Request] = {}
        self._orders = 0
        self._stop_ids: NDArray[np.bool_] = np.zeros(start.ring.vocab, np.bool_)
        self._pending_ends: list[Finished] = []
        # The device and the steps it has.
        pools = MakePools(options.num_pages, options.max_chunk_tokens if options.warm_up else 0)
        self._device = Device(
            connect, (start, pools), self._device_ready, self._collect, self._copied, self._device_lost
        )
        self._costs = CostModel(())
        self._clock = LaunchClock()
        self._in_flight: deque[LaunchedStep] = deque()
        self._sampling = SampleStage(self._scheduler, self._wake_at)
        self._free_ring: list[int] = []
        self._copies: dict[int, _UnderWay] = {}
        """Copies under way, by transfer."""
        self._next_step = 0
        # The stages.
        self._wake = asyncio.Event()
        self._storage: StorageClient | None = None
        if options.storage is not None:
            assert connect_storage is not None
            changed = self._cache_changed
            self._storage = StorageClient(connect_storage, options.storage, options.storage_limits, changed)
            self._cache.attach_storage(self._storage, options.prefetch, changed)
        self.control = CacheControl(
            self._cache,
            lambda salt: self.namespace("", salt),
            options.page_hash,
            lambda: self.max_context_tokens,
            self._storage,
        )
        self._matchers = Matchers(
            connect_grammar,
            on_mask=self._mask_came,
            on_complete=lambda request: self._end(self._requests[request], "stop"),
            on_broken=lambda request, message: self._end(self._requests[request], "error", message),
        )
        self._alarm: asyncio.TimerHandle | None = None
        self._unchecked = False
        self._steps = self._prompt_tokens = self._cached_tokens = 0
        self._cached_host_tokens = self._cached_storage_tokens = 0
        self._output_tokens = self._overrun_tokens = self._integrity_alarms = 0
        self._waited_ms: dict[WaitCause, float] = dict.fromkeys(WAIT_CAUSES, 0.0)
        self._saved_ms = 0.0

    # ------------------------------------------------------------------------------------------------------------
    # What the server calls

    @property
    def max_context_tokens(self) -> int:
        """The longest prompt plus outputs that can run."""
        pool_tokens = self._cache.capacity_pages * self._options.layout.page_tokens
        return min(self._options.start.max_context_tokens, pool_tokens)

    @property
    def phase(self) -> Phase:
        """Where the device's life stands, or that the engine has failed."""
        return self._device.phase

    @property
    def writing(self) -> bool:
        """Whether pages are on their way to the host or to storage."""
        return self._cache.writing

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Steps launched and not collected, the oldest first."""
        return tuple(launched.step for launched in self._in_flight)

    async def check_grammar(self, grammar: Grammar) -> None:
        """Before a request with it is submitted. Raises BadGrammar, GrammarWorkerFailed, Overloaded."""
        await self._matchers.compile(grammar)

    def submit(self, submit: Submit) -> None:
        """Queue a request. Raises Overloaded at the queue's bounds, NeverFits if it can never run, EngineFailed."""
        assert submit.request not in self._requests, "a handle is never used twice"
        if self._device.phase == "failed":
            raise EngineFailed(self._device.message)
        sampling, prompt_tokens = submit.sampling, len(submit.prompt_ids)
        assert prompt_tokens > 0 and sampling.max_tokens > 0
        total = prompt_tokens + sampling.max_tokens
        if total > self.max_context_tokens:
            raise NeverFits(
                f"the prompt's {prompt_tokens} tokens and max_tokens {sampling.max_tokens} are {total} together; "
                f"at most {self.max_context_tokens} fit"
            )
        waiting = self._scheduler.waiting
        queued, queued_tokens = len(waiting), waiting.tokens
        if queued >= self._options.max_queued_requests or (
            queued and queued_tokens + prompt_tokens > self._options.max_queued_tokens
        ):
            raise Overloaded(
                f"the queue is full, with {queued_tokens} tokens in requests: {queued}; try again later",
                self._retry_after_s(queued_tokens),
            )
        key = PrefixKey(
            self.namespace(submit.adapter, submit.cache_salt),
            self._options.layout.page_tokens,
            submit.prompt_ids,
            prompt_tokens,
            self._options.page_hash,
        )
        self._orders += 1
        now_s = self._loop.time()
        request = Request(submit, key, self._orders, now_s)
        for limit_ms, expire in ((submit.deadline_ms, self._expire), (submit.queue_deadline_ms, self._expire_queued)):
            if limit_ms > 0:
                request.deadlines.append(self._loop.call_later(limit_ms / 1e3, expire, submit.request))
        self._stop_ids[list(sampling.stop_ids)] = True
        self._requests[submit.request] = request
        self._prompt_tokens += prompt_tokens
        if sampling.grammar is not None:
            request.matching = self._matchers.begin(submit.request, sampling.grammar, sampling.stop_ids)
        if sampling.prompt_logprobs < 0:
            request.prefetch = self._cache.prefetch(key, submit.prefetch_policy or None)
        self._scheduler.enqueue(request, now_s)
        self._wake.set()

    def namespace(self, adapter: str, salt: str) -> bytes:
        """The 16-byte root under which requests with this adapter and salt share pages."""
        options = self._options
        return namespace(options.fingerprint, adapter, salt, options.salt_key, options.page_hash)

    def abort(self, request: int) -> None:
        """End a request now, in whatever stage it is; no effect if it is unknown or has ended."""
        if found := self._requests.get(request):
            self._end(found, "abort")

    def conclude(self, request: int, n_tokens: int) -> None:
        """A stop string was found in the first `n_tokens` outputs; no effect if the request has ended."""
        if found := self._requests.get(request):
            self._end(found, "stop", n_tokens=n_tokens)

    def flush_cache(self, device: bool = True, host: bool = True) -> Flushed:
        """Drop every page of these tiers that nothing holds."""
        return Flushed(*self._cache.flush(device, host))

    def status(self) -> EngineStatus:
        """A snapshot; can be asked at any time."""
        cache, device, scheduler = self._cache.stats(), self._device, self._scheduler
        prefetch, storage, page_bytes = self._cache.prefetch_counts, self._storage, self._cache.page_bytes
        return EngineStatus(
            phase=device.phase,
            message=device.message,
            progress=device.progress,
            device_name=device.ready.device_name if device.ready else "",
            worker_pid=device.pid,
            numerics=device.ready.numerics if device.ready else "",
            running=scheduler.running,
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.tokens,
            max_context_tokens=self.max_context_tokens,
            page_tokens=self._options.layout.page_tokens,
            pages_total=cache.total,
            pages_free=cache.free,
            pages_cached=cache.evictable,
            host_pages_total=cache.host_total,
            host_pages_free=cache.host_free,
            host_pages_cached=cache.host_indexed,
            copied_pages=cache.host_copied,
            skipped_pages=cache.host_skipped,
            stored_pages=self._cache.stored_pages,
            unstored_pages=self._cache.unstored_pages,
            storage_state="none" if storage is None else "usable" if storage.usable else storage.message or "paused",
            storage_restarts=storage.restarts if storage is not None else 0,
            storage_deadlines_missed=storage.deadlines_missed if storage is not None else 0,
            prefetch_useful_bytes=prefetch.useful * page_bytes,
            prefetch_late_bytes=prefetch.late * page_bytes,
            prefetch_wasted_bytes=prefetch.wasted * page_bytes,
            prefetch_cancelled_bytes=prefetch.cancelled * page_bytes,
            prefetch_declined_bytes=prefetch.declined * page_bytes,
            page_bytes=page_bytes,
            waited_ms=dict(self._waited_ms),
            saved_ms=self._saved_ms,
            prefill_budget_tokens=self._budget(1).tokens(0),
            last_step_age_ms=device.silent_s * 1e3 if self._in_flight else 0.0,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            cached_host_tokens=self._cached_host_tokens,
            cached_storage_tokens=self._cached_storage_tokens,
            computed_tokens=scheduler.computed_tokens,
            output_tokens=self._output_tokens,
            overrun_tokens=self._overrun_tokens,
            retractions=scheduler.retractions,
            device_restarts=device.restarts,
            step_failures=device.step_failures,
            integrity_alarms=self._integrity_alarms,
            late_masks=self._sampling.late_masks,
            grammar_worker_restarts=self._matchers.restarts,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page, lease and slot is accounted for: ms, for tests and idle time."""
        self._scheduler.check()
        assert len(self._requests) == len(self._scheduler.waiting) + self._scheduler.running
        assert len(self._in_flight) <= 2

    async def run(self) -> None:
        """Serve until cancelled. Raises EngineFailed when the engine can't go on; the device has ended either way."""
        try:
            async with asyncio.TaskGroup() as stages:
                stages.create_task(self._device.serve(), name="device")
                stages.create_task(self._execute(), name="execute")
                stages.create_task(self._watch(), name="watch")
                if self._storage is not None:
                    stages.create_task(self._storage.serve(), name="storage")
                stages.create_task(self._matchers.serve(), name="grammars")
        except ExceptionGroup as group:
            first = _first(group)
            stage_died = EngineFailed(f"a stage of the engine died: {first!r}")
            refused = EngineFailed(f"the disk cache can't be used: {first}")
            failed = first if isinstance(first, EngineFailed) else stage_died
            failed = refused if isinstance(first, StorageRefused) else failed
            self._device.phase, self._device.message = "failed", str(failed)
            for request in list(self._requests.values()):
                self._end(request, "error", f"the engine has failed: {failed}")
            self._tell_ends()
            raise failed from first
        finally:
            if self._alarm is not None:
                self._alarm.cancel()

    # ------------------------------------------------------------------------------------------------------------
    # Steps

    def _device_ready(self, ready: Ready) -> None:
        self._costs = CostModel(ready.costs)
        self._clock = LaunchClock()
        self._free_ring = list(range(self._options.start.ring.slots))
        self._wake.set()

    def _cache_changed(self) -> None:
        """A read or a write of the lower tiers is over: a waiting request may go on, and who controls the cache."""
        self._wake.set()
        self.control.changed()

    def _device_lost(self, reason: str) -> None:
        """Its pages are void: what ran on them fails, what waits goes on when a device is back."""
        self._in_flight.clear()
        self._sampling.forget()
        self._copies.clear()
        for request in self._scheduler.forget_device():
            self._drop(request)
            message = f"{reason}; send the request again"
            ended = Finished(request.submit.request, "error", self._outputs(request), message)
            self._pending_ends.append(ended)
        self._cache.complete_step(self._next_step - 1)
        self.control.changed()
        self._tell_ends()

    async def _execute(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._pump()

    def _pump(self) -> None:
        """Sample and launch what should be now, and set the alarm for what should be later; while idle, copy."""
        depth = 2 if self._options.overlap else 1
        while self._device.ready is not None:
            if self._sampling.waits and not self._sample():
                return
            if len(self._in_flight) >= depth:
                break
            at_s = self._clock.launch_at_s() if self._in_flight else 0.0
            # A clock of whole nanoseconds never reaches a float between two of them: the alarm would go off for ever.
            if at_s > self._loop.time() + ALARM_SLACK_S:
                self._wake_at(at_s)
                return
            if not self._launch():
                break
        if self._device.ready is not None and not self._in_flight and not self._copies and not self._send_copy():
            # What waited for pages whose copy will not be made need not wait any longer.
            self._launch()

    def _launch(self) -> bool:
        """Prepare a batch and send it as the next step; False if nothing can run."""
        scheduler, now_s = self._scheduler, self._loop.time()
        batch, stuck = scheduler.prepare(self._next_step, now_s, self._budget)
        for request in stuck:
            self._end(request, "error", "the KV pool has no page left for it; start with a larger --max-total-tokens")
        if batch is None:
            return False
        step, ring_slot = self._next_step, self._free_ring.pop()
        self._next_step += 1
        views = self._device.ring.write(ring_slot, step, batch.counts)
        encode(views, batch, scheduler.table, self._options.layout.page_tokens)
        self._device.send(Forward(step, ring_slot))
        launched = remember(batch, scheduler.table, step, ring_slot, now_s)
        for request in batch.entered:
            request.wait_for("prefill", now_s)
            if not request.started:
                request.started = True
                request.saved_ms = self._costs.prefill_ms(request.cached_tokens, 0)
                request.saved_by = self._costs.prefill_formula if self._costs.measured else ""
                self._saved_ms += request.saved_ms
                self._cached_tokens += request.cached_tokens
                self._cached_host_tokens += request.cached_host_tokens
                self._cached_storage_tokens += request.cached_storage_tokens
        self._sampling.launched(launched, batch.counts.rows)
        scheduler.launched(batch, step)
        if not self._in_flight:
            self._device.begins_work()
        self._in_flight.append(launched)
        predicted_ms = self._costs.predict_ms(launched.decode_rows, launched.prefill_tokens, launched.prefill_pairs)
        self._clock.launched(now_s, predicted_ms)
        self._unchecked = True
        self._sample()
        self._send_copy()
        return True

    def _sample(self) -> bool:
        """Send the `Sample` of the step that was launched last; False if it still waits for masks."""
        is_next = len(self._in_flight) == 1
        sample = self._sampling.sample(self._device.ring, is_next, self._loop.time(), self._clock.busy_until_s)
        if sample is None:
            return False
        self._device.send(sample)
        if is_next:
            # While it waited for masks the device owed nothing.
            self._device.begins_work()
        return True

    def _wake_at(self, at_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(at_s, self._wake.set)

    def _send_copy(self) -> bool:
        """One copy to the host behind the step that was just launched, or behind nothing when idle; False if there is
        none to make."""
        copy = self._cache.next_copy()
        if copy is None:
            return False
        self._copies[copy.transfer] = _UnderWay(len(copy.device), copy.device.shape[1])
        for group, (device, host) in enumerate(zip(copy.device, copy.host)):
            self._device.send(Backup(copy.transfer, group, device.tolist(), host.tolist()))
        return True

    def _copied(self, done: BackupDone) -> None:
        """A group's part of a copy has been made."""
        copy = self._copies[done.transfer]
        copy.groups_left -= 1
        copy.copy_ms += done.copy_ms
        if not copy.groups_left:
            del self._copies[done.transfer]
            self._copy_pace.observe(copy.pages, copy.copy_ms)
            self._cache.copy_pages = self._copy_pace.pages
            self._cache.copied(done.transfer)
        if not self._in_flight:
            self._pump()
        self.control.changed()

    def _collect(self, done: StepDone) -> None:
        launched = self._in_flight.popleft()
        assert launched.step == done.step, f"step {done.step} came back, {launched.step} is the oldest in flight"
        now_s = self._loop.time()
        self._cache.complete_step(done.step)
        results = self._device.ring.results(launched.ring_slot)
        collected = collect(self._scheduler, launched, results, self._stop_ids, now_s, done.load_ms)
        self._free_ring.append(launched.ring_slot)
        for request in collected.ended:
            self._drop(request)
        self._costs.observe(launched.decode_rows, launched.prefill_tokens, launched.prefill_pairs, done.step_ms)
        self._clock.done(now_s, len(self._in_flight), done.step_ms)
        if len(collected.matched):
            self._matchers.advance(collected.matched.tolist(), collected.matched_ids.tolist())
        self._pump()
        self._steps += 1
        self._overrun_tokens += collected.overruns
        self._output_tokens += len(collected.deltas.ids)
        for started in collected.deltas.started:
            for cause, part_ms in started.waited_ms.items():
                self._waited_ms[cause] += part_ms
        self.sink(collected.deltas)

    def _budget(self, decode_rows: int) -> StepBudget:
        """What a step beside these decode rows may hold."""
        options = self._options
        if options.prefill_tokens and not options.target_itl_ms:
            return StepBudget(min(options.prefill_tokens, options.max_chunk_tokens))
        most_tokens = min(options.prefill_tokens or options.max_chunk_tokens, options.max_chunk_tokens)
        target_ms = options.target_itl_ms or TARGET_STEP_MS
        return self._costs.budget(decode_rows, target_ms, most_tokens, options.layout.page_tokens)

    # ------------------------------------------------------------------------------------------------------------
    # Ends

    def _end(self, request: Request, reason: FinishReason, message: str = "", n_tokens: int = -1) -> None:
        """End a request from outside a step: its slot and pages are given back now, fenced by its last step."""
        outputs = self._outputs(request)
        self._scheduler.end(request)
        self._drop(request)
        finished = Finished(
            request=request.submit.request,
            reason=reason,
            n_tokens=outputs if n_tokens < 0 else min(n_tokens, outputs),
            message=message,
            retractions=request.retractions,
        )
        if not self._pending_ends:
            self._loop.call_soon(self._tell_ends)
        self._pending_ends.append(finished)
        self._wake.set()

    def _mask_came(self, request: int) -> None:
        """Only now is it known whether an output at its limit is complete or cut: complete, and no mask had come."""
        found = self._requests[request]
        if self._outputs(found) >= found.submit.sampling.max_tokens:
            self._end(found, "length")
        self._wake.set()

    def _drop(self, request: Request) -> None:
        del self._requests[request.submit.request]
        if request.matching is not None:
            self._matchers.end(request.submit.request)
        for deadline in request.deadlines:
            deadline.cancel()

    def _tell_ends(self) -> None:
        if ends := self._pending_ends:
            self._pending_ends = []
            none = np.zeros(0, np.int32)
            self.sink(
                StepDeltas(-1, none.astype(np.int64), np.zeros(1, np.int32), none, None, None, None, [], ends, [])
            )

    def _expire(self, request: int) -> None:
        if found := self._requests.get(request):
            self._end(found, "timeout", f"the request did not end within {found.submit.deadline_ms:.0f} ms")

    def _expire_queued(self, request: int) -> None:
        found = self._requests.get(request)
        if found is not None and not found.started:
            limit_ms = found.submit.queue_deadline_ms
            self._end(found, "queue_timeout", f"the request did not begin within {limit_ms:.0f} ms; try again later")

    def _outputs(self, request: Request) -> int:
        known = len(request.ids) if request.slot < 0 else int(self._scheduler.table.known[request.slot])
        return known - request.prompt_tokens

    def _retry_after_s(self, queued_tokens: int) -> int:
        prefill_ms = self._costs.predict_ms(0, queued_tokens, 0)
        return max(1, min(60, round(prefill_ms / 1e3)))

    # ------------------------------------------------------------------------------------------------------------
    # Watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            device, silent_s = self._device, self._device.silent_s
            owes = len(self._in_flight) > self._sampling.waits
            if owes and silent_s > self._options.step_timeout_s:
                device.lose(f"the device has not completed step {self._in_flight[0].step} in {silent_s:.0f} s")
            elif device.starting and silent_s > self._options.start_timeout_s:
                device.lose(f"the device has made no progress ({device.message or 'starting'}) in {silent_s:.0f} s")
            if self._unchecked and not self._in_flight:
                self._check_while_idle()

    def _check_while_idle(self) -> None:
        """A violation is an alarm, not the end of the server."""
        self._unchecked = False
        try:
            self.check_integrity()
        except AssertionError as violation:
            self._integrity_alarms += 1
            last, stats = self._next_step - 1, self._cache.stats()
            log.critical("integrity check failed after step %d: %s; %s", last, violation, stats)


@dataclass(slots=True)
class _UnderWay:
    """A copy to the host that the device has."""

    groups_left: int
    pages: int
    copy_ms: float = 0.0


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error

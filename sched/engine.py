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
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.cache import MOST_PAGES, KvCache
from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.storage.client import ConnectStorage, StorageClient, StorageRefused
from headrace.ops.wire import BackupDone, Forward, MakePools, Ready, StepDone
from headrace.sched.batch import encode
from headrace.sched.budget import ALARM_S, TARGET_STEP_MS, CostModel, LaunchClock, StepBudget, StepWork
from headrace.sched.cache_control import CacheControl
from headrace.sched.collect import LaunchedStep, collect, remember
from headrace.sched.copying import CopyStage
from headrace.sched.device import Device, EngineFailed
from headrace.sched.executors.protocol import Connect
from headrace.sched.grammar import Grammar
from headrace.sched.idle_check import IdleCheck
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
from headrace.sched.stages import first_of, run_stage

log = logging.getLogger(__name__)

WATCH_PERIOD_S: Final = 1.0


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
        self.step_listener: Callable[[LaunchedStep, float, float], None] | None = None
        """Told of each collected step, the device's ms for it, and the ms from the last step's end to its own if it was
        launched before that, else -1; None while nobody wants to know."""
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
            options.window_host_pages,
        )
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
        self._copying = CopyStage(self._cache, options.max_copy_bytes, self._device.send)
        self._next_step = 0
        self._collected_s = 0.0
        # The stages.
        self._wake = asyncio.Event()
        self._storage: StorageClient | None = None
        if options.storage is not None:
            assert connect_storage is not None
            usable = self._storage_changed
            self._storage = StorageClient(connect_storage, options.storage, options.storage_limits, usable)
            self._cache.attach_storage(self._storage, options.prefetch, self._cache_changed)
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
            on_broken=lambda request, reason, message: self._end(self._requests[request], reason, message),
        )
        self._alarm: asyncio.TimerHandle | None = None
        self._idle_check = IdleCheck(self._cache, self.check_lists, lambda: bool(self._in_flight))
        self._steps = self._prompt_tokens = self._cached_tokens = 0
        self._cached_host_tokens = self._cached_storage_tokens = 0
        self._output_tokens = self._overrun_tokens = 0
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
                left_s = (limit_ms - submit.elapsed_ms) / 1e3
                request.deadlines.append(self._loop.call_later(max(0.0, left_s), expire, submit.request))
        self._stop_ids[list(sampling.stop_ids)] = True
        self._requests[submit.request] = request
        self._prompt_tokens += prompt_tokens
        if sampling.grammar is not None:
            request.matching = self._matchers.begin(submit.request, sampling.grammar, sampling.stop_ids)
        request.prefetch = self._cache.prefetch(key, submit.prefetch_policy or None, request.compute_from)
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

    def stage_of(self, request: int) -> str:
        """Where a request stands, for a message."""
        found = self._requests.get(request)
        if found is None:
            return "unknown, or ended"
        waiting = list(self._scheduler.waiting)
        queued = f", {waiting.index(found) + 1} of {len(waiting)} in the queue" if found in waiting else ""
        return found.where(self._scheduler.table) + queued

    def flush_cache(self, device: bool = True, host: bool = True, most_pages: int = MOST_PAGES) -> Flushed:
        """Drop pages that nothing holds from these tiers: all, or so many of each."""
        return Flushed(*self._cache.flush(device, host, most_pages))

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
            put_off_pages=self._cache.put_off_pages,
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
            prefill_budget_tokens=self._budget(StepWork(1)).tokens(0),
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
            integrity_alarms=self._idle_check.alarms,
            window_groups=cache.windows,
            late_masks=self._sampling.late_masks,
            grammar_worker_restarts=self._matchers.restarts,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page, lease and slot is accounted for: ms, for tests."""
        self.check_lists()
        self._cache.check_integrity()

    @property
    def cache_changes(self) -> int:
        """Equal counts: no page has changed hands, and no lease."""
        return self._cache.changes

    def check_lists(self) -> None:
        """The part of the check that is not about pages: 0.1 ms at 256 requests."""
        self._scheduler.check()
        assert len(self._requests) == len(self._scheduler.waiting) + self._scheduler.running
        assert len(self._in_flight) <= 2
        # A retracted request was admitted once: it waits beyond the bound.
        bound = self._options.max_queued_requests + self._scheduler.table.max_slots
        assert len(self._scheduler.waiting) <= bound, (
            f"{len(self._scheduler.waiting)} requests wait, at most {bound} may"
        )

    async def run(self) -> None:
        """Serve until cancelled. Raises EngineFailed when the engine can't go on; the device has ended either way."""
        work = {"device": self._device.serve, "execute": self._execute, "watch": self._watch}
        work["grammars"] = self._matchers.serve
        if self._storage is not None:
            work["storage"] = self._storage.serve
        this = asyncio.current_task()
        assert this is not None
        try:
            async with asyncio.TaskGroup() as stages:
                for name, stage in work.items():
                    stages.create_task(run_stage(name, stage, this), name=name)
        except ExceptionGroup as group:
            first = first_of(group)
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

    def _storage_changed(self) -> None:
        """It may be usable again, or no more."""
        self._cache.resume_writes()
        self._cache_changed()

    def _device_lost(self, reason: str) -> Iterator[None]:
        """Its pages are void: what ran on them fails, now, and what waits goes on when a device is back. Forgetting the
        pages is done in slices, to the end before a device is asked for again."""
        self._in_flight.clear()
        self._sampling.forget()
        self._copying.forget()
        for request in self._scheduler.end_running():
            self._drop(request)
            message = f"{reason}; send the request again"
            ended = Finished(request.submit.request, "error", self._outputs(request), message)
            self._pending_ends.append(ended)
        self._cache.complete_step(self._next_step - 1)
        self._tell_ends()
        for _ in self._cache.forget_device():
            self.control.changed()
            yield

    async def _execute(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._pump()

    def _pump(self) -> None:
        """Sample and launch what should be now, and set the alarm for what should be later; while idle, copy."""
        depth = 2 if self._options.overlap else 1
        self._scheduler.read_ahead()
        while self._device.ready is not None:
            if self._sampling.waits and not self._sample():
                return
            if len(self._in_flight) >= depth:
                break
            at_s = self._clock.launch_at_s() if self._in_flight else 0.0
            if at_s > self._loop.time() + ALARM_S:
                self._wake_at(at_s)
                return
            if not self._launch():
                break
        idle = self._device.ready is not None and not self._in_flight and not self._copying.under_way
        # What waited for pages whose copy will not be made need not wait any longer; but preparing may ask for pages
        # that must be copied first, and where the host has no room for them, one more goes on without.
        if idle and not self._copying.order() and not self._launch() and not self._copying.order():
            self._launch()
        if idle and not self._in_flight:
            self._device.begins_work()  # a copy, if it has anything to do

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
        predicted_ms = self._costs.predict_ms(launched.work)
        self._clock.launched(now_s, predicted_ms)
        self._idle_check.launched(step, launched.decode_rows, launched.prefill_tokens)
        self._sample()
        if not self._copying.order():
            # Copies may have been skipped: then nothing is on its way any more.
            self.control.changed()
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

    def _copied(self, done: BackupDone) -> None:
        self._copying.made(done)
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
        if self.step_listener is not None:
            queued = launched.launched_s <= self._collected_s
            self.step_listener(launched, done.step_ms, (now_s - self._collected_s) * 1e3 if queued else -1.0)
        self._collected_s = now_s
        self._costs.observe(launched.work, done.step_ms)
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

    def _budget(self, decode: StepWork) -> StepBudget:
        """What a step beside these decode rows may hold."""
        options = self._options
        if options.prefill_tokens and not options.target_itl_ms:
            return StepBudget(min(options.prefill_tokens, options.max_chunk_tokens))
        most_tokens = min(options.prefill_tokens or options.max_chunk_tokens, options.max_chunk_tokens)
        asked_ms, least = options.target_itl_ms, options.layout.page_tokens
        return self._costs.budget(decode, asked_ms or TARGET_STEP_MS, most_tokens, least, asked_ms > 0)

    # ------------------------------------------------------------------------------------------------------------
    # Ends

    def _end(self, request: Request, reason: FinishReason, message: str = "", n_tokens: int = -1) -> None:
        """End a request from outside a step: its slot and pages are given back now, fenced by its last step."""
        outputs = self._outputs(request)
        self._scheduler.end([request])
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
        self._scheduler.mask_came(found)
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
        prefill_ms = self._costs.predict_ms(StepWork(prefill_tokens=queued_tokens))
        return max(1, min(60, round(prefill_ms / 1e3)))

    # ------------------------------------------------------------------------------------------------------------
    # Watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            device, silent_s = self._device, self._device.silent_s
            owes = len(self._in_flight) > self._sampling.waits or self._copying.under_way
            if owes and silent_s > self._options.step_timeout_s:
                owed = f"completed step {self._in_flight[0].step}" if self._in_flight else "made a copy"
                device.lose(f"the device has not {owed} in {silent_s:.0f} s")
            elif device.starting and silent_s > self._options.start_timeout_s:
                device.lose(f"the device has made no progress ({device.message or 'starting'}) in {silent_s:.0f} s")
            await self._idle_check.check()

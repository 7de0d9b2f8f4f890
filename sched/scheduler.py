"""Who computes what in the next step: decoding requests, prefill chunks, admissions, retractions.

in     submitted requests; launched batches; ended requests
out    a `ScheduleBatch`
state  the waiting queue, the prefilling list, retracted requests that still have steps in flight, the slot table
owner  the engine, in plain functions between awaits
ready  a batch is binding: its pages are taken, so it is launched in the same breath
end    `end` gives everything of a request back, fenced by its last launched step

The order of one step. 1. With preemption by priority: if the first of the waiting could run in the place of requests of
much lower priority, those are retracted. 2. Every decoding request computes one token, but for those whose mask was
late and has not come yet; one that needs a page and finds none free makes the request of lowest rank (the last
submitted of the lowest priority) retract, so the first of the ranks always goes on. 3. Prompts in progress get chunks
under the step's budget, in the order of admission. 4. Waiting requests are admitted in the order of the policy while
budget, slots and pages last; the first that does not fit ends it, so that nothing small slips past it for ever. One
that would compute pages which a request in progress is about to compute waits for those instead, and lets others by:
they are matchable as soon as that chunk is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.cache import KvCache
from headrace.kvcache.holding import Filled, Holding
from headrace.kvcache.pool import Fence
from headrace.kvcache.prefetch import PrefillMs
from headrace.ops.wire import I32, RingGeometry
from headrace.sched.batch import Chunk, Moved, ScheduleBatch
from headrace.sched.budget import GUESSED_TOKEN_MS, OutputForecast, StepBudget, StepWork
from headrace.sched.messages import WaitedFor
from headrace.sched.policies import SchedulePolicy
from headrace.sched.queue import WaitingQueue
from headrace.sched.request import Request, SlotTable, Stage
from headrace.sched.window_pages import WindowPages

BudgetFor: TypeAlias = Callable[[StepWork], StepBudget]
"""Decode rows → what the step may hold beside them."""

_MAX_PASSED_OVER: Final = 64
"""Waiting requests that one step looks past because their prefix is in progress elsewhere."""
_MAX_LOOKED_AT: Final = 256
"""The same with those that wait for storage or a mask: what hangs there must not keep a device idle."""
_NOT_PUBLISHING: Final = np.iinfo(np.int32).max


class Scheduler:
    """The requests of one engine and their claims on slots and pages."""

    def __init__(
        self,
        cache: KvCache,
        geometry: RingGeometry,
        max_context_tokens: int,
        conservativeness: float,
        prefill_ms: PrefillMs = lambda tokens, context: tokens * GUESSED_TOKEN_MS,
        policy: SchedulePolicy = "fcfs",
        preempt_above: int | None = None,
        seed: int = 0,
    ) -> None:
        """`prefill_ms`: what computing so many tokens behind such a context would take now. A request whose priority is
        higher by more than `preempt_above` takes the place of another; None: never. `seed`: of the policy `random`."""
        self.cache = cache
        self.table = SlotTable(geometry.max_samples, max_context_tokens)
        self.waiting = WaitingQueue(policy, cache, prefill_ms, np.random.default_rng(seed))
        self.prefilling: list[Request] = []
        self.retracted: list[Request] = []
        self.retractions = 0
        self.computed_tokens = 0
        self._windows = None if cache.windows is None else WindowPages(cache.windows, cache.layout, self.table)
        self._geometry = geometry
        self._page_tokens, self._full_groups = cache.layout.page_tokens, cache.layout.full_groups
        self._forecast = OutputForecast(conservativeness)
        self._prefill_ms = prefill_ms
        self._preempt_above = preempt_above
        self._now_s = 0.0
        """Of the step that is being prepared."""
        self._growth: tuple[int, int] | None = None
        """Requests with pages, and the outputs that they may still have, once this step has asked for it."""
        self._filling: dict[bytes, int] = {}
        self._await_storage: list[Request] = []
        """Those that were last seen to wait for storage."""
        self._with_duplicates: list[Request] = []
        self._moved: list[Moved] = []
        """Edits of page tables that no launched batch has carried yet."""

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return self.table.max_slots - self.table.free_slots

    def enqueue(self, request: Request, now_s: float) -> None:
        """A new or retracted request waits."""
        request.stage = Stage.WAITING
        request.waited_for = "turn" if len(self.waiting) else ""
        self.waiting.add(request, now_s)

    def end(self, requests: Sequence[Request]) -> None:
        """Give back whatever these have, in whichever stage they are."""
        self._close([request for request in requests if request.holding is not None])
        for request in requests:
            self._end_prefetch(request, None)
            if request.stage is Stage.WAITING:
                self.waiting.remove(request)
            else:
                if request.stage is Stage.PREFILL:
                    self.prefilling.remove(request)
                elif request.stage is Stage.RETRACTED:
                    self.retracted.remove(request)
                outputs = int(self.table.known[request.slot]) - request.prompt_tokens
                self._forecast.ended(outputs, request.submit.sampling.max_tokens)
                self.table.leave(request)
            request.stage = Stage.ENDED

    def read_ahead(self) -> None:
        """Let storage be read for those who are near their turn."""
        near = islice(self.waiting, _MAX_LOOKED_AT)
        self.cache.read_ahead(request.prefetch for request in near if request.prefetch is not None)

    def prepare(self, step: int, now_s: float, budget_for: BudgetFor) -> tuple[ScheduleBatch | None, list[Request]]:
        """The batch that becomes `step`, or None if nothing can run now; and requests that can never go on and must be
        failed."""
        for request in [request for request in self.retracted if self._collected(request)]:
            self.retracted.remove(request)
            self.table.leave(request)
            self.enqueue(request, now_s)
        self._now_s, self._growth = now_s, None
        self._repoint()
        stuck: list[Request] = []
        if self.waiting:
            self.waiting.begin_step(now_s)
        urgent = self._urgent()
        if urgent is not None:
            self._make_room(urgent)
        batch = self._decode(stuck)
        batch.read_tokens = self._read_tokens(batch.decode)
        budget = budget_for(StepWork(len(batch.decode), batch.read_tokens))
        # Prompts that the first of the waiting outranks by enough to preempt them get what it leaves of the step.
        later = [request for request in self.prefilling if urgent is not None and self._outranks(urgent, request)]
        for request in self.prefilling:
            if request not in later:
                self._add_chunk(batch, request, budget)
        if later:
            self._admit(batch, step, budget, above=max(request.submit.priority for request in later))
            for request in later:
                self._add_chunk(batch, request, budget)
        self._admit(batch, step, budget)
        return (batch if len(batch.decode) or batch.chunks else None), stuck

    def launched(self, batch: ScheduleBatch, step: int) -> None:
        """The batch has been sent as `step`: its pages are matchable for what is launched after it."""
        table, decode = self.table, batch.decode
        self._moved = []
        table.computed[decode] += 1
        table.extent[decode] += 1
        table.last_step[decode] = step
        for chunk in batch.chunks:
            slot = chunk.request.slot
            table.computed[slot] = chunk.end
            table.last_step[slot] = step
            self.computed_tokens += chunk.tokens
        self.publish([(chunk.request, chunk.end) for chunk in batch.chunks])
        for chunk in batch.chunks:
            if chunk.samples:
                request, slot = chunk.request, chunk.request.slot
                table.extent[slot] += 1
                table.decoding[slot] = True
                request.stage = Stage.DECODE
                self.prefilling.remove(request)
                self._forget_filling(request, request.filling_to)
        if self._windows is not None:
            self._windows.launched(batch, step)

    def skip(self, slots: NDArray[np.int64]) -> None:
        """The decoding rows of these slots in the step launched last are not sampled, for want of their masks: the
        first step after `mask_came` repeats them."""
        table = self.table
        assert (table.decoding[slots] & (table.extent[slots] == table.computed[slots] + 1)).all()
        table.computed[slots] -= 1
        table.extent[slots] -= 1
        table.lacks_mask[slots] = True

    def mask_came(self, request: Request) -> None:
        """The next output's: the request's row sits out no more steps, if it did."""
        if request.slot >= 0:
            self.table.lacks_mask[request.slot] = False

    def others_can_run(self, slots: NDArray[np.int64]) -> bool:
        """Whether a step without the decoding rows of these slots would have anything to compute, as far as a glance
        tells: one that waits for pages or for storage counts, since only `prepare` finds out."""
        if self.prefilling or self.retracted:
            return True
        others = self.table.can_decode
        others[slots] = False
        if others.any():
            return True
        has_slot = self.table.free_slots > 0 or self._preempt_above is not None
        return has_slot and not all(request.lacks_mask for request in islice(self.waiting, _MAX_PASSED_OVER))

    def publish(self, all_filled: Sequence[tuple[Request, int]]) -> None:
        """Put requests' full pages of known, launched tokens, up to so many each, into the index."""
        table, runs = self.table, list[Filled]()
        for request, tokens in all_filled:
            slot, holding = request.slot, request.holding
            assert holding is not None and tokens <= table.computed[slot]
            request.key.length = int(table.known[slot])
            runs.append(Filled(holding, request.key, tokens, int(table.last_step[slot])))
        self.cache.publish(runs)
        for request, tokens in all_filled:
            assert request.holding is not None
            if request.holding.duplicates:
                self._with_duplicates.append(request)
            table.published[request.slot] = pages = tokens // self._page_tokens
            self._forget_filling(request, pages)

    def retract(self, request: Request) -> None:
        """Take a running request's pages from it. Its launched steps are still collected; then it waits again and is
        computed from what the index has kept."""
        self._close([request])
        if request.stage is Stage.PREFILL:
            self.prefilling.remove(request)
        request.stage = Stage.RETRACTED
        request.retractions += 1
        request.wait_for("turn", self._now_s)
        self.table.decoding[request.slot] = False
        self.table.published[request.slot] = _NOT_PUBLISHING
        self.retracted.append(request)
        self.retractions += 1

    def end_running(self) -> list[Request]:
        """The device is gone with every page. Returns the requests that were running, ended; the waiting go on, and so
        do the retracted, from the ids that had been collected."""
        for request in self.retracted:
            self.table.extent[request.slot] = self.table.known[request.slot]
        lost = self._with_pages()
        self.end(lost)
        return lost

    def check(self) -> None:
        """Raise AssertionError unless slots, holdings and lists agree (invariant 1); the pages are the cache's."""
        self.table.check()
        self.waiting.check()
        assert all(request.stage is Stage.WAITING for request in self.waiting)
        bound = [request for request in self.table.requests if request is not None]
        holding = [request for request in bound if request.holding is not None]
        assert len(holding) == self.cache.stats().holdings
        assert sorted(request.order for request in bound if request.stage is Stage.PREFILL) == sorted(
            request.order for request in self.prefilling
        )
        assert self.prefilling or not self._filling, "pages are promised by nobody"
        assert len({id(request) for request in self._await_storage}) == len(self._await_storage)
        if self._windows is not None:
            self._windows.check()

    def _decode(self, stuck: list[Request]) -> ScheduleBatch:
        """One row for every decoding request that has a page for it, retracting others where none is left."""
        table = self.table
        pages: I32 | None = None
        while True:
            ready = np.flatnonzero(table.can_decode)
            full = ready[table.computed[ready] == table.held[ready]]
            pages = self.cache.take_for_rows(len(full))
            if pages is not None:
                break
            if self.cache.available_pages >= len(full):
                # Enough are on their way back behind a fence: those rows sit out a step, nobody is retracted.
                ready, full = np.setdiff1d(ready, full), full[:0]
                pages = self.cache.take_for_rows(0)
                break
            victim = max(self._with_pages(), key=lambda request: request.rank)
            if self.cache.stats().holdings == 1:
                stuck.append(victim)
                table.decoding[victim.slot] = False
            else:
                # The forecast was too low; where a request only makes way for a more urgent one, it was not.
                self._forecast.retracted()
                self.retract(victim)
        assert pages is not None
        for i, slot in enumerate(full.tolist()):
            request = table.requests[slot]
            assert request is not None and request.holding is not None
            self.cache.append_row(request.holding, pages[:, i : i + 1])
        table.held[full] += self._page_tokens
        return ScheduleBatch(ready, full, pages, self._moved)

    def _read_tokens(self, decode: NDArray[np.int64]) -> int:
        """Whose KV is read for these rows: what several share is read once."""
        stats = self.cache.stats()
        in_use = stats.total - stats.free - stats.fenced - stats.evictable
        return min(int(self.table.computed[decode].sum()) + len(decode), in_use * self._page_tokens)

    def _repoint(self) -> None:
        """Let requests read the index's pages instead of those that they have computed a second time, from the next
        batch on. First of all in a step: what they give back may be what another needs."""
        for request in self._with_duplicates:
            holding, slot = request.holding, request.slot
            if holding is not None and holding.duplicates:
                places = self.cache.repoint(holding, Fence(int(self.table.last_step[slot])))
                self._moved.append(Moved(slot, holding, places))
        self._with_duplicates = []
        requests = self.table.requests
        self._moved = [
            moved
            for moved in self._moved
            if (owner := requests[moved.slot]) is not None and owner.holding is moved.holding
        ]

    def _urgent(self) -> Request | None:
        """The first of the waiting, if it may preempt and could begin but for others."""
        if self._preempt_above is None or (first := self.waiting.candidate(0)) is None or first.lacks_mask:
            return None
        return None if self._waits_for_storage(first) or self._is_being_filled(first) else first

    def _outranks(self, urgent: Request, other: Request) -> bool:
        assert self._preempt_above is not None
        return urgent.submit.priority - other.submit.priority > self._preempt_above

    def _make_room(self, urgent: Request) -> None:
        """Retract requests that `urgent` outranks, those of lowest rank first, if that is what lets it begin."""
        if self.retracted:
            # Slots and pages are on their way back already.
            return
        cache, slots, leaving = self.cache, self.table.free_slots, list[Request]()
        # What it matches is not room for it: with that leased, the sums are those of its admission.
        holding = self._open(urgent)
        missing, room = cache.layout.pages(len(urgent.ids)) - holding.count, cache.available_pages
        windows = self._windows
        fits = slots > 0 and missing + self._reserve(urgent) <= room and (windows is None or windows.admits(holding))
        for request in sorted(self._with_pages(), key=lambda request: request.rank, reverse=True):
            if fits or not self._outranks(urgent, request):
                break
            assert request.holding is not None
            leaving.append(request)
            slots, room = slots + 1, room + cache.returned_by(request.holding)
            fits = missing + self._reserve(urgent, leaving) <= room
            fits = fits and (windows is None or windows.admits(holding, leaving))
        cache.close([holding], Fence())
        if fits:
            for request in leaving:
                self.retract(request)

    def _admit(self, batch: ScheduleBatch, step: int, budget: StepBudget, above: int | None = None) -> None:
        """Give slots and pages to waiting requests, in the order of the policy, until something runs out; with `above`
        only to those of a higher priority."""
        self._note_arrivals()
        at = passed_over = 0
        while passed_over < _MAX_PASSED_OVER and at < _MAX_LOOKED_AT:
            request = self.waiting.candidate(at)
            if request is None:
                return
            if above is not None and request.submit.priority <= above:
                return
            obstacle = self._try_admit(batch, request, step, budget)
            if obstacle:
                request.waited_for = obstacle
                if obstacle == "storage" and request.waits_for != "storage":
                    self._await_storage.append(request)
                request.wait_for(obstacle, self._now_s)
                if obstacle not in ("prefix", "storage", "mask"):
                    return
                at += 1
                passed_over += obstacle == "prefix"

    def _note_arrivals(self) -> None:
        """Whoever has got from storage what it waited for waits for its turn since then, though nobody may come to look
        at it while others use up each step."""
        for request in self._await_storage:
            if request.waits_for == "storage" and request.prefetch is not None and request.prefetch.done:
                request.wait_for("turn", request.prefetch.done_s)
        waiting = (request for request in self._await_storage if request.prefetch is not None)
        self._await_storage = [request for request in waiting if request.waits_for == "storage"]

    def _try_admit(self, batch: ScheduleBatch, request: Request, step: int, budget: StepBudget) -> WaitedFor:
        """Admit a request with pages for all its known tokens, if the pool can spare them beside what the running
        ones are expected to need; what is in its way, or ""."""
        cache, needed = self.cache, self.cache.layout.pages(len(request.ids))
        if not self.table.free_slots:
            return "slot"
        if request.lacks_mask:
            return "mask"
        if self._is_being_filled(request):
            return "prefix"
        if not budget.tokens(0):
            return "budget"
        if request.prefetch is not None and not request.prefetch.is_due and not self._fits(request):
            # Its turn to wait for storage comes when nothing else is in its way.
            return "pages"
        if self._waits_for_storage(request):
            return "storage"
        holding = self._open(request)
        missing, windows = needed - holding.count, self._windows
        pages = cache.take(missing) if missing + self._reserve(request) <= cache.available_pages else None
        if windows is not None and pages is not None and not (windows.admits(holding) and windows.can_begin(holding)):
            cache.return_taken(pages)
            pages = None
        if pages is None:
            cache.close([holding], Fence())
            return "pages"
        if not self._add_chunk(batch, request, budget, holding, needed):
            # The step or its ring slot is full; whoever is alone in a batch always fits.
            cache.return_taken(pages)
            cache.close([holding], Fence())
            return "budget"
        cache.load(holding, pages, step)
        if windows is not None:
            windows.grow(batch, request, holding, batch.chunks[-1].end, enters=True)
        self.waiting.remove(request)
        self._enter(request, holding)
        return ""

    def _fits(self, request: Request) -> bool:
        """Whether the pool can spare what the request lacks."""
        holding = self._open(request)
        missing = self.cache.layout.pages(len(request.ids)) - holding.count
        room = self.cache.available_pages - self._reserve(request)
        fits = missing <= room and (self._windows is None or self._windows.admits(holding))
        self.cache.close([holding], Fence())
        return bool(fits)

    def _open(self, request: Request) -> Holding:
        return self.cache.open(request.key, request.limit_tokens, request.compute_from)

    def _reserve(self, request: Request, leaving: Sequence[Request] = ()) -> int:
        """Pages that admission leaves for the outputs of those that run, but for those leaving, and of this request
        beside them."""
        if self._growth is None:
            # Once a step, 8 µs: who enters is added to it.
            active = np.flatnonzero(self.table.held)
            self._growth = len(active), int((self.table.limit[active] - self.table.extent[active]).sum())
        active_requests, growth = self._growth
        if active_requests == len(leaving):
            return 0
        for other in leaving:
            growth -= int(self.table.limit[other.slot] - self.table.extent[other.slot])
        growth += request.limit_tokens - len(request.ids)
        return int(self._forecast.ratio(request.retractions) * growth) // self._page_tokens

    def _enter(self, request: Request, holding: Holding) -> None:
        if self._growth is not None:
            self._growth = self._growth[0] + 1, self._growth[1] + request.limit_tokens - len(request.ids)
        self.table.enter(request, holding, self._page_tokens)
        request.stage = Stage.PREFILL
        from_storage = self._end_prefetch(request, holding)
        if not request.started:
            request.cached_tokens = holding.matched_pages * self._page_tokens
            request.cached_storage_tokens = from_storage * self._page_tokens
            request.cached_host_tokens = holding.host.shape[1] * self._page_tokens - request.cached_storage_tokens
        self.prefilling.append(request)
        full = len(request.ids) // self._page_tokens
        request.filling_from, request.filling_to = holding.matched_pages, max(full, holding.matched_pages)
        for page_hash in request.key.page_hashes(request.filling_to, request.filling_from):
            self._filling[page_hash] = self._filling.get(page_hash, 0) + 1

    def _add_chunk(
        self, batch: ScheduleBatch, request: Request, budget: StepBudget, enters: Holding | None = None, pages: int = 0
    ) -> bool:
        """Add the request's next chunk, as large as the step allows; whether there was room for any."""
        if enters is not None:
            start, known = enters.matched_pages * self._page_tokens, len(request.ids)
        else:
            start, known = int(self.table.computed[request.slot]), int(self.table.known[request.slot])
        end, windows, holding = min(known, start + budget.tokens(start)), self._windows, enters or request.holding
        assert holding is not None
        if windows is not None:
            end = windows.reach(holding, end)
        if request.compute_from is not None:
            end = min(end, start + self._geometry.max_wants - batch.counts.wants)
        if end <= start:
            return False
        chunk = Chunk(
            request=request,
            start=start,
            end=end,
            samples=end == known,
            wants_from=max(request.prompt_logprobs_from, start + 1),
            wants_to=min(request.prompt_tokens, end + 1),
        )
        edits = self._full_groups * pages
        if windows is not None:
            edits += windows.edits(holding, end, enters is not None)
        loads = 0 if enters is None else enters.num_loads
        if not batch.add(chunk, self._geometry.max_batch_bytes, enters, edits, loads):
            return False
        if windows is not None and enters is None:
            windows.grow(batch, request, holding, end, enters=False)
        budget.spend(chunk.tokens, start)
        return True

    def _waits_for_storage(self, request: Request) -> bool:
        return request.prefetch is not None and self.cache.waits(request.prefetch, self._prefill_ms)

    def _is_being_filled(self, request: Request) -> bool:
        """Whether the first page that this request would compute is about to be computed for another."""
        if not self._filling or request.compute_from is not None:
            return False
        # A page that was missing at the last look and is still in progress is missing now: no need to look again.
        if self._is_filling(request, request.matched_tokens // self._page_tokens):
            return True
        if self._filling.keys().isdisjoint(request.key.page_hashes(len(request.ids) // self._page_tokens)):
            return False
        self.waiting.look(request)
        return self._is_filling(request, request.matched_tokens // self._page_tokens)

    def _is_filling(self, request: Request, page: int) -> bool:
        if page >= (len(request.ids) - 1) // self._page_tokens:
            return False
        return request.key.page_hashes(page + 1, page)[0] in self._filling

    def _forget_filling(self, request: Request, upto: int) -> None:
        upto = min(upto, request.filling_to)
        if upto <= request.filling_from:
            return
        for page_hash in request.key.page_hashes(upto, request.filling_from):
            count = self._filling.pop(page_hash) - 1
            if count:
                self._filling[page_hash] = count
        request.filling_from = upto

    def _close(self, requests: Sequence[Request]) -> None:
        """Take the pages from requests that have some."""
        self._growth = None
        # Those that end together mostly have one last step, or two that follow each other: few calls, of 20 µs each.
        behind: dict[int, list[Holding]] = {}
        for request in requests:
            assert request.holding is not None
            behind.setdefault(int(self.table.last_step[request.slot]), []).append(request.holding)
            request.holding = None
            self.table.held[request.slot] = 0
            self._forget_filling(request, request.filling_to)
        for step, holdings in behind.items():
            self.cache.close(holdings, Fence(step))

    def _end_prefetch(self, request: Request, holding: Holding | None) -> int:
        """The request stops waiting for storage; pages that it got from there."""
        if request.prefetch is None:
            return 0
        prefetch, request.prefetch = request.prefetch, None
        if prefetch.asked:
            request.prefetch_policy, request.prefetch_decision = prefetch.policy, prefetch.decision
            request.prefetch_reason = prefetch.reason
        return self.cache.end_prefetch(prefetch, holding)

    def _collected(self, request: Request) -> bool:
        return bool(self.table.known[request.slot] == self.table.extent[request.slot])

    def _with_pages(self) -> list[Request]:
        return [request for request in self.table.requests if request is not None and request.holding is not None]

"""Who computes what in the next step: decoding requests, prefill chunks, admissions, retractions.

in     submitted requests; launched batches; ended requests
out    a `ScheduleBatch`
state  the waiting list, the prefilling list, retracted requests that still have steps in flight, the slot table
owner  the engine, in plain functions between awaits
ready  a batch is binding: its pages are taken, so it is launched in the same breath
end    `end` gives everything of a request back, fenced by its last launched step

The order of one step. 1. Every decoding request computes one token; one that needs a page and finds none free makes
the request of lowest rank (the last submitted of the lowest priority) retract, so the first of the ranks always goes
on. 2. Prompts in progress get chunks under the token budget, in the order of admission. 3. Waiting requests are
admitted in rank order while budget, slots and pages last. One that would compute pages which a request in progress is
about to compute waits for those instead: they are matchable as soon as that chunk is launched.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Final

import numpy as np

from headrace.kvcache.cache import Holding, KvCache
from headrace.kvcache.pool import Fence
from headrace.kvcache.prefetch import PrefillMs
from headrace.ops.wire import I32, RingGeometry
from headrace.sched.batch import Chunk, Moved, ScheduleBatch
from headrace.sched.budget import OutputForecast
from headrace.sched.messages import WaitCause
from headrace.sched.request import Request, SlotTable, Stage

Budget = Callable[[int, int], int]
"""(decode rows, context tokens) → prefill tokens that the step may hold beside them."""

_MAX_PASSED_OVER: Final = 64
"""Waiting requests that one step looks past because their prefix is in progress elsewhere."""
_NOT_PUBLISHING: Final = np.iinfo(np.int32).max


class Scheduler:
    """The requests of one engine and their claims on slots and pages."""

    def __init__(
        self,
        cache: KvCache,
        geometry: RingGeometry,
        max_context_tokens: int,
        conservativeness: float,
        prefill_ms: PrefillMs = lambda tokens, context: 0.0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`prefill_ms`: what computing so many tokens behind such a context would take now. `clock`: the time in
        seconds, for the ledger of what requests wait for."""
        self.cache = cache
        self.table = SlotTable(geometry.max_samples, max_context_tokens)
        self.waiting: list[Request] = []
        self.waiting_tokens = 0
        self.prefilling: list[Request] = []
        self.retracted: list[Request] = []
        self.retractions = 0
        self.computed_tokens = 0
        self._geometry = geometry
        self._page_tokens = cache.layout.page_tokens
        self._forecast = OutputForecast(conservativeness)
        self._prefill_ms = prefill_ms
        self._clock = clock
        self._filling: dict[bytes, int] = {}
        self._with_duplicates: list[Request] = []
        self._moved: list[Moved] = []
        """Edits of page tables that no launched batch has carried yet."""

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return self.table.max_slots - self.table.free_slots

    def enqueue(self, request: Request) -> None:
        """A new or retracted request waits."""
        request.stage = Stage.WAITING
        insort(self.waiting, request, key=lambda other: other.rank)
        self.waiting_tokens += len(request.ids)

    def end(self, request: Request) -> None:
        """Give back whatever the request has, in whichever stage it is."""
        self._end_prefetch(request, None)
        if request.stage is Stage.WAITING:
            self.waiting.remove(request)
            self.waiting_tokens -= len(request.ids)
        else:
            if request.holding is not None:
                self._close(request)
            if request.stage is Stage.PREFILL:
                self.prefilling.remove(request)
            elif request.stage is Stage.RETRACTED:
                self.retracted.remove(request)
            self._forecast.ended(
                int(self.table.known[request.slot]) - request.prompt_tokens, request.submit.sampling.max_tokens
            )
            self.table.leave(request)
        request.stage = Stage.ENDED

    def prepare(self, step: int, budget: Budget) -> tuple[ScheduleBatch | None, list[Request]]:
        """The batch that becomes `step`, or None if nothing can run now; and requests that can never go on and must be
        failed."""
        for request in [request for request in self.retracted if self._collected(request)]:
            self.retracted.remove(request)
            self.table.leave(request)
            self.enqueue(request)
        self._repoint()
        stuck: list[Request] = []
        batch = self._decode(stuck)
        context = int(self.table.computed[self.prefilling[0].slot]) if self.prefilling else 0
        left = budget(len(batch.decode), context)
        for request in self.prefilling:
            if left > 0:
                left -= self._add_chunk(batch, request, left)
        self._admit(batch, step, left)
        return (batch if len(batch.decode) or batch.chunks else None), stuck

    def launched(self, batch: ScheduleBatch, step: int) -> None:
        """The batch has been sent as `step`: its pages are matchable for what is launched after it."""
        table, decode = self.table, batch.decode
        self._moved = []
        table.computed[decode] += 1
        table.extent[decode] += 1
        table.last_step[decode] = step
        for chunk in batch.chunks:
            request, slot = chunk.request, chunk.request.slot
            table.computed[slot] = chunk.end
            table.last_step[slot] = step
            self.computed_tokens += chunk.tokens
            self.publish(request, chunk.end)
            if chunk.samples:
                table.extent[slot] += 1
                table.decoding[slot] = True
                request.stage = Stage.DECODE
                self.prefilling.remove(request)
                self._forget_filling(request, request.filling_to)

    def publish(self, request: Request, filled_tokens: int) -> None:
        """Put a request's full pages of known, launched tokens into the index."""
        slot, holding = request.slot, request.holding
        assert holding is not None and filled_tokens <= self.table.computed[slot]
        request.key.length = int(self.table.known[slot])
        self.cache.publish(holding, request.key, filled_tokens, int(self.table.last_step[slot]))
        if holding.duplicates:
            self._with_duplicates.append(request)
        self.table.published[slot] = filled_tokens // self._page_tokens
        self._forget_filling(request, filled_tokens // self._page_tokens)

    def retract(self, request: Request) -> None:
        """Take a running request's pages from it. Its launched steps are still collected; then it waits again and is
        computed from what the index has kept."""
        self._close(request)
        if request.stage is Stage.PREFILL:
            self.prefilling.remove(request)
        request.stage = Stage.RETRACTED
        request.retractions += 1
        request.wait_for("queue", self._clock())
        self.table.decoding[request.slot] = False
        self.table.published[request.slot] = _NOT_PUBLISHING
        self.retracted.append(request)
        self.retractions += 1
        self._forecast.retracted()

    def forget_device(self) -> list[Request]:
        """The device is gone with every page. Returns the requests that were running, ended; the waiting go on, and so
        do the retracted, from the ids that had been collected."""
        for request in self.retracted:
            self.table.extent[request.slot] = self.table.known[request.slot]
        lost = self._with_pages()
        for request in lost:
            self.end(request)
        self.cache.forget_device()
        return lost

    def check(self) -> None:
        """Raise AssertionError unless slots, pages and lists agree (invariants 1 and 2)."""
        self.table.check()
        self.cache.check_integrity()
        assert self.waiting_tokens == sum(len(request.ids) for request in self.waiting)
        ranks = [request.rank for request in self.waiting]
        assert ranks == sorted(ranks)
        bound = [request for request in self.table.requests if request is not None]
        holding = [request for request in bound if request.holding is not None]
        assert len(holding) == self.cache.stats().holdings
        assert sorted(request.order for request in bound if request.stage is Stage.PREFILL) == sorted(
            request.order for request in self.prefilling
        )
        assert self.prefilling or not self._filling, "pages are promised by nobody"

    def _decode(self, stuck: list[Request]) -> ScheduleBatch:
        """One row for every decoding request that has a page for it, retracting others where none is left."""
        table = self.table
        pages: I32 | None = None
        while True:
            ready = np.flatnonzero(table.decoding & (table.extent < table.limit))
            full = ready[table.computed[ready] == table.held[ready]]
            pages = self.cache.take(len(full))
            if pages is not None:
                break
            if self.cache.available_pages >= len(full):
                # Enough are on their way back behind a fence: those rows sit out a step, nobody is retracted.
                ready, full = np.setdiff1d(ready, full), full[:0]
                pages = self.cache.take(0)
                break
            victim = max(self._with_pages(), key=lambda request: request.rank)
            if self.cache.stats().holdings == 1:
                stuck.append(victim)
                table.decoding[victim.slot] = False
            else:
                self.retract(victim)
        assert pages is not None
        for i, slot in enumerate(full.tolist()):
            request = table.requests[slot]
            assert request is not None and request.holding is not None
            self.cache.append(request.holding, pages[:, i : i + 1])
        table.held[full] += self._page_tokens
        return ScheduleBatch(ready, full, pages, self._moved)

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

    def _admit(self, batch: ScheduleBatch, step: int, left: int) -> None:
        """Give slots and pages to waiting requests, in rank order, until something runs out."""
        at = 0
        while left > 0 and at < min(len(self.waiting), _MAX_PASSED_OVER) and self.table.free_slots:
            request = self.waiting[at]
            cause = self._waits_for(request)
            request.wait_for(cause, self._clock())
            if cause != "queue":
                at += 1
                continue
            tokens = self._try_admit(batch, request, step, left)
            if not tokens:
                return
            del self.waiting[at]
            self.waiting_tokens -= len(request.ids)
            left -= tokens

    def _try_admit(self, batch: ScheduleBatch, request: Request, step: int, left: int) -> int:
        """Admit a request with pages for all its known tokens, if the pool can spare them beside what the running
        ones are expected to need; tokens of its first chunk, 0 if it has to wait."""
        cache, needed = self.cache, self.cache.layout.pages(len(request.ids))
        holding = cache.open(request.key, request.limit_tokens, request.prompt_logprobs_from >= request.prompt_tokens)
        missing = needed - holding.count
        pages = cache.take(missing) if missing + self._reserve(request) <= cache.available_pages else None
        if pages is None:
            cache.close(holding, Fence())
            return 0
        tokens = self._add_chunk(batch, request, left, holding, needed)
        if not tokens:
            # The ring slot is full; whoever is alone in a batch always fits.
            cache.append(holding, pages)
            cache.close(holding, Fence())
            return 0
        cache.load(holding, pages, step)
        self._enter(request, holding)
        return tokens

    def _reserve(self, request: Request) -> int:
        """Pages that admission leaves for the outputs of those that run, and of this request beside them."""
        if self.cache.stats().holdings == 1:
            return 0
        active = np.flatnonzero(self.table.held)
        growth = int((self.table.limit[active] - self.table.extent[active]).sum())
        growth += request.limit_tokens - len(request.ids)
        return int(self._forecast.ratio * growth) // self._page_tokens

    def _enter(self, request: Request, holding: Holding) -> None:
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
        for page_hash in request.key.page_hashes(request.filling_to)[request.filling_from :]:
            self._filling[page_hash] = self._filling.get(page_hash, 0) + 1

    def _add_chunk(
        self, batch: ScheduleBatch, request: Request, left: int, enters: Holding | None = None, pages: int = 0
    ) -> int:
        """Add the request's next chunk of at most `left` tokens; its size, 0 if the batch has no room for it."""
        if enters is not None:
            start, known = enters.matched_pages * self._page_tokens, len(request.ids)
        else:
            start, known = int(self.table.computed[request.slot]), int(self.table.known[request.slot])
        end = min(known, start + left)
        if request.prompt_logprobs_from < request.prompt_tokens:
            end = min(end, start + self._geometry.max_wants - batch.counts.wants)
            if end <= start:
                return 0
        chunk = Chunk(
            request=request,
            start=start,
            end=end,
            samples=end == known,
            wants_from=max(request.prompt_logprobs_from, start + 1),
            wants_to=min(request.prompt_tokens, end + 1),
        )
        return chunk.tokens if batch.add(chunk, self._geometry.max_batch_bytes, enters, pages) else 0

    def _waits_for(self, request: Request) -> WaitCause:
        """What a request whose turn it is has to wait for; "queue" if for nothing but room."""
        if request.prefetch is not None and self.cache.waits(request.prefetch, self._prefill_ms):
            return "storage"
        return "prefix" if self._is_being_filled(request) else "queue"

    def _is_being_filled(self, request: Request) -> bool:
        """Whether the first page that this request would compute is about to be computed for another."""
        if not self._filling or request.prompt_logprobs_from < request.prompt_tokens:
            return False
        page = self.cache.peek(request.key) // self._page_tokens
        if page >= (len(request.ids) - 1) // self._page_tokens:
            return False
        return request.key.page_hashes(page + 1)[page] in self._filling

    def _forget_filling(self, request: Request, upto: int) -> None:
        upto = min(upto, request.filling_to)
        for page_hash in request.key.page_hashes(upto)[request.filling_from : upto]:
            count = self._filling.pop(page_hash) - 1
            if count:
                self._filling[page_hash] = count
        request.filling_from = max(request.filling_from, upto)

    def _close(self, request: Request) -> None:
        assert request.holding is not None
        self.cache.close(request.holding, Fence(int(self.table.last_step[request.slot])))
        request.holding = None
        self.table.held[request.slot] = 0
        self._forget_filling(request, request.filling_to)

    def _end_prefetch(self, request: Request, holding: Holding | None) -> int:
        """The request stops waiting for storage; pages that it got from there."""
        if request.prefetch is None:
            return 0
        prefetch, request.prefetch = request.prefetch, None
        request.prefetch_policy, request.prefetch_decision = prefetch.policy, prefetch.decision
        request.prefetch_reason = prefetch.reason
        return self.cache.end_prefetch(prefetch, holding)

    def _collected(self, request: Request) -> bool:
        return bool(self.table.known[request.slot] == self.table.extent[request.slot])

    def _with_pages(self) -> list[Request]:
        return [request for request in self.table.requests if request is not None and request.holding is not None]

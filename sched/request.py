"""One request's long-lived state, and the table of those that have a slot.

in     submissions; launched and collected steps
out    what the next step may compute for whom
state  per request: its ids, its holding; per slot: flat arrays, so that a step over 256 decoding requests costs a few
       numpy operations and no Python per request
owner  the scheduler
ready  a slot's arrays describe launched steps as soon as they are launched; `known` follows when a step is collected
end    a slot is free when its request has ended or has left it; steps in flight for it are told by the generation

The tokens of a request in a slot::

    | computed: KV launched      | to compute | future |
    0                        computed      known   extent            limit
                                                                     (prompt + max_tokens)

`known` ids are on the host; `extent - known` more have been drawn by launched steps and are on the device only. A row
computes positions [computed, end); it samples when `end == extent`. While decoding, `extent == computed + 1`.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.holding import Holding
from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.prefetch import Prefetch
from headrace.ops.wire import I32
from headrace.sched.matching import Matching
from headrace.sched.messages import WAIT_CAUSES, Submit, WaitCause, WaitedFor


class Stage(IntEnum):
    """Where a request stands."""

    WAITING = 0
    """No slot, no pages."""
    PREFILL = 1
    """Slot and pages; part of its known tokens is not launched."""
    DECODE = 2
    """One token a step."""
    RETRACTED = 3
    """Its pages are given back, its launched steps not collected; then WAITING again."""
    ENDED = 4


class Request:
    """A submitted request until its end."""

    __slots__ = (
        *("arrival_s", "cached_host_tokens", "cached_storage_tokens", "cached_tokens", "deadlines", "filling_from"),
        *("filling_to", "holding", "ids", "key", "limit_tokens", "matched_tokens", "matched_version", "matching"),
        *("order", "place", "prefetch", "prefetch_decision", "prefetch_policy", "prefetch_reason"),
        *("prompt_logprobs_from", "prompt_tokens", "retractions", "saved_by", "saved_ms", "slot", "stage", "started"),
        *("submit", "waited_for", "waited_ms", "waits_for", "_waiting_since_s"),
    )

    def __init__(self, submit: Submit, key: PrefixKey, order: int, arrival_s: float) -> None:
        self.submit = submit
        self.key = key
        self.order = order
        """Of submission: the tie-breaker of every policy."""
        self.arrival_s = arrival_s
        self.prompt_tokens = len(submit.prompt_ids)
        self.limit_tokens = self.prompt_tokens + submit.sampling.max_tokens
        """The longest its context may become."""
        self.stage = Stage.WAITING
        self.ids: I32 = submit.prompt_ids
        """Known ids while it has no slot."""
        self.slot = -1
        self.holding: Holding | None = None
        self.filling_from = self.filling_to = 0
        """Pages [from, to) of its known tokens that it is about to compute, for others with the same prefix."""
        self.cached_tokens = self.cached_host_tokens = self.cached_storage_tokens = 0
        """Prompt tokens it found in the cache when it first started; those of them that only the host had, and that
        the host had from storage, for this request."""
        self.prefetch: Prefetch | None = None
        self.prefetch_policy = self.prefetch_decision = self.prefetch_reason = ""
        """Of its first start; see `Started`."""
        self.saved_ms = 0.0
        self.saved_by = ""
        """What computing its cached tokens would have taken, and the estimate's formula."""
        self.started = False
        """Its first chunk has been launched."""
        self.waits_for: WaitCause | None = "turn"
        """What it waits for now; None from its first id on."""
        self.waited_ms: dict[WaitCause, float] = dict.fromkeys(WAIT_CAUSES, 0.0)
        """What it waited for before, until its first id."""
        self._waiting_since_s = arrival_s
        wants = submit.sampling.prompt_logprobs >= 0
        self.prompt_logprobs_from = submit.sampling.prompt_logprobs_from if wants else self.prompt_tokens
        """Prompt positions from here on still need their logprobs."""
        self.retractions = 0
        self.matching: Matching | None = None
        """Its grammar, if it has one, and how far the output has come in it."""
        self.matched_tokens = 0
        """Of its known tokens, cached when the index had `matched_version`."""
        self.matched_version = -1
        self.place: tuple[int, bool, float, int] = (-submit.priority, True, 0.0, order)
        """Among the waiting; `queue` keeps it."""
        self.waited_for: WaitedFor = ""
        """What kept it waiting when it was last looked at."""
        self.deadlines: list[asyncio.TimerHandle] = []
        """Timers to cancel at its end."""

    def wait_for(self, cause: WaitCause | None, now_s: float) -> None:
        """From now on it waits for something else: the ledger's parts follow each other without a gap, so that they
        add up. No effect after its first id."""
        if self.waits_for is not None and cause != self.waits_for:
            self.waited_ms[self.waits_for] += (now_s - self._waiting_since_s) * 1e3
            self.waits_for, self._waiting_since_s = cause, now_s

    @property
    def compute_from(self) -> int | None:
        """Positions from here on are computed, whatever is cached: the logprob of a prompt id comes from the logits of
        the position before it. None if the prompt's are not wanted, or all have been told."""
        return self.prompt_logprobs_from - 1 if self.prompt_logprobs_from < self.prompt_tokens else None

    @property
    def lacks_mask(self) -> bool:
        """Whether it has a grammar that has not said yet what the next output may be."""
        outputs = len(self.ids) - self.prompt_tokens
        return self.matching is not None and self.matching.mask(outputs) is None

    @property
    def rank(self) -> tuple[int, int]:
        """Who keeps its pages when not all can: priority first, then the order of submission."""
        return -self.submit.priority, self.order

    def where(self, table: SlotTable) -> str:
        """Where it stands, for a message."""
        where = self.stage.name.lower()
        if self.prefetch is not None:
            where += f", prefetching ({self.prefetch.policy}: {self.prefetch.reason or 'not asked yet'})"
        if self.slot >= 0:
            computed, known, limit = (array[self.slot] for array in (table.computed, table.known, table.limit))
            where += f", slot {self.slot}: {computed} computed, {known} known, limit {limit}"
        return where


class SlotTable:
    """Requests that have a slot, as arrays over the slots."""

    def __init__(self, max_slots: int, max_context_tokens: int) -> None:
        self.max_slots = max_slots
        self.requests: list[Request | None] = [None] * max_slots
        self._free = list(range(max_slots - 1, -1, -1))
        # Touched only as far as contexts really reach: 256 slots x 128k tokens would be 134 MB.
        self.tokens: I32 = np.zeros((max_slots, max_context_tokens), np.int32)
        self.handle: NDArray[np.int64] = np.zeros(max_slots, np.int64)
        self.generation: NDArray[np.int64] = np.zeros(max_slots, np.int64)
        """Counts the requests a slot has had: what a step in flight launched for an earlier one is an overrun."""
        self.last_step: NDArray[np.int64] = np.full(max_slots, -1, np.int64)
        self.prompt: I32 = np.zeros(max_slots, np.int32)
        self.computed: I32 = np.zeros(max_slots, np.int32)
        self.known: I32 = np.zeros(max_slots, np.int32)
        self.extent: I32 = np.zeros(max_slots, np.int32)
        self.limit: I32 = np.zeros(max_slots, np.int32)
        self.held: I32 = np.zeros(max_slots, np.int32)
        """Positions that its pages have room for."""
        self.published: I32 = np.zeros(max_slots, np.int32)
        """Pages in the index."""
        self.decoding: NDArray[np.bool_] = np.zeros(max_slots, np.bool_)
        self.watched: NDArray[np.bool_] = np.zeros(max_slots, np.bool_)
        """Every result needs a look of its own (logprobs)."""
        self.masked: NDArray[np.bool_] = np.zeros(max_slots, np.bool_)
        """What may be drawn is said by a grammar."""
        self.lacks_mask: NDArray[np.bool_] = np.zeros(max_slots, np.bool_)
        """It has not said so in time, nor since: until then the slot sits out all steps."""

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def can_decode(self) -> NDArray[np.bool_]:
        """[slots] whether it has a token to compute in the next step; a fresh array."""
        return self.decoding & ~self.lacks_mask & (self.extent < self.limit)

    def enter(self, request: Request, holding: Holding, page_tokens: int) -> int:
        """Bind a request with its holding to a free slot."""
        slot = self._free.pop()
        known = len(request.ids)
        self.requests[slot] = request
        self.tokens[slot, :known] = request.ids
        self.handle[slot] = request.submit.request
        self.last_step[slot] = -1
        self.prompt[slot] = request.prompt_tokens
        self.computed[slot] = holding.matched_pages * page_tokens
        self.known[slot] = self.extent[slot] = known
        self.limit[slot] = request.limit_tokens
        self.held[slot] = holding.count * page_tokens
        self.published[slot] = holding.lease.num_pages
        self.decoding[slot] = False
        self.watched[slot] = request.submit.sampling.logprobs >= 0
        self.masked[slot] = request.matching is not None
        request.slot = slot
        request.holding = holding
        request.key.tokens = self.tokens[slot]
        request.key.length = known
        return slot

    def leave(self, request: Request) -> None:
        """Free a request's slot; it keeps its known ids."""
        slot = request.slot
        known = int(self.known[slot])
        request.ids = self.tokens[slot, :known].copy()
        request.key.tokens, request.key.length = request.ids, known
        request.slot = -1
        self.requests[slot] = None
        self.generation[slot] += 1
        self.decoding[slot] = self.masked[slot] = self.lacks_mask[slot] = False
        self._free.append(slot)

    def check(self) -> None:
        """Raise AssertionError unless the lengths of every bound slot are ordered as drawn above."""
        for slot, request in enumerate(self.requests):
            if request is None:
                continue
            computed, known, extent = int(self.computed[slot]), int(self.known[slot]), int(self.extent[slot])
            assert request.slot == slot and request.prompt_tokens <= known <= extent <= request.limit_tokens
            if request.stage in (Stage.PREFILL, Stage.DECODE):
                assert (
                    request.holding is not None and request.holding.count * request.key.page_tokens == self.held[slot]
                )
                assert computed <= self.held[slot] and computed < extent
                assert (request.stage is Stage.DECODE) == bool(self.decoding[slot])
            if self.lacks_mask[slot]:
                assert known == extent and request.matching is not None
                assert request.matching.mask(known - request.prompt_tokens) is None, "a mask has come, and nobody knows"
        free = sorted(self._free)
        assert free == [slot for slot, request in enumerate(self.requests) if request is None]

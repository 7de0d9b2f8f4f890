"""The waiting requests, in the order of the policy.

in     requests that were submitted or retracted; the index, as far as it says how much of them is cached
out    the request whose turn it is, and those after it
state  the requests sorted by their place; who is looked at next; the draws of `random`
owner  the scheduler
ready  at once; a place may be old by a few steps, except that of a request whose turn it is
end    `remove`, when a request is admitted or ends

A place is (priority, retracted ones first, the policy's number, the order of submission). Looking up how much of a
prompt is cached takes 2 to 8 µs, so 1024 waiting requests are not all looked up in each step. What was found is kept
with the index's version; at most `LOOKS` requests a step are looked up again: first those whose turn it is, and
`ROTA` in rotation. A request's own turn never comes by an old number, it may only come some steps late.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np

from headrace.kvcache.cache import KvCache
from headrace.kvcache.prefetch import PrefillMs
from headrace.sched.policies import (
    CHANGING,
    LEAST_WORK_MS,
    MATCHING,
    SchedulePolicy,
    dfs_weight_order,
    hrrn_key,
    least_work_key,
)
from headrace.sched.request import Request

Place: TypeAlias = tuple[int, bool, float, int]

LOOKS: Final = 32
"""Requests that one step looks up in the index: about 0.15 ms."""
ROTA: Final = 8
"""Of them, whether their turn has come or not: with 1024 waiting each is looked at every 128 steps."""
DFS_MOST: Final = 256
"""Requests, those that came first, that `dfs-weight` puts in order: 1 ms. The others follow as they came."""


class WaitingQueue:
    """Requests without a slot."""

    def __init__(
        self, policy: SchedulePolicy, cache: KvCache, prefill_ms: PrefillMs, random: np.random.Generator
    ) -> None:
        self.tokens = 0
        """Known tokens of all of them."""
        self._policy = policy
        self._cache = cache
        self._prefill_ms = prefill_ms
        self._random = random
        self._sorted: list[Request] = []
        self._rota: OrderedDict[int, Request] = OrderedDict()
        self._looks = LOOKS
        self._now_s = 0.0
        self._arrived = False
        """Since `dfs-weight` was last worked out."""
        self._steps = 0
        self._dfs_version = -1

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._sorted)

    def add(self, request: Request, now_s: float) -> None:
        """A request waits from now on."""
        self._now_s = now_s
        self.tokens += len(request.ids)
        self._match(request)
        request.place = self._place(request)
        insort(self._sorted, request, key=_place_of)
        self._rota[request.order] = request
        self._arrived = True

    def remove(self, request: Request) -> None:
        """It waits no longer."""
        self._take_out(request)
        self.tokens -= len(request.ids)
        del self._rota[request.order]

    def begin_step(self, now_s: float) -> None:
        """Bring some places up to date; look-ups are counted from here."""
        self._now_s, self._looks = now_s, LOOKS
        if self._policy not in MATCHING and self._policy not in CHANGING:
            return
        for _ in range(min(ROTA, len(self._sorted))):
            order, request = next(iter(self._rota.items()))
            self._rota.move_to_end(order)
            self.look(request)
            self._put(request)
        if self._policy == "dfs-weight":
            self._steps += 1
            self._order_by_branches()

    def candidate(self, at: int) -> Request | None:
        """The request at this place, counted from the first, by numbers that are true now; None past the end, or when
        this step has looked at enough of them."""
        while at < len(self._sorted):
            request = self._sorted[at]
            if self._policy not in MATCHING or self._is_matched(request):
                return request
            if not self.look(request):
                return None
            self._put(request)
            if self._sorted[at] is request:
                return request
        return None

    def look(self, request: Request) -> bool:
        """Look up again how much of a request is cached, if need be and as often as a step may; whether what is known
        is true now."""
        if self._is_matched(request):
            return True
        if not self._looks:
            return False
        self._looks -= 1
        self._match(request)
        return True

    def check(self) -> None:
        """Raise AssertionError unless the order and the sums are right."""
        places = [request.place for request in self._sorted]
        assert places == sorted(places)
        assert self.tokens == sum(len(request.ids) for request in self._sorted)
        assert sorted(self._rota) == sorted(request.order for request in self._sorted)

    def _match(self, request: Request) -> None:
        request.matched_tokens = self._cache.peek(request.key)
        request.matched_version = self._cache.version

    def _is_matched(self, request: Request) -> bool:
        return request.matched_version == self._cache.version

    def _put(self, request: Request) -> None:
        """Move a request to where it belongs."""
        place = self._place(request)
        if place != request.place:
            self._take_out(request)
            request.place = place
            insort(self._sorted, request, key=_place_of)

    def _take_out(self, request: Request) -> None:
        at = bisect_left(self._sorted, request.place, key=_place_of)
        assert self._sorted[at] is request
        del self._sorted[at]

    def _place(self, request: Request) -> Place:
        # What was retracted has been paid for once: its pages are still in the index if it comes back soon.
        return -request.submit.priority, not request.retractions, self._number(request), request.order

    def _number(self, request: Request) -> float:
        match self._policy:
            case "fcfs":
                return 0.0
            case "lpm":
                return float(-request.matched_tokens)
            case "lof":
                return float(-request.submit.sampling.max_tokens)
            case "random":
                return float(self._random.random())
            case "hrrn":
                return hrrn_key((self._now_s - request.arrival_s) * 1e3, self._work_ms(request))
            case "least-work":
                return least_work_key(request.arrival_s, self._work_ms(request))
            case "dfs-weight":
                return request.place[2] if request.order in self._rota else float("inf")

    def _work_ms(self, request: Request) -> float:
        """Prefill that the cache does not save; or reading from storage, where that is quicker."""
        matched = request.matched_tokens
        work_ms = self._compute_ms(request, matched)
        if request.prefetch is not None:
            tokens, read_ms = self._cache.to_come(request.prefetch)
            if tokens > matched:
                work_ms = min(work_ms, read_ms + self._compute_ms(request, tokens))
        return max(work_ms, LEAST_WORK_MS)

    def _compute_ms(self, request: Request, matched: int) -> float:
        tokens = len(request.ids) - matched
        return self._prefill_ms(tokens, matched)

    def _order_by_branches(self) -> None:
        """`dfs-weight` for the requests that came first, as often as costs what looking at `ROTA` requests does."""
        changed = self._arrived or self._dfs_version != self._cache.version
        if not changed or self._steps * 2 * ROTA < min(len(self._sorted), DFS_MOST):
            return
        self._arrived, self._dfs_version, self._steps = False, self._cache.version, 0
        page_tokens = self._cache.layout.page_tokens
        first = sorted(self._sorted, key=lambda request: request.order)[:DFS_MOST]
        paths = [request.key.page_hashes(request.matched_tokens // page_tokens) for request in first]
        for rank, at in enumerate(dfs_weight_order(paths)):
            request = first[at]
            request.place = (*request.place[:2], float(rank), request.order)
        self._sorted.sort(key=_place_of)


def _place_of(request: Request) -> Place:
    return request.place

"""The allocator of one pool's pages: which are free, who owns the rest, and what a returned page must outlive.

in     `take`, `hand_over`, `give_back` with a fence; completions of steps and transfers
out    page numbers
state  the free stack, one owner byte a page, pages behind fences
owner  `KvCache`; nothing else calls it
ready  a taken page may be written by commands sent after the `take`
end    a page is free again when its fence is complete: the last launched step that touches it and every transfer
"""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.ops.wire import I32

PINNED_SHARE: Final = 0.5
"""Of a pool, or the smaller of the device's and the host's, that pins may hold."""
EVICTED_SHARE: Final = 1 / 128
"""Of the pool, at least so much is evicted at a time: so one eviction (20 µs, and 5 a prefix) serves many requests
that begin in a step."""


class Owner:
    """Who may give a page back. Exactly one at a time. Plain ints: numpy takes an IntEnum apart in 2 µs a time."""

    FREE: Final = 0
    REQUEST: Final = 1
    INDEX: Final = 2
    FENCED: Final = 3
    TRANSFER: Final = 4
    names: Final = ("FREE", "REQUEST", "INDEX", "FENCED", "TRANSFER")


class Fence(NamedTuple):
    """What a page must outlive before it is reused."""

    after_step: int = -1
    """The last launched step that reads or writes it; -1 for none."""
    transfers: tuple[int, ...] = ()
    """Copies from or to it that have not been acknowledged."""


class _Held(NamedTuple):
    after_step: int
    order: int
    pages: I32
    transfers: frozenset[int]


class Pools(tuple["PagePool", ...]):
    """The pools of several groups whose pages come and go together: int32 [groups, n]."""

    def take(self, count: int) -> I32:
        """`count` pages of each for a request; there are so many."""
        taken = [pages for pool in self if (pages := pool.take(count)) is not None]
        # One copy; `np.stack` would take 5 µs to find the shape.
        return np.concatenate(taken).reshape(len(self), count)

    def hand_over(self, pages: I32, giver: int, taker: int) -> None:
        """Change the owner of pages that `giver` owns."""
        for pool, some in zip(self, pages):
            pool.hand_over(some, giver, taker)

    def give_back(self, pages: I32, giver: int, fence: Fence) -> None:
        """Return pages of `giver`; they are free when the fence is complete."""
        for pool, some in zip(self, pages):
            pool.give_back(some, giver, fence)


class PagePool:
    """Pages 0..num_pages - 1 of one layer group."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.completed_step = -1
        self.changes = 0
        """How often pages have changed hands: equal counts, equal owners."""
        self._order = 0
        self.reset()

    def reset(self) -> None:
        """Every page is free: at the start, and when the device is gone and its fences are moot."""
        num_pages = self.num_pages
        self.changes += 1
        self.owner: NDArray[np.uint8] = np.zeros(num_pages, np.uint8)
        self.free_pages = num_pages
        self.fenced_pages = 0
        # Low pages are on top, so that a short run touches few of the pool's bytes.
        self._free: I32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._held: list[_Held] = []
        self._waiting_for: dict[int, list[_Held]] = {}
        self._open_transfers: dict[int, None] = {}

    def take(self, count: int, taker: int = Owner.REQUEST) -> I32 | None:
        """`count` pages for a new owner, or None if fewer are free (nothing is taken then)."""
        if count > self.free_pages:
            return None
        self.free_pages -= count
        pages = self._free[self.free_pages : self.free_pages + count][::-1].copy()
        # Bytes count an owner in a third of the time that comparing and reducing an array takes (50 calls a step).
        assert self.owner[pages].tobytes().count(Owner.FREE) == count, "a page on the free stack has an owner"
        self.owner[pages] = taker
        self.changes += count > 0
        return pages

    def hand_over(self, pages: I32, giver: int, taker: int) -> None:
        """Change the owner of pages that `giver` owns."""
        owned = self.owner[pages].tobytes().count(giver)
        assert owned == len(pages), f"pages {pages} are not all owned by {Owner.names[giver]}"
        self.owner[pages] = taker
        self.changes += len(pages) > 0

    def give_back(self, pages: I32, giver: int, fence: Fence) -> None:
        """Return pages of `giver`; they are free when the fence is complete."""
        if not len(pages):
            return
        self.hand_over(pages, giver, Owner.FENCED)
        self.fenced_pages += len(pages)
        self._order += 1
        held = _Held(fence.after_step, self._order, pages, frozenset(fence.transfers))
        if held.after_step > self.completed_step:
            heapq.heappush(self._held, held)
        else:
            self._pass_step(held)

    def open_transfer(self, transfer: int) -> None:
        """A copy that fences may name has begun."""
        self._open_transfers[transfer] = None

    def complete_step(self, step: int) -> None:
        """All commands of `step`, and so of every step before it, have completed."""
        assert step >= self.completed_step
        self.completed_step = step
        while self._held and self._held[0].after_step <= step:
            self._pass_step(heapq.heappop(self._held))

    def complete_transfer(self, transfer: int) -> None:
        """The copy was acknowledged, cancelled for good, or its process reaped."""
        self._open_transfers.pop(transfer, None)
        for held in self._waiting_for.pop(transfer, ()):
            if not any(other in self._open_transfers for other in held.transfers):
                self._free_now(held.pages)

    def check(self) -> None:
        """Raise AssertionError unless free and fenced pages are what the owner bytes say, each once."""
        seen: NDArray[np.bool_] = np.zeros(self.num_pages, np.bool_)
        free = self._free[: self.free_pages]
        seen[free] = True
        assert np.count_nonzero(seen) == self.free_pages, "a page is free twice"
        assert not self.owner[free].any(), "a free page has an owner"
        waiting = {held.order: held for queue in self._waiting_for.values() for held in queue}
        fenced = [held.pages for held in (*self._held, *waiting.values())]
        if fenced:
            flat = np.concatenate(fenced)
            seen[flat] = True
            assert np.count_nonzero(seen) == len(flat) + self.free_pages, "a page is fenced twice"
            assert (self.owner[flat] == Owner.FENCED).all(), "a fenced page has another owner"
        assert self.fenced_pages == sum(map(len, fenced)), "pages behind fences are not those that are counted"
        counts = np.bincount(self.owner, minlength=len(Owner.names))
        assert counts[Owner.FREE] == self.free_pages and counts[Owner.FENCED] == self.fenced_pages, counts

    def _pass_step(self, held: _Held) -> None:
        pending = [transfer for transfer in sorted(held.transfers) if transfer in self._open_transfers]
        if not pending:
            self._free_now(held.pages)
        for transfer in pending:
            self._waiting_for.setdefault(transfer, []).append(held)

    def _free_now(self, pages: I32) -> None:
        self.owner[pages] = Owner.FREE
        self.changes += 1
        self._free[self.free_pages : self.free_pages + len(pages)] = pages
        self.free_pages += len(pages)
        self.fenced_pages -= len(pages)

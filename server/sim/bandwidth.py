"""A channel whose bandwidth is shared equally by all transfers under way, in virtual time.

in     transfers of so many bytes
out    a call at the moment each has been moved
state  the transfers under way, by what each must still see moved; one timer
owner  the simulated store that has the channel
ready  `done` is called when the last byte has gone
end    `cancel` and `stop` call nothing

With n transfers each gets 1/n of the bandwidth. `_moved` is what a transfer that had been there from the start would
have got by now; one that begins at `_moved = m` with b bytes ends at `m + b`, whatever comes and goes meanwhile, so an
arrival costs a heap operation and not a look at all others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from headrace.server.sim.virtual_loop import VirtualLoop, VirtualTimer


class _Transfer(NamedTuple):
    ends_at: float
    number: int
    size_bytes: int
    done: Callable[[], None]


class SharedBandwidth:
    """One direction of a disk or a link."""

    def __init__(self, loop: VirtualLoop, bytes_per_s: float) -> None:
        assert bytes_per_s > 0
        self.moved_bytes = 0
        """Of all transfers that have ended."""
        self._loop = loop
        self._bytes_per_ns = bytes_per_s / 1e9
        self._moved = 0.0
        self._at_ns = loop.time_ns()
        self._heap: list[_Transfer] = []
        self._under_way: dict[int, _Transfer] = {}
        self._numbers = 0
        self._timer: VirtualTimer | None = None

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def begin(self, size_bytes: int, done: Callable[[], None]) -> int:
        """Move so many bytes; the transfer's number."""
        self._advance()
        self._numbers += 1
        transfer = _Transfer(self._moved + size_bytes, self._numbers, size_bytes, done)
        self._under_way[transfer.number] = transfer
        heapq.heappush(self._heap, transfer)
        self._set_timer()
        return transfer.number

    def cancel(self, number: int) -> float:
        """Stop a transfer; the share of it that had been moved, 1 if it had ended."""
        self._advance()
        transfer = self._under_way.pop(number, None)
        if transfer is None:
            return 1.0
        self._set_timer()
        return min(1.0, max(0.0, 1.0 - (transfer.ends_at - self._moved) / max(1, transfer.size_bytes)))

    def stop(self) -> None:
        """Drop everything."""
        self._under_way.clear()
        self._set_timer()

    def _advance(self) -> None:
        now_ns = self._loop.time_ns()
        if self._under_way:
            self._moved += (now_ns - self._at_ns) * self._bytes_per_ns / len(self._under_way)
        self._at_ns = now_ns

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and self._heap[0].number not in self._under_way:
            heapq.heappop(self._heap)
        if self._heap:
            left = max(0.0, self._heap[0].ends_at - self._moved) * len(self._under_way)
            # A nanosecond more, so that rounding never leaves the first one a little short of its end.
            self._timer = self._loop.call_later_ns(int(left / self._bytes_per_ns) + 1, self._end_first)

    def _end_first(self) -> None:
        self._timer = None
        self._advance()
        transfer = heapq.heappop(self._heap)
        del self._under_way[transfer.number]
        self.moved_bytes += transfer.size_bytes
        self._set_timer()
        transfer.done()

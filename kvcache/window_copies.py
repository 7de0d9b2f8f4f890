"""Copies of window pages to the host: only what somebody who goes on from an end needs.

in     prefixes behind which somebody may go on; acknowledgements of copies
out    `Copy` after `Copy` to send to the device; pages to write to storage
state  ends whose windows wait to be copied, copies under way, each with its number (of `HostTier`)
owner  `KvCache`
ready  a host page can be matched when its copy is acknowledged
end    as in `HostTier`; what waits holds no window page: those that go before their turn are not copied

Under `write_through_selective` only ends that a request has matched are copied; under the other policies also those of
prompts and answers, when they are there: a window's idle pages go long before the full groups' do, so that nothing
would be left to copy when those are evicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from headrace.kvcache.host import NOTHING_PENDING, Copy, HostTier
from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.pool import Fence, Owner
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.radix_nodes import Lease, places_from
from headrace.kvcache.window_group import WindowGroup
from headrace.ops.wire import I32

MOST_WAITING: Final = 4096
"""Ends whose windows wait to be copied; beyond, the oldest is given up. Each holds a lease."""


class _Waiting(NamedTuple):
    """An end whose window waits to be copied."""

    group: WindowGroup
    lease: Lease
    pages: int
    """Of the prefix, up to the end: the lease may reach further."""
    step: int
    """That fills its last page."""
    key: PrefixKey | None
    number: int
    begun: int = 0
    """Pages of the prefix before this one have had their copy, and maybe lost it to those behind them, where the host
    has less room than a window: copied again, they would go round for ever."""


class WindowCopied(NamedTuple):
    """A copy of pages of one group. The lease keeps the places; whoever gets this gives it back."""

    group: WindowGroup
    lease: Lease
    key: PrefixKey | None
    number: int
    at: I32
    """int32 [k]: which pages of the prefix."""
    places: I32
    host: I32


class WindowCopies:
    """All of one cache."""

    def __init__(
        self, index: RadixIndex, groups: Sequence[WindowGroup], host: HostTier, page_bytes: Sequence[int]
    ) -> None:
        """`page_bytes`: of a page of each group of the layout."""
        self.skipped_pages = 0
        """For lack of host room."""
        self._index = index
        self._groups = groups
        self._host = host
        self._page_bytes = page_bytes
        self._waiting: deque[_Waiting] = deque()
        self._under_way: dict[int, WindowCopied] = {}

    @property
    def leases(self) -> list[Lease]:
        """For the integrity check."""
        return [*(one.lease for one in self._waiting), *(copy.lease for copy in self._under_way.values())]

    @property
    def busy(self) -> bool:
        """Whether copies wait or are under way."""
        return bool(self._waiting or self._under_way)

    @property
    def oldest_number(self) -> int:
        """Of what waits to be copied or is being copied; `NOTHING_PENDING` if nothing is."""
        numbers = [*(one.number for one in self._waiting), *(copy.number for copy in self._under_way.values())]
        return min(numbers, default=NOTHING_PENDING)

    def reading(self, group: WindowGroup) -> list[I32]:
        """Places whose device pages copies read."""
        return [copy.places for copy in self._under_way.values() if copy.group is group]

    def transferring(self, group: WindowGroup) -> list[I32]:
        """Host pages that copies write to."""
        return [copy.host for copy in self._under_way.values() if copy.group is group]

    def ended(self, lease: Lease, pages: int, step: int, key: PrefixKey | None, matched: bool = False) -> None:
        """Somebody may go on behind the first `pages` pages of the lease's path, the last of which `step` fills;
        `matched`: somebody does."""
        if self._host.policy == "write_through_selective" and not matched:
            return
        for group in self._groups:
            if len(self._waiting) >= MOST_WAITING:
                self._index.release(self._waiting.popleft().lease, -1, touch=False)
            number = self._host.next_number()
            self._waiting.append(_Waiting(group, self._index.lease_again(lease), pages, step, key, number))

    def next_copy(self, completed_step: int, copy_bytes: int) -> Copy | None:
        """The next copy to send, of `copy_bytes` or one page at most; None if nothing can be copied."""
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            if waiting.step > completed_step:
                self._waiting.append(waiting)
            elif (copy := self._begin(waiting, completed_step, copy_bytes)) is not None:
                return copy
        return None

    def acknowledge(self, transfer: int) -> WindowCopied | None:
        """The host pages of a copy hold the bytes; None if the copy is not of these."""
        done = self._under_way.pop(transfer, None)
        if done is None:
            return None
        group = done.group
        # Storage may have brought some meanwhile.
        taken = group.host.pages[done.places] < 0
        group.put_host(done.places[taken], done.host[taken])
        group.host_pool.give_back(done.host[~taken], Owner.TRANSFER, Fence())
        group.unpin(done.places, -1)
        group.copied_pages += len(done.host)
        return done._replace(at=done.at[taken], places=done.places[taken], host=done.host[taken])

    def give_up(self) -> None:
        """The device has ended, and with it every copy."""
        for copy in self._under_way.values():
            copy.group.host_pool.give_back(copy.host, Owner.TRANSFER, Fence())
            copy.group.unpin(copy.places, -1)
        for lease in self.leases:
            self._index.release(lease, -1, touch=False)
        self._waiting.clear()
        self._under_way.clear()

    def _begin(self, waiting: _Waiting, completed_step: int, copy_bytes: int) -> Copy | None:
        """Begin to copy what the end lacks on the host, as much as one copy may; the rest comes next."""
        group, most = waiting.group, max(1, copy_bytes // self._page_bytes[waiting.group.number])
        first = max(group.end_from(waiting.pages), waiting.begun)
        places = places_from(waiting.lease, first)[: waiting.pages - first]
        lacking = (group.device.pages[places] >= 0) & (group.host.pages[places] < 0)
        lacking &= group.filled_by[places] <= completed_step
        for copied in self.reading(group):
            lacking &= ~np.isin(places, copied)
        found = np.flatnonzero(lacking)
        at = found[:most]
        host = group.take_host(len(at)) if len(at) else None
        if host is None:
            self.skipped_pages += len(found)
            self._index.release(waiting.lease, -1, touch=False)
            return None
        if len(found) > most:
            begun = first + int(at[-1]) + 1
            self._waiting.appendleft(waiting._replace(lease=self._index.lease_again(waiting.lease), begun=begun))
        places = places[at]
        group.pin(places)
        transfer = self._host.next_transfer()
        self._under_way[transfer] = WindowCopied(
            group, waiting.lease, waiting.key, waiting.number, (first + at).astype(np.int32), places, host
        )
        return Copy(transfer, group.device.pages[places][None], host[None], group.number)

"""The host tier: pages in the server's own (pinned) memory, and the copies that bring them there.

in     published prefixes, by the write policy; acknowledgements of copies
out    `Copy` after `Copy` to send to the device; pages to write to storage
state  the host pool, prefixes whose pages wait to be copied, copies under way, each with its number
owner  `KvCache`; nothing else calls it
ready  a host page is indexed, and so matchable, when its copy is acknowledged
end    a page under way is the transfer's until it is acknowledged, or the device that writes it has ended

The write policies: `write_through` copies what is published as soon as the step that fills it has completed;
`write_through_selective` what has been matched again; `write_back` what the device is about to evict.

Whatever is on its way down has a number, from the moment at which it is asked for until storage has acknowledged it:
who waits for all that was under way at some moment waits until the oldest number is a later one.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal, NamedTuple, TypeAlias

from headrace.kvcache.host_pool import HostPool
from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.pool import Fence, Owner
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.radix_nodes import Dropped, Lease, Span, held_by_these
from headrace.ops.wire import I32

WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]

READING_SHARE: Final = 0.25
"""Of the host, that copies of running requests' pages leave to what is read from storage: those are on the device, and
so read by nobody, and stay as long as their request runs. They are made when it has ended."""
NOTHING_PENDING: Final = 1 << 62
"""A number that is later than all."""


class Copy(NamedTuple):
    """Device pages to bring to host pages: int32 [groups, k] each."""

    transfer: int
    device: I32
    host: I32
    first_group: int = 0
    """Of the layout, whose pages stand in the first row."""


class Copied(NamedTuple):
    """An acknowledged copy. The lease keeps the pages; whoever gets this gives it back."""

    lease: Lease
    spans: list[Span]
    host: I32
    key: PrefixKey | None
    """Of the request that published the pages, whose hashes are known; None where eviction asked for the copy."""
    number: int


class _Waiting(NamedTuple):
    """A prefix whose pages wait to be copied."""

    lease: Lease
    step: int
    """That fills its last page."""
    key: PrefixKey | None
    """None where eviction asks for the copy."""
    number: int
    owner: int = 0
    """The holding that published it."""


class HostTier:
    """Pages of all full groups in one pool of equal slots."""

    def __init__(self, index: RadixIndex, groups: int, num_pages: int, policy: WritePolicy, min_hits: int = 1) -> None:
        """`min_hits` is the k of `write_through_selective`."""
        self.pool = HostPool(num_pages)
        self.policy: WritePolicy = policy
        self.skipped_pages = 0
        """Copies not made for lack of host room."""
        self.copied_pages = 0
        self.full = False
        """A write-back found no host room: the next eviction goes ahead without a copy."""
        self._index = index
        self._groups = groups
        self._min_hits = min_hits if policy == "write_through_selective" else 0
        self.last_number = 0
        """Of all that was ever asked for."""
        self._evicting: deque[_Waiting] = deque()
        self._begun: deque[_Waiting] = deque()
        """What is left of published prefixes whose first pages have been sent."""
        self._published: dict[int, _Waiting] = {}
        """By number, the oldest first."""
        self._numbers: dict[int, list[int]] = {}
        """Of each holding's published prefixes: two at most."""
        self._running: set[int] = set()
        """Holdings that have published and not been closed."""
        self._wanted_number = 0
        """Up to here no copy waits for its request to end."""
        self._under_way: dict[int, Copied] = {}
        self._transfers = 0

    @property
    def returning_pages(self) -> int:
        """Device pages that nothing but a copy of this tier holds: evictable when it is acknowledged, or given up."""
        return held_by_these(self.leases)

    @property
    def leases(self) -> list[Lease]:
        """Every lease that this tier holds, for the integrity check."""
        waiting = (*self._evicting, *self._begun, *self._published.values())
        return [*(one.lease for one in waiting), *(copy.lease for copy in self._under_way.values())]

    @property
    def room_pages(self) -> int:
        """Pages per group that a transfer could get now, but for fences of those that would be evicted for it."""
        return self.pool.free_pages // self._groups + self._index.evictable_host_pages

    @property
    def transferring(self) -> list[I32]:
        """Pages that copies write to."""
        return [copy.host.ravel() for copy in self._under_way.values()]

    @property
    def busy(self) -> bool:
        """Whether copies wait or are under way."""
        return bool(self._published or self._begun or self._evicting or self._under_way)

    @property
    def oldest_number(self) -> int:
        """Of what waits to be copied or is being copied; `NOTHING_PENDING` if nothing is."""
        begun = [one.number for one in (*self._evicting, *self._begun)]
        under_way = [copy.number for copy in self._under_way.values()]
        return min([*begun, *under_way, next(iter(self._published), NOTHING_PENDING)])

    def next_number(self) -> int:
        """For something that is on its way down from now on."""
        self.last_number += 1
        return self.last_number

    def next_transfer(self) -> int:
        """The name of a copy."""
        self._transfers += 1
        return self._transfers

    def published(self, owner: int, lease: Lease, step: int, key: PrefixKey) -> None:
        """A request (named by its holding) has published up to the end of `lease`; `step` fills the last page. `key`
        is kept until the copies are made: a long prompt is copied in many pieces, and hashed once.

        What it publishes next does not put off what waits already: a long prompt is copied while it is computed. From
        the third on, the second waits for the new step too."""
        if self.policy == "write_back":
            return
        self._running.add(owner)
        numbers = self._numbers.setdefault(owner, [])
        if len(numbers) < 2:
            numbers.append(self.next_number())
        else:
            self._index.release(self._published[numbers[1]].lease, -1, touch=False)
        self._published[numbers[-1]] = _Waiting(self._index.lease_again(lease), step, key, numbers[-1], owner)

    def hold_nothing_back(self) -> int:
        """No copy of what has been published so far waits for its request to end; → the last number."""
        self._wanted_number = self.last_number
        return self.last_number

    def closed(self, owner: int) -> None:
        """The request lets go of its pages: what the host has of them may be evicted."""
        self._running.discard(owner)

    def evict_after_copy(self, leases: list[Lease]) -> None:
        """Write-back: these paths (leased for this tier) are copied first and then let go."""
        self._evicting.extend(_Waiting(lease, -1, None, self.next_number()) for lease in leases)

    def next_copy(self, completed_step: int, copy_pages: int) -> Copy | None:
        """The next copy to send, of `copy_pages` a group at most, ordered behind all that the device has been sent;
        None if nothing can be copied."""
        for queue in (self._evicting, self._begun):
            for waiting in list(queue):
                if not self._waits(waiting):
                    queue.remove(waiting)
                    copy = self._begin(waiting, completed_step, copy_pages)
                    if copy is not None:
                        return copy
        for waiting in list(self._published.values()):
            if waiting.step <= completed_step and not self._waits(waiting):
                self._forget_published(waiting)
                copy = self._begin(waiting, completed_step, copy_pages)
                if copy is not None:
                    return copy
        return None

    def acknowledge(self, transfer: int) -> Copied:
        """The host pages of a copy hold the bytes."""
        done = self._under_way.pop(transfer)
        self._index.end_backup(done.lease, done.spans, done.host)
        self.pool.hand_over(done.host.ravel(), Owner.TRANSFER, Owner.INDEX)
        self.copied_pages += done.host.shape[1]
        return done

    def give_up(self) -> None:
        """The device has ended, and with it every copy: their host pages are free, what waited is forgotten."""
        for copy in self._under_way.values():
            self._index.end_backup(copy.lease, copy.spans, None)
            self.pool.give_back(copy.host.ravel(), Owner.TRANSFER, Fence())
        for lease in self.leases:
            self._index.release(lease, -1, touch=False)
        for waiting in (self._evicting, self._begun, self._published, self._numbers, self._under_way):
            waiting.clear()

    def take(self, pages: int) -> I32 | None:
        """Host pages for a transfer, int32 [groups, pages], evicting what nobody leases; None if there are not so
        many now."""
        count = pages * self._groups
        missing = count - self.pool.free_pages
        if missing > 0:
            if missing > self._index.evictable_host_pages * self._groups + self.pool.fenced_pages:
                return None
            # Pages behind a fence come back by themselves: only what they leave short is evicted.
            self.drop(self._index.evict_host(-(-max(0, missing - self.pool.fenced_pages) // self._groups)))
        taken = self.pool.take(count, Owner.TRANSFER)
        return None if taken is None else taken.reshape(self._groups, pages)

    def drop(self, runs: list[Dropped]) -> None:
        """Host pages that left the index."""
        for run in runs:
            self.pool.drop(run.host.ravel(), run.last_step)

    def _forget_published(self, waiting: _Waiting) -> None:
        del self._published[waiting.number]
        self._numbers[waiting.owner].remove(waiting.number)
        if not self._numbers[waiting.owner]:
            del self._numbers[waiting.owner]

    def _waits(self, waiting: _Waiting) -> bool:
        return self._may_wait(waiting) and self._room_for(waiting) <= 0

    def _may_wait(self, waiting: _Waiting) -> bool:
        return waiting.owner in self._running and waiting.number > self._wanted_number

    def _room_for(self, waiting: _Waiting) -> int:
        """Pages per group that a copy of it may take."""
        left = int(READING_SHARE * self.pool.num_pages) // self._groups if self._may_wait(waiting) else 0
        return self.room_pages - left

    def _begin(self, waiting: _Waiting, completed_step: int, copy_pages: int) -> Copy | None:
        """Begin to copy what a path lacks, as much as one copy may; the rest comes next."""
        lease, evicts = waiting.lease, waiting.key is None
        min_hits = 0 if evicts else self._min_hits
        most = min(copy_pages, self._room_for(waiting))
        spans, device = self._index.begin_backup(lease, completed_step, most, min_hits)
        count = device.shape[1]
        host = self.take(count) if count else None
        if host is None:
            if count or not most or not self._under_way:
                # With nothing to copy, another copy has these pages already: its acknowledgement frees them.
                self.full = evicts
            self.skipped_pages += count
            self._index.end_backup(lease, spans, None)
            self._index.release(lease, -1, touch=False)
            return None
        transfer = self.next_transfer()
        if count == most:
            queue = self._evicting if evicts else self._begun
            queue.appendleft(waiting._replace(lease=self._index.lease_again(lease)))
        self._under_way[transfer] = Copied(lease, spans, host, waiting.key, waiting.number)
        return Copy(transfer, device, host)

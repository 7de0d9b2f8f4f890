"""The host tier: pages in the server's own (pinned) memory, and the copies that bring them there.

in     published prefixes, by the write policy; acknowledgements of copies
out    `Copy` after `Copy` to send to the device, each small enough not to delay a step; pages to write to storage
state  the host pool, prefixes whose pages wait to be copied, copies under way
owner  `KvCache`; nothing else calls it
ready  a host page is indexed, and so matchable, when its copy is acknowledged
end    a page under way is the transfer's until it is acknowledged, or the device that writes it has ended

The write policies: `write_through` copies what is published as soon as the step that fills it has completed;
`write_through_selective` what has been matched again; `write_back` what the device is about to evict.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.pool import Fence, Owner, PagePool
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.radix_nodes import Dropped, Lease, Node, Span
from headrace.ops.wire import I32

WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]


class Copy(NamedTuple):
    """Device pages to bring to host pages: int32 [groups, k] each."""

    transfer: int
    device: I32
    host: I32


class Copied(NamedTuple):
    """An acknowledged copy. The lease keeps the pages; whoever gets this gives it back."""

    lease: Lease
    spans: list[Span]
    host: I32
    key: PrefixKey | None
    """Of the request that published the pages, whose hashes are known; None where eviction asked for the copy."""


class _UnderWay(NamedTuple):
    lease: Lease
    spans: list[Span]
    host: I32
    key: PrefixKey | None


class HostTier:
    """Pages of all groups in one pool of equal slots."""

    def __init__(self, index: RadixIndex, groups: int, num_pages: int, policy: WritePolicy, min_hits: int = 1) -> None:
        """`min_hits` is the k of `write_through_selective`."""
        self.pool = PagePool(num_pages)
        self.policy: WritePolicy = policy
        self.skipped_pages = 0
        """Copies not made for lack of host room."""
        self.copied_pages = 0
        self.full = False
        """A write-back found no host room: the next eviction goes ahead without a copy."""
        self._index = index
        self._groups = groups
        self._min_hits = min_hits if policy == "write_through_selective" else 0
        self.writer: NDArray[np.int64] = np.zeros(num_pages, np.int64)
        """The transfer by which storage reads a page; 0 for none."""
        self._published: dict[int, tuple[Lease, int, PrefixKey]] = {}
        self._evicting: deque[Lease] = deque()
        self._under_way: dict[int, _UnderWay] = {}
        self._transfers = 0

    @property
    def returning_pages(self) -> int:
        """Device pages that nothing but a copy holds: evictable when it is acknowledged, or given up."""
        leases, crossing = self.leases, dict[Node, int]()
        for lease in leases:
            node: Node | None = lease.node
            # Towards the root a node has more leases, never fewer: from some point on requests hold it too.
            while node is not None and node.leases <= len(leases):
                crossing[node] = crossing.get(node, 0) + 1
                node = node.parent
        return sum(node.num_device for node, count in crossing.items() if count == node.leases)

    @property
    def leases(self) -> list[Lease]:
        """Every lease that this tier holds, for the integrity check."""
        return [
            *(lease for lease, _, _ in self._published.values()),
            *self._evicting,
            *(copy.lease for copy in self._under_way.values()),
        ]

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
        return bool(self._published or self._evicting or self._under_way)

    def published(self, owner: int, lease: Lease, step: int, key: PrefixKey) -> None:
        """A request (named by its holding) has published up to the end of `lease`; `step` fills the last page. `key`
        is kept until the copies are made: a long prompt is copied in many pieces, and hashed once."""
        if self.policy == "write_back":
            return
        if (older := self._published.pop(owner, None)) is not None:
            self._index.release(older[0], -1, touch=False)
        self._published[owner] = (self._index.lease_again(lease), step, key)

    def evict_after_copy(self, leases: list[Lease]) -> None:
        """Write-back: these paths (leased for this tier) are copied first and then let go."""
        self._evicting.extend(leases)

    def next_copy(self, completed_step: int, copy_pages: int) -> Copy | None:
        """The next copy to send, of `copy_pages` a group at most, ordered behind all that the device has been sent;
        None if nothing can be copied."""
        while self._evicting:
            copy = self._begin(self._evicting.popleft(), completed_step, copy_pages, None)
            if copy is not None:
                return copy
        for owner, (lease, step, key) in list(self._published.items()):
            if step <= completed_step:
                del self._published[owner]
                copy = self._begin(lease, completed_step, copy_pages, key)
                if copy is not None:
                    return copy
        return None

    def acknowledge(self, transfer: int) -> Copied:
        """The host pages of a copy hold the bytes."""
        done = self._under_way.pop(transfer)
        self._index.end_backup(done.lease, done.spans, done.host)
        self.pool.hand_over(done.host.ravel(), Owner.TRANSFER, Owner.INDEX)
        self.copied_pages += done.host.shape[1]
        return Copied(done.lease, done.spans, done.host, done.key)

    def give_up(self) -> None:
        """The device has ended, and with it every copy: their host pages are free, what waited is forgotten."""
        for copy in self._under_way.values():
            self._index.end_backup(copy.lease, copy.spans, None)
            self.pool.give_back(copy.host.ravel(), Owner.TRANSFER, Fence())
        for lease in self.leases:
            self._index.release(lease, -1, touch=False)
        self._published.clear()
        self._evicting.clear()
        self._under_way.clear()

    def begin_write(self, pages: I32, transfer: int) -> None:
        """Storage reads these pages (int32 [k]) until `end_write`: they may leave the index, but are not used again."""
        self.pool.open_transfer(transfer)
        self.writer[pages] = transfer

    def end_write(self, pages: I32, transfer: int) -> None:
        """Storage has acknowledged, or its agent has been reaped."""
        self.writer[pages] = 0
        self.pool.complete_transfer(transfer)

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
        """Host pages that left the index: free when their last reader has completed, and storage has read them."""
        for run in runs:
            pages = run.host.ravel()
            if not len(pages):
                continue
            writers = self.writer[pages]
            # `unique` takes 10 µs, and few pages are being read when they go.
            reading = tuple(np.unique(writers[writers > 0]).tolist()) if writers.any() else ()
            self.pool.give_back(pages, Owner.INDEX, Fence(run.last_step, reading))

    def check(self) -> None:
        """Raise AssertionError if storage reads a page that may be written."""
        self.pool.check()
        owners = self.pool.owner[self.writer > 0]
        read = (owners == Owner.INDEX) | (owners == Owner.FENCED)
        assert read.all(), "storage reads a page that is free or written to"

    def _begin(self, lease: Lease, completed_step: int, copy_pages: int, key: PrefixKey | None) -> Copy | None:
        """Begin to copy what a path lacks, as much as one copy may; the rest goes back into its queue. Without a key it
        is an eviction's."""
        evicts = key is None
        min_hits = 0 if evicts else self._min_hits
        most = min(copy_pages, self.room_pages)
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
        self._transfers += 1
        if count == most:
            again = self._index.lease_again(lease)
            if key is None:
                self._evicting.appendleft(again)
            else:
                self._published[-self._transfers] = (again, completed_step, key)
        self._under_way[self._transfers] = _UnderWay(lease, spans, host, key)
        return Copy(self._transfers, device, host)

"""The KV cache as the scheduler sees it: what a request holds, from its first match to its last step.

in     prefixes to look up, pages to grow by, launched steps, fences
out    page numbers for the page table; how many tokens need not be computed
state  the pools (who owns each page), the index (which prefixes have pages), the holdings of requests
owner  the scheduler, which calls it between awaits; nothing here waits
ready  a page is matchable when the step that fills it is launched (later steps are ordered behind it)
end    `close` with the last launched step: leased pages stay in the index, private ones are free after that step

The pages of one request, while it runs::

    | leased: in the index, shared | private: its own, maybe a duplicate | grown: being filled, not yet published |
    0                       lease.num_pages                                                       holding.count

`publish` moves full pages of committed tokens to the left of the line. A page that another request published first
stays private to this one: its bytes are used by this request alone and go when it goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.layout import KvLayout
from headrace.kvcache.pool import Fence, Owner, PagePool
from headrace.kvcache.radix import Lease, RadixIndex
from headrace.ops.wire import I32


class Holding:
    """What one request holds: a leased prefix and pages of its own. `pages`: int32 [groups, capacity]."""

    __slots__ = ("count", "handle", "lease", "matched_pages", "pages", "private")

    def __init__(self, handle: int, lease: Lease, pages: I32, capacity: int) -> None:
        groups, count = pages.shape
        self.handle = handle
        self.lease = lease
        self.matched_pages = count
        """Pages that were there at `open`."""
        self.count = count
        self.pages: I32 = np.full((groups, capacity), -1, np.int32)
        self.pages[:, :count] = pages
        self.private: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        """[capacity] which of the first `count` pages the request owns."""


class CacheStats(msgspec.Struct, frozen=True):
    """Device pages of the smallest group."""

    total: int
    free: int
    fenced: int
    indexed: int
    evictable: int
    nodes: int
    holdings: int


class KvCache:
    """Pools and index of one model on one device."""

    def __init__(self, layout: KvLayout, num_pages: Sequence[int], reuse: bool = True) -> None:
        """`num_pages` per group. Without `reuse` nothing is ever matched (`--disable-radix-cache`)."""
        assert len(num_pages) == len(layout.groups)
        self.layout = layout
        self._reuse = reuse
        self._pools = [PagePool(count) for count in num_pages]
        self._index = RadixIndex(layout.page_tokens, len(layout.groups))
        self._holdings: dict[int, Holding] = {}
        self._handles = 0

    @property
    def capacity_pages(self) -> int:
        """Pages that one request can have at most."""
        return min(pool.num_pages for pool in self._pools)

    @property
    def available_pages(self) -> int:
        """Pages that are free, or will be without taking anything from a request."""
        return min(pool.free_pages + pool.fenced_pages for pool in self._pools) + self._index.evictable_pages

    def peek(self, key: PrefixKey) -> int:
        """Tokens of the key whose KV could be reused now; changes nothing."""
        pages = self._matchable_pages(key)
        return self._index.peek(key.namespace, key.raw(0, pages)) * key.page_tokens if pages else 0

    def open(self, key: PrefixKey, capacity_tokens: int, match: bool = True) -> Holding:
        """Lease the longest reusable prefix, always leaving at least one token to compute (its logits are needed).

        `capacity_tokens` is the longest context the request may reach. Without `match` nothing is reused (every
        position's logits are wanted), but what the request computes may still be published.
        """
        pages_wanted = self._matchable_pages(key) if match else 0
        lease, pages = self._index.acquire(key.namespace, key.raw(0, pages_wanted))
        self._handles += 1
        holding = Holding(self._handles, lease, pages, self.layout.pages(capacity_tokens))
        self._holdings[holding.handle] = holding
        return holding

    def take(self, count: int) -> I32 | None:
        """`count` pages of every group, int32 [groups, count], evicting what nobody leases; None if there are not so
        many now. The caller appends them to holdings in the same breath."""
        missing = max(count - pool.free_pages for pool in self._pools)
        if missing > 0:
            if any(pool.free_pages + pool.fenced_pages + self._index.evictable_pages < count for pool in self._pools):
                return None
            # Pages behind a fence come back by themselves within two steps: only what they leave short is evicted.
            self._evict(max(count - pool.free_pages - pool.fenced_pages for pool in self._pools))
            if any(pool.free_pages < count for pool in self._pools):
                return None
        taken = [pool.take(count) for pool in self._pools]
        return np.stack([pages for pages in taken if pages is not None])

    def append(self, holding: Holding, pages: I32) -> None:
        """Give taken pages (int32 [groups, n]) to a request."""
        end = holding.count + pages.shape[1]
        holding.pages[:, holding.count : end] = pages
        holding.private[holding.count : end] = True
        holding.count = end

    def publish(self, holding: Holding, key: PrefixKey, filled_tokens: int, step: int) -> None:
        """Make full pages of the first `filled_tokens` known tokens matchable; `step` is the last launched step that
        fills any of them."""
        start, end = holding.lease.num_pages, filled_tokens // key.page_tokens
        if not self._reuse or end <= start:
            return
        assert filled_tokens <= key.length and end <= holding.count
        raw = key.raw(start, end)
        taken = self._index.extend(holding.lease, raw, holding.pages[:, start:end], step)
        for group, pool in enumerate(self._pools):
            pool.hand_over(holding.pages[group, start:end][taken], Owner.REQUEST, Owner.INDEX)
        holding.private[start:end] = ~taken

    def close(self, holding: Holding, fence: Fence) -> None:
        """The request lets go of everything; nothing of it is reused before the fence is complete."""
        del self._holdings[holding.handle]
        own = holding.private[: holding.count]
        for group, pool in enumerate(self._pools):
            pool.give_back(holding.pages[group, : holding.count][own], Owner.REQUEST, fence)
        self._index.release(holding.lease, fence.after_step)

    def complete_step(self, step: int) -> None:
        """The device has completed `step`."""
        for pool in self._pools:
            pool.complete_step(step)

    def flush(self) -> tuple[int, int]:
        """Drop every page that nobody leases: `(dropped, kept)`."""
        dropped = self._index.evictable_pages
        self._evict(dropped)
        return dropped, self._index.num_pages

    def forget_device(self) -> None:
        """The device and its pages are gone. Every holding must have been closed."""
        assert not self._holdings, "requests still hold pages of a device that is gone"
        self._index.clear()
        for pool in self._pools:
            pool.reset()

    def stats(self) -> CacheStats:
        """Counts, for metrics."""
        pool = min(self._pools, key=lambda pool: pool.num_pages)
        index = self._index
        return CacheStats(
            total=pool.num_pages,
            free=pool.free_pages,
            fenced=pool.fenced_pages,
            indexed=index.num_pages,
            evictable=index.evictable_pages,
            nodes=index.num_nodes,
            holdings=len(self._holdings),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page has exactly one owner and every lease is counted (invariant 1)."""
        holdings = list(self._holdings.values())
        self._index.check([holding.lease for holding in holdings])
        nodes = [node.pages for node in self._index.nodes()]
        for group, pool in enumerate(self._pools):
            pool.check()
            indexed = np.concatenate([pages[group] for pages in nodes]) if nodes else np.zeros(0, np.int32)
            held = [holding.pages[group, : holding.count][holding.private[: holding.count]] for holding in holdings]
            private = np.concatenate(held) if held else np.zeros(0, np.int32)
            for pages, owner in ((indexed, Owner.INDEX), (private, Owner.REQUEST)):
                assert len(np.unique(pages)) == len(pages), f"a page has two places as {Owner.names[owner]}"
                assert (pool.owner[pages] == owner).all(), f"a page that {Owner.names[owner]} has is owned by another"
                assert np.count_nonzero(pool.owner == owner) == len(pages), f"a page of {Owner.names[owner]} is lost"

    def _matchable_pages(self, key: PrefixKey) -> int:
        return (key.length - 1) // key.page_tokens if self._reuse else 0

    def _evict(self, count: int) -> None:
        for pages, last_step in self._index.evict(count):
            for group, pool in enumerate(self._pools):
                pool.give_back(pages[group], Owner.INDEX, Fence(last_step))

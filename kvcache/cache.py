"""The KV cache as the scheduler sees it: what a request holds, from its first match to its last step.

in     prefixes to look up, pages to grow by, launched steps, fences, acknowledgements of copies
out    page numbers for the page table; loads for a batch; copies to send; how many tokens need not be computed
state  the device pools (who owns each page), the index (which prefixes have pages), the host tier, the holdings
owner  the scheduler, which calls it between awaits; nothing here waits
ready  a page is matchable when the step that fills or loads it is launched (later steps are ordered behind it)
end    `close` with the last launched step: leased pages stay in the index, private ones are free after that step

The pages of one request, while it runs::

    | leased: in the index, shared      | published by it: in the index too | grown: private, not yet published |
    | on the device | loaded from host  |
    0               device_pages     matched_pages              lease.num_pages               holding.count

`publish` moves full pages of committed tokens to the left of the line. A page that another request published first is
a duplicate: `repoint` gives it back and lets this request read the index's, so that none is held twice, and so that
what follows it can be published too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.cache_check import check_cache
from headrace.kvcache.events import KvEvents
from headrace.kvcache.holding import CacheStats, Cleared, Filled, Held, Holding, Repointed
from headrace.kvcache.host import NOTHING_PENDING, Copied, Copy, HostTier, WritePolicy
from headrace.kvcache.identity import PageHash, PrefixKey
from headrace.kvcache.layout import KvLayout
from headrace.kvcache.pins import Pins
from headrace.kvcache.pool import EVICTED_SHARE, PINNED_SHARE, Fence, Owner, PagePool, Pools
from headrace.kvcache.prefetch import Prefetch, PrefetchOptions, PrefetchPolicy, PrefillMs
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.radix_nodes import Dropped, Lease, held_alone, held_by_these, path_of
from headrace.kvcache.read_ahead import PrefetchCounts, Prefetcher
from headrace.kvcache.storage.client import StorageClient
from headrace.kvcache.window_copies import WindowCopies
from headrace.kvcache.window_reads import WindowReads
from headrace.kvcache.windows import Windows
from headrace.kvcache.writeback import WriteBack, runs_of, window_runs
from headrace.ops.wire import I32

MOST_PAGES: Final = 1 << 40
FORGOTTEN_NODES: Final = 128
"""Of a lost device, at a time: 1.3 ms."""


class KvCache:
    """Pools and index of one model on one device, and its host tier."""

    def __init__(
        self,
        layout: KvLayout,
        num_pages: Sequence[int],
        reuse: bool = True,
        host_pages: int = 0,
        write_policy: WritePolicy = "write_through",
        page_hash: PageHash = "xxh3",
        window_host_pages: Sequence[int] = (),
    ) -> None:
        """`num_pages` per group on the device; `host_pages` of all full groups together, 0 for none, and
        `window_host_pages` of each window group. Without `reuse` nothing is ever matched (`--disable-radix-cache`)."""
        groups = layout.full_groups
        assert len(num_pages) == len(layout.groups)
        self.layout = layout
        self._reuse = reuse
        self._page_hash: PageHash = page_hash
        self._pools = Pools(PagePool(count) for count in num_pages[:groups])
        self.version = 0
        """Grows when `peek` may find another length than before."""
        self.windows: Windows | None = None
        """The pages of window groups, if the layout has any; everything else here is about the full groups'."""
        if layout.is_hybrid:
            host = [0] * groups + list(window_host_pages if host_pages else [0] * (len(layout.groups) - groups))
            places = num_pages[0] + host_pages // groups
            self.windows = Windows(layout, num_pages, host, places, self._lengths_changed)
        self._index = RadixIndex(layout.page_tokens, groups, self.windows)
        self._host = HostTier(self._index, groups, host_pages, write_policy) if host_pages else None
        self._window_copies: WindowCopies | None = None
        if self._host is not None and self.windows is not None:
            page_bytes = [layout.page_bytes(group) for group in range(len(layout.groups))]
            self._window_copies = self.windows.copies = WindowCopies(
                self._index, self.windows.groups, self._host, page_bytes
            )
        self._holdings: dict[int, Holding] = {}
        self._handles = 0
        self._prefetcher: Prefetcher | None = None
        self._writeback: WriteBack | None = None
        self.events = KvEvents(self._index, layout.page_tokens, page_hash)
        self.pins = Pins(self._index, self.windows)

    def attach_storage(self, client: StorageClient, options: PrefetchOptions, on_change: Callable[[], None]) -> None:
        """Use a storage tier behind the host's. `on_change` is called when a waiting request may be able to go on."""
        assert self._host is not None, "storage is reached through the host tier"

        def arrived() -> None:
            self.version += 1
            on_change()

        def written() -> None:
            self._room_came()
            on_change()

        groups, page_tokens, windows = len(self._pools), self.layout.page_tokens, self.windows
        page_bytes = [self.layout.page_bytes(group) for group in range(len(self.layout.groups))]
        reads, usable = None, None
        if windows is not None:
            reads = windows.reads = WindowReads(self._index, windows, client, self.page_bytes, page_bytes[groups:])
            usable = self._usable_pages
        full = max(page_bytes[:groups])
        self._prefetcher = Prefetcher(
            self._index, self._host, client, options, full, groups, arrived, on_change, reads, usable
        )
        self._writeback = WriteBack(
            self._index, self._host, client, self.events, max(page_bytes), page_tokens, written, windows
        )

    @property
    def page_bytes(self) -> int:
        """Of one page of every full group."""
        return sum(self.layout.page_bytes(group) for group in range(len(self._pools)))

    @property
    def capacity_pages(self) -> int:
        """Pages that one request can have at most."""
        return min(pool.num_pages for pool in self._pools)

    @property
    def available_pages(self) -> int:
        """Device pages that are free, or will be without taking anything from a request, once copies have been made."""
        evictable = self._index.evictable_device_pages + held_by_these(self._copy_leases)
        return min(pool.free_pages + pool.fenced_pages for pool in self._pools) + evictable

    def peek(self, key: PrefixKey) -> int:
        """Tokens of the key whose KV could be reused now, from the device or the host; changes nothing."""
        pages = self._matchable_pages(key)
        return self._usable_pages(key, pages) * key.page_tokens if pages else 0

    def open(self, key: PrefixKey, capacity_tokens: int, compute_from: int | None = None) -> Holding:
        """Lease the longest reusable prefix, always leaving at least one token to compute (its logits are needed).

        `capacity_tokens` is the longest context the request may reach. Positions from `compute_from` on are not
        reused (their logits are wanted, and no page holds those), but what the request computes may be published.
        """
        wanted = self._matchable_pages(key, compute_from)
        places = None
        if self.windows is not None:
            places = self._index.places_of(key.namespace, key.raw(0, wanted))
            wanted = self.windows.usable(places)
        lease, device, host = self._index.acquire(key.namespace, key.raw(0, wanted))
        self._handles += 1
        holding = Holding(self._handles, lease, device, host, self.layout.pages(capacity_tokens))
        if self.windows is not None and places is not None:
            self.windows.open(holding, places, key)
        self._holdings[holding.handle] = holding
        return holding

    def take(self, count: int) -> I32 | None:
        """`count` device pages of every group, int32 [groups, count], evicting what nobody leases; None if there are
        not so many now. The caller gives them to holdings in the same breath."""
        missing = max(count - pool.free_pages for pool in self._pools)
        if missing > 0:
            if count > self.available_pages:
                return None
            # Pages behind a fence come back by themselves within two steps: only what they leave short is evicted.
            short = max(count - pool.free_pages - pool.fenced_pages for pool in self._pools)
            if short > 0:
                self._evict(max(short, int(self.capacity_pages * EVICTED_SHARE)))
            if any(pool.free_pages < count for pool in self._pools):
                return None
        return self._pools.take(count)

    def return_taken(self, pages: I32) -> None:
        """What `take` gave is not needed."""
        self._pools.give_back(pages, Owner.REQUEST, Fence())

    def take_for_rows(self, count: int) -> I32 | None:
        """A device page of every group of the layout, for each of `count` running requests: int32 [all groups, count];
        None if there are not so many now."""
        if self.windows is None:
            return self.take(count)
        windows = self.windows.take_one_each(count)
        pages = self.take(count) if windows is not None else None
        if pages is not None and windows is not None:
            return np.concatenate([pages, *(some[None] for some in windows)])
        if windows is not None:
            self.windows.return_taken(windows)
        return None

    def load(self, holding: Holding, pages: I32, step: int) -> None:
        """Of the taken pages (int32 [groups, n]), the first become what `step` loads from the host; the others are the
        request's own."""
        count = holding.host.shape[1]
        if count:
            self._index.load(holding.lease, pages[:, :count], step)
            self._pools.hand_over(pages[:, :count], Owner.REQUEST, Owner.INDEX)
            holding.pages[:, holding.count : holding.count + count] = pages[:, :count]
            holding.count += count
        self.append(holding, pages[:, count:])
        if self.windows is not None:
            self.windows.enter(holding, step)

    def append(self, holding: Holding, pages: I32) -> None:
        """Give taken pages (int32 [groups, n]) to a request."""
        end = holding.count + pages.shape[1]
        holding.pages[:, holding.count : end] = pages
        holding.count = end

    def append_row(self, holding: Holding, pages: I32) -> None:
        """Give a page of every group of the layout (int32 [all groups, 1]) to a running request."""
        full = len(self._pools)
        self.append(holding, pages[:full])
        if self.windows is not None:
            self.windows.append(holding.windows, pages[full:])

    def publish(self, all_filled: Iterable[Filled]) -> None:
        """Make what requests have filled matchable."""
        # All that a step brings in one call: the pools are told once, in 4 µs, and not 25 times in 3.
        taken: list[I32] = []
        for filled in all_filled:
            self._publish(filled, taken)
        if taken:
            self._pools.hand_over(np.concatenate(taken, axis=1), Owner.REQUEST, Owner.INDEX)
            self.version += 1

    def _publish(self, filled: Filled, taken: list[I32]) -> None:
        """One request's. Adds the pages that the index takes: int32 [groups, n] a run."""
        holding, key, tokens, step = filled
        start, end = holding.lease.num_pages, tokens // key.page_tokens
        if not self._reuse or end <= start:
            return
        assert tokens <= key.length and end <= holding.count
        had = self._index.extend(holding.lease, key.raw(start, end), holding.pages[:, start:end], step)
        at = start
        for run in had:
            first = start + run.start
            taken.append(holding.pages[:, at:first])
            at = first + run.pages.shape[1]
            holding.duplicates.append(Repointed(np.arange(first, at, dtype=np.int32), run.pages))
        taken.append(holding.pages[:, at:end])
        if self._host is not None and sum(run.pages.shape[1] for run in had) < end - start:
            self._host.published(holding.handle, holding.lease, step, key)
        if self.windows is not None:
            self.windows.publish(holding, start, step, key)

    def repoint(self, holding: Holding, fence: Fence) -> Repointed:
        """Give the request's duplicates back behind `fence`, its last launched step; from the next one on it reads the
        index's pages instead, which an earlier step has filled."""
        duplicates, holding.duplicates = holding.duplicates, []
        indices = np.concatenate([some.indices for some in duplicates])
        pages = np.concatenate([some.pages for some in duplicates], axis=1)
        self._pools.give_back(holding.pages[:, indices], Owner.REQUEST, fence)
        holding.pages[:, indices] = pages
        return Repointed(indices, pages)

    def close(self, holdings: Sequence[Holding], fence: Fence) -> None:
        """These requests let go of everything; nothing of it is reused before the fence is complete."""
        own = np.concatenate([run for holding in holdings for run in holding.own_runs], axis=1)
        self._pools.give_back(own, Owner.REQUEST, fence)
        for holding in holdings:
            del self._holdings[holding.handle]
            if self._host is not None:
                self._host.closed(holding.handle)
            if self.windows is not None:
                self.windows.close(holding, fence)
            self._index.release(holding.lease, fence.after_step)
        self._room_came()

    def returned_by(self, holding: Holding) -> int:
        """Device pages that closing a holding makes available, at least."""
        return holding.own_pages + held_alone(holding.lease)

    def complete_step(self, step: int) -> None:
        """The device has completed `step`."""
        for pool in self._pools:
            pool.complete_step(step)
        if self._host is not None:
            self._host.pool.complete_step(step)
        if self.windows is not None:
            self.windows.complete_step(step)
        self._room_came()

    # ------------------------------------------------------------------------------------------------------------
    # The host tier

    @property
    def copying(self) -> bool:
        """Whether copies to the host wait or are under way."""
        return self._host is not None and (
            self._host.busy or (self._window_copies is not None and self._window_copies.busy)
        )

    def next_copy(self, most_pages: int) -> Copy | None:
        """The next copy to the host, to be ordered behind all that the device has been sent; of so many pages of every
        full group, or as many bytes of a window group."""
        if self._host is None:
            return None
        completed = self._pools[0].completed_step
        copy = self._host.next_copy(completed, most_pages)
        if copy is None and self._window_copies is not None:
            copy = self._window_copies.next_copy(completed, most_pages * self.page_bytes)
        return copy

    def copied(self, transfer: int) -> None:
        """The host has the pages of a copy; storage gets them next."""
        assert self._host is not None
        if self._window_copies is not None and (window := self._window_copies.acknowledge(transfer)) is not None:
            if self._writeback is not None and len(window.at):
                key = window.key or self._key_of(window.lease)
                self._writeback.write(key, window_runs(window.group.number, window.at, window.host), window.number)
            self._index.release(window.lease, -1, touch=False)
            self._room_came()
            return
        done: Copied = self._host.acknowledge(transfer)
        if self._writeback is not None:
            key = done.key or self._key_of(done.lease)
            self._writeback.write(key, runs_of(done.spans, done.host), done.number)
        self._index.release(done.lease, -1, touch=False)
        self._room_came()

    # ------------------------------------------------------------------------------------------------------------
    # Storage

    def prefetch(
        self, key: PrefixKey, policy: PrefetchPolicy | None, compute_from: int | None = None
    ) -> Prefetch | None:
        """Ask storage for what a waiting request could reuse, before `compute_from` as in `open`; None if it can't
        help."""
        if self._prefetcher is None:
            return None
        return self._prefetcher.begin(key, self._matchable_pages(key, compute_from), policy)

    def read_ahead(self, order: Iterable[Prefetch]) -> None:
        """Read from storage what waiting requests lack, for those first that come first in `order`."""
        if self._prefetcher is not None:
            self._prefetcher.read_ahead(order)

    def to_come(self, prefetch: Prefetch) -> tuple[int, float]:
        """Tokens of a prefix that will be there when its prefetch is done, and ms until then."""
        assert self._prefetcher is not None
        return self._prefetcher.to_come(prefetch)

    def waits(self, prefetch: Prefetch, prefill_ms: PrefillMs) -> bool:
        """Whether a request whose turn it is should wait for more of its prefetch."""
        assert self._prefetcher is not None
        return self._prefetcher.waits(prefetch, prefill_ms)

    def end_prefetch(self, prefetch: Prefetch, holding: Holding | None) -> int:
        """The request goes on with this holding, or has ended; pages that storage brought, of those it matched on the
        host."""
        assert self._prefetcher is not None
        used = self._prefetcher.storage_pages(prefetch, holding.matched_pages) if holding is not None else 0
        self._prefetcher.release(prefetch, used)
        return min(used, holding.host.shape[1]) if holding is not None else 0

    def _room_came(self) -> None:
        """Host pages are free, or nobody holds them any more."""
        if self._prefetcher is not None:
            self._prefetcher.room_came()

    @property
    def writing(self) -> bool:
        """Whether pages are on their way down: to the host, or to storage."""
        return self.copying or (self._writeback is not None and self._writeback.busy)

    def hold_nothing_back(self) -> int:
        """Of what is on its way down → the last number; when `oldest_write` is later, all of that has arrived."""
        return self._host.hold_nothing_back() if self._host is not None else 0

    @property
    def oldest_write(self) -> int:
        """The lowest number of what is on its way down; later than all if nothing is."""
        copies = self._host.oldest_number if self._host is not None else NOTHING_PENDING
        if self._window_copies is not None:
            copies = min(copies, self._window_copies.oldest_number)
        return min(copies, self._writeback.oldest_number if self._writeback is not None else NOTHING_PENDING)

    @property
    def stored_pages(self) -> int:
        """Pages that storage has acknowledged."""
        return self._writeback.stored_pages if self._writeback is not None else 0

    @property
    def unstored_pages(self) -> int:
        """Pages that storage did not get, and will not."""
        return self._writeback.unstored_pages if self._writeback is not None else 0

    @property
    def put_off_pages(self) -> int:
        """Pages that storage did not get yet."""
        return self._writeback.put_off_pages if self._writeback is not None else 0

    def resume_writes(self) -> None:
        """Storage may be usable again."""
        if self._writeback is not None:
            self._writeback.resume()

    def forget_put_off(self, namespace: bytes | None) -> None:
        """What storage did not get yet of a namespace, or of all (None), it is not to get."""
        if self._writeback is not None:
            self._writeback.forget(namespace)

    @property
    def prefetch_counts(self) -> PrefetchCounts:
        """Zeros without storage."""
        return PrefetchCounts() if self._prefetcher is None else self._prefetcher.counts

    # ------------------------------------------------------------------------------------------------------------
    # Control

    def held(self, key: PrefixKey) -> Held:
        """Which of the key's whole pages are where; changes nothing."""
        raw = key.raw(0, key.length // key.page_tokens)
        device, indexed = self._index.peek(key.namespace, raw)
        host = self._index.host_run(key.namespace, raw).shape[1]
        return Held(device, host, indexed, self._usable_pages(key, len(raw) // key.page_tokens // 4))

    def warm(self, key: PrefixKey) -> Prefetch | None:
        """Bring what storage has of a prefix to the host, for no request yet; None if there is nothing to bring."""
        if self._prefetcher is None or not self._reuse:
            return None
        return self._prefetcher.begin(key, key.length // key.page_tokens, "wait_complete", queued=False)

    def end_warm(self, warmed: Prefetch) -> None:
        """Whoever warmed a prefix does not wait any longer."""
        assert self._prefetcher is not None
        self._prefetcher.release(warmed, warmed.brought_pages)

    def pin_limit(self, longest_pages: int) -> int:
        """Pages that pins may hold, so that a request of `longest_pages` can still run, and the host still works.

        A page counts whichever tier it is in: one that only the host has comes to the device with the next request.
        """
        smallest = self.capacity_pages
        if self._host is not None:
            smallest = min(smallest, self._host.pool.num_pages // len(self._pools))
        return max(0, min(int(smallest * PINNED_SHARE), self.capacity_pages - longest_pages))

    def unpin(self, pin: int) -> None:
        """The pages of a pin may be evicted again, as if just used."""
        self.pins.unpin(pin)
        self._room_came()

    # ------------------------------------------------------------------------------------------------------------
    # Clearing and checking

    def flush(self, device: bool = True, host: bool = True, most_pages: int = MOST_PAGES) -> Cleared:
        """Drop pages that nobody leases from these tiers, the longest unused first: all, or so many of each. One in a
        node of its own takes 10 µs."""
        index = self._index
        before = index.device_pages, index.host_pages
        if device:
            self._drop(index.evict_device(min(most_pages, index.evictable_device_pages)))
        if host and self._host is not None:
            self._drop(index.evict_host(min(most_pages, index.evictable_host_pages)))
        if self.windows is not None:
            self.windows.flush(device, host, most_pages)
        self._room_came()
        return self._cleared(*before)

    def clear(self, key: PrefixKey, device: bool, host: bool) -> Cleared:
        """The same for a prefix and what continues it; all of the namespace where the key has no tokens."""
        before = self._index.device_pages, self._index.host_pages
        raw = key.raw(0, key.length // key.page_tokens)
        if raw or not key.length:
            self._drop(self._index.drop(key.namespace, raw, device, host and self._host is not None))
        self._room_came()
        return self._cleared(*before)

    def forget_device(self) -> Iterator[None]:
        """The device and its pages are gone, and it has ended. Every holding must have been closed, and none may be
        opened before the last step of this: 100k pages in small nodes take 120 ms. What the host has stays."""
        assert not self._holdings, "requests still hold pages of a device that is gone"
        self.version += 1
        if self.windows is not None:
            self.windows.forget_device()
        if self._host is not None:
            self._host.give_up()
            yield
            while runs := self._index.forget_device(FORGOTTEN_NODES):
                self._drop(runs)
                yield
        # What is left is pinned.
        pinned = self.pins.let_go()
        if self._host is None:
            self._index.clear()
        else:
            self._drop(self._index.forget_device(self._index.num_nodes))
        for pool in self._pools:
            pool.reset()
        # A pin goes on with what the host has of its prefix.
        self.pins.hold(pinned)
        yield

    def stats(self) -> CacheStats:
        """Counts, for metrics."""
        pool = min(self._pools, key=lambda pool: pool.num_pages)
        index, host, groups = self._index, self._host, len(self._pools)
        return CacheStats(
            total=pool.num_pages,
            free=pool.free_pages,
            fenced=pool.fenced_pages,
            indexed=index.device_pages,
            evictable=index.evictable_device_pages,
            nodes=index.num_nodes,
            holdings=len(self._holdings),
            host_total=host.pool.num_pages // groups if host else 0,
            host_free=host.pool.free_pages // groups if host else 0,
            host_indexed=index.host_pages,
            host_copied=host.copied_pages if host else 0,
            host_skipped=host.skipped_pages if host else 0,
            windows=self.windows.stats() if self.windows is not None else [],
        )

    @property
    def changes(self) -> int:
        """Equal counts, nothing has changed: no page its owner, no lease, no holding."""
        host_changes = self._host.pool.changes if self._host is not None else 0
        windows = self.windows.changes if self.windows is not None else 0
        return sum(pool.changes for pool in self._pools) + self._index.changes + host_changes + windows

    def checking(self) -> Iterator[None]:
        """The check of all pages and leases in steps of about 0.2 ms, for a loop that has other things to do; nothing
        may change before the last. Raises AssertionError."""
        holdings, others = list(self._holdings.values()), [*self._copy_leases, *self.pins.leases]
        reads = self._prefetcher.transferring if self._prefetcher is not None else []
        return check_cache(self._index, self._pools, self._host, self.windows, holdings, others, reads)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page has exactly one owner and every lease is counted (invariant 1)."""
        for _ in self.checking():
            pass

    @property
    def _copy_leases(self) -> list[Lease]:
        """Of copies to the host that wait or are under way."""
        return [lease for tier in (self._host, self._window_copies) if tier is not None for lease in tier.leases]

    def _matchable_pages(self, key: PrefixKey, compute_from: int | None = None) -> int:
        most = key.length - 1 if compute_from is None else min(key.length - 1, compute_from)
        return most // key.page_tokens if self._reuse else 0

    def usable_with(self, key: PrefixKey, stored: Sequence[NDArray[np.bool_]], pages: int) -> int:
        """As `_usable_pages`, where all that storage has of each window group (bool [pages]) could be brought."""
        assert self.windows is not None
        places = self._index.places_of(key.namespace, key.raw(0, pages))
        return self.windows.usable_with(places, stored, pages)

    def _usable_pages(self, key: PrefixKey, pages: int) -> int:
        """Of the first `pages` pages of the key, those of the longest prefix that a request could go on from."""
        raw = key.raw(0, pages)
        if self.windows is None:
            return self._index.peek(key.namespace, raw)[1]
        return self.windows.usable(self._index.places_of(key.namespace, raw))

    def _lengths_changed(self) -> None:
        self.version += 1

    def _key_of(self, lease: Lease) -> PrefixKey:
        """The key of a lease's path, from the index."""
        namespace, raw = path_of(lease)
        tokens = np.frombuffer(raw, np.int32)
        return PrefixKey(namespace, self.layout.page_tokens, tokens, len(tokens), self._page_hash)

    def _cleared(self, device_before: int, host_before: int) -> Cleared:
        device, host = self._index.device_pages, self._index.host_pages
        return Cleared(device_before - device, device, host_before - host, host)

    def _evict(self, count: int) -> None:
        """Make room for `count` pages; under write-back, what the host lacks is copied first and room comes later."""
        host = self._host
        if host is None or host.policy != "write_back" or host.full:
            if host is not None:
                host.full = False
            self._drop(self._index.evict_device(count))
            return
        count -= host.returning_pages
        while count > 0:
            ready, leases = self._index.coldest(count)
            host.evict_after_copy(leases)
            if not ready:
                return
            self._drop(self._index.evict_device(ready))
            count -= ready + sum(held_alone(lease) for lease in leases)

    def _drop(self, runs: list[Dropped]) -> None:
        self.version += bool(runs)
        # Most were last used by a step that has completed: neighbours go back together, since each call costs 6 µs.
        completed = self._pools[0].completed_step
        for last_step, same in groupby(runs, lambda run: run.last_step if run.last_step > completed else -1):
            pages = np.concatenate([run.device for run in same], axis=1)
            self._pools.give_back(pages, Owner.INDEX, Fence(last_step))
        if self._host is not None:
            self._host.drop(runs)

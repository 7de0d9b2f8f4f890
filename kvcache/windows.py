"""The pages of window groups: for each place of the index any of them, in either tier, or none.

A *place* is a page's position in the radix tree, numbered while it is indexed. The tree is made of the full groups'
pages. A window group has a page at a place or has not; a prefix of n pages can be used when every window group has the
pages that the token behind it looks at, in some tier::

    place     0    1    2    3    4    5    6    7         a window of two pages and a bit:
    full      ##   ##   ##   ##   ##   ##   ##   ##        8 pages are usable, for the group has 5, 6 and 7;
    window    ##   ##   ##   ..   ..   ##   ##   ##        so are 1 to 3, and none at all

in     places that come and go; a request's match, growth, launched steps and end; copies that have been made
out    how much of a prefix is usable; page numbers; pages to load; what a request may take without starving another
state  per group: pages by place and tier, pins, in what order idle pages go; what running requests lay claim to
owner  `KvCache`; the scheduler asks it what a request may take
ready  a device page is matchable when the step that fills or loads it is launched, a host page when it is put here
end    a page that no request looks at any more, nor a copy reads, is idle: it goes when its room is needed, behind its
       last step; or with its place

Idle pages that end something go last: where a prompt ended, where an answer did, where somebody went on. What a request
has merely passed goes first: it is of use only to who leaves the path right there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.holding import Holding, WindowHold, WindowStats
from headrace.kvcache.host_pool import HostPool
from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.layout import KvLayout
from headrace.kvcache.pool import PINNED_SHARE, Fence, Owner
from headrace.kvcache.radix_nodes import Lease, places_from
from headrace.kvcache.window_copies import WindowCopies
from headrace.kvcache.window_group import WindowGroup
from headrace.kvcache.window_reads import WindowReads
from headrace.ops.wire import I32


class Windows:
    """All window groups of a layout, and the places of the index that they share."""

    def __init__(
        self,
        layout: KvLayout,
        num_pages: Sequence[int],
        host_pages: Sequence[int],
        places: int,
        on_change: Callable[[], None],
    ) -> None:
        """Pages per group of the layout; `places`: the most pages that the index can have. `on_change` is called when
        another length of a prefix may be usable than before."""
        full, page_tokens = layout.full_groups, layout.page_tokens
        self.groups = [
            WindowGroup(number, group, page_tokens, num_pages[number], host_pages[number], places, on_change)
            for number, group in enumerate(layout.groups)
            if number >= full
        ]
        for group in self.groups:
            least = min(group.running_pages, num_pages[0])
            assert group.device.pool.num_pages >= least, "a window group can't hold one request's window"
        self.copies: WindowCopies | None = None
        """What brings pages to the host, if there is one ..."""
        self.reads: WindowReads | None = None
        """... from the device; and from storage."""
        self._pinned: dict[int, list[I32]] = {}
        """By pin, places of each group."""
        self._on_change = on_change
        self.page_tokens = page_tokens
        self._full_pages = num_pages[0]
        self._exists: NDArray[np.bool_] = np.zeros(places, np.bool_)
        self._free: I32 = np.arange(places - 1, -1, -1, dtype=np.int32)
        self._free_places = places

    @property
    def changes(self) -> int:
        """Equal counts, no page has changed its owner."""
        return sum(group.device.pool.changes + group.host_pool.changes for group in self.groups)

    # ------------------------------------------------------------------------------------------------------------
    # Places, for the index

    def take(self, count: int) -> I32:
        """New places, int32 [count]."""
        self._free_places -= count
        assert self._free_places >= 0, "the index has more pages than there are"
        places = self._free[self._free_places : self._free_places + count][::-1].copy()
        self._exists[places] = True
        return places

    def give_back(self, places: I32) -> None:
        """These are no longer in the index."""
        if not len(places):
            return
        for group in self.groups:
            group.forget(places)
        self._exists[places] = False
        self._free[self._free_places : self._free_places + len(places)] = places
        self._free_places += len(places)
        self._on_change()

    def drop(self, places: I32, device: bool, host: bool) -> None:
        """Somebody wants these pages gone from the tiers: all that nobody has pinned go."""
        for group in self.groups:
            group.drop(places, device, host)
        self._on_change()

    # ------------------------------------------------------------------------------------------------------------
    # Matching, and the life of a request

    def usable(self, places: I32) -> int:
        """Of a path of these places, the pages of the longest prefix that can be used."""
        pages = len(places)
        if all(group.has(places[group.first_page(pages * self.page_tokens) :]).all() for group in self.groups):
            return pages
        usable = np.ones(pages + 1, np.bool_)
        for group in self.groups:
            usable &= group.usable_ends(group.has(places))
        return int(np.flatnonzero(usable)[-1])

    def usable_with(self, places: I32, stored: Sequence[NDArray[np.bool_]], pages: int) -> int:
        """The same of the first `pages` pages of a path that begins with these places, if all that is `stored` (of each
        group, bool [pages] or more) were here."""
        usable = np.ones(pages + 1, np.bool_)
        for group, there in zip(self.groups, stored):
            has = there[:pages].copy()
            has[: len(places)] |= group.has(places[:pages])
            usable &= group.usable_ends(has)
        return int(np.flatnonzero(usable)[-1])

    def host_run(self, group: int, places: I32) -> I32:
        """Host pages of these places, up to a gap; `group` of the layout."""
        pages = next(one for one in self.groups if one.number == group).host.pages[places]
        return pages[: int((pages < 0).argmax())] if (pages < 0).any() else pages

    def host_pool(self, group: int) -> HostPool:
        """Of a window group of the layout."""
        return next(one for one in self.groups if one.number == group).host_pool

    def open(self, holding: Holding, places: I32, key: PrefixKey) -> None:
        """A request is about to run behind the usable prefix that it has leased, of an indexed one of these places."""
        pages = holding.lease.num_pages
        holding.windows = [group.open(places[:pages], holding.pages.shape[1]) for group in self.groups]
        if pages < len(places):
            for group, hold in zip(self.groups, holding.windows):
                hold.is_short = not group.has(places[group.first_page(len(places) * self.page_tokens) :]).all()
        # Who comes after wants to go on where this one's prompt ends, or where the index did.
        ends = sorted((len(places), key.length // self.page_tokens))
        holding.ends = [end for end in dict.fromkeys(ends) if end > pages]

    def admits(self, holds: Sequence[WindowHold], leaving: Iterable[Sequence[WindowHold]] = ()) -> bool:
        """Whether these can run beside those that do, but for those that leave: none ever waits for another's end."""
        left = list(leaving)
        return all(
            group.committed - sum(held[i].claim for held in left) + group.claim_of(hold) <= group.device.pool.num_pages
            for i, (group, hold) in enumerate(zip(self.groups, holds))
        )

    def reach(self, holds: Sequence[WindowHold], tokens: int) -> int:
        """Up to which token, at most `tokens`, a request could compute now with what is free, and what nobody else may
        need."""
        for group, hold in zip(self.groups, holds):
            wanted = -(-tokens // self.page_tokens) - hold.end
            loads = 0 if hold.claim else len(hold.lacking)
            if wanted + loads <= 0:
                continue
            pool = group.device.pool
            have = hold.claim or group.claim_of(hold)
            others = group.committed - hold.claim + have
            extra = max(0, pool.num_pages - others - pool.fenced_pages)
            room = group.room(min(wanted + loads, have - (hold.end - hold.first) + loads + extra)) - loads
            tokens = min(tokens, max(0, hold.end + room) * self.page_tokens)
        return tokens

    def enter(self, holding: Holding, step: int) -> None:
        """The request runs from `step` on, which loads what the device lacks of its prefix."""
        for group, hold in zip(self.groups, holding.windows):
            group.enter(hold, step)
        if self.copies is not None and holding.matched_pages:
            self.copies.ended(holding.lease, holding.matched_pages, step, None, matched=True)
        self._on_change()

    def grow(self, holds: Sequence[WindowHold], tokens: int) -> list[I32]:
        """Pages for the tokens up to `tokens`, within `reach` → those of each group, int32 [n]."""
        end = -(-tokens // self.page_tokens)
        return [group.grow(hold, max(end, hold.end)) for group, hold in zip(self.groups, holds)]

    def take_one_each(self, count: int) -> list[I32] | None:
        """One more device page for each of `count` running requests → int32 [count] of each group; None if not all can
        have one now: they come back behind fences."""
        if any(group.room(count) < count for group in self.groups):
            return None
        taken = [group.device.pool.take(count) for group in self.groups]
        return [pages for pages in taken if pages is not None]

    def return_taken(self, pages: Sequence[I32]) -> None:
        """What `take_one_each` gave is not needed."""
        for group, some in zip(self.groups, pages):
            group.device.pool.give_back(some, Owner.REQUEST, Fence())

    def append(self, holds: Sequence[WindowHold], pages: I32) -> None:
        """Give a running request its pages of `take_one_each`: int32 [groups, n]."""
        for group, hold, some in zip(self.groups, holds, pages):
            group.append(hold, some)

    def publish(self, holding: Holding, start: int, step: int, key: PrefixKey) -> None:
        """The request's pages from `start` to the end of its lease are indexed now; `step` is the last that fills
        any."""
        places = places_from(holding.lease, start)
        for group, hold in zip(self.groups, holding.windows):
            group.publish(hold, start, places, step)
        while holding.ends and holding.ends[0] <= holding.lease.num_pages:
            self._end_at(holding.lease, holding.ends.pop(0), step, key)

    def _end_at(self, lease: Lease, pages: int, step: int, key: PrefixKey | None) -> None:
        """Somebody may go on behind the first `pages` pages of the lease's path, the last of which `step` fills."""
        first = self.end_from(pages)
        places = places_from(lease, first)[: pages - first]
        for group in self.groups:
            group.mark_ends(places[group.end_from(pages) - first :])
        if self.copies is not None:
            self.copies.ended(lease, pages, step, key)

    def end_from(self, pages: int) -> int:
        """The first page that any group wants kept of a prefix that something may go on behind."""
        return min(group.end_from(pages) for group in self.groups)

    def passed(self, holds: Sequence[WindowHold], tokens: int, step: int) -> None:
        """`step` has been launched, and computes up to `tokens`."""
        for group, hold in zip(self.groups, holds):
            group.passed(hold, tokens, step)

    def close(self, holding: Holding, fence: Fence) -> None:
        """The request lets go of everything; it still has its lease."""
        pages = holding.lease.num_pages
        if pages > holding.matched_pages:
            self._end_at(holding.lease, pages, fence.after_step, None)
        for group, hold in zip(self.groups, holding.windows):
            group.close(hold, fence)

    # ------------------------------------------------------------------------------------------------------------
    # Pins of prefixes

    def can_pin(self, pages: int) -> bool:
        """Whether the windows at the end of so many pages may stay whatever happens: requests must still get on."""
        pinned = [sum(len(places[i]) for places in self._pinned.values()) for i in range(len(self.groups))]
        for group, held in zip(self.groups, pinned):
            count, total = pages - group.end_from(pages), group.device.pool.num_pages
            limit = min(int(total * PINNED_SHARE), total - group.running_pages)
            if held + count > limit or group.committed + count > total:
                return False
        return True

    def pin(self, pin: int, lease: Lease) -> None:
        """Keep what somebody who goes on from the lease's end needs, until `unpin`."""
        pages, held = lease.num_pages, []
        for group in self.groups:
            places = places_from(lease, group.end_from(pages))
            group.pin(places)
            group.committed += len(places)
            held.append(places)
        self._pinned[pin] = held

    def unpin(self, pin: int) -> None:
        """No effect if the device has been lost since."""
        for group, places in zip(self.groups, self._pinned.pop(pin, ())):
            group.unpin(places, -1)
            group.committed -= len(places)

    # ------------------------------------------------------------------------------------------------------------

    def stats(self) -> list[WindowStats]:
        """Counts, for metrics."""
        return [group.stats(self._full_pages) for group in self.groups]

    def complete_step(self, step: int) -> None:
        """The device has completed `step`."""
        for group in self.groups:
            group.device.pool.complete_step(step)
            group.host_pool.complete_step(step)

    def forget_device(self) -> None:
        """The device is gone with every page; nobody holds any. Copies are given up."""
        if self.copies is not None:
            self.copies.give_up()
        for pin in list(self._pinned):
            self.unpin(pin)
        for group in self.groups:
            group.forget_device()

    def flush(self, device: bool, host: bool, most_pages: int) -> None:
        """Drop idle pages from these tiers, up to so many of each group and tier."""
        for group in self.groups:
            if device:
                group.evict(most_pages)
            if host:
                group.evict_host(most_pages)
        self._on_change()

    def checking(self, holdings: Sequence[Holding], places: Iterable[I32]) -> Iterator[None]:
        """Raise AssertionError unless every page has one owner and every pin is counted, in steps; `places`: of the
        index's nodes."""
        counted = np.zeros_like(self._exists)
        total = 0
        for some in places:
            counted[some] = True
            total += len(some)
        assert total == np.count_nonzero(counted), "two pages of the index have the same place"
        assert (counted == self._exists).all(), "places are not those of the index"
        assert self._free_places == len(self._exists) - total
        copies, pinned = self.copies, list(self._pinned.values())
        for i, group in enumerate(self.groups):
            reading = [*(copies.reading(group) if copies is not None else []), *(places[i] for places in pinned)]
            moving = copies.transferring(group) if copies is not None else []
            if self.reads is not None:
                moving = [*moving, *self.reads.transferring(group)]
            held = [holding.windows[i] for holding in holdings]
            claimed = sum(len(places[i]) for places in pinned)
            yield from group.checking(held, reading, moving, counted, claimed)

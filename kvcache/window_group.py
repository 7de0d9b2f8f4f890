"""One window group's pages: by place in each tier, pinned by who reads them, idle pages in the order in which they go.

in     places that requests look at and have passed; steps; copies; room that is needed
out    page numbers, pages to load, what a request may take
state  pages by place and tier, pins, idle pages in order, what running requests lay claim to
owner  `windows.Windows`
ready  a device page is matchable when the step that fills or loads it is launched, a host page when it is put here
end    an idle page goes when its room is needed, behind its last step; or with its place
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.holding import WindowHold, WindowStats
from headrace.kvcache.host_pool import HostPool
from headrace.kvcache.integrity import Claims, joined
from headrace.kvcache.layout import LayerGroup
from headrace.kvcache.pool import Fence, Owner, PagePool
from headrace.ops.wire import I32

_NONE: I32 = np.zeros(0, np.int32)


class WindowTier:
    """One group's pages in one tier."""

    def __init__(self, pool: PagePool, places: int) -> None:
        self.pool = pool
        self.pages: I32 = np.full(places, -1, np.int32)
        """By place; -1 for none."""
        # By place, the longest unused first: dictionaries remember the order, and forget one in the middle in 50 ns.
        self._passed: dict[int, None] = {}
        self._ends: dict[int, None] = {}

    @property
    def idle_pages(self) -> int:
        return len(self._passed) + len(self._ends)

    def is_idle(self, place: int) -> bool:
        return place in self._passed or place in self._ends

    def offer(self, place: int, is_end: bool) -> None:
        """Nobody uses the page any more, if there is one."""
        if self.pages[place] >= 0:
            (self._ends if is_end else self._passed)[place] = None

    def withdraw(self, place: int) -> None:
        self._passed.pop(place, None)
        self._ends.pop(place, None)

    def promote(self, place: int) -> None:
        """Among those that go last."""
        if self._passed.pop(place, 0) is None:
            self._ends[place] = None

    def coldest(self, count: int) -> list[int]:
        """Take up to `count` places out of the queues."""
        places: list[int] = []
        for queue in (self._passed, self._ends):
            while queue and len(places) < count:
                place = next(iter(queue))
                del queue[place]
                places.append(place)
        return places

    def forget(self) -> None:
        """All pages are gone."""
        self.pages[:] = -1
        self._passed.clear()
        self._ends.clear()
        self.pool.reset()


class WindowGroup:
    """One window group's pages."""

    def __init__(
        self,
        number: int,
        group: LayerGroup,
        page_tokens: int,
        num_pages: int,
        host_pages: int,
        places: int,
        on_change: Callable[[], None],
    ) -> None:
        self.number = number
        """In the layout."""
        self.running_pages = group.running_pages(page_tokens)
        self.device = WindowTier(PagePool(num_pages), places)
        self.host_pool = HostPool(host_pages)
        self.host = WindowTier(self.host_pool, places)
        self.copied_pages = self.short_matches = 0
        self.committed = 0
        """Device pages that running requests lay claim to."""
        self._group = group
        self._page_tokens = page_tokens
        self._on_change = on_change
        self.pins: I32 = np.zeros(places, np.int32)
        self.last_step: NDArray[np.int64] = np.full(places, -1, np.int64)
        """The last launched step that reads or writes the page, as far as is known."""
        self.filled_by: NDArray[np.int64] = np.full(places, -1, np.int64)
        """The step whose launch made the device page matchable."""
        self._is_end: NDArray[np.bool_] = np.zeros(places, np.bool_)

    def first_page(self, tokens: int) -> int:
        """The first page that the token behind so many looks at."""
        return self._group.first_page(tokens, self._page_tokens)

    def end_from(self, pages: int) -> int:
        """The first page that must be there for a prefix to be usable up to its page `pages`, or the one before: of a
        prompt that ends with a page, the last one is computed again."""
        return self.first_page(max(0, pages - 1) * self._page_tokens)

    def has(self, places: I32) -> NDArray[np.bool_]:
        """Which of these pages are in some tier."""
        return (self.device.pages[places] >= 0) | (self.host.pages[places] >= 0)

    def usable_ends(self, has: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool [n] → bool [n + 1]: whether a prefix of so many pages is usable, where these are there."""
        lacking = np.concatenate((np.zeros(1, np.int64), np.cumsum(~has)))
        ends = np.arange(len(has) + 1)
        firsts = np.maximum(0, ends * self._page_tokens + 1 - self._group.window_tokens) // self._page_tokens
        usable: NDArray[np.bool_] = lacking[ends] == lacking[firsts]
        return usable

    # ------------------------------------------------------------------------------------------------------------
    # Pins

    def pin(self, places: I32) -> None:
        """Somebody reads these pages: they stay in their tiers."""
        self.pins[places] += 1
        for place in places[self.pins[places] == 1].tolist():
            self.device.withdraw(place)
            self.host.withdraw(place)

    def unpin(self, places: I32, last_step: int) -> None:
        """A reader is done once `last_step` is."""
        assert (self.pins[places] > 0).all(), "a window page was unpinned twice"
        self.pins[places] -= 1
        self.last_step[places] = np.maximum(self.last_step[places], last_step)
        self.offer(places)

    def offer(self, places: I32) -> None:
        """Let pages of these places go when their turn comes, those that nobody has pinned."""
        idle = places[self.pins[places] == 0]
        for place, is_end in zip(idle.tolist(), self._is_end[idle].tolist()):
            self.device.offer(place, is_end)
            self.host.offer(place, is_end)

    def mark_ends(self, places: I32) -> None:
        """Somebody may go on behind these: they go last."""
        for place in places[~self._is_end[places]].tolist():
            self.device.promote(place)
            self.host.promote(place)
        self._is_end[places] = True

    # ------------------------------------------------------------------------------------------------------------
    # Room

    def room(self, count: int) -> int:
        """How many of `count` device pages can be taken now, evicting idle ones. Pages behind a fence come back by
        themselves within two steps: only what they leave short is evicted."""
        pool = self.device.pool
        self.evict(count - pool.free_pages - pool.fenced_pages)
        return min(count, pool.free_pages)

    def evict(self, count: int) -> int:
        """Up to `count` idle device pages, the coldest first → how many."""
        if count <= 0 or not self.device.idle_pages:
            return 0
        places = np.array(self.device.coldest(count), np.int32)
        self._drop_device(places)
        self._on_change()
        return len(places)

    def evict_host(self, count: int) -> int:
        """The same for host pages."""
        if count <= 0 or not self.host.idle_pages:
            return 0
        places = np.array(self.host.coldest(count), np.int32)
        self._drop_host(places)
        self._on_change()
        return len(places)

    def take_host(self, count: int) -> I32 | None:
        """Host pages for a transfer, int32 [count]; None if there are not so many now."""
        pool = self.host_pool
        if count > pool.free_pages + pool.fenced_pages + self.host.idle_pages:
            return None
        self.evict_host(count - pool.free_pages - pool.fenced_pages)
        return pool.take(count, Owner.TRANSFER)

    def put_device(self, places: I32, pages: I32, step: int) -> None:
        """The index's own pages, which `step` fills or loads."""
        self.device.pages[places] = pages
        self.filled_by[places] = step
        self.last_step[places] = np.maximum(self.last_step[places], step)

    def put_host(self, places: I32, pages: I32) -> None:
        """Host pages that a transfer has filled, for places that have none: where somebody goes on."""
        self.host_pool.hand_over(pages, Owner.TRANSFER, Owner.INDEX)
        self.host.pages[places] = pages
        self.mark_ends(places)
        self.offer(places)
        self._on_change()

    def forget(self, places: I32) -> None:
        """These places are no more, and with them their pages."""
        assert not self.pins[places].any(), "a place goes whose page somebody reads"
        self.drop(places, device=True, host=True)
        self.last_step[places] = self.filled_by[places] = -1
        self._is_end[places] = False

    def drop(self, places: I32, device: bool, host: bool) -> None:
        """Take the pages of these places that nobody has pinned from the tiers."""
        idle = places[self.pins[places] == 0]
        for place in idle.tolist():
            if device:
                self.device.withdraw(place)
            if host:
                self.host.withdraw(place)
        if device:
            self._drop_device(idle[self.device.pages[idle] >= 0])
        if host:
            self._drop_host(idle[self.host.pages[idle] >= 0])
        # Those that stay in the other tier are on offer there already.

    def forget_device(self) -> None:
        """The device is gone with its pages. Nobody has pinned any."""
        assert not self.committed and not self.pins.any()
        self.device.forget()
        self.filled_by[:] = self.last_step[:] = -1

    def _drop_device(self, places: I32) -> None:
        pool = self.device.pool
        for last_step, some in _by_step(places, self.last_step[places], pool.completed_step):
            pool.give_back(self.device.pages[some], Owner.INDEX, Fence(last_step))
        self.device.pages[places] = -1

    def _drop_host(self, places: I32) -> None:
        for last_step, some in _by_step(places, self.last_step[places], self.host_pool.completed_step):
            self.host_pool.drop(self.host.pages[some], last_step)
        self.host.pages[places] = -1

    # ------------------------------------------------------------------------------------------------------------
    # One request

    def open(self, places: I32, capacity: int) -> WindowHold:
        """Hold what the token behind these places looks at; all of it must be in some tier."""
        pages = len(places)
        hold = WindowHold(capacity, self.first_page(pages * self._page_tokens), pages)
        mine = places[hold.first :]
        self.pin(mine)
        hold.places[hold.first : pages] = mine
        hold.pages[hold.first : pages] = device = self.device.pages[mine]
        if len(absent := np.flatnonzero(device < 0)):
            hold.lacking = (hold.first + absent).astype(np.int32)
            hold.host = self.host.pages[mine[absent]]
            assert (hold.host >= 0).all(), "a prefix is matched whose window is nowhere"
        return hold

    def enter(self, hold: WindowHold, step: int) -> None:
        """The request runs from `step` on, which loads what the device lacks; the room is there."""
        places = hold.places[hold.lacking]
        pages = self.device.pool.take(len(places), Owner.INDEX)
        assert pages is not None
        self.put_device(places, pages, step)
        hold.pages[hold.lacking] = pages
        self.mark_ends(hold.places[hold.first : hold.end])
        self.short_matches += hold.is_short
        self._claim(hold)

    def grow(self, hold: WindowHold, end: int) -> I32:
        """Pages up to `end` for the request → int32 [n]; the room is there."""
        pages = self.device.pool.take(end - hold.end)
        assert pages is not None
        self.append(hold, pages)
        return pages

    def append(self, hold: WindowHold, pages: I32) -> None:
        """Give taken pages to the request."""
        end = hold.end + len(pages)
        hold.pages[hold.end : end] = pages
        hold.end = end
        self._claim(hold)

    def publish(self, hold: WindowHold, start: int, places: I32, step: int) -> None:
        """The request's pages from `start` on have these places now. Where the index has a device page already, the
        request keeps its own until it has passed it."""
        first, end = max(start, hold.first), min(start + len(places), hold.end)
        if first >= end:
            return
        at = np.arange(first, end)
        mine = places[first - start : end - start]
        fresh = self.device.pages[mine] < 0
        at, mine = at[fresh], mine[fresh]
        self.device.pool.hand_over(hold.pages[at], Owner.REQUEST, Owner.INDEX)
        self.put_device(mine, hold.pages[at], step)
        self.pin(mine)
        hold.places[at] = mine

    def passed(self, hold: WindowHold, tokens: int, step: int) -> None:
        """`step` has been launched, and computes up to `tokens`: what even the last of them, were it computed once
        more, would not look at goes behind that step."""
        first = min(self.first_page(tokens - 1), hold.end)
        if first > hold.first:
            self._let_go(hold, first, Fence(step))
            self._claim(hold)

    def close(self, hold: WindowHold, fence: Fence) -> None:
        self._let_go(hold, hold.end, fence)
        self.committed -= hold.claim
        hold.claim = 0

    def _let_go(self, hold: WindowHold, first: int, fence: Fence) -> None:
        """Of all before page `first`."""
        places, pages = hold.places[hold.first : first], hold.pages[hold.first : first]
        own = places < 0
        self.unpin(places[~own], fence.after_step)
        self.device.pool.give_back(pages[own], Owner.REQUEST, fence)
        hold.first = first

    def _claim(self, hold: WindowHold) -> None:
        claim = max(hold.end - hold.first, self.claim_of(hold))
        self.committed += claim - hold.claim
        hold.claim = claim

    def claim_of(self, hold: WindowHold) -> int:
        """Pages with which the request always gets on."""
        return min(self.running_pages, len(hold.pages))

    def stats(self, full_pages: int) -> WindowStats:
        """`full_pages`: device pages of a full group."""
        pool = self.device.pool
        page_bytes = self._page_tokens * self._group.token_bytes
        return WindowStats(
            window_tokens=self._group.window_tokens,
            pages_total=pool.num_pages,
            pages_free=pool.free_pages,
            pages_cached=self.device.idle_pages,
            pages_claimed=self.committed,
            host_pages_total=self.host_pool.num_pages,
            host_pages_cached=int(np.count_nonzero(self.host.pages >= 0)),
            copied_pages=self.copied_pages,
            short_matches=self.short_matches,
            saved_bytes=(full_pages - pool.num_pages) * page_bytes,
        )

    def checking(
        self,
        holds: Sequence[WindowHold],
        reading: Sequence[I32],
        moving: Sequence[I32],
        places: NDArray[np.bool_],
        pinned: int,
    ) -> Iterator[None]:
        """Raise AssertionError unless every page has one owner and every pin is counted. `reading`: places that copies
        read, and pins of prefixes hold, which claim `pinned` pages; `moving`: host pages that transfers write to;
        `places`: bool, which there are."""
        pins = np.zeros_like(self.pins)
        for held in (*(hold.places[hold.first : hold.end] for hold in holds), *reading):
            np.add.at(pins, held[held >= 0], 1)
        assert (pins == self.pins).all(), "a window page's pins are not those of its readers"
        assert self.committed == pinned + sum(hold.claim for hold in holds), (
            "claims on window pages are not those of requests"
        )
        assert self.committed <= self.device.pool.num_pages, "more window pages are promised than there are"
        for tier in (self.device, self.host):
            has = tier.pages >= 0
            assert not has[~places].any(), "a window page is kept for a place that is gone"
            idle = np.flatnonzero(has & (pins == 0)).tolist()
            assert tier.idle_pages == len(idle) and all(map(tier.is_idle, idle)), "idle window pages are not on offer"
            tier.pool.check()
            yield
        owners = Claims(self.device.pool)
        owners.claim(Owner.INDEX, self.device.pages[self.device.pages >= 0])
        own = [hold.pages[hold.first : hold.end][hold.places[hold.first : hold.end] < 0] for hold in holds]
        owners.claim(Owner.REQUEST, joined(own))
        owners.finish(Owner.INDEX, Owner.REQUEST, Owner.TRANSFER)
        yield
        owners = Claims(self.host_pool)
        owners.claim(Owner.INDEX, self.host.pages[self.host.pages >= 0])
        owners.claim(Owner.TRANSFER, joined(list(moving)))
        owners.finish(Owner.INDEX, Owner.REQUEST, Owner.TRANSFER)
        yield


def _by_step(places: I32, last_steps: NDArray[np.int64], completed_step: int) -> Iterator[tuple[int, I32]]:
    """Places by the step that their pages must outlive; -1 where it has completed, as most have."""
    over = last_steps <= completed_step
    if over.any():
        yield -1, places[over]
    if not over.all():
        for step in np.unique(last_steps[~over]).tolist():
            yield step, places[last_steps == step]

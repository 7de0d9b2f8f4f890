"""Copies from the device to the host: some behind each step, or one after the other while idle.

in     what the cache wants copied; the device's `BackupDone`
out    `Backup` commands; pages that the host has, to the cache
state  copies under way, how many pages they may take
owner  the engine
ready  a copy's host pages when every group's part has been made
end    with the device's life: `forget`; the cache gives up what was under way
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.kvcache.cache import KvCache
from headrace.kvcache.host import Copy
from headrace.ops.wire import Backup, BackupDone
from headrace.sched.budget import COPIES_AHEAD, CopyPace


@dataclass(slots=True)
class _UnderWay:
    groups_left: int
    pages: int
    copy_ms: float = 0.0


class CopyStage:
    """Orders copies; the device makes them in its own order."""

    def __init__(self, cache: KvCache, pace: CopyPace, send: Callable[[Backup], None]) -> None:
        self._cache = cache
        self._pace = pace
        self._send = send
        self._copies: dict[int, _UnderWay] = {}
        """By transfer."""

    @property
    def under_way(self) -> bool:
        """Whether the device has a copy to make."""
        return bool(self._copies)

    def order(self, step_ms: float = 0.0) -> bool:
        """Send the next copies behind all that the device has been sent, the last of it a step that should take so
        long; False if there is none to make."""
        if not self._pace.delays:
            return self._top_up()
        left, ordered = self._pace.pages(step_ms), False
        while left > 0 and (pages := self._order(min(left, self._pace.most))):
            left, ordered = left - pages, True
        return ordered

    def _top_up(self) -> bool:
        """As many copies under way as may be, if there are so many to make; whether there are any."""
        while len(self._copies) < COPIES_AHEAD and self._order(self._pace.most):
            pass
        return bool(self._copies)

    def _order(self, most_pages: int) -> int:
        """Send the next copy; its pages."""
        copy = self._cache.next_copy(most_pages)
        if copy is None:
            return 0
        pages = self._size_of(copy)
        self._copies[copy.transfer] = _UnderWay(len(copy.device), pages)
        for group, (device, host) in enumerate(zip(copy.device, copy.host), copy.first_group):
            self._send(Backup(copy.transfer, group, device.tolist(), host.tolist()))
        return pages

    def _size_of(self, copy: Copy) -> int:
        """In pages of every full group, which is how the pace counts."""
        layout, pages = self._cache.layout, int(copy.device.shape[1])
        if not copy.first_group:
            return pages
        return max(1, pages * layout.page_bytes(copy.first_group) // self._cache.page_bytes)

    def made(self, done: BackupDone) -> None:
        """A group's part of a copy has been made."""
        copy = self._copies[done.transfer]
        copy.groups_left -= 1
        copy.copy_ms += done.copy_ms
        if not copy.groups_left:
            del self._copies[done.transfer]
            self._pace.observe(copy.pages, copy.copy_ms)
            self._cache.copied(done.transfer)
            if not self._pace.delays:
                self._top_up()

    def forget(self) -> None:
        """The device is gone, and what it was copying with it."""
        self._copies.clear()

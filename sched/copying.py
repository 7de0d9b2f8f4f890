"""Copies from the device to the host: a few are always under way, beside the steps, as long as there are some to make.

in     what the cache wants copied; the device's `BackupDone`
out    `Backup` commands; pages that the host has, to the cache
state  copies under way
owner  the engine
ready  a copy's host pages when every group's part has been made
end    with the device's life: `forget`; the cache gives up what was under way
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.kvcache.cache import KvCache
from headrace.ops.wire import Backup, BackupDone

COPIES_AHEAD: Final = 8
"""Under way. A CPU's worker acknowledges them between steps: with 32 MiB in a step of 200 ms they keep up with 7,000
tokens/s of the default model."""
MAX_COPY_BYTES: Final = 8 << 20
"""Of one copy: its command has to fit a message, and room on the host comes in such pieces. One is all that a load may
find begun: 1 to 2 ms."""


class CopyStage:
    """Orders copies; the device makes them in its own order."""

    def __init__(self, cache: KvCache, most_bytes: int, send: Callable[[Backup], None]) -> None:
        """`most_bytes`: of one copy, or a single page."""
        self._cache = cache
        self._most_pages = max(1, most_bytes // cache.page_bytes)
        self._send = send
        self._groups_left: dict[int, int] = {}
        """Of each copy under way, by transfer."""

    @property
    def under_way(self) -> bool:
        """Whether the device has a copy to make."""
        return bool(self._groups_left)

    def order(self) -> bool:
        """Have as many copies under way as may be, if there are so many to make; whether there are any."""
        while len(self._groups_left) < COPIES_AHEAD:
            copy = self._cache.next_copy(self._most_pages)
            if copy is None:
                break
            self._groups_left[copy.transfer] = len(copy.device)
            for group, (device, host) in enumerate(zip(copy.device, copy.host), copy.first_group):
                self._send(Backup(copy.transfer, group, device.tolist(), host.tolist()))
        return bool(self._groups_left)

    def made(self, done: BackupDone) -> None:
        """A group's part of a copy has been made."""
        self._groups_left[done.transfer] -= 1
        if not self._groups_left[done.transfer]:
            del self._groups_left[done.transfer]
            self._cache.copied(done.transfer)
            self.order()

    def forget(self) -> None:
        """The device is gone, and what it was copying with it."""
        self._groups_left.clear()

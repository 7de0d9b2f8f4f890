"""The host pool as the agent sees it: one buffer, in which each layer group has its pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.kvcache.storage.protocol import OpenStore

ALIGNMENT: Final = 4096
"""O_DIRECT reads and writes memory on such boundaries."""


class HostPages:
    """Views of host pages. Which of them may be touched is the business of whoever holds the request."""

    def __init__(self, buffer: memoryview, command: OpenStore) -> None:
        """Raises ValueError where the groups don't lie inside the buffer, or not on boundaries."""
        self._buffer = buffer.cast("B")
        self._groups = list(zip(command.host_offsets, command.slot_bytes, command.host_pages, strict=True))
        for group, (offset, slot_bytes, pages) in enumerate(self._groups):
            if offset < 0 or offset % ALIGNMENT or slot_bytes <= 0 or slot_bytes % ALIGNMENT or pages < 0:
                raise ValueError(f"group {group} of the host pool does not lie on {ALIGNMENT}-byte boundaries")
            if offset + slot_bytes * pages > len(self._buffer):
                raise ValueError(f"group {group} reaches past the host pool's {len(self._buffer)} bytes")

    @property
    def groups(self) -> int:
        return len(self._groups)

    def slot_bytes(self, group: int) -> int:
        """Size of a page of this group."""
        return self._groups[group][1]

    def views(self, group: int, pages: Sequence[int]) -> list[memoryview]:
        """Writable views of these pages. Raises ValueError for a page outside the pool."""
        offset, slot_bytes, count = self._groups[group]
        if pages and (min(pages) < 0 or max(pages) >= count):
            raise ValueError(f"a host page outside 0..{count - 1}")
        starts = [offset + page * slot_bytes for page in pages]
        return [self._buffer[start : start + slot_bytes] for start in starts]

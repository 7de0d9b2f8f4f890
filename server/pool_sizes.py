"""How many pages each layer group gets of the memory that there is.

A full group needs a page for every token that is kept. A window group needs the windows of all requests that run at
once, a chunk, and the windows behind which kept prefixes can be gone on from; so beyond some size of the full pool it
gets a share of its pages only, and the memory that it leaves holds more of both.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.kvcache.layout import KvLayout

WINDOW_SHARE: Final = 0.25
"""Window pages for each page of the full groups, where that is more than running requests can use: a conversation that
is four windows long, or longer, keeps one."""


class PoolSizes(msgspec.Struct, frozen=True):
    """Of one tier's pools. Sizes are told by the pages of a full group, which all follow from."""

    layout: KvLayout
    running_requests: int = 0
    """That have a window each in this tier, whatever is kept."""
    chunk_tokens: int = 0

    def pages(self, full_pages: int) -> tuple[int, ...]:
        """Pages of each group."""
        return tuple(
            full_pages if group.kind == "full" else self._window_pages(number, full_pages)
            for number, group in enumerate(self.layout.groups)
        )

    def size_bytes(self, full_pages: int, host: bool = False) -> int:
        """Of all groups' pages; `host`: as the host keeps them."""
        pages, layout, full = self.pages(full_pages), self.layout, self.layout.full_groups
        if not host:
            return sum(count * layout.page_bytes(group) for group, count in enumerate(pages))
        # Full groups share a pool of equal slots.
        slots = [layout.host_slot_bytes(group) for group in range(len(pages))]
        slots[:full] = [max(slots[:full])] * full
        return sum(count * slot_bytes for count, slot_bytes in zip(pages, slots))

    def pages_in(self, size_bytes: int, host: bool = False) -> int:
        """The most pages of a full group for which there is room with all that follows from them."""
        least, most = 0, max(0, size_bytes) // self.layout.page_bytes(0)
        while least < most:
            middle = (least + most + 1) // 2
            if self.size_bytes(middle, host) <= size_bytes:
                least = middle
            else:
                most = middle - 1
        return least

    def saved_bytes(self, full_pages: int) -> int:
        """What the window groups would take more if they kept a page for every token."""
        groups = range(len(self.layout.groups))
        return sum(full_pages * self.layout.page_bytes(group) for group in groups) - self.size_bytes(full_pages)

    def _window_pages(self, number: int, full_pages: int) -> int:
        page_tokens = self.layout.page_tokens
        running = self.running_requests * self.layout.groups[number].running_pages(page_tokens)
        least = running + self.layout.pages(self.chunk_tokens)
        return min(full_pages, max(least, int(full_pages * WINDOW_SHARE)))

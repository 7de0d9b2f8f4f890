"""Page copies between the card and the host pool, by a kernel that reads and writes the host's memory itself.

in     pairs of host and device pages
out    device pages (`DeviceLoad.bring`), host pages (`PinnedPages.back_up`)
state  none but the mapping, which the card reaches (`card.pin`)
owner  host pages: whoever holds their transfer, in the server; here they are only read or written
ready  when the event behind the copy is
end    the mapping ends with the process
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.ops.kv_pool import KvPool
from headrace.ops.triton.kv_copy import back_up, load_layer
from headrace.ops.wire import I32, HostArea


class PinnedPages:
    """A `step_copies.Copier` of one group."""

    def __init__(self, buffer: mmap.mmap | bytearray, area: HostArea, dtype: torch.dtype) -> None:
        """`buffer`: pinned where the pools are a card's; `area`: the part of it that a group's pages are in."""
        size_bytes = area.pages * area.slot_bytes
        slots = torch.frombuffer(buffer, dtype=torch.uint8, count=size_bytes, offset=area.offset)
        self.slots: Tensor = slots.view(dtype).view(area.pages, -1)
        """`[pages, values]`"""

    def load(self, pool: KvPool, host_pages: I32, device_pages: I32) -> DeviceLoad:
        """Raises IndexError for a page outside its pool."""
        self._check(pool, device_pages, host_pages)
        return DeviceLoad(pool, self.slots, host_pages.copy(), device_pages.copy())

    def back_up(self, pool: KvPool, device_pages: list[int], host_pages: list[int]) -> Callable[[], None]:
        """Raises IndexError for a page outside its pool."""
        self._check(pool, device_pages, host_pages)
        return partial(_back_up, pool, self.slots, device_pages, host_pages)

    def _check(self, pool: KvPool, device_pages: Sequence[int] | I32, host_pages: Sequence[int] | I32) -> None:
        """The kernel checks nothing."""
        for pages, count in ((device_pages, pool.num_pages), (host_pages, len(self.slots))):
            if len(pages) and (min(pages) < 0 or max(pages) >= count):
                raise IndexError(f"a copy has a page outside 0..{count - 1}")


class DeviceLoad:
    """The host pages that one batch brings to device pages of one group."""

    def __init__(self, pool: KvPool, slots: Tensor, host_pages: I32, device_pages: I32) -> None:
        self.pages = host_pages, device_pages
        self._pool = pool
        self._slots = slots
        self._on_device: list[Tensor] | None = None

    def bring(self, layer: int) -> None:
        """In the load stream: copy the pages' part of the group's `layer`-th layer."""
        if self._on_device is None:
            self._on_device = [_page_numbers(pages, self._pool) for pages in self.pages]
        load_layer(self._slots, self._pool.layer(layer), layer, *self._on_device)


def _back_up(pool: KvPool, slots: Tensor, device_pages: list[int], host_pages: list[int]) -> None:
    numbers = [_page_numbers(np.array(pages, np.int32), pool) for pages in (device_pages, host_pages)]
    back_up(pool.pages, slots, *numbers)


def _page_numbers(pages: I32, pool: KvPool) -> Tensor:
    """int32 `[pages]` where the pool is, sent in the current stream."""
    numbers = torch.from_numpy(pages)
    if pool.pages.device.type == "cpu":
        return numbers
    # torch gives the pinned block to nobody else before this stream has copied it.
    return numbers.pin_memory().to(pool.pages.device, non_blocking=True)

"""Page copies between the device pool and the host pool, torch reference.
On a GPU: `ops.triton.kv_copy`.

A host page is one blob: the page's part of each of its group's layers, one after the other, each laid out as in the
device pool (`kv_pool`). On a CPU both pools are ordinary memory, and a copy is work like any other. When it is made is
the streams' business (`streams`): a load's layers come one by one, each with an event of its own.

in     the mapping of the host pool; pairs of host and device pages
out    device pages (`PageLoad.bring`), host pages (`back_up`)
state  none but the mapping
owner  host pages: whoever holds their transfer, in the server; here they are only read or written
ready  when the call returns
end    the mapping ends with the process
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from headrace.ops.kv_pool import KvPool
from headrace.ops.wire import I32


class HostPages:
    """The host pool as this worker sees it: `[pages, values]`, `slot_bytes` apart."""

    def __init__(self, buffer: mmap.mmap | bytearray, slot_bytes: int, dtype: torch.dtype) -> None:
        count = len(buffer) // slot_bytes
        self._slots: Tensor = torch.frombuffer(buffer, dtype=torch.uint8)[: count * slot_bytes].view(dtype)
        self._slots = self._slots.view(count, -1)

    @property
    def slot_elements(self) -> int:
        return self._slots.shape[1]

    def layer(self, index: int, elements: int) -> Tensor:
        """`[pages, elements]`: the part of the group's `index`-th layer in every page."""
        return self._slots[:, index * elements : (index + 1) * elements]


class PageLoad:
    """The host pages that one batch brings to device pages of one group."""

    def __init__(self, pool: KvPool, host: HostPages, host_pages: I32, device_pages: I32) -> None:
        self._pool = pool
        self._host = host
        self.pages = host_pages.copy(), device_pages.copy()
        self._from = torch.from_numpy(self.pages[0])
        self._to = torch.from_numpy(self.pages[1]).long()

    def bring(self, layer: int) -> None:
        """Copy the pages' part of the group's `layer`-th layer. Raises IndexError for a page outside its pool."""
        source = self._host.layer(layer, self._pool.layer_elements)
        target = self._pool.layer(layer).view(self._pool.num_pages, -1)
        target.index_copy_(0, self._to, source.index_select(0, self._from))


def back_up(pool: KvPool, host: HostPages, device_pages: list[int], host_pages: list[int]) -> None:
    """Copy device pages, all layers, to host pages. Raises IndexError for a page outside its pool."""
    device = torch.tensor(device_pages, dtype=torch.int64)
    to = torch.tensor(host_pages, dtype=torch.int64)
    for layer in range(len(pool.shape.layers)):
        source = pool.layer(layer).view(pool.num_pages, -1)
        host.layer(layer, pool.layer_elements).index_copy_(0, to, source.index_select(0, device))

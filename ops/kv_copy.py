"""Page copies between the device pool and the host pool of a CPU. On a GPU: `ops.triton.kv_copy`.

A host page is one blob: the page's part of each of its group's layers, one after the other, each laid out as in the
device pool (`kv_pool`). On a CPU both pools are ordinary memory, and a copy is work like any other. When it is made is
the streams' business (`streams`): a load's layers come one by one, each with an event of its own, made by the model's
threads (`Model.copy_pages`); copies to the host are made beside them (`copy_thread`, `Model.back_up_pages`).

What a copy means is `copy_pages`, of torch. Compiled (`simd.copies`), it reads each byte once and writes it once.

in     the mapping of the host pool; pairs of host and device pages
out    device pages (`PageLoad.bring`), host pages (what `HostPages.back_up` returns)
state  none but the mapping
owner  host pages: whoever holds their transfer, in the server; here they are only read or written
ready  when the call returns
end    the mapping ends with the process
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headrace.ops.kv_pool import KvPool
from headrace.ops.wire import I32, HostArea

if TYPE_CHECKING:
    from headrace.ops.simd.program import Program

RUN_BYTES: Final = 128 << 10
"""Of a copy that is made beside steps, between two moments at which others may have its core: 20 µs. A kernel that is
asked so lets a busy core's other threads run for 3 ms: where other programs had every core, twice over, copies went on
with 70 MB/s, as much KV as two cores can compute. With 64 kB 36 MB/s, with 256 kB 120, and steps of two threads on two
cores were delayed by twice as much."""

CopyPages: TypeAlias = Callable[[Tensor, I32, Tensor, I32], None]
"""`(to, to_pages, source, source_pages)`: pools as `[pages, layers, elements]`, whose elements lie side by side, and
int32 [n] page numbers in them, `to_pages` each once."""


def copy_pages(
    to: Tensor, to_pages: I32, source: Tensor, source_pages: I32, after_layer: Callable[[], None] = lambda: None
) -> None:
    """A `CopyPages`: the reference."""
    to_index, source_index = (torch.from_numpy(pages.astype(np.int64)) for pages in (to_pages, source_pages))
    for layer in range(to.shape[1]):
        to[:, layer].index_copy_(0, to_index, source[:, layer].index_select(0, source_index))
        after_layer()


def copy_pages_by(program: Program, run_bytes: int = sys.maxsize) -> CopyPages:
    """A `CopyPages` of a program's threads, which let others have their cores after each `run_bytes`."""
    from headrace.ops.simd.copies import Pages

    def addresses(pool: Tensor, pages: I32) -> Pages:
        size_bytes = pool.element_size()
        return Pages(pool.data_ptr(), pages.ctypes.data, pool.stride(0) * size_bytes, pool.stride(1) * size_bytes)

    def copy(to: Tensor, to_pages: I32, source: Tensor, source_pages: I32) -> None:
        _, layers, elements = to.shape
        assert source.shape[1:] == to.shape[1:] and source.dtype == to.dtype and len(to_pages) == len(source_pages)
        for pages in (to_pages, source_pages):
            assert pages.dtype == np.int32 and pages.flags.c_contiguous
        size_bytes = elements * to.element_size()
        sides = addresses(to, to_pages), addresses(source, source_pages)
        program.copy(len(to_pages), layers, size_bytes, *sides, run_bytes)

    return copy


class HostPages:
    """The host pool as this worker sees it: `[pages, values]`, `slot_bytes` apart."""

    def __init__(
        self,
        buffer: mmap.mmap | bytearray,
        slot_bytes: int,
        dtype: torch.dtype,
        bring: CopyPages = copy_pages,
        back_up: CopyPages = copy_pages,
        area: HostArea | None = None,
    ) -> None:
        """`area`: a part of it, instead of as many pages as there is room for."""
        if area is None:
            area = HostArea(0, slot_bytes, len(buffer) // slot_bytes)
        self.bring = bring
        """Copies pages from it."""
        self._back_up = back_up
        size_bytes = area.pages * area.slot_bytes
        self._slots: Tensor = torch.frombuffer(buffer, dtype=torch.uint8, count=size_bytes, offset=area.offset)
        self._slots = self._slots.view(dtype).view(area.pages, -1)

    @property
    def slot_elements(self) -> int:
        return self._slots.shape[1]

    def layers(self, first: int, count: int, elements: int) -> Tensor:
        """`[pages, count, elements]`: the parts of the group's layers from `first` on, in every page."""
        parts = self._slots[:, first * elements : (first + count) * elements]
        return parts.view(len(parts), count, elements)

    def load(self, pool: KvPool, host_pages: I32, device_pages: I32) -> PageLoad:
        """As `step_copies.Copier`."""
        return PageLoad(pool, self, host_pages, device_pages)

    def back_up(self, pool: KvPool, device_pages: list[int], host_pages: list[int]) -> Callable[[], None]:
        """→ what copies device pages, all layers, to host pages. Raises IndexError for a page outside its pool."""
        device, to = np.array(device_pages, np.int32), np.array(host_pages, np.int32)
        target = self.layers(0, len(pool.shape.layers), pool.layer_elements)
        _check(pool.by_page, device)
        _check(target, to)
        return partial(self._back_up, target, to, pool.by_page, device)


class PageLoad:
    """The host pages that one batch brings to device pages of one group."""

    def __init__(self, pool: KvPool, host: HostPages, host_pages: I32, device_pages: I32) -> None:
        """Raises IndexError for a page outside its pool."""
        self._pool = pool
        self._host = host
        self.pages = host_pages.copy(), device_pages.copy()
        everything = host.layers(0, 1, pool.layer_elements)
        _check(everything, host_pages)
        _check(pool.by_page, device_pages)

    def bring(self, layer: int) -> None:
        """Copy the pages' part of the group's `layer`-th layer."""
        source = self._host.layers(layer, 1, self._pool.layer_elements)
        self._host.bring(self._pool.by_page[:, layer : layer + 1], self.pages[1], source, self.pages[0])


def _check(pool: Tensor, pages: I32) -> None:
    """A wrong number would read or write memory of others without a sound."""
    if len(pages) and (pages.min() < 0 or pages.max() >= len(pool)):
        raise IndexError(f"a copy names a page outside 0..{len(pool) - 1}")

"""Pages go between the layer-major device pool and the page-major host pool. On a CPU: `ops.kv_copy`.

The kernel reads or writes the host's memory itself, over the bus, so that pages of 16 tokens, scattered on both sides,
need neither a copy each (a call of 3 µs for 64 KB) nor a staging buffer. The host's mapping must be registered
(`cudaHostRegister`), or the launch fails. A load brings one layer, so that the next can come while this one computes; a
backup takes all of them.

The bus is the floor: 64 KB of a layer of an 8B page are 1.2 µs at 55 GB/s. A latency of 2 µs wants 110 KB under way; a
program has 8 KB, so that 32 fill the bus twice over and leave most of the GPU to the step that runs beside them.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.dispatch import ceil_div, launches

PROGRAMS: Final = 32
_BLOCK: Final = 2048
"""Words that a program moves at a time."""


def load_layer(host: Tensor, layer: Tensor, index: int, host_pages: Tensor, device_pages: Tensor) -> None:
    """Bring the part of the group's `index`-th layer of host pages to device pages.

    `host`: `[pages, values]`, pinned, each page the layers of one page one after the other, pages apart by any stride.
    `layer`: `[num_pages, 2, kv_heads, page_tokens, head_dim]`, on the device, of the same dtype. `host_pages`,
    `device_pages`: int32 `[n]` on the device. Pages must exist: nothing here checks them.
    """
    elements = layer[0].numel()
    if not launches(layer):
        source = host[:, index * elements : (index + 1) * elements]
        layer.view(len(layer), -1)[device_pages.long()] = source[host_pages.long()]
        return
    source, target = _words(host), _words(layer.view(len(layer), -1))
    words = target.shape[1]
    _launch(source[:, index * words :], host_pages, (source.stride(0), 0), target, device_pages, (words, 0), words, 1)


def back_up(pool: Tensor, host: Tensor, device_pages: Tensor, host_pages: Tensor) -> None:
    """Copy device pages, all layers, to host pages.

    `pool`: `[layers, num_pages, 2, kv_heads, page_tokens, head_dim]`, contiguous; the others as in `load_layer`.
    """
    layers, count = pool.shape[:2]
    if not launches(pool):
        by_page = pool.view(layers, count, -1)[:, device_pages.long()].transpose(0, 1).flatten(1)
        host[host_pages.long(), : by_page.shape[1]] = by_page
        return
    source, target = _words(pool.view(layers, count, -1)), _words(host)
    words = source.shape[2]
    strides = (words, count * words), (target.stride(0), words)
    _launch(source, device_pages, strides[0], target, host_pages, strides[1], words, layers)


def _words(pages: Tensor) -> Tensor:
    """Four bytes each: a copy needn't know the dtype."""
    return pages.view(torch.int32)


def _launch(
    source: Tensor,
    source_pages: Tensor,
    source_strides: tuple[int, int],
    target: Tensor,
    target_pages: Tensor,
    target_strides: tuple[int, int],
    words: int,
    layers: int,
) -> None:
    """Strides: from page to page, from layer to layer."""
    chunks = ceil_div(words, _BLOCK)
    items = len(source_pages) * layers * chunks
    # Of no page too: such a copy compiles the kernel, and does nothing.
    _copy[(min(PROGRAMS, max(items, 1)),)](
        source,
        source_pages,
        target,
        target_pages,
        items,
        *source_strides,
        *target_strides,
        LAYERS=layers,
        CHUNKS=chunks,
        WORDS=words,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["items"])
def _copy(
    source,
    source_pages,
    target,
    target_pages,
    items,
    source_page_stride,
    source_layer_stride,
    target_page_stride,
    target_layer_stride,
    LAYERS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # In 64 bits from here on: an offset into a pool may need them.
    for item in range(tl.program_id(0).to(tl.int64), items, tl.num_programs(0)):
        page, part = item // (LAYERS * CHUNKS), item % (LAYERS * CHUNKS)
        layer, chunk = part // CHUNKS, part % CHUNKS
        from_page = tl.load(source_pages + page).to(tl.int64)
        to_page = tl.load(target_pages + page).to(tl.int64)
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        from_ = source + from_page * source_page_stride + layer * source_layer_stride
        to = target + to_page * target_page_stride + layer * target_layer_stride
        tl.store(to + at, tl.load(from_ + at, mask=at < WORDS), mask=at < WORDS)

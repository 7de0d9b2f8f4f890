"""Attention of rows with several new tokens: chunks of prompts behind prefixes of any length.

The chunk's own KV is in the pool when this begins, so prefix and chunk are one run of pages. A tile is a few tokens of
a row with all query heads of one KV head: 128 rows of a product. Where there are too few tiles for the GPU, as when a
short question follows a long context, each tile's keys are cut into spans, and a second kernel merges what they leave.
Which tiles there are, and what each sees, is planned on the host: prefill is launched eagerly.

Operations are the floor: a tile does 4 · 128 · 128 for each token that it sees (4 · 16k, at 128 dimensions), for 512 B
of KV: 128 a byte. A100 has 312 TFLOP/s and 2 TB/s, 156; the L2 cache, where the tiles of a row meet, has several times
that. Hence 128 rows, the queries and the running mixture in the registers of eight warps (212 a thread), and 64 keys at
a time, 64 KB of shared memory on sm_80: one program an SM, for the registers' sake. Wider heads halve the rows;
float32, whose products are three of TF32, takes a quarter of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.triton.dispatch import WIDEN, launches, power_of_two
from headrace.ops.triton.paged_attention import LOG2_E, attend_blocks, merge_parts, merged_together
from headrace.ops.triton.paged_attention import reference as reference_of_rows

_KEYS: Final = 64
"""At a time; a span is a multiple of it."""
_LEAST_SPAN: Final = 1024
"""Shorter ones cost more in mixtures than their parallelism saves: a mixture is 64 KB, so many tokens of KV 512."""


class ExtendPlan(NamedTuple):
    """Pieces of work, those that take longest first, and what is to be merged."""

    pieces: NDArray[np.int32]
    """`[pieces, 5]`: row, its first token in the row, keys from, keys to, place among the parts (-1: nothing to merge).
    """
    merges: NDArray[np.int32]
    """`[merges, 4]`: row, its first token in the row, first place among the parts, how many."""
    parts: int
    """How many parts there are."""


def tile_tokens(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens in a tile; the plan is made with it."""
    return _rows(heads, kv_heads, head_dim, dtype) // (heads // kv_heads)


def plan_extend(
    row_start: NDArray[np.int32],
    row_kv_len: NDArray[np.int32],
    tile: int,
    kv_heads: int,
    *,
    window: int = 0,
    programs: int = 264,
) -> ExtendPlan:
    """Cut rows into tiles of `tile` tokens (`tile_tokens`), and their keys into spans if that keeps `programs` busy.

    `row_start`: `[rows + 1]`, `row_kv_len`: `[rows]`, as in `ForwardBatch`. `programs`: 2 for each SM are good.
    """
    lengths = np.diff(row_start)
    counts = -(-lengths // tile)
    rows = np.repeat(np.arange(len(lengths)), counts)
    first = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    prefix = (row_kv_len - lengths)[rows]
    end = prefix + np.minimum(first + tile, lengths[rows])
    begin = np.maximum(prefix + first - window + 1, 0) // _KEYS * _KEYS if window else np.zeros_like(end)
    busy = max(programs // max(kv_heads, 1), 1)
    # All keys, shared out among the programs, are what one of them should see.
    span = max(int((end - begin).sum()) // busy // _KEYS * _KEYS, _LEAST_SPAN)
    spans = -(-(end - begin) // span)
    tiles = np.repeat(np.arange(len(rows)), spans)
    part = np.arange(len(tiles)) - np.repeat(np.cumsum(spans) - spans, spans)
    split = spans > 1
    is_part = split[tiles]
    place = np.where(is_part, np.cumsum(is_part) - 1, -1)
    keys_from = begin[tiles] + part * span
    keys_to = np.minimum(keys_from + span, end[tiles])
    pieces = np.stack((rows[tiles], first[tiles], keys_from, keys_to, place), 1)
    longest = np.argsort(keys_from - keys_to, kind="stable")
    first_place = np.cumsum(spans * split) - spans * split
    merges = np.stack((rows, first, first_place, spans), 1)[split]
    return ExtendPlan(pieces[longest].astype(np.int32), merges.astype(np.int32), int(is_part.sum()))


def attend_extend(
    q: Tensor,
    layer: Tensor,
    table: Tensor,
    row_start: Tensor,
    row_slot: Tensor,
    row_kv_len: Tensor,
    out: Tensor,
    pieces: Tensor,
    merges: Tensor,
    parts: Tensor,
    part_sums: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Rows of several tokens (or one), whose KV is in the pool already.

    `q`, `out`: `[tokens, heads, head_dim]`, tokens apart by any stride. `layer`: `[num_pages, 2, kv_heads, page_tokens,
    head_dim]`. `table`: int32 `[slots, pages]`. `row_start`: int32 `[rows + 1]`, `row_slot`, `row_kv_len`: int32
    `[rows]`, as in `ForwardBatch`: a row's tokens are the last of its context. `pieces`, `merges`: int32, those of
    `plan_extend` with the same window, on the device. `parts`: float32 `[parts, heads, tile_tokens, head_dim]`,
    `part_sums`: float32 `[parts, heads, tile_tokens]`, for at least the plan's parts, of any content. `window`,
    `soft_cap`: 0 is none.
    """
    if not launches(q):
        reference_of_rows(
            q, layer, table, row_start, row_slot, row_kv_len, out, scale=scale, window=window, soft_cap=soft_cap
        )
        return
    heads, head_dim = q.shape[1:]
    kv_heads, page_tokens = layer.shape[2:4]
    block_m = _rows(heads, kv_heads, head_dim, layer.dtype)
    tile = block_m // (heads // kv_heads)
    is_float32 = layer.dtype == torch.float32
    widths = {"HEADS": heads, "HEAD_DIM": head_dim, "TILE": tile, "BLOCK_D": power_of_two(head_dim)}
    _attend_tiles[(len(pieces), kv_heads)](
        q,
        layer,
        table,
        row_start,
        row_slot,
        row_kv_len,
        out,
        pieces,
        parts,
        part_sums,
        scale * LOG2_E.value,
        soft_cap,
        q.stride(0),
        out.stride(0),
        table.stride(0),
        WINDOW=window,
        CAPPED=soft_cap > 0,
        KV_HEADS=kv_heads,
        PAGE_TOKENS=page_tokens,
        BLOCK_M=block_m,
        BLOCK_N=(16 if head_dim > 128 else 32) if is_float32 else 32 if head_dim > 128 or block_m % tile else _KEYS,
        **widths,
        num_warps=4 if is_float32 and head_dim <= 64 else 8,
        # Two spill for heads of 256 in groups of 8 on sm_100; a third costs 128 bytes of shared memory there.
        num_stages=3 if head_dim > 128 and not is_float32 else 2,
    )
    if len(merges):
        together = merged_together(head_dim)
        _merge_tiles[(len(merges), tile, heads)](
            row_start, out, merges, parts, part_sums, out.stride(0), BLOCK_PARTS=together, **widths, num_warps=1
        )


def _rows(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Rows of a tile's product: 128, and half where a row's mixture takes twice the registers."""
    rows = (32 if dtype == torch.float32 else 128) // (1 + (head_dim > 128))
    return max(rows, power_of_two(heads // kv_heads))


@triton.jit
def _attend_tiles(
    q,
    layer,
    table,
    row_start,
    row_slot,
    row_kv_len,
    out,
    pieces,
    parts,
    part_sums,
    scale,
    soft_cap,
    q_stride,
    out_stride,
    table_stride,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    piece = pieces + tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    row = tl.load(piece)
    first = tl.load(piece + 1)
    begin = tl.load(piece + 2)
    end = tl.load(piece + 3)
    place = tl.load(piece + 4).to(tl.int64)
    start = tl.load(row_start + row)
    length = tl.load(row_start + row + 1) - start
    context = tl.load(row_kv_len + row)
    pages = table + tl.load(row_slot + row).to(tl.int64) * table_stride

    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    in_tile = m // group
    token = first + in_tile
    head = kv_head * group + m % group
    live = (in_tile < TILE) & (token < length)
    inside = live[:, None] & (dim < HEAD_DIM)[None, :]
    row_of_batch = (start + token).to(tl.int64)[:, None]
    at = head[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(q + row_of_batch * q_stride + at, mask=inside, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    prefix = context - length
    position = tl.where(live, prefix + token, -1)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # Keys before the tile's first token need no mask, whole blocks of them.
    masked_from = begin
    if not WINDOW:
        masked_from += tl.maximum(tl.minimum(end, prefix + first + 1) - begin, 0) // BLOCK_N * BLOCK_N
        best, total, mixed = attend_blocks(
            query,
            position,
            best,
            total,
            mixed,
            layer,
            pages,
            kv_head,
            begin,
            masked_from,
            context,
            scale,
            soft_cap,
            0,
            CAPPED,
            False,
            KV_HEADS,
            PAGE_TOKENS,
            HEAD_DIM,
            BLOCK_N,
            BLOCK_D,
        )
    best, total, mixed = attend_blocks(
        query,
        position,
        best,
        total,
        mixed,
        layer,
        pages,
        kv_head,
        masked_from,
        end,
        context,
        scale,
        soft_cap,
        WINDOW,
        CAPPED,
        True,
        KV_HEADS,
        PAGE_TOKENS,
        HEAD_DIM,
        BLOCK_N,
        BLOCK_D,
    )
    # A query may see nothing of a span: its tokens are all before it, or after it.
    weight = tl.where(total > 0, total, 1.0)
    mixed = mixed / weight[:, None]
    if place < 0:
        tl.store(out + row_of_batch * out_stride + at, mixed, mask=inside)
    else:
        to = (place * HEADS + head) * TILE + in_tile
        sums = tl.where(total > 0, best + tl.log2(weight), float("-inf"))
        tl.store(part_sums + to, sums, mask=live)
        tl.store(parts + to[:, None] * HEAD_DIM + dim[None, :], mixed, mask=inside)


@triton.jit
def _merge_tiles(
    row_start,
    out,
    merges,
    parts,
    part_sums,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    merge = merges + tl.program_id(0) * 4
    in_tile = tl.program_id(1)
    head = tl.program_id(2)
    row = tl.load(merge)
    start = tl.load(row_start + row)
    token = start + tl.load(merge + 1) + in_tile
    if token < tl.load(row_start + row + 1):
        place = tl.load(merge + 2).to(tl.int64)
        dim = tl.arange(0, BLOCK_D)
        first = (place * HEADS + head) * TILE + in_tile
        count = tl.load(merge + 3)
        total, mixed = merge_parts(parts, part_sums, first, HEADS * TILE, count, dim, HEAD_DIM, BLOCK_D, BLOCK_PARTS)
        tl.store(out + token.to(tl.int64) * out_stride + head * HEAD_DIM + dim, mixed / total, mask=dim < HEAD_DIM)

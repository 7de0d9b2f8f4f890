"""Attention of rows with one new token, over contexts of any length beside each other: split and merged.

A context is cut into spans of some hundred tokens, longer ones where there would be too many, and a span of one row,
for one KV head, is a piece of work. A fixed number of programs share all pieces, so that one long context beside many
short ones is spread over the whole GPU; where a row is cut depends on nothing but its own length, so that its sums are
made in one order, whatever else runs. Each piece leaves a mixture of values and the logarithm of its weights' sum; a
second kernel merges those of a row.

Everything that changes from step to step comes from tensors: a captured graph may be replayed with other contexts. The
number of rows is an argument like any other, and the tile that counts them has one of four sizes: a server compiles
four kernels for each window and cap of its model, all of them when it captures its graphs.

Bytes and operations: a token of context is 512 B a KV head (128 dimensions, bfloat16), read once for all query heads of
the group, and 4 · 128 operations for each of them: 8 a byte at 8 heads, far below what any GPU has, so bandwidth is the
floor: 64 rows of 8k tokens at 8 KV heads are 2.1 GB a layer, 0.7 ms at 3 TB/s. Hence 16 rows in a product, the least
that a tensor core takes (at 4 heads a group three quarters of them are idle, which costs nothing here), 64 tokens in a
step (16 KB of keys, as much of values), the next step's on their way: 39 KB of shared memory on sm_80, three programs
an SM, which together have 96 KB of reads in flight; 2 TB/s at a latency of 0.7 µs want 13 KB an SM.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.dispatch import WIDEN, ceil_div, launches, power_of_two
from headrace.ops.triton.paged_attention import LOG2_E, attend_blocks, merge_parts, merged_together
from headrace.ops.triton.paged_attention import reference as reference_of_rows
from headrace.ops.triton.spans import MOST_SPANS, SPAN_TOKENS

_KEY_BYTES: Final = 16384
_ROWS: Final = (16, 64, 256, 1024)
"""Sizes of the tile that counts rows."""


def attend_decode(
    q: Tensor,
    layer: Tensor,
    table: Tensor,
    row_slot: Tensor,
    row_kv_len: Tensor,
    out: Tensor,
    parts: Tensor,
    part_sums: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    span_tokens: int = SPAN_TOKENS,
    programs: int = 396,
) -> None:
    """Rows with one token each, whose KV is in the pool already.

    `q`, `out`: `[rows, heads, head_dim]`, rows apart by any stride. `layer`: `[num_pages, 2, kv_heads, page_tokens,
    head_dim]`. `table`: int32 `[slots, pages]`. `row_slot`, `row_kv_len`: int32 `[rows]`; a context of 0 pads the
    batch: its `out` is left alone. `parts`: float32 `[rows, max_spans, heads, head_dim]`, `part_sums`: float32 `[rows,
    max_spans, heads]`, written and read here, of any content before; no context may be cut into more spans than they
    have room for. `window`, `soft_cap`: 0 is none. `span_tokens`, of contexts that make no more than `MOST_SPANS`, must
    be a multiple of 64. `programs`: 3 for each SM are good.
    """
    if not launches(q):
        starts = torch.arange(len(q) + 1)
        reference_of_rows(
            q, layer, table, starts, row_slot, row_kv_len, out, scale=scale, window=window, soft_cap=soft_cap
        )
        return
    rows, heads, head_dim = q.shape
    kv_heads, page_tokens = layer.shape[2:4]
    spans = parts.shape[1]
    widths = {"HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_D": power_of_two(head_dim)}
    cut = {"SPANS": spans, "WINDOW": window, "SPAN": span_tokens, "MOST": MOST_SPANS}
    # 16 KB of keys at a time, whatever their dtype and width; half of it for short heads in float32, which spill else.
    block_n = min(_KEY_BYTES // (layer.element_size() * power_of_two(head_dim)), 128 // layer.element_size())
    _attend_spans[(min(ceil_div(programs, kv_heads), rows * spans), kv_heads)](
        q,
        layer,
        table,
        row_slot,
        row_kv_len,
        parts,
        part_sums,
        scale * LOG2_E.value,
        soft_cap,
        q.stride(0),
        table.stride(0),
        rows,
        CAPPED=soft_cap > 0,
        KV_HEADS=kv_heads,
        PAGE_TOKENS=page_tokens,
        BLOCK_ROWS=next((size for size in _ROWS if rows <= size), power_of_two(rows)),
        BLOCK_M=max(16, power_of_two(heads // kv_heads)),
        BLOCK_N=block_n,
        **widths,
        **cut,
        num_warps=4 if head_dim <= 128 else 8,
        num_stages=3,
    )
    together = merged_together(head_dim)
    _merge_spans[(rows, heads)](
        row_kv_len, parts, part_sums, out, out.stride(0), BLOCK_PARTS=together, **widths, **cut, num_warps=1
    )


@triton.jit(do_not_specialize=["rows"])
def _attend_spans(
    q,
    layer,
    table,
    row_slot,
    row_kv_len,
    parts,
    part_sums,
    scale,
    soft_cap,
    q_stride,
    table_stride,
    rows,
    SPANS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    MOST: tl.constexpr,
    CAPPED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    kv_head = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    head = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    inside = (head < group)[:, None] & (dim < HEAD_DIM)[None, :]
    # Where each row's pieces begin in the list of all: every program counts them again, once.
    row_at = tl.arange(0, BLOCK_ROWS)
    contexts = tl.load(row_kv_len + row_at, mask=row_at < rows, other=0)
    span = _span(contexts, WINDOW, SPAN, MOST)
    counts = tl.cdiv(contexts, span) - _first_span(contexts, span, WINDOW)
    ends = tl.cumsum(counts, 0)
    pieces = tl.sum(counts, 0)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = tl.sum((ends <= piece).to(tl.int32), 0)
        part = piece - tl.max(tl.where(ends <= piece, ends, 0), 0)
        context = tl.load(row_kv_len + row)
        span_here = _span(context, WINDOW, SPAN, MOST)
        begin = (_first_span(context, span_here, WINDOW) + part) * span_here
        end = tl.minimum(begin + span_here, context)
        pages = table + tl.load(row_slot + row).to(tl.int64) * table_stride
        row = row.to(tl.int64)
        query = tl.load(
            q + row * q_stride + (kv_head * group + head)[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0
        )
        if WIDEN:
            query = query.to(tl.float32)
        position = tl.zeros((BLOCK_M,), tl.int32) + context - 1
        best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        if WINDOW:
            begin = tl.maximum(begin, (context - WINDOW) // BLOCK_N * BLOCK_N)
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
        to = (row * SPANS + part) * HEADS + kv_head * group + head
        tl.store(part_sums + to, best + tl.log2(total), mask=head < group)
        tl.store(parts + to[:, None] * HEAD_DIM + dim[None, :], mixed / total[:, None], mask=inside)


@triton.jit
def _span(context, WINDOW: tl.constexpr, SPAN: tl.constexpr, MOST: tl.constexpr):
    """Tokens of a span: a multiple of `SPAN` that cuts what is seen into `MOST` parts or fewer."""
    seen = context
    if WINDOW:
        seen = tl.minimum(context, WINDOW + SPAN)
    return SPAN * tl.maximum(tl.cdiv(tl.cdiv(seen, SPAN), MOST), 1)


@triton.jit
def _first_span(context, span, WINDOW: tl.constexpr):
    """The first span of which the last token of a context sees anything."""
    if WINDOW:
        return tl.maximum(context - WINDOW, 0) // span
    return context * 0


@triton.jit
def _merge_spans(
    row_kv_len,
    parts,
    part_sums,
    out,
    out_stride,
    SPANS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    MOST: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context = tl.load(row_kv_len + row)
    if context > 0:
        dim = tl.arange(0, BLOCK_D)
        span = _span(context, WINDOW, SPAN, MOST)
        count = tl.cdiv(context, span) - _first_span(context, span, WINDOW)
        first = row * (SPANS * HEADS) + head
        total, mixed = merge_parts(parts, part_sums, first, HEADS, count, dim, HEAD_DIM, BLOCK_D, BLOCK_PARTS)
        tl.store(out + row * out_stride + head * HEAD_DIM + dim, mixed / total, mask=dim < HEAD_DIM)

"""Attention over paged KV: what it means, and the loop over keys that both kernels share.

Query head h of a token reads KV head `h // (heads / kv_heads)`. A token at position p sees the positions 0..p of its
row, with a window W only those from p - W + 1 on. Scores are `soft_cap · tanh(s / soft_cap)` where there is a cap
(Gemma 2, arXiv:2408.00118). Scores and sums are float32; weights are rounded to KV's dtype before they meet the values.

`decode_attention` is for rows with one new token, `extend_attention` for rows with several. On a CPU: `ops.attention`,
and `ops.simd.attention`. Both kernels keep a running maximum and sum (arXiv:1805.02867, arXiv:2205.14135), and let the
query heads that share a KV head be the rows of one product, so that KV is read once for all of them.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.dispatch import WIDEN, power_of_two

LOG2_E: Final = tl.constexpr(math.log2(math.e))


def reference(
    q: Tensor,
    layer: Tensor,
    table: Tensor,
    row_start: Tensor,
    row_slot: Tensor,
    row_kv_len: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Row by row in torch; arguments as in `extend_attention`. Rows with a context of 0 are left out."""
    page_tokens = layer.shape[3]
    for row, context in enumerate(row_kv_len.tolist()):
        start, end = row_start[row : row + 2].tolist()
        if not context:
            continue
        # What stands before a window may be another's by now.
        first = max(context - (end - start) + 1 - window, 0) // page_tokens if window else 0
        pages = table[row_slot[row], first : -(-context // page_tokens)].long()
        # [2, kv_heads, tokens, head_dim]
        kv = layer[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : context - first * page_tokens].float()
        kv_heads, group = kv.shape[1], q.shape[1] // kv.shape[1]
        queries = q[start:end].float().unflatten(1, (kv_heads, group))
        scores = torch.einsum("tkgd,knd->kgtn", queries, kv[0]) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        queries_at = torch.arange(context - (end - start), context, device=q.device)
        behind = queries_at[:, None] - torch.arange(first * page_tokens, context, device=q.device)
        hidden = (behind < 0) | (behind >= window) if window else behind < 0
        weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
        out[start:end] = torch.einsum("kgtn,knd->tkgd", weights, kv[1]).flatten(1, 2).to(out.dtype)


@triton.jit
def attend_blocks(
    q,
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
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Let the queries see the keys `begin..end`, `BLOCK_N` at a time, and go on with their maxima, sums and mixtures.

    `q`: `[M, BLOCK_D]`, `position`: `[M]`, `best`, `total`: float32 `[M]`, `mixed`: float32 `[M, BLOCK_D]`. A query
    is at a position, or at -1 and sees nothing. Not `MASKED`: all queries see all of the keys, and `end - begin` is a
    multiple of `BLOCK_N`. `scale` has a factor of `LOG2_E`: powers are of two.
    """
    dim = tl.arange(0, BLOCK_D)
    inside_head = dim < HEAD_DIM
    for first in range(begin, end, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        if MASKED:
            known = at < context
            page = tl.load(pages + at // PAGE_TOKENS, mask=known, other=0).to(tl.int64)
            inside = known[:, None] & inside_head[None, :]
        else:
            page = tl.load(pages + at // PAGE_TOKENS).to(tl.int64)
            inside = inside_head[None, :]
        run = (page * (2 * KV_HEADS) + kv_head) * PAGE_TOKENS + at % PAGE_TOKENS
        where = layer + run[:, None] * HEAD_DIM + dim[None, :]
        k = tl.load(where, mask=inside, other=0.0)
        v = tl.load(where + KV_HEADS * PAGE_TOKENS * HEAD_DIM, mask=inside, other=0.0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        if CAPPED:
            # tanh(x) = 2 / (1 + exp(-2x)) - 1
            scores = soft_cap * LOG2_E * (2 / (1 + tl.exp2(scores * (-2 / soft_cap))) - 1)
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOW:
                seen &= at[None, :] > position[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A query that has seen nothing yet has no maximum: -inf minus -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(best - base)
        total = total * kept + tl.sum(weights, 1)
        mixed = mixed * kept[:, None]
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision="tf32x3")
        best = higher
    return best, total, mixed


def merged_together(head_dim: int) -> int:
    """Parts that a warp loads at a time: 8 KB of them, 64 registers of a thread."""
    return 2048 // power_of_two(head_dim)


@triton.jit
def merge_parts(
    parts,
    part_sums,
    first,
    STRIDE: tl.constexpr,
    count,
    dim,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Add up `count` mixtures by the logarithms of their weights' sums, `STRIDE` apart from `first` on → the sum of the
    weights, and the mixture, `[BLOCK_D]`, of which that is to be taken out.

    Several at a time: one after the other, each would wait for the L2 cache, about 0.6 µs; 64 of them take as long as
    the attention of one row to 32k tokens. A mixture whose sum is -inf has seen nothing; not all of them may be such.
    """
    each = tl.arange(0, BLOCK_PARTS)
    best = float("-inf")
    total = 0.0
    mixed = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, count, BLOCK_PARTS):
        at = first + (start + each) * STRIDE
        inside = start + each < count
        weights = tl.load(part_sums + at, mask=inside, other=float("-inf"))
        there = inside[:, None] & (dim < HEAD_DIM)[None, :]
        values = tl.load(parts + at[:, None] * HEAD_DIM + dim[None, :], mask=there, other=0.0)
        higher = tl.maximum(best, tl.max(weights, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(best - base)
        new = tl.exp2(weights - base)
        total = total * kept + tl.sum(new, 0)
        mixed = mixed * kept + tl.sum(values * new[:, None], 0)
        best = higher
    return total, mixed

"""Attention over paged KV, torch reference: plan once a step, then write and attend in each layer.
`ops.triton.decode_attention` and `ops.triton.extend_attention` are its kernels on a GPU, `ops.simd.attention` on a CPU.

Rows with one token are batched: rows of similar context stand in one group, their pages are gathered once, the query
heads that share a KV head form the rows of one small matrix, so that KV is never repeated. Rows with several tokens
(prefill chunks) run one by one through torch's fused attention, over prefix and chunk, with a causal mask that is
offset by the prefix. Scores and sums are float32 in both.

A gather is a copy of what is read anyway, 8 MB at most unless one context is longer, and stays in the cache; the pool
itself is only ever indexed.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.kv_pool import KvPool
from headrace.ops.wire import I32, ForwardBatch

MAX_GATHER_BYTES: Final = 8 << 20
"""Of one group of rows and layer: larger ones would leave the last-level cache before they are read."""
FREE_PADDING_TOKENS: Final = 1024
"""Padding that one group may have whatever its size: as dear as the operations of another group (60 µs a layer)."""
MAX_PADDING: Final = 0.25
"""Share of padding in a group beyond that."""
MASKED_TOKENS: Final = 256
"""Of a chunk behind a prefix, so many tokens attend at a time: their mask has a bound (4 MB at a context of 8k), and
less of the chunk is computed only to be masked."""


class Scores(NamedTuple):
    """How a layer makes weights of products of queries and keys."""

    scale: float
    window_tokens: int = 0
    """A token sees itself and so many - 1 before it; 0: all."""
    cap: float = 0.0
    """Scores become cap · tanh(score / cap); 0: they stay."""


class SingleTokenRows(NamedTuple):
    """A group of rows with one token each."""

    tokens: Tensor | None
    """int64 [rows]: where their tokens stand in the batch; None: all of the batch, in order."""
    gather: Tensor
    """int64 [2 · rows · kv_heads · pages], into a layer seen as [num_pages · 2 · kv_heads, page_tokens · head_dim]."""
    rows: int
    hidden: Tensor | None
    """float32 [rows, 1, 1, pages · page_tokens]: 0, or -inf beyond a row's context and before its window; None where
    all of the pages is seen."""


class ChunkRow(NamedTuple):
    """A row with several tokens, or a part of one."""

    start: int
    end: int
    gather: Tensor
    """int64 [2 · kv_heads · pages], as in `SingleTokenRows`."""
    context_tokens: int
    """From the first token of the first page on."""
    hidden: Tensor | None
    """[tokens, context_tokens] in KV's dtype: 0, or -inf after each token and before its window; None without a prefix
    where the window holds all."""


class AttentionPlan(NamedTuple):
    """What all layers of a group with the same window share in one step."""

    write: Tensor
    """int64 [tokens, 2 · kv_heads], into a layer seen as [num_pages · 2 · kv_heads · page_tokens, head_dim]."""
    singles: list[SingleTokenRows]
    chunks: list[ChunkRow]


def plan_attention(batch: ForwardBatch, pool: KvPool, window_tokens: int = 0) -> AttentionPlan:
    """Raises ValueError where the page table has no page for a token."""
    assert not pool.shape.window_tokens or 0 < window_tokens <= pool.shape.window_tokens, "the window's pages may go"
    lengths = np.diff(batch.row_start)
    first_pages = _first_page(pool, batch.row_kv_len - lengths, window_tokens)
    seen = batch.row_kv_len - first_pages * pool.page_tokens
    groups = _similar(np.flatnonzero(lengths == 1), seen, _gather_limit_tokens(pool))
    alone = len(groups) == 1 and len(groups[0]) == batch.counts.tokens
    return AttentionPlan(
        write=_write_rows(batch, pool, lengths),
        singles=[
            _single_rows(batch, pool, window_tokens, np.sort(group) if alone else group, alone) for group in groups
        ],
        chunks=[
            part for row in np.flatnonzero(lengths > 1) for part in _chunk_rows(batch, pool, window_tokens, int(row))
        ],
    )


def attend(pool: KvPool, layer: int, qkv: Tensor, plan: AttentionPlan, scores: Scores) -> Tensor:
    """Write a layer's keys and values, then attend.

    `qkv`: `[tokens, (heads + 2 · kv_heads) · head_dim]`, queries and keys rotated → `[tokens, heads · head_dim]`.
    """
    head_dim = pool.shape.head_dim
    planes = qkv.view(len(qkv), -1, head_dim)
    heads = planes.shape[1] - 2 * pool.shape.kv_heads
    kv = pool.layer(layer)
    kv.view(-1, head_dim).index_put_((plan.write,), planes[:, heads:])
    runs = kv.view(-1, pool.page_tokens * head_dim)
    queries = qkv[:, : heads * head_dim]
    if plan.singles and plan.singles[0].tokens is None:
        return _attend_singles(pool, runs, queries, plan.singles[0], scores)
    out = torch.empty((len(qkv), heads * head_dim), dtype=qkv.dtype)
    for rows in plan.singles:
        assert rows.tokens is not None
        out[rows.tokens] = _attend_singles(pool, runs, queries[rows.tokens], rows, scores)
    for row in plan.chunks:
        _attend_chunk(pool, runs, queries[row.start : row.end], row, scores, out[row.start : row.end])
    return out


# ---------------------------------------------------------------------------------------------------------------
# The plan


def _first_page(pool: KvPool, positions: I32, window_tokens: int) -> I32:
    """Of the pages that tokens at these positions look at, in the order of their contexts."""
    if not window_tokens:
        return np.zeros_like(positions)
    return np.maximum(positions + 1 - window_tokens, 0) // pool.page_tokens


def _similar(rows: NDArray[np.intp], seen: I32, limit_tokens: int) -> list[NDArray[np.intp]]:
    """Cut rows into groups that see similarly much, most first: padding is bounded, and so is what a group gathers."""
    order = rows[np.argsort(-seen[rows], kind="stable")]
    groups: list[NDArray[np.intp]] = []
    start, padding, longest = 0, 0, 0
    for at, length in enumerate(seen[order].tolist()):
        size = at - start
        padding += longest - length
        too_long = (size + 1) * longest > limit_tokens
        if size and (too_long or padding > max(FREE_PADDING_TOKENS, MAX_PADDING * longest * (size + 1))):
            groups.append(order[start:at])
            start, size = at, 0
        if size == 0:
            padding, longest = 0, length
    if len(order):
        groups.append(order[start:])
    return groups


def _gather_limit_tokens(pool: KvPool) -> int:
    bytes_per_token = pool.layer_elements // pool.page_tokens * pool.pages.element_size()
    return MAX_GATHER_BYTES // bytes_per_token


def _single_rows(
    batch: ForwardBatch, pool: KvPool, window_tokens: int, rows: NDArray[np.intp], alone: bool
) -> SingleTokenRows:
    """`alone`: these rows are the batch, in its order."""
    kv_len = batch.row_kv_len[rows]
    first = _first_page(pool, kv_len - 1, window_tokens)
    # A shorter row repeats its own last page: it must not read what another request left in some other page.
    last = (kv_len - 1) // pool.page_tokens
    page_count = int((last - first).max()) + 1
    indices = first[:, None] + np.arange(page_count)
    pages = _pages(pool, batch.row_slot[rows][:, None], np.minimum(indices, last[:, None]))
    positions = first[:, None] * pool.page_tokens + np.arange(page_count * pool.page_tokens)
    unseen = positions >= kv_len[:, None]
    if window_tokens:
        unseen |= positions < kv_len[:, None] - window_tokens
    hidden = None
    if unseen.any():
        hidden = torch.zeros(unseen.shape).masked_fill_(torch.from_numpy(unseen), -math.inf)[:, None, None]
    tokens = None if alone else torch.from_numpy(batch.row_start[rows].astype(np.int64))
    return SingleTokenRows(tokens, _gather(pool, pages), len(rows), hidden)


def _chunk_rows(batch: ForwardBatch, pool: KvPool, window_tokens: int, row: int) -> list[ChunkRow]:
    start, end = int(batch.row_start[row]), int(batch.row_start[row + 1])
    context_tokens = int(batch.row_kv_len[row])
    prefix_tokens = context_tokens - (end - start)
    if not prefix_tokens and not 0 < window_tokens < context_tokens:
        pages = _pages(pool, batch.row_slot[row], np.arange((context_tokens - 1) // pool.page_tokens + 1))
        return [ChunkRow(start, end, _gather(pool, pages[None]), context_tokens, None)]
    parts = []
    for first in range(start, end, MASKED_TOKENS):
        last = min(first + MASKED_TOKENS, end)
        position, seen = prefix_tokens + first - start, prefix_tokens + last - start
        first_page = max(position + 1 - window_tokens, 0) // pool.page_tokens if window_tokens else 0
        left_out = first_page * pool.page_tokens
        hidden = torch.full((last - first, seen - left_out), -math.inf, dtype=pool.pages.dtype)
        before = torch.tril(hidden, position - left_out - window_tokens) if window_tokens else None
        hidden.triu_(position - left_out + 1)
        if before is not None:
            hidden.add_(before)
        pages = _pages(pool, batch.row_slot[row], np.arange(first_page, (seen - 1) // pool.page_tokens + 1))
        parts.append(ChunkRow(first, last, _gather(pool, pages[None]), seen - left_out, hidden))
    return parts


def _gather(pool: KvPool, pages: NDArray[np.int64]) -> Tensor:
    """`pages` `[rows, pages]` → flat indices of runs, ordered `[2, rows, kv_heads, pages]`."""
    kv_heads = pool.shape.kv_heads
    runs = np.arange(2 * kv_heads).reshape(2, 1, kv_heads, 1) + pages[None, :, None, :] * (2 * kv_heads)
    return torch.from_numpy(runs.reshape(-1))


def _write_rows(batch: ForwardBatch, pool: KvPool, lengths: I32) -> Tensor:
    slots = np.repeat(batch.row_slot, lengths)
    pages = _pages(pool, slots, batch.positions // pool.page_tokens)
    planes = 2 * pool.shape.kv_heads
    first = pages * (planes * pool.page_tokens) + batch.positions % pool.page_tokens
    return torch.from_numpy(first[:, None] + np.arange(planes) * pool.page_tokens)


def _pages(pool: KvPool, slots: NDArray[np.integer] | np.integer, indices: NDArray[np.integer]) -> NDArray[np.int64]:
    """Look up the page table; every page that is read or written in a step passes through here."""
    pages: NDArray[np.int64] = pool.table[slots, indices].astype(np.int64)
    if pages.min() < 0:
        raise ValueError("the page table has no page for a position that the batch uses")
    return pages


# ---------------------------------------------------------------------------------------------------------------
# The layers


def _attend_singles(pool: KvPool, runs: Tensor, queries: Tensor, rows: SingleTokenRows, scores: Scores) -> Tensor:
    """`queries` `[rows, heads · head_dim]` → the same shape."""
    kv_heads, head_dim = pool.shape.kv_heads, pool.shape.head_dim
    # Whole pages: cut to the longest context the matrices would no longer be contiguous, and torch would copy them.
    kv = runs.index_select(0, rows.gather).view(2, rows.rows * kv_heads, -1, head_dim)
    products = _products(queries.reshape(rows.rows * kv_heads, -1, head_dim), kv[0])
    by_row = products.view(rows.rows, kv_heads, *products.shape[1:])
    if scores.cap:
        _cap(by_row, scores)
        if rows.hidden is not None:
            by_row.add_(rows.hidden)
    elif rows.hidden is None:
        by_row.mul_(scores.scale)
    else:
        torch.add(rows.hidden, by_row, alpha=scores.scale, out=by_row)
    return torch.bmm(products.softmax(-1).to(queries.dtype), kv[1]).view(rows.rows, -1)


def _cap(products: Tensor, scores: Scores) -> None:
    """Products → scores, in place."""
    products.mul_(scores.scale / scores.cap).tanh_().mul_(scores.cap)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """float32 `q · kᵀ` per matrix of the batch.

    A bfloat16 product is summed in float32, but rounded when it is stored: at a score of 10 by up to 0.03, 3 % of the
    attention weight. The second product is what the rounding took away.
    """
    if q.dtype == torch.float32:
        return torch.bmm(q, k.transpose(1, 2))
    rounded = torch.bmm(q, k.transpose(1, 2))
    return rounded.float().add_(torch.baddbmm(rounded, q, k.transpose(1, 2), beta=-1))


def _attend_chunk(pool: KvPool, runs: Tensor, queries: Tensor, row: ChunkRow, scores: Scores, out: Tensor) -> None:
    """`queries`, `out`: `[tokens, heads · head_dim]`."""
    kv_heads, head_dim = pool.shape.kv_heads, pool.shape.head_dim
    kv = runs.index_select(0, row.gather).view(2, kv_heads, -1, head_dim)[:, :, : row.context_tokens]
    q = queries.view(len(queries), kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    if scores.cap:
        mixed = _capped_mix(q, kv, row, scores)
    else:
        # KV heads are the batch, and each is seen by its query heads through a stride of 0: nothing is repeated.
        k, v = (part.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for part in kv)
        whole = row.hidden is None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=row.hidden, is_causal=whole, scale=scores.scale)
    out.view(len(out), kv_heads, -1, head_dim).copy_(mixed.permute(2, 0, 1, 3))


def _capped_mix(q: Tensor, kv: Tensor, row: ChunkRow, scores: Scores) -> Tensor:
    """torch's fused attention has no cap. `q` `[kv_heads, sharing, tokens, head_dim]` → the same shape."""
    products = _products(q.reshape(len(q), -1, q.shape[3]), kv[0]).view(*q.shape[:3], -1)
    _cap(products, scores)
    hidden = torch.full(products.shape[2:], -math.inf).triu_(1) if row.hidden is None else row.hidden
    weights = products.add_(hidden).softmax(-1).to(q.dtype)
    return torch.bmm(weights.flatten(1, 2), kv[1]).view(q.shape)

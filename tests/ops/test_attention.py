"""Paged attention equals dense attention, for any shape, page table and batch."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.ops import attention
from headrace.ops.attention import Scores, attend, plan_attention
from headrace.ops.kv_pool import KvPool
from headrace.ops.wire import BatchRing, Counts, ForwardBatch, GroupShape, RingGeometry

CONTEXT = 160


class Row(NamedTuple):
    prefix: int
    tokens: int


class Shape(NamedTuple):
    kv_heads: int
    sharing: int
    head_dim: int
    page_tokens: int


shapes = st.builds(
    Shape, st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 8, 10, 64]), st.sampled_from([1, 2, 16])
)
rows = st.builds(Row, st.sampled_from([0, 0, 1, 7, 15, 16, 31, 100]), st.sampled_from([1, 1, 1, 2, 15, 16, 17, 33]))


def batch_of(rows: list[Row], pool: KvPool, rng: np.random.Generator) -> ForwardBatch:
    """Every row in its own slot, over pages in random order."""
    counts = Counts(sum(row.tokens for row in rows), len(rows), 0, *[0] * 7)
    geometry = RingGeometry(1, 1 << 16, 16, 0, 64)
    batch = BatchRing(bytearray(geometry.size_bytes), geometry).write(0, 0, counts)
    batch.row_slot[:] = rng.permutation(pool.table.shape[0])[: len(rows)]
    batch.row_start[:] = [0, *np.cumsum([row.tokens for row in rows])]
    batch.row_kv_len[:] = [row.prefix + row.tokens for row in rows]
    batch.positions[:] = np.concatenate([np.arange(row.prefix, row.prefix + row.tokens) for row in rows])
    free = iter(rng.permutation(pool.num_pages).tolist())
    for row, slot in zip(rows, batch.row_slot):
        pages = -(-(row.prefix + row.tokens) // pool.page_tokens)
        pool.table[slot, :pages] = [next(free) for _ in range(pages)]
    return batch


def pool_for(rows: list[Row], shape: Shape, dtype: torch.dtype, window_tokens: int = 0) -> KvPool:
    """With a window, a window group's."""
    pages = sum(-(-(row.prefix + row.tokens) // shape.page_tokens) for row in rows)
    kind = "window" if window_tokens else "full"
    group = GroupShape(kind, window_tokens, [0, 1], shape.kv_heads, shape.head_dim)
    return KvPool(group, pages + 2, shape.page_tokens, 12, CONTEXT, dtype)


def dense(q: Tensor, k: Tensor, v: Tensor, prefix: int, sharing: int, kind: Scores) -> Tensor:
    """`q` `[tokens, heads, dim]`, `k`, `v` `[context, kv_heads, dim]`, in float64."""
    out = torch.empty_like(q)
    for token in range(len(q)):
        for head in range(q.shape[1]):
            end = prefix + token + 1
            seen = slice(max(0, end - kind.window_tokens) if kind.window_tokens else 0, end)
            scores = k[seen, head // sharing] @ q[token, head] * kind.scale
            if kind.cap:
                scores = kind.cap * torch.tanh(scores / kind.cap)
            out[token, head] = scores.softmax(0) @ v[seen, head // sharing]
    return out


def check(
    shape: Shape,
    rows: list[Row],
    dtype: torch.dtype,
    tolerance: float,
    window_tokens: int = 0,
    cap: float = 0.0,
    *,
    forgets: bool = False,
) -> None:
    """`forgets`: the pool is a window group's, and what stands before each row's window is gone."""
    kind = Scores(1.3 / math.sqrt(shape.head_dim), window_tokens, cap)
    rng = np.random.default_rng(3)
    pool = pool_for(rows, shape, dtype, window_tokens if forgets else 0)
    # A page beyond the rows' own is never looked at.
    pool.pages.fill_(math.nan)
    batch = batch_of(rows, pool, rng)
    heads = shape.kv_heads * shape.sharing
    random = torch.Generator().manual_seed(11)
    contexts = []
    for row, slot in zip(rows, batch.row_slot):
        context = torch.randn((row.prefix + row.tokens, 2, shape.kv_heads, shape.head_dim), generator=random).to(dtype)
        contexts.append(context)
        for position in range(row.prefix):
            page = int(pool.table[slot, position // pool.page_tokens])
            pool.pages[1, page, :, :, position % pool.page_tokens] = context[position]
        if row.prefix % pool.page_tokens:
            pool.pages[1, page, :, :, row.prefix % pool.page_tokens :] = 0
        if forgets:
            gone = max(0, row.prefix + 1 - window_tokens) // pool.page_tokens
            pool.pages[:, pool.table[slot, :gone]] = math.nan
            pool.table[slot, :gone] = -1
    queries = torch.randn((batch.counts.tokens, heads, shape.head_dim), generator=random).to(dtype)
    new = torch.cat([context[row.prefix :] for row, context in zip(rows, contexts)])
    qkv = torch.cat((queries.flatten(1), new.flatten(1)), dim=1)
    before = batch.row_kv_len - np.diff(batch.row_start)
    pool.clear(pool.begun_pages(batch.row_slot, before, batch.row_kv_len))
    plan = plan_attention(batch, pool, window_tokens)
    out = attend(pool, 1, qkv, plan, kind).view(-1, heads, shape.head_dim)
    for at, (row, context) in enumerate(zip(rows, contexts)):
        tokens = slice(int(batch.row_start[at]), int(batch.row_start[at + 1]))
        k, v = context.double().unbind(1)
        expected = dense(queries[tokens].double(), k, v, row.prefix, shape.sharing, kind)
        torch.testing.assert_close(out[tokens].double(), expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=60, deadline=None)
@given(shapes, st.lists(rows, min_size=1, max_size=8))
@example(Shape(3, 3, 64, 16), [Row(31, 1), Row(15, 1), Row(0, 1)])
@example(Shape(3, 3, 64, 16), [Row(100, 33), Row(16, 1), Row(0, 17), Row(7, 1)])
def test_paged_attention_equals_dense_attention(shape: Shape, rows: list[Row]) -> None:
    check(shape, rows, torch.float32, 1e-5)


@settings(max_examples=20, deadline=None)
@given(shapes, st.lists(rows, min_size=1, max_size=8))
def test_paged_attention_in_bfloat16_is_as_good_as_its_inputs(shape: Shape, rows: list[Row]) -> None:
    check(shape, rows, torch.bfloat16, 2e-2)


@settings(max_examples=60, deadline=None)
@given(shapes, st.lists(rows, min_size=1, max_size=8), st.sampled_from([1, 5, 16, 17, 40]), st.sampled_from([0.0, 2.0]))
@example(Shape(2, 3, 8, 16), [Row(0, 33), Row(100, 1), Row(3, 1)], 17, 0.0)
@example(Shape(2, 3, 8, 16), [Row(0, 33), Row(100, 33), Row(100, 1), Row(3, 1)], 17, 2.0)
def test_windows_and_soft_caps_equal_dense_attention(shape: Shape, rows: list[Row], window: int, cap: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MASKED_TOKENS", 10)
        check(shape, rows, torch.float32, 1e-5, window, cap)


def test_pages_before_the_window_are_not_looked_up() -> None:
    shape, rows = Shape(1, 1, 8, 16), [Row(100, 1), Row(90, 20)]
    pool = pool_for(rows, shape, torch.float32)
    batch = batch_of(rows, pool, np.random.default_rng(0))
    pool.table[batch.row_slot, :4] = -1
    plan_attention(batch, pool, 20)
    with pytest.raises(ValueError, match="no page"):
        plan_attention(batch, pool, 60)


def test_a_long_chunk_behind_a_prefix_attends_in_parts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MASKED_TOKENS", 10)
        check(Shape(2, 3, 8, 16), [Row(31, 33), Row(0, 33), Row(1, 10), Row(7, 1)], torch.float32, 1e-5)


@settings(max_examples=20, deadline=None)
@given(st.lists(rows, min_size=2, max_size=8))
def test_rows_that_are_cut_into_small_groups_are_each_right(rows: list[Row]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "FREE_PADDING_TOKENS", 8)
        patch.setattr(attention, "MAX_GATHER_BYTES", 1 << 14)
        check(Shape(2, 2, 8, 16), rows, torch.float32, 1e-5)


def test_single_token_rows_of_similar_context_share_a_group_and_others_do_not() -> None:
    shape = Shape(1, 1, 8, 16)
    rows = [Row(100, 1), Row(3, 1), Row(98, 1), Row(4, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "FREE_PADDING_TOKENS", 16)
        pool = pool_for(rows, shape, torch.float32)
        plan = plan_attention(batch_of(rows, pool, np.random.default_rng(0)), pool)
    groups = [group.tokens.tolist() for group in plan.singles if group.tokens is not None]
    assert groups == [[0, 2], [3, 1]]


def test_a_gather_keeps_to_its_bound() -> None:
    shape = Shape(1, 1, 8, 16)
    rows = [Row(100, 1)] * 8
    with pytest.MonkeyPatch.context() as patch:
        # Two rows' pages: 2 × 7 pages × 16 tokens × 2 planes × 8 values × 4 bytes, and a bit.
        patch.setattr(attention, "MAX_GATHER_BYTES", 2 * 7 * 16 * 2 * 8 * 4 + 100)
        pool = pool_for(rows, shape, torch.float32)
        plan = plan_attention(batch_of(rows, pool, np.random.default_rng(0)), pool)
    assert [group.rows for group in plan.singles] == [2, 2, 2, 2]


def test_a_window_group_needs_no_page_before_the_window() -> None:
    rows = [Row(100, 1), Row(3, 1), Row(70, 60), Row(0, 90), Row(64, 1)]
    check(Shape(2, 2, 16, 16), rows, torch.float32, 1e-5, window_tokens=33, forgets=True)


def test_a_page_that_is_missing_inside_the_window_is_noticed() -> None:
    rows = [Row(100, 1)]
    pool = pool_for(rows, Shape(1, 1, 8, 16), torch.float32, window_tokens=33)
    batch = batch_of(rows, pool, np.random.default_rng(0))
    pool.table[batch.row_slot[0], :4] = -1
    assert not len(pool.begun_pages(batch.row_slot, batch.row_kv_len - 1, batch.row_kv_len)), "its page was begun"
    pool.table[batch.row_slot[0], 4] = -1
    with pytest.raises(ValueError, match="no page for a position"):
        pool.begun_pages(batch.row_slot, batch.row_kv_len - 1, batch.row_kv_len)


def test_a_position_without_a_page_is_refused() -> None:
    pool = pool_for([Row(0, 17)], Shape(1, 1, 8, 16), torch.float32)
    batch = batch_of([Row(0, 17)], pool, np.random.default_rng(0))
    pool.table[batch.row_slot[0], 1] = -1
    with pytest.raises(ValueError, match="no page for a position"):
        plan_attention(batch, pool)

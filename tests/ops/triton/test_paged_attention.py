"""The kernels of paged attention equal the reference, and the reference equals the CPU's attention."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.triton.paged import Paged, Shape, assert_close, int32, paged, queries, shapes
from torch import Tensor

from headrace.ops.attention import Scores, attend, plan_attention
from headrace.ops.triton import decode_attention, dispatch, extend_attention
from headrace.ops.triton.decode_attention import attend_decode
from headrace.ops.triton.extend_attention import attend_extend, plan_extend, tile_tokens
from headrace.ops.triton.paged_attention import reference
from headrace.ops.triton.spans import max_spans
from ops import test_attention

few = settings(max_examples=25, deadline=None)


def decoded(q: Tensor, kv: Paged, shape: Shape, span: int, programs: int = 5) -> Tensor:
    longest = int(kv.row_kv_len.max())
    spans = max_spans(longest, span, shape.window, vars(decode_attention)["MOST_SPANS"])
    parts = torch.full((len(q), spans, shape.heads, shape.head_dim), float("nan"))
    out = torch.full(q.shape, 7.0, dtype=q.dtype)
    options = {"scale": shape.scale, "window": shape.window, "soft_cap": shape.soft_cap}
    attend_decode(q, *kv, out, parts, parts[..., 0].clone(), **options, span_tokens=span, programs=programs)  # type: ignore[arg-type]
    return out


def by_reference(q: Tensor, kv: Paged, row_start: Tensor, shape: Shape) -> Tensor:
    out = torch.full(q.shape, 7.0, dtype=q.dtype)
    options = {"scale": shape.scale, "window": shape.window, "soft_cap": shape.soft_cap}
    reference(q, kv.layer, kv.table, row_start, kv.row_slot, kv.row_kv_len, out, **options)  # type: ignore[arg-type]
    return out


@few
@given(shapes, st.lists(st.sampled_from([0, 1, 15, 64, 65, 129, 300]), min_size=1, max_size=4), st.integers(0, 99))
def test_decode_equals_the_reference(shape: Shape, contexts: list[int], seed: int) -> None:
    kv = paged(shape, contexts if any(contexts) else [1], np.random.default_rng(seed))
    q = queries(len(kv.row_slot), shape)
    assert_close(decoded(q, kv, shape, 64), by_reference(q, kv, torch.arange(len(q) + 1), shape), shape.dtype)


def test_a_row_that_pads_a_decode_batch_is_left_alone() -> None:
    shape = Shape(2, 2, 16, 8, 0, 0.0, torch.float32)
    kv = paged(shape, [20, 0], np.random.default_rng(0))
    out = decoded(queries(2, shape), kv, shape, 64)
    assert (out[1] == 7).all() and (out[0] != 7).any()


def test_what_a_row_reads_does_not_depend_on_who_is_beside_it_or_how_many_programs_there_are() -> None:
    shape = Shape(2, 3, 64, 16, 0, 0.0, torch.float32)
    kv = paged(shape, [300, 40, 129], np.random.default_rng(1))
    q = queries(3, shape)
    together = decoded(q, kv, shape, 64)
    alone = decoded(q[2:], kv._replace(row_slot=kv.row_slot[2:], row_kv_len=kv.row_kv_len[2:]), shape, 64, programs=1)
    assert torch.equal(together[2], alone[0])


@pytest.mark.parametrize("window", [0, 1, 120, 200, 500])
def test_spans_of_long_contexts_are_longer_so_that_there_are_no_more_of_them(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(decode_attention, "MOST_SPANS", 3)
    shape = Shape(2, 3, 16, 16, window, 0.0, torch.float32)
    kv = paged(shape, [64, 192, 193, 384, 385, 577, 640, 1000], np.random.default_rng(2))
    assert max_spans(1000, 64, window, 3) == min(3 + bool(window), -(-min(1000, window + 64 if window else 1000) // 64))
    q = queries(8, shape)
    # What has no room among the parts would be read as NaN.
    assert_close(decoded(q, kv, shape, 64), by_reference(q, kv, torch.arange(9), shape), shape.dtype)


def extended(q: Tensor, kv: Paged, row_start: Tensor, shape: Shape, programs: int) -> Tensor:
    tile = tile_tokens(shape.heads, shape.kv_heads, shape.head_dim, shape.dtype)
    plan = plan_extend(
        row_start.numpy(), kv.row_kv_len.numpy(), tile, shape.kv_heads, window=shape.window, programs=programs
    )
    parts = torch.full((max(plan.parts, 1), shape.heads, tile, shape.head_dim), float("nan"))
    work = (torch.from_numpy(plan.pieces), torch.from_numpy(plan.merges), parts, parts[..., 0].clone())
    out = torch.full(q.shape, 7.0, dtype=q.dtype)
    options = {"scale": shape.scale, "window": shape.window, "soft_cap": shape.soft_cap}
    attend_extend(q, kv.layer, kv.table, row_start, kv.row_slot, kv.row_kv_len, out, *work, **options)  # type: ignore[arg-type]
    return out


chunks = st.tuples(st.sampled_from([0, 0, 1, 63, 64, 200]), st.sampled_from([1, 2, 31, 33, 70]))


@few
@given(shapes, st.lists(chunks, min_size=1, max_size=3), st.sampled_from([1, 64]), st.integers(0, 99))
def test_extend_equals_the_reference(shape: Shape, rows: list[tuple[int, int]], programs: int, seed: int) -> None:
    """With 64 programs keys are cut into spans; with one they are not."""
    least, extend_attention._LEAST_SPAN = extend_attention._LEAST_SPAN, 64  # type: ignore[misc]
    try:
        contexts, lengths = [prefix + tokens for prefix, tokens in rows], [tokens for _, tokens in rows]
        kv = paged(shape, contexts, np.random.default_rng(seed), lengths)
        row_start = int32(np.cumsum([0, *(tokens for _, tokens in rows)]))
        q = queries(int(row_start[-1]), shape)
        assert_close(extended(q, kv, row_start, shape, programs), by_reference(q, kv, row_start, shape), shape.dtype)
    finally:
        extend_attention._LEAST_SPAN = least  # type: ignore[misc]


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 700)), min_size=1, max_size=6),
    st.sampled_from([5, 32, 128]),
    st.sampled_from([0, 0, 1, 1000]),
    st.sampled_from([1, 8, 300]),
)
def test_a_plan_lets_every_token_see_every_key_once(
    rows: list[tuple[int, int]], tile: int, window: int, programs: int
) -> None:
    row_start = np.cumsum([0, *(tokens for _, tokens in rows)]).astype(np.int32)
    contexts = np.array([prefix + tokens for prefix, tokens in rows], np.int32)
    plan = plan_extend(row_start, contexts, tile, 2, window=window, programs=programs)
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, first, begin, end, _ in plan.pieces.tolist():
        seen.setdefault((row, first), []).append((begin, end))
    wanted = {(row, first) for row, (_, tokens) in enumerate(rows) for first in range(0, tokens, tile)}
    assert set(seen) == wanted
    for (row, first), spans in seen.items():
        prefix, tokens = rows[row]
        spans.sort()
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert all((end - begin) % 64 == 0 for begin, end in spans[:-1])
        least = max(prefix + first - window + 1, 0) if window else 0
        assert least - 64 < spans[0][0] <= least and spans[-1][1] == prefix + min(first + tile, tokens)
    places = {(row, first): count for row, first, _, count in plan.merges.tolist()}
    assert places == {key: len(spans) for key, spans in seen.items() if len(spans) > 1}
    assert sorted(plan.pieces[plan.pieces[:, 4] >= 0, 4].tolist()) == list(range(plan.parts))


def test_the_parts_of_a_tile_stand_one_after_the_other_in_the_order_of_its_keys() -> None:
    plan = plan_extend(np.array([0, 70], np.int32), np.array([20000], np.int32), 32, 1, programs=64)
    for row, first, place, count in plan.merges.tolist():
        own = [piece for piece in plan.pieces.tolist() if piece[:2] == [row, first]]
        assert [piece[4] for piece in sorted(own, key=lambda piece: piece[2])] == list(range(place, place + count))


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (20, 3.0)])
def test_the_reference_is_the_attention_of_a_cpu(window: int, soft_cap: float) -> None:
    rows = [test_attention.Row(31, 1), test_attention.Row(7, 33), test_attention.Row(0, 15)]
    shape = test_attention.Shape(2, 3, 64, 16)
    pool = test_attention.pool_for(rows, shape, torch.float32)
    batch = test_attention.batch_of(rows, pool, np.random.default_rng(3))
    torch.manual_seed(3)
    pool.pages.normal_()
    qkv = torch.randn(batch.counts.tokens, (6 + 4) * 64)
    scores = Scores(0.2, window, soft_cap)
    expected = attend(pool, 1, qkv, plan_attention(batch, pool, window), scores)
    out = torch.empty_like(expected)
    table, starts, slots, contexts = (
        torch.from_numpy(each.copy()) for each in (pool.table, batch.row_start, batch.row_slot, batch.row_kv_len)
    )
    q, layer, mixed = qkv.view(len(qkv), -1, 64)[:, :6], pool.layer(1), out.view(len(out), 6, 64)
    reference(q, layer, table, starts, slots, contexts, mixed, scale=0.2, window=window, soft_cap=soft_cap)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_without_the_interpreter_tensors_of_a_cpu_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(1, 2, 16, 8, 0, 0.0, torch.float32)
    kv = paged(shape, [20], np.random.default_rng(0))
    q = queries(1, shape)
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    assert torch.equal(decoded(q, kv, shape, 64), by_reference(q, kv, torch.arange(2), shape))

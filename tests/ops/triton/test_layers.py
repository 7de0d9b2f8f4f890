"""Kernels of a layer beside attention equal their references, and these equal the CPU's layers."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.ops.activation import gated
from headrace.ops.models.config import Rope
from headrace.ops.norm import RmsNorm
from headrace.ops.rotary import Rotary
from headrace.ops.triton import activation, embedding, kv_copy, kv_write, norm, rotary

few = settings(max_examples=10, deadline=None)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows stand apart, as those of a part of something wider."""
    return torch.randn(*shape[:-1], shape[-1] + 8).to(dtype)[..., : shape[-1]]


def assert_close(one: Tensor, other: Tensor) -> None:
    tolerance = TOLERANCE[one.dtype]
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@few
@given(st.integers(1, 5), st.sampled_from([2, 64, 100, 576]), dtypes, st.booleans())
def test_rms_norm_equals_its_reference(rows: int, size: int, dtype: torch.dtype, adds: bool) -> None:
    x, add, weight = randn(rows, size), randn(rows, size, dtype=dtype) if adds else None, torch.rand(size)
    same, out, expected = x.clone(), randn(rows, size, dtype=dtype), torch.empty(rows, size, dtype=dtype)
    norm.rms_norm(x, weight, out, 1e-5, add)
    norm.reference(same, weight, expected, 1e-5, add)
    assert_close(out, expected)
    assert_close(x, same)


@few
@given(st.integers(1, 3), st.integers(1, 11), st.sampled_from([16, 80, 128]), dtypes)
def test_the_norm_of_heads_equals_its_reference(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    fused, weights = torch.randn(tokens, heads + 2, head_dim).to(dtype), torch.rand(heads, head_dim)
    expected = fused.clone()
    norm.norm_heads_(fused[:, :heads], weights, 1e-5)
    norm.norm_heads_reference_(expected[:, :heads], weights, 1e-5)
    assert_close(fused, expected)
    one = RmsNorm(weights[0], 1e-5, torch.float32)(expected[:, 0].float())
    norm.norm_heads_reference_(expected[:, :1], weights[:1], 1e-5)
    assert_close(expected[:, 0].float(), one.to(dtype).float())


def test_the_norm_of_a_cpu_is_the_reference() -> None:
    x, weight, out = torch.randn(3, 64), torch.rand(64), torch.empty(3, 64)
    norm.reference(x, weight, out, 1e-5)
    assert_close(out, RmsNorm(weight, 1e-5, torch.float32)(x))


@few
@given(st.integers(1, 4), st.sampled_from([1, 100, 1024, 1500]), dtypes, st.sampled_from(["silu", "gelu"]))
def test_gated_activations_equal_their_reference_and_the_cpus(
    rows: int, size: int, dtype: torch.dtype, kind: Literal["silu", "gelu"]
) -> None:
    gate_up = randn(rows, 2 * size, dtype=dtype)
    out, expected = randn(rows, size, dtype=dtype), torch.empty(rows, size, dtype=dtype)
    activation.gated(gate_up, out, kind)
    activation.reference(gate_up, expected, kind)
    assert_close(out, expected)
    assert_close(expected, gated(gate_up.float(), kind).to(dtype))


@few
@given(
    *(st.integers(1, 4), st.integers(1, 11), st.sampled_from([(16, 16), (80, 32), (96, 96)]), dtypes),
    st.sampled_from(["interleaved", "halves"]),
)
def test_rotary_equals_its_reference(
    tokens: int, heads: int, dims: tuple[int, int], dtype: torch.dtype, pairs: Literal["interleaved", "halves"]
) -> None:
    head_dim, rotary_dim = dims
    fused = torch.randn(tokens, heads + 3, head_dim).to(dtype)
    expected = fused.clone()
    angles = torch.rand(50, rotary_dim // 2) * 6
    turns = torch.stack((angles.cos(), angles.sin()), -1)
    positions = torch.randint(50, (tokens,), dtype=torch.int32)
    rotary.rotate_(fused[:, :heads], positions, turns, pairs)
    rotary.reference(expected[:, :heads], positions, turns, pairs)
    assert_close(fused, expected)


def test_the_rotary_of_a_cpu_is_the_reference_for_interleaved_pairs() -> None:
    heads = torch.randn(3, 2, 32)
    expected = heads.clone()
    cpu, positions = Rotary(40, 32, Rope(theta=1e4)), torch.tensor([0, 7, 39])
    cpu.rotate_(expected, cpu.turns(positions))
    rotary.reference(heads, positions.int(), torch.view_as_real(cpu.table), "interleaved")
    assert_close(heads, expected)


@few
@given(st.sampled_from([1, 100, 1500]), dtypes, st.sampled_from([1.0, 3.5]))
def test_an_embedding_is_looked_up_by_id_or_by_what_was_drawn_for_a_slot(
    hidden: int, dtype: torch.dtype, scale: float
) -> None:
    table, drawn = torch.randn(20, hidden).to(dtype), torch.tensor([5, 19, 0])
    ids = torch.tensor([3, -1, 0, -3, -2, 19], dtype=torch.int32)
    out, expected = torch.empty(6, hidden), torch.empty(6, hidden)
    embedding.embed(ids, drawn, table, out, scale)
    embedding.reference(ids, drawn, table, expected, scale)
    assert_close(out, expected)
    assert_close(expected, table.float()[[3, 5, 0, 0, 19, 19]] * scale)


@few
@given(st.integers(1, 3), st.sampled_from([16, 80]), st.sampled_from([1, 3, 16]), dtypes, st.integers(0, 99))
def test_kv_goes_where_the_page_table_says_and_nowhere_else(
    kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    layer = torch.randn(9, 2, kv_heads, page_tokens, head_dim).to(dtype)
    expected = layer.clone()
    table = torch.from_numpy(rng.permutation(9)[:8].astype(np.int32)).view(2, 4)
    places = rng.permutation(8 * page_tokens)[:6]
    token_slot = torch.from_numpy((places // (4 * page_tokens)).astype(np.int32))
    positions = torch.from_numpy((places % (4 * page_tokens)).astype(np.int32))
    token_slot[0] = -1
    kv = torch.randn(len(places), 2 * kv_heads + 3, head_dim).to(dtype)[:, 3:]
    kv_write.write_kv(kv, layer, table, token_slot, positions)
    kv_write.reference(kv, expected, table, token_slot, positions)
    assert torch.equal(layer, expected)
    slot, position = int(token_slot[-1]), int(positions[-1])
    page = table[slot, position // page_tokens]
    assert torch.equal(layer[page, 1, :, position % page_tokens], kv[-1, kv_heads:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_pages_go_to_the_host_and_come_back_layer_by_layer(dtype: torch.dtype, head_dim: int) -> None:
    pool = torch.randn(3, 9, 2, 2, 16, head_dim).to(dtype)
    elements = pool[0, 0].numel()
    host = torch.zeros(7, 3 * elements + 64, dtype=dtype)
    device_pages, host_pages = torch.tensor([3, 8, 0], dtype=torch.int32), torch.tensor([6, 0, 2], dtype=torch.int32)
    kv_copy.back_up(pool, host, device_pages, host_pages)
    for device_page, host_page in zip(device_pages.tolist(), host_pages.tolist()):
        assert torch.equal(host[host_page, : 3 * elements], pool[:, device_page].flatten())
    assert not host[[1, 3, 4, 5]].any() and not host[:, 3 * elements :].any()

    back = torch.zeros_like(pool)
    targets = torch.tensor([1, 4, 7], dtype=torch.int32)
    kv_copy.load_layer(host, back[1], 1, host_pages, targets)
    assert torch.equal(back[1, targets.long()], pool[1, device_pages.long()])
    assert not back[[0, 2]].any() and not back[1, [0, 2, 3, 5, 6, 8]].any()


def test_a_copy_of_no_pages_does_nothing() -> None:
    pool, host, none = torch.ones(1, 2, 2, 1, 4, 8), torch.zeros(2, 64), torch.empty(0, dtype=torch.int32)
    kv_copy.back_up(pool, host, none, none)
    assert not host.any()

"""Each kernel equals its plain meaning, for the elements, shapes and pages that it takes.

`test_simd_targets.py` runs this file again with code for other CPUs.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.ops.simd import vector
from headrace.ops.simd.attention import attend_block, block_tokens, scratch_bytes
from headrace.ops.simd.head_pages import HeadPages
from headrace.ops.simd.inputs import GROUP, q8_row_bytes, store_group
from headrace.ops.simd.instructions import LANES, kernel
from headrace.ops.simd.packing import pack, pack_groups, round_up
from headrace.ops.simd.products import BUFFER_BYTES, begin_products, end_products, multiply_block
from headrace.ops.simd.rows import normalize_row, rotate_head, write_key, write_value
from headrace.ops.simd.softmax import Sight
from headrace.ops.simd.target import AMX
from headrace.ops.simd.tiles import PANELS, TILE_COLUMNS
from headrace.ops.simd.vector import BF16, F32, Q8
from headrace.ops.weights.groups import Groups

WITNESSES: Final[dict[torch.dtype, Any]] = {torch.float32: F32, torch.bfloat16: BF16}
DTYPES: Final = list(WITNESSES)
TOLERANCE: Final = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@kernel
def exp_of(element: Any, source: int, to: int, count: int) -> None:
    size = vector.value_bytes(element)
    for at in range(0, count * size, LANES * size):
        vector.store(element, to + at, vector.exp(vector.load(element, source + at)))


@kernel
def powers_of(element: Any, source: int, factor: float, bias: float, to: int, count: int) -> None:
    by, less = vector.splat(np.float32(factor)), vector.splat(np.float32(bias))
    for at in range(0, count * 4, LANES * 4):
        vector.store(F32, to + at, vector.power(element, vector.load(F32, source + at), by, less))


@kernel
def shrink_of(source: int, to: int) -> None:
    vector.store(F32, to, vector.power_of_two(vector.load(F32, source)))


@kernel
def as_inputs(element: Any, source: int, to: int, width: int) -> None:
    """float32 [width], a whole number of groups."""
    for group in range(width // GROUP):
        here = source + group * GROUP * 4
        low, high = vector.load(F32, here), vector.load(F32, here + 64)
        store_group(element, to, group, width // GROUP, low, high)


@kernel
def one_more(count: int) -> int:
    return count + 1


@kernel
def three_more() -> int:
    return one_more(1) + one_more(2) + one_more(3)


def test_a_kernel_is_compiled_once_whatever_constants_it_is_called_with() -> None:
    assert three_more() == 9
    assert len(one_more.signatures) == 1  # type: ignore[attr-defined]


def filled(x: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1])).contiguous()


def at_a_wall(rows: Tensor) -> Tensor:
    """The same bytes, before memory that nobody may read: who reads on, dies."""
    whole = -(-rows.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = torch.frombuffer(mmap.mmap(-1, whole + mmap.PAGESIZE), dtype=torch.uint8)
    library = ctypes.CDLL(None, use_errno=True)
    start, no_access = ctypes.c_void_p(pages.data_ptr() + whole), ctypes.c_int(0)
    assert library.mprotect(start, ctypes.c_size_t(mmap.PAGESIZE), no_access) == 0
    last = pages[whole - rows.nbytes : whole]
    last.copy_(rows.contiguous().view(torch.uint8).flatten())
    return last


def test_exp_is_right_to_the_last_bits_and_keeps_nan_to_itself() -> None:
    x = torch.linspace(-86, 87, 1600)
    x[5] = math.nan
    out = torch.empty_like(x)
    exp_of(F32, x.data_ptr(), out.data_ptr(), len(x))
    torch.testing.assert_close(out, x.double().exp().float(), rtol=3e-7, atol=0, equal_nan=True)


def test_exp_beyond_what_float32_holds_is_nearly_nothing_or_large_but_a_number() -> None:
    x = torch.tensor([-1e30, -200.0, -88.0, 89.0, 1e30, math.inf, -math.inf, 0.0] * 2)
    out = torch.empty_like(x)
    exp_of(F32, x.data_ptr(), out.data_ptr(), len(x))
    assert bool(torch.isfinite(out).all())
    assert bool((out[[0, 1, 2, 6]] < 1e-37).all()) and bool((out[[3, 4, 5]] > 1e38).all()) and out[7] == 1


@pytest.mark.parametrize(("element", "tolerance"), [(F32, 3e-7), (BF16, 8e-5)])
def test_weights_are_powers_of_two_as_exact_as_their_element(element: Any, tolerance: float) -> None:
    x = torch.linspace(-12, 3, 1600)
    out = torch.empty_like(x)
    powers_of(element, x.data_ptr(), 10.0, vector.ROUNDER - 30, out.data_ptr(), len(x))
    expected = (x.double() * 10 - 30).exp2()
    torch.testing.assert_close(out.double(), expected.where(expected >= 2**-125.5, 0), rtol=tolerance, atol=0)


def test_a_weight_that_is_too_small_is_nothing_and_nan_stays_nan() -> None:
    x = torch.tensor([-1e30, -1e9, -127.0, -math.inf, math.nan, 0.0, 1.0, -1.0] * 2)
    out = torch.empty_like(x)
    powers_of(F32, x.data_ptr(), 1.0, vector.ROUNDER, out.data_ptr(), len(x))
    assert not out[:4].any() and bool(out[4].isnan())
    torch.testing.assert_close(out[5:8], torch.tensor([1.0, 2.0, 0.5]), rtol=2e-7, atol=0)


def test_what_was_added_up_shrinks_by_exact_powers_of_two() -> None:
    n = torch.tensor([0.0, -1.0, -8.0, -126.0, -127.0, -1e6, -2e9, 5.0] * 2)
    out = torch.empty_like(n)
    shrink_of(n.data_ptr(), out.data_ptr())
    assert out.tolist() == [1.0, 0.5, 2.0**-8, 2.0**-126, 0.0, 0.0, 0.0, 32.0] * 2


def test_bfloat16_is_rounded_to_nearest_even_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32).view(np.float32)
    x = torch.from_numpy(np.concatenate((bits, np.array([0, -0.0, math.inf, -math.inf] * 4, np.float32))))
    # Numbers too small for their first digit are zero to the instruction that rounds.
    x = torch.where((x.abs() < 1e-37) | x.isnan(), torch.zeros_like(x), x)
    out = torch.empty(len(x), dtype=torch.bfloat16)
    for at in range(0, len(x), GROUP):
        as_inputs(BF16, x[at:].data_ptr(), out[at:].data_ptr(), GROUP) if at + GROUP <= len(x) else None
    whole = len(x) // GROUP * GROUP
    assert torch.equal(out[:whole], x[:whole].bfloat16())


@pytest.mark.skipif(AMX, reason="in tiles a row of q8 is one of bfloat16")
def test_a_row_of_q8_is_bfloat16_and_then_the_sums_of_what_was_rounded() -> None:
    x = torch.randn(2 * GROUP, generator=torch.Generator().manual_seed(5))
    out = torch.empty(q8_row_bytes(2 * GROUP), dtype=torch.uint8)
    as_inputs(Q8, x.data_ptr(), out.data_ptr(), 2 * GROUP)
    assert torch.equal(out[: GROUP * 4].view(torch.bfloat16), x.bfloat16())
    sums = out[GROUP * 4 : GROUP * 4 + 8].view(torch.float32)
    torch.testing.assert_close(sums, x.bfloat16().float().view(2, GROUP).sum(1))


# ---------------------------------------------------------------------------------------------------------------
# Products


def product(x: Tensor, weight: Tensor | Groups, element: Any) -> Tensor:
    """By the kernel, a tile at a time; `x` float32."""
    rows, columns = len(x), round_up(x.shape[1], GROUP)
    packed = pack_groups(weight) if isinstance(weight, Groups) else pack(weight)
    inputs = filled(x, columns)
    if isinstance(weight, Groups):
        width, steps = len(weight.codes), columns // GROUP
        row_bytes, panel_bytes = q8_row_bytes(columns), packed.nbytes // len(packed)
        given_rows = torch.empty((rows, row_bytes), dtype=torch.uint8)
        for row, into in zip(inputs, given_rows):
            as_inputs(Q8, row.data_ptr(), into.data_ptr(), columns)
    else:
        width = len(weight)
        given_rows = inputs.to(weight.dtype)
        row_bytes = columns * weight.itemsize
        panel_bytes, steps = row_bytes * LANES, row_bytes // 4
    out = torch.full((rows, round_up(width, TILE_COLUMNS)), math.nan)
    walled = at_a_wall(given_rows)
    buffer = torch.full((BUFFER_BYTES,), 255, dtype=torch.uint8)
    begin_products(element, rows)
    for tile in range(out.shape[1] // TILE_COLUMNS):
        here = packed.data_ptr() + tile * 4 * panel_bytes
        to = out.data_ptr() + tile * TILE_COLUMNS * 4
        multiply_block(
            element,
            PANELS,
            walled.data_ptr(),
            row_bytes,
            rows,
            here,
            here,
            panel_bytes,
            steps,
            to,
            out.shape[1] * 4,
            buffer.data_ptr(),
        )
    end_products(element)
    return out[:, :width]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 100), st.integers(1, 130), st.integers(1, 200), st.sampled_from(DTYPES))
@example(16, 64, 576, torch.bfloat16)
@example(33, 70, 1536, torch.bfloat16)
def test_a_product_is_the_matrix_product_for_any_shape(rows: int, out: int, width: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(rows * out)
    x = torch.randn((rows, width), generator=random).to(dtype)
    weight = torch.randn((out, width), generator=random).to(dtype)
    expected = x.double() @ weight.double().T
    given_by_kernel = product(x.float(), weight, WITNESSES[dtype]).double()
    torch.testing.assert_close(given_by_kernel, expected, rtol=0, atol=1e-6 * width)


def random_groups(out: int, width: int, bits: int, random: torch.Generator) -> Groups:
    groups = round_up(width, GROUP) // GROUP
    codes = torch.randint(1 << bits, (out, groups * GROUP), generator=random).to(torch.uint8)
    return Groups(bits, codes, *(torch.randn((out, groups), generator=random) for _ in range(2)))


def values(groups: Groups) -> Tensor:
    """float64 [out, in]."""
    _, codes, scales, minimums = groups
    whole = codes.view(len(codes), -1, GROUP).double() * scales.unsqueeze(-1) + minimums.unsqueeze(-1)
    return whole.view(len(codes), -1)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 130), st.integers(1, 200), st.sampled_from([4, 8]))
@example(1, 64, 1536, 4)
@example(37, 70, 1536, 8)
@example(4, 64, 128, 4)
def test_a_product_of_q8_is_that_of_bfloat16_rows_and_exact_weights(rows: int, out: int, width: int, bits: int) -> None:
    random = torch.Generator().manual_seed(rows * out)
    x, weight = torch.randn((rows, width), generator=random), random_groups(out, width, bits, random)
    if AMX:
        plain = values(weight)[:, :width].float().bfloat16()
        assert torch.equal(product(x, weight, Q8), product(x.bfloat16().float(), plain, BF16))
        return
    expected = x.bfloat16().double() @ values(weight)[:, :width].T
    torch.testing.assert_close(product(x, weight, Q8).double(), expected, rtol=0, atol=1e-6 * width * (1 << bits))


@pytest.mark.parametrize("element", [F32, BF16, Q8], ids=["float32", "bfloat16", "q8"])
def test_a_row_of_a_product_has_the_same_bits_whatever_is_beside_it(element: Any) -> None:
    random = torch.Generator().manual_seed(4)
    dtype = torch.bfloat16 if element is BF16 else torch.float32
    x = torch.randn((120, 96), generator=random).to(dtype)
    plain = torch.randn((64, 96), generator=random).to(dtype)
    weight = random_groups(64, 96, 8, random) if element is Q8 else plain
    together = product(x.float(), weight, element)
    for rows in (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 47, 48, 64, 65, 97):
        assert torch.equal(product(x[:rows].float(), weight, element), together[:rows])


# ---------------------------------------------------------------------------------------------------------------
# Rows


@pytest.mark.parametrize("width", [32, 40, 576])
def test_normalized_rows_have_a_mean_square_of_one_times_the_weight(width: int) -> None:
    random = torch.Generator().manual_seed(width)
    x, weight = torch.randn((1, width), generator=random) * 9, torch.randn((1, width), generator=random)
    columns = round_up(width, GROUP)
    out = torch.empty(columns)
    given_x, given_weight = filled(x, columns), filled(weight, columns)
    normalize_row(F32, given_x.data_ptr(), given_weight.data_ptr(), width, 1e-5, out.data_ptr())
    expected = x.double() / (x.double().square().mean() + 1e-5).sqrt() * weight
    torch.testing.assert_close(out[:width].double(), expected[0], rtol=1e-6, atol=1e-6)
    assert not out[width:].any()


def test_pairs_are_turned_as_complex_numbers_and_the_rest_is_left() -> None:
    random = torch.Generator().manual_seed(1)
    head = torch.randn(80, generator=random)
    turns = torch.polar(torch.ones(32), torch.randn(32, generator=random))
    out = torch.empty(80)
    rotate_head(F32, head.data_ptr(), turns.data_ptr(), 64, 80, out.data_ptr())
    expected = torch.view_as_real(torch.view_as_complex(head[:64].view(32, 2)) * turns).flatten()
    torch.testing.assert_close(out[:64], expected)
    assert torch.equal(out[64:], head[64:])


# ---------------------------------------------------------------------------------------------------------------
# Attention


class Shape(NamedTuple):
    sharing: int
    head_dim: int
    page_tokens: int
    window: int = 0
    cap: float = 0.0


class Pages:
    """Keys and values of one KV head in pages of random numbers, among pages of NaN."""

    def __init__(self, keys: Tensor, values: Tensor, shape: Shape) -> None:
        tokens, self._dtype = len(keys), keys.dtype
        self._shape = shape
        count = -(-tokens // shape.page_tokens)
        self._pages = torch.full((2 * count + 1, 2, shape.page_tokens, shape.head_dim), math.nan, dtype=keys.dtype)
        self.table = np.random.default_rng(2).permutation(2 * count + 1)[:count].astype(np.int32)
        self._pages[torch.from_numpy(self.table).long()] = 0
        packed = shape.page_tokens % LANES == 0
        for position in range(tokens):
            page, offset = self._pages[int(self.table[position // shape.page_tokens])], position % shape.page_tokens
            for plane, row, write in ((page[0], keys[position], write_key), (page[1], values[position], write_value)):
                write(WITNESSES[keys.dtype], row.data_ptr(), shape.head_dim, packed, plane.data_ptr(), offset)

    def attend(self, queries: Tensor, position: int) -> Tensor:
        """`queries` `[tokens, sharing, head_dim]`, a block at a time."""
        shape, size = self._shape, queries.itemsize
        out = torch.empty_like(queries)
        tiled = AMX and self._dtype == torch.bfloat16
        scratch = torch.empty(scratch_bytes(shape.sharing, shape.head_dim, tiled), dtype=torch.uint8)
        step = block_tokens(shape.sharing, tiled)
        head = HeadPages(
            table=self.table.ctypes.data,
            pages=self._pages.data_ptr(),
            page_bytes=self._pages.stride(0) * size,
            page_tokens=shape.page_tokens,
            head_dim=shape.head_dim,
            keys=0,
            values=self._pages.stride(1) * size,
        )
        shaped = 0
        for first in range(0, len(queries), step):
            block, into = queries[first : first + step], out[first:]
            shaped = attend_block(
                WITNESSES[self._dtype],
                head,
                block.data_ptr(),
                shape.sharing * shape.head_dim * size,
                len(block),
                position + first,
                Sight(shape.sharing, shape.window, shape.head_dim**-0.5, shape.cap),
                scratch.data_ptr(),
                into.data_ptr(),
                shape.sharing * shape.head_dim * size,
                shaped,
            )
        return out


def tensors(shape: Shape, context: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(context + tokens)
    keys, values = torch.randn((2, context, shape.head_dim), generator=random).to(dtype)
    queries = torch.randn((tokens, shape.sharing, shape.head_dim), generator=random) * 2
    return queries.to(dtype), keys.contiguous(), values.contiguous()


def dense(queries: Tensor, keys: Tensor, values: Tensor, position: int, shape: Shape) -> Tensor:
    """In float64."""
    q, k, v = queries.double(), keys.double(), values.double()
    out = torch.empty_like(q)
    for token in range(len(q)):
        at = position + token
        first = max(0, at + 1 - shape.window) if shape.window else 0
        scores = q[token] @ k[first : at + 1].T * shape.head_dim**-0.5
        if shape.cap:
            scores = shape.cap * torch.tanh(scores / shape.cap)
        out[token] = scores.softmax(-1) @ v[first : at + 1]
    return out


shapes = st.builds(
    Shape,
    st.sampled_from([1, 2, 3, 7, 50]),
    st.sampled_from([16, 64, 80, 96, 128, 256]),
    st.sampled_from([1, 2, 16, 64]),
    st.sampled_from([0, 0, 1, 5, 64, 70]),
    st.sampled_from([0.0, 0.0, 5.0]),
)


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(0, 200), st.integers(1, 40), st.sampled_from(DTYPES))
@example(Shape(3, 64, 16), 191, 1, torch.bfloat16)
@example(Shape(3, 64, 16), 0, 40, torch.bfloat16)
@example(Shape(1, 16, 16, window=5), 120, 30, torch.float32)
def test_paged_attention_equals_dense_attention(shape: Shape, position: int, tokens: int, dtype: torch.dtype) -> None:
    queries, keys, values = tensors(shape, position + tokens, tokens, dtype)
    out = Pages(keys, values, shape).attend(queries, position)
    expected = dense(queries, keys, values, position, shape)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=15, deadline=None)
@given(shapes, st.integers(0, 150), st.integers(2, 40), st.sampled_from(DTYPES))
@example(Shape(3, 64, 16), 100, 33, torch.bfloat16)
def test_a_token_attends_with_the_same_bits_alone_and_in_a_chunk(
    shape: Shape, position: int, tokens: int, dtype: torch.dtype
) -> None:
    queries, keys, values = tensors(shape, position + tokens, tokens, dtype)
    together = Pages(keys, values, shape).attend(queries, position)
    for token in {0, tokens // 2, tokens - 1}:
        seen = position + token + 1
        alone = Pages(keys[:seen], values[:seen], shape).attend(queries[token : token + 1], position + token)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("growth", [-1.0, 1.0])
def test_scores_may_grow_or_fall_by_hundreds_along_the_keys(dtype: torch.dtype, growth: float) -> None:
    """Where they grow, each block of keys outweighs all before it; where they fall, it weighs nothing."""
    shape, context = Shape(3, 64, 16), 400
    queries, keys, values = tensors(shape, context, 40, dtype)
    queries[..., 0], keys[:, 0] = 8, growth * torch.arange(context)
    together = Pages(keys, values, shape).attend(queries, context - 40)
    # Scores of 3200 have 2e-4 of rounding in float32.
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-3
    expected = dense(queries, keys, values, context - 40, shape)
    torch.testing.assert_close(together.double(), expected, rtol=tolerance, atol=tolerance)
    alone = Pages(keys, values, shape).attend(queries[-1:], context - 1)
    assert torch.equal(alone[0], together[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_of_nan_leaves_the_rows_before_it_alone_and_is_not_hidden_from_those_after(dtype: torch.dtype) -> None:
    shape = Shape(3, 64, 16)
    queries, keys, values = tensors(shape, 100, 100, dtype)
    expected = Pages(keys, values, shape).attend(queries, 0)
    keys[70] = math.nan
    given = Pages(keys, values, shape).attend(queries, 0)
    assert torch.equal(given[:70], expected[:70])
    assert bool(given[70:].isnan().all())

"""Pools, page tables and ragged batches for the tests of paged attention."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.models.config import KEY_BLOCK_TOKENS

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Shape(NamedTuple):
    kv_heads: int
    group: int
    head_dim: int
    page_tokens: int
    window: int
    soft_cap: float
    dtype: torch.dtype

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


shapes = st.builds(
    Shape,
    st.integers(1, 3),
    st.sampled_from([1, 3, 4, 7]),
    st.sampled_from([16, 64, 80, 96]),
    st.sampled_from([1, 8, 16, 24]),
    st.sampled_from([0, 0, 1, 50, 200]),
    st.sampled_from([0.0, 0.0, 2.5]),
    st.sampled_from(list(TOLERANCE)),
)


class Paged(NamedTuple):
    """Rows in slots of their own, over pages in random order; what no row owns is NaN, and so is what stands before a
    row's window: a window group has given those pages to others."""

    layer: Tensor
    table: Tensor
    row_slot: Tensor
    row_kv_len: Tensor


def paged(shape: Shape, contexts: list[int], rng: np.random.Generator, lengths: list[int] | None = None) -> Paged:
    """`lengths`: how many of each row's tokens are new; None: the last."""
    slots = len(contexts) + 2
    counts = [-(-context // shape.page_tokens) for context in contexts]
    pages = rng.permutation(sum(counts) + 2)
    torch.manual_seed(int(rng.integers(1 << 30)))
    layer = torch.randn(len(pages), 2, shape.kv_heads, shape.page_tokens, shape.head_dim)
    layer[pages[sum(counts) :]] = float("nan")
    # The rows of the table stand apart: it may be a part of a larger one.
    table = torch.full((slots, max(counts) + 5), -1, dtype=torch.int32)[:, : max(counts) + 1]
    row_slot: NDArray[np.intp] = rng.permutation(slots)[: len(contexts)]
    taken = 0
    for slot, context, count in zip(row_slot.tolist(), contexts, counts):
        table[slot, :count] = torch.from_numpy(pages[taken : taken + count].astype(np.int32))
        if context % shape.page_tokens:
            layer[pages[taken + count - 1], :, :, context % shape.page_tokens :] = float("nan")
        taken += count
    for slot, context, length in zip(row_slot.tolist(), contexts, lengths or [1] * len(contexts)):
        span = shape.window + KEY_BLOCK_TOKENS - 1 if shape.window else context
        table[slot, : max(context - length + 1 - span, 0) // shape.page_tokens] = int(pages[-1])
    return Paged(layer.to(shape.dtype), table, int32(row_slot), int32(np.array(contexts)))


def int32(values: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def queries(tokens: int, shape: Shape) -> Tensor:
    """A part of a fused projection: tokens stand apart."""
    fused = torch.randn(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    return fused.to(shape.dtype)[:, : shape.heads]


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(out.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

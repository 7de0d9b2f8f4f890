"""What is done row by row: RMSNorm, biases, and rotary embedding with the write of keys and values into their pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.ops.simd.inputs import GROUP, store_group
from headrace.ops.simd.instructions import LANES, kernel
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    LANE_BYTES,
    VECTOR_BYTES,
    add,
    copy_lane,
    copy_value,
    even_lanes,
    fma,
    lane_values,
    load,
    multiply,
    odd_lanes,
    splat,
    store,
    sum_lanes,
    swapped,
    value_bytes,
    zeros,
)


@kernel
def inverse_length(x: int, width: int, epsilon: float) -> Any:
    """1 / sqrt(mean of squares + epsilon) of float32 [width], which goes on with zeros up to a whole group; in all
    lanes."""
    low, high = zeros(), zeros()
    for at in range(0, width, GROUP):
        first, second = load(F32, x + at * F32_BYTES), load(F32, x + at * F32_BYTES + VECTOR_BYTES)
        low, high = fma(first, first, low), fma(second, second, high)
    mean = sum_lanes(add(low, high)) / np.float32(width)
    return splat(np.float32(1) / np.sqrt(mean + np.float32(epsilon)))


@kernel
def normalize_row(element: Any, x: int, weight: int, width: int, epsilon: float, out: int) -> None:
    """RMSNorm (arXiv:1910.07467) of float32 [width] → inputs of a product. Row and weight (float32) go on with zeros
    up to a whole group."""
    scale = inverse_length(x, width, epsilon)
    for at in range(0, width, GROUP):
        here, of = x + at * F32_BYTES, weight + at * F32_BYTES
        first = multiply(multiply(load(F32, here), scale), load(F32, of))
        second = multiply(multiply(load(F32, here + VECTOR_BYTES), scale), load(F32, of + VECTOR_BYTES))
        store_group(element, out, at // GROUP, (width + GROUP - 1) // GROUP, first, second)


@kernel
def add_normalized(row: int, weight: int, width: int, epsilon: float, x: int) -> None:
    """x += RMSNorm of the row; all float32 [width], with zeros up to a whole group."""
    scale = inverse_length(row, width, epsilon)
    for at in range(0, width * F32_BYTES, VECTOR_BYTES):
        normed = multiply(multiply(load(F32, row + at), scale), load(F32, weight + at))
        store(F32, x + at, add(load(F32, x + at), normed))


@kernel
def normalize_head(x: int, weight: int, head_dim: int, epsilon: float) -> None:
    """RMSNorm of float32 [head_dim] in place; a multiple of 16."""
    total = zeros()
    for at in range(0, head_dim * F32_BYTES, VECTOR_BYTES):
        here = load(F32, x + at)
        total = fma(here, here, total)
    mean = sum_lanes(total) / np.float32(head_dim)
    scale = splat(np.float32(1) / np.sqrt(mean + np.float32(epsilon)))
    for at in range(0, head_dim * F32_BYTES, VECTOR_BYTES):
        store(F32, x + at, multiply(multiply(load(F32, x + at), scale), load(F32, weight + at)))


@kernel
def add_row(x: int, row: int, width: int) -> None:
    """x += row; float32 [width], a multiple of 16."""
    for at in range(0, width * F32_BYTES, VECTOR_BYTES):
        store(F32, x + at, add(load(F32, x + at), load(F32, row + at)))


@kernel
def rotate_head(kv: Any, x: int, turns: int, rotary_dim: int, head_dim: int, out: int) -> None:
    """float32 [head_dim] → the same in `kv`; interleaved pairs of the first `rotary_dim` are turned.

    `turns`: float32 [rotary_dim], cosine and sine of each pair.
    """
    for at in range(0, head_dim, LANES):
        head = load(F32, x + at * F32_BYTES)
        if at < rotary_dim:
            turn = load(F32, turns + at * F32_BYTES)
            head = fma(swapped(head), odd_lanes(turn), multiply(head, even_lanes(turn)))
        store(kv, out + at * value_bytes(kv), head)


@kernel
def write_key(kv: Any, key: int, head_dim: int, packed: bool, page: int, offset: int) -> None:
    """Put a key of `kv` values into its page at token `offset`.

    `page`: the head's keys, packed as groups of 16 tokens `[groups, head_dim / lane, 16, lane]`, or by token.
    """
    if packed:
        lanes = head_dim // lane_values(kv)
        to = page + (offset // LANES * lanes * LANES + offset % LANES) * LANE_BYTES
        for at in range(lanes):
            copy_lane(to + at * VECTOR_BYTES, key + at * LANE_BYTES)
    else:
        _copy_row(kv, key, head_dim, page, offset)


@kernel
def write_value(kv: Any, value: int, head_dim: int, packed: bool, page: int, offset: int) -> None:
    """Put a value vector into its page. `page`: the head's values, packed as `[tokens / lane, head_dim, lane]`, or by
    token."""
    if packed:
        lane, inside = offset // lane_values(kv), offset % lane_values(kv)
        to = page + lane * head_dim * LANE_BYTES + inside * value_bytes(kv)
        for at in range(head_dim):
            copy_value(kv, to + at * LANE_BYTES, value + at * value_bytes(kv))
    else:
        _copy_row(kv, value, head_dim, page, offset)


@kernel
def _copy_row(kv: Any, row: int, head_dim: int, page: int, offset: int) -> None:
    size = value_bytes(kv)
    for at in range(head_dim):
        copy_value(kv, page + (offset * head_dim + at) * size, row + at * size)

"""From logits to ids, a row at a time: what `ops.sampling.choose` means, in passes over a row that stays in the cache.

    greedy   the row's largest, and that one's first place: no more for temperature 0
    copy     the row, and its largest
    weights  scaled = (row - largest) / temperature, and e to the power of it
    floor    top-k, top-p and min-p as the smallest scaled value that may be drawn
    draw     sums of blocks of 64 ids, then of ids within one

A value that ends top-k or top-p is sought by its bits: values go into buckets by their upper 11, then those of one
bucket by the next 10, then by the last. Values far below the largest are looked at only if the others do not suffice,
and 16 values with none of interest are passed over at once.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numba
import numpy as np
import torch
from numba.core import types
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.sampling import LEAST, MIN_P, TEMPERATURE, TOP_K, TOP_P, UNIFORM
from headrace.ops.simd.instructions import KERNEL_OPTIONS, LANES, kernel
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    VECTOR_BYTES,
    any_from,
    as_f32,
    divide,
    exp,
    fma,
    get_f32,
    get_i32,
    keep_from,
    load,
    max_lanes,
    maximum,
    put_f32,
    splat,
    store,
    subtract,
    sum_f64,
    sum_lanes,
    zeros,
)

BLOCK: Final = 64
"""Ids of a block of sums."""
_PART_BITS: Final = 10
BUCKETS: Final = 2048
"""Of the upper bits of a float32 without its sign; each has `PARTS` parts, and each of those as many values."""
PARTS: Final = 1 << _PART_BITS

_FINITE: Final = np.float32(-3e38)
_NOTHING: Final = np.float32(-np.inf)
_CUTOFFS: Final = (-4.0, -8.0, -16.0, LEAST)
"""Of scaled values, where top-k and top-p are sought: of the default model's logits for a text, 9 of 49k are above the
first, 70 above the second, 4400 above the third."""
_ALMOST_ONE: Final = 1 - 2**-40
_MAGNITUDE: Final = 0x7FFFFFFF
_SIGN: Final = 0x80000000


@kernel
def copy_row(source: int, vocab: int, width: int, to: int) -> Any:
    """Copy float32 [vocab], and nothing (-inf) up to `width`, whole blocks → the largest; NaN if one is NaN or +inf."""
    whole = vocab // LANES * LANES
    for at in range(whole, width):
        put_f32(to + at * F32_BYTES, get_f32(source + at * F32_BYTES) if at < vocab else _NOTHING)
    best, finite, broken = splat(_NOTHING), splat(_FINITE), zeros()
    for at in range(0, width, LANES):
        values = load(F32, source + at * F32_BYTES if at < whole else to + at * F32_BYTES)
        store(F32, to + at * F32_BYTES, values)
        best = maximum(values, best)
        # The larger of the two is the second where that is NaN. Zero times it is zero, or NaN.
        broken = fma(maximum(finite, values), zeros(), broken)
    return max_lanes(best) + sum_lanes(broken)


@kernel
def largest_of(source: int, vocab: int, scratch: int) -> Any:
    """The same without a copy."""
    whole = vocab // LANES * LANES
    for at in range(LANES):
        put_f32(
            scratch + at * F32_BYTES, get_f32(source + (whole + at) * F32_BYTES) if whole + at < vocab else _NOTHING
        )
    best, finite, broken = splat(_NOTHING), splat(_FINITE), zeros()
    for at in range(0, whole + LANES, LANES):
        values = load(F32, source + at * F32_BYTES if at < whole else scratch)
        best = maximum(values, best)
        broken = fma(maximum(finite, values), zeros(), broken)
    return max_lanes(best) + sum_lanes(broken)


@kernel
def first_from(values: int, vocab: int, wanted: float) -> int:
    """The first place of a value that is not below `wanted`."""
    limit, at, whole = splat(np.float32(wanted)), 0, vocab // LANES * LANES
    while at < whole and not any_from(load(F32, values + at * F32_BYTES), limit):
        at += LANES
    while at < vocab and get_f32(values + at * F32_BYTES) < wanted:
        at += 1
    return at


@kernel
def scale_row(values: int, weights: int, width: int, largest: float, temperature: float) -> None:
    """values = (values - largest) / temperature, at most 0; weights = e to the power of them."""
    most, by = splat(np.float32(largest)), splat(np.float32(temperature))
    for at in range(0, width * F32_BYTES, VECTOR_BYTES):
        scaled = divide(subtract(load(F32, values + at), most), by)
        store(F32, values + at, scaled)
        store(F32, weights + at, exp(scaled))


@kernel
def weight_from(values: int, weights: int, block: int, lowest: Any) -> float:
    """The sum of a block's weights whose values are not below `lowest`."""
    here, of = values + block * BLOCK * F32_BYTES, weights + block * BLOCK * F32_BYTES
    second, third, fourth = VECTOR_BYTES, 2 * VECTOR_BYTES, 3 * VECTOR_BYTES
    a, b = keep_from(load(F32, here), lowest, load(F32, of)), load(F32, of + second)
    c = keep_from(load(F32, here + third), lowest, load(F32, of + third))
    d = keep_from(load(F32, here + fourth), lowest, load(F32, of + fourth))
    total: float = sum_f64(a, keep_from(load(F32, here + second), lowest, b), c, d)
    return total


@kernel
def clear(sums: Any) -> None:
    for at in range(BUCKETS):
        sums[at] = 0.0


@kernel
def fill_buckets(values: int, weights: int, width: int, counted: bool, cutoff: float, sums: Any) -> None:
    """Weights of values from `cutoff` on, or how many there are, by the upper 11 of their bits."""
    clear(sums)
    limit = splat(np.float32(cutoff))
    for first in range(0, width, LANES):
        if any_from(load(F32, values + first * F32_BYTES), limit):
            for at in range(first, first + LANES):
                if get_f32(values + at * F32_BYTES) >= cutoff:
                    bucket = (get_i32(values + at * F32_BYTES) & _MAGNITUDE) >> 2 * _PART_BITS
                    sums[bucket] += 1.0 if counted else np.float64(get_f32(weights + at * F32_BYTES))


@kernel
def gather_bucket(values: int, weights: int, width: int, bucket: int, to_values: int, to_weights: int) -> int:
    """Copy a bucket's values, and their weights → how many there are."""
    count = 0
    # The next bucket's first value is below all of this one.
    limit = splat(as_f32(_SIGN | (bucket + 1) << 2 * _PART_BITS))
    for first in range(0, width, LANES):
        if any_from(load(F32, values + first * F32_BYTES), limit):
            for at in range(first, first + LANES):
                if (get_i32(values + at * F32_BYTES) & _MAGNITUDE) >> 2 * _PART_BITS == bucket:
                    put_f32(to_values + count * F32_BYTES, get_f32(values + at * F32_BYTES))
                    put_f32(to_weights + count * F32_BYTES, get_f32(weights + at * F32_BYTES))
                    count += 1
    return count


@kernel
def fill_parts(values: int, weights: int, count: int, counted: bool, prefix: int, shift: int, sums: Any) -> None:
    """The same as `fill_buckets` for values whose bits begin with `prefix`, by the 10 bits behind."""
    clear(sums)
    for at in range(count):
        bits = get_i32(values + at * F32_BYTES) & _MAGNITUDE
        if bits >> (shift + _PART_BITS) == prefix:
            sums[bits >> shift & PARTS - 1] += 1.0 if counted else np.float64(get_f32(weights + at * F32_BYTES))


@kernel
def find_bucket(sums: Any, before: float, wanted: float) -> tuple[int, float, bool]:
    """The first bucket with which `before` and the sums reach `wanted`, what they are without it, and True; else the
    last that is not empty."""
    last, without = -1, before
    for bucket in range(BUCKETS):
        if sums[bucket] > 0:
            last, without = bucket, before
            before += sums[bucket]
            if before >= wanted:
                return last, without, True
    return last, without, False


@kernel
def value_reaching(values: int, weights: int, width: int, counted: bool, wanted: float, sums: Any) -> float:
    """The largest of the values such that it and all larger ones weigh (or are) `wanted` or more; -inf where the sum of
    all is below that. The weights are followed by twice as much memory."""
    for cutoff in _CUTOFFS:
        fill_buckets(values, weights, width, counted, cutoff, sums)
        prefix, before, reached = find_bucket(sums, 0.0, wanted)
        if reached:
            to_values, to_weights = weights + width * F32_BYTES, weights + 2 * width * F32_BYTES
            count = gather_bucket(values, weights, width, prefix, to_values, to_weights)
            for further in range(2):
                fill_parts(to_values, to_weights, count, counted, prefix, (1 - further) * _PART_BITS, sums)
                # Sums of parts are rounded in another order: they may miss by a hair what the bucket reaches.
                part, before, _ = find_bucket(sums, before, wanted)
                prefix = prefix << _PART_BITS | part
            return float(as_f32(_SIGN | prefix))
    return float(_NOTHING)


@kernel
def floor_of(values: int, weights: int, vocab: int, width: int, row: int, parameters: Any, sums: Any) -> float:
    """The smallest scaled value that may be drawn."""
    floor = LEAST
    for counted in (True, False):
        wanted = parameters[row, TOP_K] if counted else parameters[row, TOP_P]
        if not (0 < wanted < vocab if counted else wanted < 1):
            continue
        if not counted:
            lowest, total = splat(np.float32(floor)), 0.0
            for block in range(width // BLOCK):
                total += weight_from(values, weights, block, lowest)
            wanted *= total
        floor = max(floor, value_reaching(values, weights, width, counted, wanted, sums))
    if parameters[row, MIN_P] > 0:
        floor = max(floor, float(np.log(np.float32(parameters[row, MIN_P]))))
    return floor


@kernel
def draw_row(values: int, weights: int, width: int, floor: float, uniform: float, blocks: Any) -> int:
    """The first id at which the sum of weights exceeds its share, `uniform`, of the whole."""
    lowest, total = splat(np.float32(floor)), 0.0
    for block in range(width // BLOCK):
        blocks[block] = weight_from(values, weights, block, lowest)
        total += blocks[block]
    # Rounding may bring a share up to the whole: then the last id with a weight is drawn.
    target, before, at = min(uniform * total, total * _ALMOST_ONE), 0.0, 0
    while before + blocks[at] <= target:
        before += blocks[at]
        at += 1
    target = min(target - before, blocks[at] * _ALMOST_ONE)
    inside, drawn = 0.0, at * BLOCK
    for place in range(at * BLOCK, (at + 1) * BLOCK):
        if get_f32(values + place * F32_BYTES) >= floor:
            drawn, inside = place, inside + np.float64(get_f32(weights + place * F32_BYTES))
            if inside > target:
                return drawn
    return drawn


@numba.njit(**KERNEL_OPTIONS)  # type: ignore[untyped-decorator]
def choose_rows(
    logits: int, row_bytes: int, vocab: int, parameters: Any, scratch: int, sums: Any, usable: Any, ids: Any
) -> None:
    """`Chooser` for rows of float32 logits. `scratch`: the address of float32 [4, vocab in whole blocks]. `sums`:
    float64 [buckets, or blocks]."""
    width = (vocab + BLOCK - 1) // BLOCK * BLOCK
    values, weights = scratch, scratch + width * F32_BYTES
    for row in range(len(ids)):
        source, greedy = logits + row * row_bytes, parameters[row, TEMPERATURE] == 0
        largest = largest_of(source, vocab, values) if greedy else copy_row(source, vocab, width, values)
        usable[row], ids[row] = not math.isnan(largest) and largest > _NOTHING, 0
        if not usable[row]:
            continue
        if greedy:
            ids[row] = first_from(source, vocab, largest)
            continue
        scale_row(values, weights, width, largest, parameters[row, TEMPERATURE])
        floor = floor_of(values, weights, vocab, width, row, parameters, sums)
        ids[row] = draw_row(values, weights, width, floor, parameters[row, UNIFORM], sums)


_f64: Final = types.float64
SIGNATURE: Final = (
    *(types.int64, types.int64, types.int64),
    *(_f64[:, ::1], types.int64, _f64[::1], types.boolean[::1], types.int64[::1]),
)
"""Of `choose_rows`."""


class Chooser:
    """A `sampling.Choose`. Holds memory for one row."""

    def __init__(self, vocab: int) -> None:
        width = -(-vocab // BLOCK) * BLOCK
        self._scratch = np.zeros((4, width), np.float32)
        self._sums = np.zeros(max(BUCKETS, width // BLOCK))

    def __call__(self, logits: Tensor, parameters: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        rows, vocab = logits.shape
        assert logits.dtype == torch.float32 and logits.stride(1) == 1 and len(parameters) == rows
        assert self._scratch.shape[1] - BLOCK < vocab <= self._scratch.shape[1]
        usable, ids = np.zeros(rows, np.bool_), np.zeros(rows, np.int64)
        of, row_bytes, scratch = logits.data_ptr(), logits.stride(0) * F32_BYTES, self._scratch.ctypes.data
        choose_rows(of, row_bytes, vocab, parameters, scratch, self._sums, usable, ids)
        return usable, ids

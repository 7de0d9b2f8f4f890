"""Softmax as attention goes along the keys: scores of 64 keys, for some rows → their weights.

    weight = 2^(score · scale · log2 e - n)

with a whole number n for each row, which stays as it is until a weight would exceed 2^8. Then it becomes that score's,
and what the row has added up so far is multiplied by a power of two, which is exact. So n is rarely looked at: a row's
largest score is sought across its lanes only where n is raised. In the first 64 keys that a row sees it is, and seldom
later.

(AMX has an exponent of its own: `softmax_tiles`.)

A row's state is its bias, `ROUNDER` - n, and its sums of weights, one for each lane: they are added up at the end.

    scores   float32 [rows, 64]
    biases   float32 [rows]
    totals   float32 [rows, 16]
    weights  of KV's elements [rows, 64]
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from headrace.ops.simd.instructions import LANES, kernel
from headrace.ops.simd.tiles import PANELS, TILE_COLUMNS
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    ROUNDER,
    VECTOR_BYTES,
    add,
    any_above,
    divide,
    exp,
    first_lane,
    fma,
    get_f32,
    load,
    max_lanes,
    maximum,
    multiply,
    power,
    power_of_two,
    put_f32,
    splat,
    store,
    store_pair,
    subtract,
    sum_lanes,
    value_bytes,
    where_between,
    zeros,
)

KEYS: Final = TILE_COLUMNS
"""Keys that a block looks at at a time."""
SCORE_BYTES: Final = KEYS * F32_BYTES
"""Of a row of scores."""
LARGEST: Final = 8
"""Weights stay below two to the power of this, and a bit: far from where sums of them end, in bfloat16 too."""
_LOG2_E: Final = np.float32(1.4426950408889634)
_HIDDEN: Final = np.float32(-1e30)
"""The score of a key that a row may not see: its weight is exactly 0."""
_FIRST_BIAS: Final = np.float32(ROUNDER + 2.0**21)
"""Any score raises it."""
_RAISED: Final = np.float32(ROUNDER + LARGEST)


class Sight(NamedTuple):
    """What the rows of a block see, and how much of it."""

    sharing: int
    """Rows of one token: they see the same."""
    window: int
    """A token sees itself and so many - 1 before it; 0: all."""
    scale: float
    """Of scores."""
    cap: float
    """Of scaled scores, soft; 0: none."""


@kernel
def capped(scores: Any, cap: float) -> Any:
    """cap · tanh(scores / cap)."""
    one = splat(np.float32(1))
    raised = exp(multiply(scores, splat(np.float32(2) / np.float32(cap))))
    return multiply(splat(np.float32(cap)), divide(subtract(raised, one), add(raised, one)))


@kernel
def begin_rows(rows: int, biases: int, totals: int) -> None:
    """Rows that have seen no key."""
    for row in range(rows):
        put_f32(biases + row * F32_BYTES, _FIRST_BIAS)
        store(F32, totals + row * VECTOR_BYTES, zeros())


@kernel
def cap_scores(rows: int, scores: int, scale: float, cap: float) -> None:
    """scores = capped(scale · scores)."""
    factor = splat(np.float32(scale))
    for at in range(0, rows * SCORE_BYTES, VECTOR_BYTES):
        store(F32, scores + at, capped(multiply(load(F32, scores + at), factor), cap))


@kernel
def hide_keys(sight: Any, first: int, rows: int, seen: int, scores: int) -> None:
    """Hide what the rows may not see."""
    hidden = splat(_HIDDEN)
    for row in range(rows):
        high = seen + (first + row) // sight.sharing
        low = high - sight.window if sight.window > 0 else 0
        if low > 0 or high < KEYS:
            here = scores + row * SCORE_BYTES
            for panel in range(PANELS):
                at, key = here + panel * VECTOR_BYTES, panel * LANES
                store(F32, at, where_between(low - key, high - key, load(F32, at), hidden))


@kernel
def prepare_scores(sight: Any, first: int, rows: int, seen: int, scores: int) -> Any:
    """Cap the scores, and hide what is not seen → what they are multiplied with to be exponents of 2.

    The rows are those of a block from its row `first` on, `scores` theirs. `sight`: a `Sight`. `seen`: keys that the
    block's first row sees if there is no window; may be below 0.
    """
    scale, last = sight.scale, seen + (first + rows - 1) // sight.sharing
    if sight.cap > 0:
        cap_scores(rows, scores, scale, sight.cap)
        scale = 1.0
    if seen + first // sight.sharing < KEYS or (sight.window > 0 and last > sight.window):
        hide_keys(sight, first, rows, seen, scores)
    return np.float32(scale) * _LOG2_E


@kernel
def row_maximum(scores: int) -> Any:
    """Of a row's 64 scores, lane by lane."""
    low = maximum(load(F32, scores), load(F32, scores + VECTOR_BYTES))
    return maximum(low, maximum(load(F32, scores + 2 * VECTOR_BYTES), load(F32, scores + 3 * VECTOR_BYTES)))


@kernel
def raise_biases(rows: int, factor: Any, scores: int, biases: int, totals: int, mixed: int, head_dim: int) -> None:
    """Where a weight would be too large: let the largest be 1, and shrink what was added up before."""
    limit, rounder = splat(_RAISED), splat(np.float32(ROUNDER))
    for row in range(rows):
        largest, bias = row_maximum(scores + row * SCORE_BYTES), splat(get_f32(biases + row * F32_BYTES))
        if any_above(fma(largest, factor, bias), limit):
            whole = subtract(fma(splat(max_lanes(largest)), factor, rounder), rounder)
            new_bias = subtract(rounder, whole)
            shrink = power_of_two(subtract(new_bias, bias))
            store(F32, totals + row * VECTOR_BYTES, multiply(load(F32, totals + row * VECTOR_BYTES), shrink))
            for at in range(row * head_dim * F32_BYTES, (row + 1) * head_dim * F32_BYTES, VECTOR_BYTES):
                store(F32, mixed + at, multiply(load(F32, mixed + at), shrink))
            put_f32(biases + row * F32_BYTES, first_lane(new_bias))


@kernel
def weigh_rows(
    kv: Any,
    sight: Any,
    rows: int,
    seen: int,
    scores: int,
    biases: int,
    totals: int,
    mixed: int,
    head_dim: int,
    weights: int,
) -> None:
    """Weights of 64 keys, and what follows for the rows' state and sums. `scores` is overwritten.

    `sight`: a `Sight`. `seen`: keys that the block's first row sees if there is no window; may be below 0. `mixed`:
    float32 [rows, head_dim].
    """
    factor = splat(prepare_scores(sight, 0, rows, seen, scores))
    raised = splat(np.float32(0))
    for row in range(rows):
        bias = splat(get_f32(biases + row * F32_BYTES))
        raised = maximum(fma(row_maximum(scores + row * SCORE_BYTES), factor, bias), raised)
    if any_above(raised, splat(_RAISED)):
        raise_biases(rows, factor, scores, biases, totals, mixed, head_dim)
    step = LANES * value_bytes(kv)
    for row in range(rows):
        here, to, total = scores + row * SCORE_BYTES, weights + row * PANELS * step, totals + row * VECTOR_BYTES
        bias = splat(get_f32(biases + row * F32_BYTES))
        a, b = power(kv, load(F32, here), factor, bias), power(kv, load(F32, here + VECTOR_BYTES), factor, bias)
        c = power(kv, load(F32, here + 2 * VECTOR_BYTES), factor, bias)
        d = power(kv, load(F32, here + 3 * VECTOR_BYTES), factor, bias)
        store(F32, total, add(load(F32, total), add(add(a, b), add(c, d))))
        store_pair(kv, to, a, b)
        store_pair(kv, to + 2 * step, c, d)


@kernel
def share_of(totals: int) -> Any:
    """1 / the sum of a row's weights, in all lanes."""
    return splat(np.float32(1) / sum_lanes(load(F32, totals)))

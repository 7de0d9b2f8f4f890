"""Softmax of rows whose scores AMX's tiles made: `softmax` with AVX-512's own exponent, and emitted between dots.

    weight = 2^(score · factor - n)

`vreduceps` gives an exponent's fraction and `vscalefps` multiplies by two to its whole part, so that a weight takes 6
instructions instead of 9, is 0 or infinite where that is out of range, and needs no look at the row's largest score
beforehand. In the first 64 keys that a row sees, n becomes the whole part of the largest exponent; and later where 4
weights of the row exceed 2^8 together, which is seldom: then it is weighed again (`settle_rows`).

A row's state is -n, and its sums of weights, one for each lane. What these were is kept, so that a row can be weighed
again.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir

from headrace.ops.simd.instructions import (
    ADDRESS,
    INT,
    LANES,
    Builder,
    F32x16,
    Value,
    bf16,
    call,
    const,
    every_lane,
    f32,
    f32x16,
    fused,
    i16,
    i32,
    instruction,
    kernel,
    load_from,
    offset,
    spread,
    store_to,
)
from headrace.ops.simd.softmax import SCORE_BYTES, row_maximum
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    ROUNDER,
    VECTOR_BYTES,
    any_above,
    emit_maximum,
    fma,
    get_f32,
    load,
    max_lanes,
    multiply,
    power_of_two,
    put_f32,
    splat,
    store,
    subtract,
    zeros,
)

WEIGHT_BYTES: Final = SCORE_BYTES // 2
"""Of a row of weights, in bfloat16."""
LARGEST: Final = np.float32(2**8)
"""What 4 weights may be together."""
_FIRST: Final = np.float32(2.0**21)
"""-n of a row that has seen no key: any score is too large for it."""
_SEEN: Final = np.float32(-1e29)
"""Scores of keys that a row may see are above this."""
_POWER: Final = (7.802452e-2, 0.22606716, 0.69583356, 0.9999252)
"""2^f for 0 ≤ f ≤ 1, highest power first, with the least largest error there is (Remez): 7.5e-5 of the value, a 26th
of what rounding to bfloat16 may change."""
_DOWN: Final = 1
_CURRENT: Final = 4


def _masked(b: Builder, name: str, operands: list[Value]) -> Value:
    """An instruction of AVX-512, for all lanes."""
    everywhere, rounding = ir.Constant(i16, -1), ir.Constant(i32, _CURRENT)
    return call(b, f"llvm.x86.avx512.mask.{name}.ps.512", f32x16, [*operands, everywhere, rounding])


def _emit_weight(b: Builder, score: Value, factor: Value, bias: Value) -> Value:
    """2^(score · factor + bias); 0 and infinity where that is out of range; NaN stays NaN."""
    exponent = fused(b, score, factor, bias)
    fraction = _masked(b, "reduce", [exponent, ir.Constant(i32, _DOWN), every_lane(0.0)])
    value = every_lane(_POWER[0])
    for coefficient in _POWER[1:]:
        value = fused(b, value, fraction, every_lane(coefficient))
    return _masked(b, "scalef", [value, exponent, every_lane(0.0)])


def _emit_row(b: Builder, row: Value, factor: Value, state: list[Value], high: Value) -> Value:
    scores, biases, totals, old_totals, weights = state
    bias = spread(b, load_from(b, b.add(biases, b.mul(row, const(F32_BYTES))), f32, 4))
    here = b.add(scores, b.mul(row, const(SCORE_BYTES)))
    taken = [
        _emit_weight(b, load_from(b, offset(b, here, at), f32x16), factor, bias)
        for at in range(0, SCORE_BYTES, VECTOR_BYTES)
    ]
    both, to = ir.VectorType(bf16, 2 * LANES), b.add(weights, b.mul(row, const(WEIGHT_BYTES)))
    for at in range(0, len(taken), 2):
        pair = call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", both, [taken[at + 1], taken[at]])
        store_to(b, offset(b, to, at // 2 * VECTOR_BYTES), pair)
    four = b.fadd(b.fadd(taken[0], taken[1]), b.fadd(taken[2], taken[3]))
    of_row = b.mul(row, const(VECTOR_BYTES))
    total = load_from(b, b.add(totals, of_row), f32x16)
    store_to(b, b.add(old_totals, of_row), total)
    store_to(b, b.add(totals, of_row), b.fadd(total, four))
    # NaN is passed over: it does not hide another row.
    return emit_maximum(b, four, high)


def emit_row(b: Builder, row: Value, end: Value, factor: Value, state: list[Value], high: Value) -> Value:
    """`weigh`, where code is emitted, for one row, if it is before the `end`."""
    before, turn, after = b.block, b.append_basic_block("row"), b.append_basic_block("after_row")
    b.cbranch(b.icmp_signed("<", row, end), turn, after)
    b.position_at_end(turn)
    raised, last = _emit_row(b, row, factor, state, high), b.block
    b.branch(after)
    b.position_at_end(after)
    highest = b.phi(f32x16)
    highest.add_incoming(high, before)
    highest.add_incoming(raised, last)
    return highest


STATE: Final = (ADDRESS,) * 5
"""Of rows, what `weigh` needs: scores, biases, totals, what these were before, and weights."""


@instruction(F32x16, INT, F32x16, *STATE, F32x16)
def weigh_row(b: Builder, row: Value, factor: Value, *rest: Value) -> Value:
    """Weights of 64 keys for a row, and its new total → the largest of `high`, the last operand, and sums of 4."""
    *state, high = rest
    return _emit_row(b, row, factor, state, high)


@kernel
def weigh(
    first: int, end: int, factor: Any, scores: int, biases: int, totals: int, old_totals: int, weights: int, high: Any
) -> Any:
    """The same for rows `first` .. `end` - 1."""
    for row in range(first, end):
        high = weigh_row(row, factor, scores, biases, totals, old_totals, weights, high)
    return high


@kernel
def begin_tiled_rows(rows: int, biases: int, totals: int) -> None:
    """Rows that have seen no key."""
    for row in range(rows):
        put_f32(biases + row * F32_BYTES, _FIRST)
        store(F32, totals + row * VECTOR_BYTES, zeros())


class Weighed(NamedTuple):
    """Up to 16 rows whose weights are computed."""

    rows: int
    factor: Any
    scores: int
    biases: int
    totals: int
    old_totals: int
    weights: int


@kernel
def bias_of(largest: Any, factor: Any) -> Any:
    """What makes the weight of a row's largest score, lane by lane, about 1."""
    rounder = splat(np.float32(ROUNDER))
    return -max_lanes(subtract(fma(largest, factor, rounder), rounder))


@kernel
def first_biases(weighed: Any) -> None:
    """What `settle_rows` would make of rows that have seen no key, a third of the time of a prompt of 512."""
    for row in range(weighed.rows):
        largest = row_maximum(weighed.scores + row * SCORE_BYTES)
        if any_above(largest, splat(_SEEN)):
            put_f32(weighed.biases + row * F32_BYTES, bias_of(largest, weighed.factor))


@kernel
def settle_rows(weighed: Any, mixed: int, head_dim: int) -> None:
    """Weigh rows again whose weights are too large: the largest becomes 1, what was added up before shrinks.

    `weighed`: a `Weighed`. `mixed`: float32 [rows, head_dim].
    """
    scores, biases, totals, old_totals = weighed.scores, weighed.biases, weighed.totals, weighed.old_totals
    state, factor = (scores, biases, totals, old_totals, weighed.weights), weighed.factor
    limit = splat(LARGEST)
    for row in range(weighed.rows):
        store(F32, totals + row * VECTOR_BYTES, load(F32, old_totals + row * VECTOR_BYTES))
        high = weigh_row(row, factor, *state, zeros())
        if any_above(high, limit):
            new_bias = bias_of(row_maximum(scores + row * SCORE_BYTES), factor)
            shrink = power_of_two(splat(new_bias - get_f32(biases + row * F32_BYTES)))
            store(F32, totals + row * VECTOR_BYTES, multiply(load(F32, old_totals + row * VECTOR_BYTES), shrink))
            for at in range(row * head_dim * F32_BYTES, (row + 1) * head_dim * F32_BYTES, VECTOR_BYTES):
                store(F32, mixed + at, multiply(load(F32, mixed + at), shrink))
            put_f32(biases + row * F32_BYTES, new_bias)
            weigh_row(row, factor, *state, zeros())

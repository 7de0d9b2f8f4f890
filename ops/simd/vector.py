"""The SIMD language: vectors of 16 float32, and what kernels do with them.

    load store store_pair         16 elements at an address, converted from and to float32
    splat zeros                   the same value in every lane
    add subtract multiply divide fma maximum absolute exp power
    sum_lanes sum_f64 max_lanes first_lane
    any_above any_from keep_from  comparisons of lanes
    where_between                 lanes by their number
    even_lanes odd_lanes swapped  for pairs of lanes
    get_… put_… prefetch          one value in memory, a line of it

A kind of elements is named by a witness (`F32`, `BF16`, `Q8`), which a kernel takes as an argument; numba compiles the
kernel once for each. *Packed* memory has lanes of four bytes: one float32, two bfloat16 or eight codes of 4 bits that
are adjacent in the direction of a sum. `tiles` multiplies them.

Addresses are plain integers. They are made where tensors are handed over, and bounds are checked there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba.core import types

from headrace.ops.simd.instructions import (
    ADDRESS,
    BOOL,
    DOUBLE,
    ELEMENT,
    FLOAT,
    INT,
    LANES,
    NOTHING,
    Builder,
    F32x16,
    Value,
    bf16,
    call,
    const,
    every_int,
    every_lane,
    f32,
    f32x16,
    f64,
    fused,
    i8,
    i16,
    i16x16,
    i32,
    i32x16,
    i64,
    instruction,
    load_from,
    offset,
    shuffled,
    spread,
    store_to,
)
from headrace.ops.simd.target import host_features

F32: Final = np.float32(0)
BF16: Final = np.uint16(0)
"""numba has no bfloat16: its bits are."""
Q8: Final = np.int8(0)
"""Weights of 4 or 8 bits in groups of 32 along a sum, each with float32 scale and offset; activations are bfloat16."""

F32_BYTES: Final = 4
LANE_BYTES: Final = 4
VECTOR_BYTES: Final = LANES * LANE_BYTES

VALUE_BYTES: Final[dict[Any, int]] = {types.float32: 4, types.uint16: 2, types.int8: 1}


def is_bf16(element: Any) -> bool:
    return bool(element == types.uint16)


@instruction(INT, ELEMENT)
def value_bytes(b: Builder, element: Any) -> Value:
    """Bytes of one value."""
    return const(VALUE_BYTES[element])


@instruction(INT, ELEMENT)
def lane_values(b: Builder, element: Any) -> Value:
    """Values that a packed lane holds."""
    return const(LANE_BYTES // VALUE_BYTES[element])


# ---------------------------------------------------------------------------------------------------------------
# Memory


def emit_load(b: Builder, element: Any, address: Value) -> Value:
    if not is_bf16(element):
        return load_from(b, address, f32x16)
    wide = b.zext(load_from(b, address, i16x16), i32x16)
    return b.bitcast(b.shl(wide, every_int(16)), f32x16)


def emit_store(b: Builder, element: Any, address: Value, vector: Value) -> None:
    store_to(b, address, _as_bf16(b, vector) if is_bf16(element) else vector)


def _as_bf16(b: Builder, vector: Value) -> Value:
    """The upper half of each float32, rounded to nearest even."""
    if "avx512bf16" in host_features():
        return b.fptrunc(vector, ir.VectorType(bf16, LANES))
    # Elsewhere LLVM would call a function of the compiler's library for each value.
    bits = b.bitcast(vector, i32x16)
    odd = b.and_(b.lshr(bits, every_int(16)), every_int(1))
    rounded = b.lshr(b.add(bits, b.add(odd, every_int(0x7FFF))), every_int(16))
    nan = b.fcmp_unordered("uno", vector, vector)
    return b.trunc(b.select(nan, every_int(0x7FC0), rounded), i16x16)


@instruction(F32x16, ELEMENT, ADDRESS)
def load(b: Builder, element: Any, address: Value) -> Value:
    """16 adjacent values."""
    return emit_load(b, element, address)


@instruction(NOTHING, ELEMENT, ADDRESS, F32x16)
def store(b: Builder, element: Any, address: Value, vector: Value) -> None:
    """16 adjacent values, rounded to nearest even."""
    emit_store(b, element, address, vector)


@instruction(NOTHING, ELEMENT, ADDRESS, F32x16, F32x16)
def store_pair(b: Builder, element: Any, address: Value, first: Value, second: Value) -> None:
    """32 adjacent values, rounded to nearest even; in bfloat16 two vectors at once cost as much as one."""
    if is_bf16(element) and "avx512bf16" in host_features():
        both = ir.VectorType(bf16, 2 * LANES)
        store_to(b, address, call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", both, [second, first]))
        return
    emit_store(b, element, address, first)
    emit_store(b, element, offset(b, address, LANES * VALUE_BYTES[element]), second)


@instruction(FLOAT, ADDRESS)
def get_f32(b: Builder, address: Value) -> Value:
    return load_from(b, address, f32, 4)


@instruction(NOTHING, ADDRESS, FLOAT)
def put_f32(b: Builder, address: Value, value: Value) -> None:
    store_to(b, address, value, 4)


@instruction(INT, ADDRESS)
def get_i32(b: Builder, address: Value) -> Value:
    return b.sext(load_from(b, address, i32, 4), i64)


@instruction(NOTHING, ADDRESS, INT)
def put_i32(b: Builder, address: Value, value: Value) -> None:
    store_to(b, address, b.trunc(value, i32), 4)


@instruction(FLOAT, INT)
def as_f32(b: Builder, bits: Value) -> Value:
    """The float32 of the low 32 bits."""
    return b.bitcast(b.trunc(bits, i32), f32)


@instruction(ADDRESS, ADDRESS)
def get_address(b: Builder, address: Value) -> Value:
    return load_from(b, address, i64, 8)


@instruction(NOTHING, ADDRESS, ADDRESS)
def put_address(b: Builder, address: Value, value: Value) -> None:
    store_to(b, address, value, 8)


@instruction(NOTHING, ADDRESS, ADDRESS)
def copy_lane(b: Builder, to: Value, source: Value) -> None:
    """Four bytes."""
    store_to(b, to, load_from(b, source, i32))


@instruction(NOTHING, ELEMENT, ADDRESS, ADDRESS)
def copy_value(b: Builder, element: Any, to: Value, source: Value) -> None:
    """One value."""
    store_to(b, to, load_from(b, source, i16 if is_bf16(element) else i32))


@instruction(NOTHING, ADDRESS)
def put_zero_lane(b: Builder, to: Value) -> None:
    store_to(b, to, ir.Constant(i32, 0))


def emit_prefetch(b: Builder, address: Value) -> None:
    """A hint that the line at the address is read soon; harmless where there is none."""
    hints = [ir.Constant(i32, hint) for hint in (0, 3, 1)]
    call(b, "llvm.prefetch.p0", ir.VoidType(), [b.inttoptr(address, i8.as_pointer()), *hints])


@instruction(NOTHING, ADDRESS)
def prefetch(b: Builder, address: Value) -> None:
    emit_prefetch(b, address)


# ---------------------------------------------------------------------------------------------------------------
# Arithmetic


@instruction(F32x16, FLOAT)
def splat(b: Builder, value: Value) -> Value:
    return spread(b, value)


@instruction(F32x16)
def zeros(b: Builder) -> Value:
    return every_lane(0.0)


@instruction(F32x16, F32x16, F32x16)
def add(b: Builder, x: Value, y: Value) -> Value:
    return b.fadd(x, y)


@instruction(F32x16, F32x16, F32x16)
def subtract(b: Builder, x: Value, y: Value) -> Value:
    return b.fsub(x, y)


@instruction(F32x16, F32x16, F32x16)
def multiply(b: Builder, x: Value, y: Value) -> Value:
    return b.fmul(x, y)


@instruction(F32x16, F32x16, F32x16)
def divide(b: Builder, x: Value, y: Value) -> Value:
    return b.fdiv(x, y)


@instruction(F32x16, F32x16, F32x16, F32x16)
def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x · y + z, rounded once."""
    return fused(b, x, y, z)


def emit_maximum(b: Builder, x: Value, y: Value) -> Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@instruction(F32x16, F32x16, F32x16)
def maximum(b: Builder, x: Value, y: Value) -> Value:
    """The larger; `y` where either is NaN."""
    return emit_maximum(b, x, y)


@instruction(F32x16, F32x16)
def absolute(b: Builder, x: Value) -> Value:
    return call(b, "llvm.fabs.v16f32", f32x16, [x])


ROUNDER: Final = 1.5 * 2**23
"""Added to a float32 below 2^22 it leaves the nearest whole number in the low bits."""


@instruction(F32x16, F32x16)
def exp(b: Builder, x: Value) -> Value:
    """To 2e-7 of the value; 0 below -87 is 1e-38 here, above 88 it stays finite; NaN stays NaN.

    2^(n + f) with |f| ≤ 1/2: n goes into the exponent, 2^f is its Taylor polynomial of degree 6.
    """
    # Comparisons with NaN are false, so that NaN passes.
    x = b.select(b.fcmp_ordered("<", x, every_lane(-87.0)), every_lane(-87.0), x)
    x = b.select(b.fcmp_ordered(">", x, every_lane(88.0)), every_lane(88.0), x)
    shifted = fused(b, x, every_lane(1 / np.log(2)), every_lane(ROUNDER))
    n = b.fsub(shifted, every_lane(ROUNDER))
    # log 2 in two parts: the first has few digits, so that its product with n is exact.
    f = fused(b, n, every_lane(-0.693359375), x)
    f = fused(b, n, every_lane(2.12194440e-4), f)
    power = every_lane(1 / 720)
    for factorial in (120, 24, 6, 2, 1, 1):
        power = fused(b, power, f, every_lane(1 / factorial))
    exponent = b.shl(b.add(b.bitcast(shifted, i32x16), every_int(127)), every_int(23))
    return b.fmul(power, b.bitcast(exponent, f32x16))


_POWER: Final[dict[Any, tuple[float, ...]]] = {
    types.uint16: (5.51716685e-2, 0.242611125, 0.693260968, 0.999928057),
    types.float32: (1.32764724e-3, 9.67554096e-3, 5.55071309e-2, 0.240221202, 0.693146944, 1.00000012),
}
"""2^f for |f| ≤ 1/2, highest power first, with the least largest error there is (Remez): 7.5e-5 of the value, which is
a 26th of what rounding to bfloat16 may change, and 7.5e-8."""
_LEAST: Final = -125
"""The least whole part: the power's own exponent may be -1, and the sum of both stays normal."""


@instruction(F32x16, ELEMENT, F32x16, F32x16, F32x16)
def power(b: Builder, element: Any, x: Value, factor: Value, bias: Value) -> Value:
    """2^(x · factor - n), as exact as the element needs it, where `bias` is `ROUNDER` - n. Below 2^-125.5 it is 0;
    NaN stays NaN; from 2^127 on it is wrong.

    Its exponent is the whole part's, which the sum with `bias` has in its low bits.
    """
    shifted = fused(b, x, factor, bias)
    f = fused(b, x, factor, b.fneg(b.fsub(shifted, bias)))
    first, *others = _POWER[element]
    value = every_lane(first)
    for coefficient in others:
        value = fused(b, value, f, every_lane(coefficient))
    exponent = b.shl(b.bitcast(shifted, i32x16), every_int(23))
    scaled = b.add(b.bitcast(value, i32x16), exponent)
    # Whole numbers, so that the comparison is one of the exponent; it is false for NaN, which passes.
    none = b.fcmp_ordered("<", shifted, every_lane(ROUNDER + _LEAST))
    return b.bitcast(b.select(none, every_int(0), scaled), f32x16)


@instruction(F32x16, F32x16)
def power_of_two(b: Builder, n: Value) -> Value:
    """2^n for whole numbers up to 127; 0 below -126."""
    n = emit_maximum(b, n, every_lane(-127.0))
    return b.bitcast(b.shl(b.add(b.fptosi(n, i32x16), every_int(127)), every_int(23)), f32x16)


# ---------------------------------------------------------------------------------------------------------------
# Across lanes


def folded(b: Builder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """All lanes combined as a tree: halves first, then their halves. The order is the same on every machine."""
    for half in (8, 4, 2, 1):
        x = combine(x, shuffled(b, x, [(lane + half) % LANES for lane in range(LANES)]))
    return b.extract_element(x, ir.Constant(i32, 0))


@instruction(FLOAT, F32x16)
def sum_lanes(b: Builder, x: Value) -> Value:
    return folded(b, x, b.fadd)


@instruction(FLOAT, F32x16)
def max_lanes(b: Builder, x: Value) -> Value:
    return folded(b, x, lambda left, right: emit_maximum(b, left, right))


@instruction(FLOAT, F32x16)
def first_lane(b: Builder, x: Value) -> Value:
    return b.extract_element(x, ir.Constant(i32, 0))


@instruction(BOOL, F32x16, F32x16)
def any_above(b: Builder, x: Value, limit: Value) -> Value:
    """Whether a lane of `x` is larger than `limit`'s."""
    return b.icmp_unsigned("!=", b.bitcast(b.fcmp_ordered(">", x, limit), i16), ir.Constant(i16, 0))


@instruction(BOOL, F32x16, F32x16)
def any_from(b: Builder, x: Value, limit: Value) -> Value:
    """Whether a lane of `x` is not below `limit`'s."""
    return b.icmp_unsigned("!=", b.bitcast(b.fcmp_ordered(">=", x, limit), i16), ir.Constant(i16, 0))


@instruction(F32x16, F32x16, F32x16, F32x16)
def keep_from(b: Builder, x: Value, limit: Value, value: Value) -> Value:
    """`value` where `x` is not below `limit`, 0 elsewhere."""
    return b.select(b.fcmp_ordered(">=", x, limit), value, every_lane(0.0))


@instruction(DOUBLE, F32x16, F32x16, F32x16, F32x16)
def sum_f64(b: Builder, w: Value, x: Value, y: Value, z: Value) -> Value:
    """All lanes of four vectors, added up in float64."""
    wide = [b.fpext(vector, ir.VectorType(f64, LANES)) for vector in (w, x, y, z)]
    return folded(b, b.fadd(b.fadd(wide[0], wide[1]), b.fadd(wide[2], wide[3])), b.fadd)


@instruction(F32x16, INT, INT, F32x16, F32x16)
def where_between(b: Builder, first: Value, end: Value, inside: Value, outside: Value) -> Value:
    """`inside` in lanes first .. end - 1, `outside` in the others; the bounds may lie beyond the lanes."""
    lanes = ir.Constant(i32x16, list(range(LANES)))
    from_first = b.icmp_signed(">=", lanes, spread(b, b.trunc(first, i32)))
    to_end = b.icmp_signed("<", lanes, spread(b, b.trunc(end, i32)))
    return b.select(b.and_(from_first, to_end), inside, outside)


@instruction(F32x16, F32x16)
def even_lanes(b: Builder, x: Value) -> Value:
    """0 0 2 2 4 4 …"""
    return shuffled(b, x, [lane & ~1 for lane in range(LANES)])


@instruction(F32x16, F32x16)
def odd_lanes(b: Builder, x: Value) -> Value:
    """-1 1 -3 3 -5 5 …: each odd lane in its pair, negative first."""
    signs = ir.Constant(f32x16, [-1.0, 1.0] * (LANES // 2))
    return b.fmul(shuffled(b, x, [lane | 1 for lane in range(LANES)]), signs)


@instruction(F32x16, F32x16)
def swapped(b: Builder, x: Value) -> Value:
    """1 0 3 2 5 4 …"""
    return shuffled(b, x, [lane ^ 1 for lane in range(LANES)])

"""What a matrix product takes: rows in groups of 32 values, in the form of the weights' elements.

    F32   32 float32
    BF16  32 bfloat16
    Q8    32 int8, their float32 scale (the largest magnitude / 127), and -128 · their sum as int32

The last number makes up for the weights of Q8, which are stored as unsigned bytes, 128 too high: x86's dot product
multiplies unsigned by signed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba.core import types

from headrace.ops.simd.instructions import (
    ADDRESS,
    ELEMENT,
    INT,
    LANES,
    NOTHING,
    Builder,
    F32x16,
    Value,
    call,
    const,
    every_int,
    every_lane,
    f32,
    f32x16,
    i8x16,
    i16,
    i32,
    i32x16,
    instruction,
    offset,
    spread,
    store_to,
)
from headrace.ops.simd.vector import ROUNDER, VALUE_BYTES, emit_maximum, emit_store, folded

GROUP: Final = 32
Q8_GROUP_BYTES: Final = GROUP + 8


def input_bytes(element: Any) -> int:
    """Bytes of a group, by the element's numba type."""
    return Q8_GROUP_BYTES if element == types.int8 else GROUP * VALUE_BYTES[element]


@instruction(INT, ELEMENT)
def group_bytes(b: Builder, element: Any) -> Value:
    """Bytes of a group of inputs."""
    return const(input_bytes(element))


@instruction(NOTHING, ELEMENT, ADDRESS, F32x16, F32x16)
def store_group(b: Builder, element: Any, address: Value, low: Value, high: Value) -> None:
    """32 values, as inputs of products with weights of these elements."""
    if element != types.int8:
        emit_store(b, element, address, low)
        emit_store(b, element, offset(b, address, LANES * VALUE_BYTES[element]), high)
        return
    largest = folded(b, _magnitude(b, low, high), lambda x, y: emit_maximum(b, x, y))
    scale = b.fmul(largest, ir.Constant(f32, float(np.float32(1 / 127))))
    empty = b.fcmp_ordered("==", scale, ir.Constant(f32, 0.0))
    inverse = b.select(empty, ir.Constant(f32, 0.0), b.fdiv(ir.Constant(f32, 1.0), scale))
    broken = b.icmp_unsigned("!=", b.bitcast(b.fcmp_unordered("uno", low, high), i16), ir.Constant(i16, 0))
    total = ir.Constant(i32, 0)
    for at, half in enumerate((low, high)):
        whole = _rounded(b, b.fmul(half, spread(b, inverse)))
        store_to(b, offset(b, address, at * LANES), b.trunc(whole, i8x16))
        total = b.add(total, call(b, "llvm.vector.reduce.add.v16i32", i32, [whole]))
    # A row with a NaN must end as NaN: an int8 can't say so, the scale can.
    store_to(b, offset(b, address, GROUP), b.select(broken, ir.Constant(f32, float("nan")), scale))
    store_to(b, offset(b, address, GROUP + 4), b.mul(total, ir.Constant(i32, -128)))


def _magnitude(b: Builder, low: Value, high: Value) -> Value:
    return emit_maximum(b, *(call(b, "llvm.fabs.v16f32", f32x16, [half]) for half in (low, high)))


def _rounded(b: Builder, x: Value) -> Value:
    """The nearest whole numbers, ties to even, as int32."""
    shifted = b.fadd(x, every_lane(ROUNDER))
    return b.sub(b.bitcast(shifted, i32x16), every_int(ROUNDER_BITS))


ROUNDER_BITS: Final = 0x4B400000
"""Of `ROUNDER` as a float32."""

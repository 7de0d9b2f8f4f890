"""What a matrix product takes: rows in groups of 32 values, in the form of the weights' elements.

    F32   [in] float32
    BF16  [in] bfloat16
    Q8    [in] bfloat16; where there are no tiles (AMX), then float32 [in / 32]: the sum of each group; and nothing, up
          to a whole line of 64 bytes

`in` is filled up with zeros to whole groups. Weights of Q8 are code · scale + offset in a group: the sum is what the
offset is multiplied with. In tiles they are bfloat16 by then (`amx_q8`).
"""

from __future__ import annotations

from typing import Any, Final

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
    const,
    instruction,
    offset,
    store_to,
)
from headrace.ops.simd.target import AMX
from headrace.ops.simd.vector import F32_BYTES, VALUE_BYTES, VECTOR_BYTES, emit_load, emit_store, folded

GROUP: Final = 32
Q8_VALUES_BYTES: Final = GROUP * VALUE_BYTES[types.uint16]
"""Of a group's values in Q8."""


def q8_row_bytes(width: int) -> int:
    """From a row of `width` values to the next."""
    used = -(-width // GROUP) * (Q8_VALUES_BYTES + (0 if AMX else F32_BYTES))
    return -(-used // VECTOR_BYTES) * VECTOR_BYTES


@instruction(NOTHING, ELEMENT, ADDRESS, INT, INT, F32x16, F32x16)
def store_group(b: Builder, element: Any, row: Value, group: Value, groups: Value, low: Value, high: Value) -> None:
    """32 values, as group number `group` of so many in a row of inputs for weights of these elements."""
    kept = types.uint16 if element == types.int8 else element
    size = VALUE_BYTES[kept]
    address = b.add(row, b.mul(group, const(GROUP * size)))
    emit_store(b, kept, address, low)
    emit_store(b, kept, offset(b, address, LANES * size), high)
    if element == types.int8 and not AMX:
        halves = [emit_load(b, kept, offset(b, address, at)) for at in (0, LANES * size)]
        sums = b.add(row, b.mul(groups, const(Q8_VALUES_BYTES)))
        store_to(b, b.add(sums, b.mul(group, const(F32_BYTES))), folded(b, b.fadd(*halves), b.fadd))

"""What a matrix product takes: rows in groups of 32 values, in the form of the weights' elements.

    F32   32 float32
    BF16  32 bfloat16
    Q8    32 bfloat16, and their sum as a float32

Weights of Q8 are code · scale + offset in a group: the sum is what the offset is multiplied with.
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
from headrace.ops.simd.vector import VALUE_BYTES, emit_load, emit_store, folded

GROUP: Final = 32
Q8_GROUP_BYTES: Final = GROUP * 2 + 4


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
    kept = types.uint16 if element == types.int8 else element
    emit_store(b, kept, address, low)
    emit_store(b, kept, offset(b, address, LANES * VALUE_BYTES[kept]), high)
    if element == types.int8:
        halves = [emit_load(b, kept, offset(b, address, at)) for at in (0, LANES * VALUE_BYTES[kept])]
        store_to(b, offset(b, address, GROUP * VALUE_BYTES[kept]), folded(b, b.fadd(*halves), b.fadd))

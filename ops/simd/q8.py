"""Products with weights of q8: codes of 4 bits in groups of 32 along the sum, each group with scales and offsets.

A code is read as the bfloat16 16 + code, which is exact: its bits are those of 16 and the code itself. The products of
a group are summed; then the sum is scaled, and the sum of the inputs times the offset is added. Codes of 8 bits are two
planes of a group, the high halves first.

For more rows than a register tile has, the codes of 64 columns are unpacked once, `PIECE_PLANES` planes at a time, into
a buffer that stays in the second cache. `amx_q8` multiplies in AMX tiles, `q8_products` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from numba.core import types

from headrace.ops.simd.inputs import GROUP, Q8_VALUES_BYTES
from headrace.ops.simd.instructions import (
    ADDRESS,
    INT,
    LANES,
    NOTHING,
    Builder,
    Value,
    by_case,
    const,
    every_int,
    every_lane,
    f32,
    f32x16,
    fused,
    i32,
    i32x16,
    instruction,
    load_from,
    loop,
    offset,
    spread,
    store_to,
)
from headrace.ops.simd.tiles import HEIGHTS, PANELS, Sums, addresses, dot, keep, panels_at_once
from headrace.ops.simd.vector import F32_BYTES, LANE_BYTES, VECTOR_BYTES, emit_prefetch

CODE_VECTORS: Final = 4
"""Vectors of codes in a plane of a panel."""
PAIRS: Final = 4
"""Pairs of codes in a lane."""
Q8_WEIGHT_BYTES: Final = GROUP // 2 * LANES + 2 * VECTOR_BYTES
"""A plane of a panel: 4 lanes of 16 columns with 8 codes each, 16 float32 scales, and 16 offsets."""
SCALES: Final = CODE_VECTORS * VECTOR_BYTES
CODE_SHIFTS: Final = (3, -1, -5, -9)
"""To the left, for each of a lane's four pairs of codes: to where bfloat16 has the highest bits of its fraction."""

PIECE_PLANES: Final = 32
"""An even number: both planes of a group of 8 bits."""
UNPACKED_BYTES: Final = CODE_VECTORS * PAIRS * VECTOR_BYTES
"""Of a plane of a panel: bfloat16 [16, 16, 2], a tile's right side."""
PIECE_BYTES: Final = PIECE_PLANES * UNPACKED_BYTES


def _pair_of_codes(b: Builder, lanes: Value, number: int) -> Value:
    """Two codes of each lane as bfloat16: 16 + code."""
    by = CODE_SHIFTS[number]
    moved = b.shl(lanes, every_int(by)) if by > 0 else b.lshr(lanes, every_int(-by))
    return b.or_(b.and_(moved, every_int(0x00780078)), every_int(0x41804180))


def _accumulate(
    b: Builder,
    planes: Value,
    in_two: Value,
    rows: Sequence[Value],
    sums_at: Value,
    panels: Sequence[Value],
    unpacked: Sequence[Value],
    start: Sums,
) -> Sums:
    """`start` + the sum over `planes`; `in_two`: 1 where a group has two.

    `rows`: the inputs; their groups' sums lie `sums_at` bytes further. `unpacked`: what `panels` hold, or nothing.
    """

    def body(k: Value, flat: list[Value]) -> list[Value]:
        group = b.lshr(k, in_two)
        panel_at = b.mul(k, const(Q8_WEIGHT_BYTES))
        here = [b.add(row, b.mul(group, const(Q8_VALUES_BYTES))) for row in rows]
        beside = [b.add(panel, panel_at) for panel in panels]
        ready = [b.add(panel, b.mul(k, const(UNPACKED_BYTES))) for panel in unpacked]
        sums = [[every_lane(0.0)] * len(panels) for _ in rows]
        for lane in range(CODE_VECTORS):
            codes = [] if unpacked else [load_from(b, offset(b, at, lane * VECTOR_BYTES), i32x16) for at in beside]
            for pair in range(PAIRS):
                number = PAIRS * lane + pair
                weights = [load_from(b, offset(b, at, number * VECTOR_BYTES), i32x16) for at in ready]
                weights += [_pair_of_codes(b, lanes, pair) for lanes in codes]
                for at, row in enumerate(here):
                    inputs = spread(b, load_from(b, offset(b, row, number * LANE_BYTES), i32))
                    sums[at] = [dot(b, types.uint16, total, inputs, two) for total, two in zip(sums[at], weights)]
        scales, offsets = (
            [load_from(b, offset(b, at, SCALES + part * VECTOR_BYTES), f32x16) for at in beside] for part in (0, 1)
        )
        totals = []
        for at, row in enumerate(rows):
            whole_at = b.add(b.add(row, sums_at), b.mul(group, const(F32_BYTES)))
            whole = spread(b, load_from(b, whole_at, f32))
            for panel in range(len(panels)):
                before = fused(b, whole, offsets[panel], flat[at * len(panels) + panel])
                totals.append(fused(b, sums[at][panel], scales[panel], before))
        return totals

    flat = loop(b, planes, [total for row in start for total in row], body)
    return [flat[at : at + len(panels)] for at in range(0, len(flat), len(panels))]


@instruction(NOTHING, INT, INT, ADDRESS, INT, INT, ADDRESS, ADDRESS, INT, INT, INT, ADDRESS, INT)
def groups_tile(
    b: Builder,
    going_on: Value,
    rows: Value,
    x: Value,
    x_bytes: Value,
    sums_at: Value,
    weights: Value,
    unpacked: Value,
    panel_bytes: Value,
    planes: Value,
    in_two: Value,
    out: Value,
    out_bytes: Value,
) -> None:
    """1 to 6 rows times 64 columns → float32, added to what is there if `going_on`.

    `unpacked`: 0 if the panels are not; if they are, there are 3 rows or more.
    """

    def emit(height: int, ready: bool) -> None:
        inputs, outputs = addresses(b, x, x_bytes, height), addresses(b, out, out_bytes, height)
        # A sum is two: of the group, and of all groups before it.
        width = panels_at_once(height, registers=2)
        for first in range(0, PANELS, width):
            panels = [b.add(weights, b.mul(panel_bytes, const(first + at))) for at in range(width)]
            pieces = [offset(b, unpacked, (first + at) * PIECE_BYTES) for at in range(width)] if ready else []
            start = [_so_far(b, going_on, offset(b, row, first * VECTOR_BYTES), width) for row in outputs]
            keep(b, _accumulate(b, planes, in_two, inputs, sums_at, panels, pieces, start), outputs, first)

    with b.if_else(b.icmp_signed("==", unpacked, const(0))) as (packed, ready):
        with packed:
            by_case(b, rows, HEIGHTS, lambda height: emit(height, False))
        with ready:
            by_case(b, rows, HEIGHTS[2:], lambda height: emit(height, True))


def _so_far(b: Builder, going_on: Value, address: Value, vectors: int) -> list[Value]:
    """What lies at the address, or zeros."""
    there = [load_from(b, offset(b, address, at * VECTOR_BYTES), f32x16) for at in range(vectors)]
    used = b.icmp_signed("!=", going_on, const(0))
    return [b.select(used, vector, every_lane(0.0)) for vector in there]


@instruction(NOTHING, ADDRESS, ADDRESS, INT, ADDRESS)
def unpack(b: Builder, panel: Value, ahead: Value, planes: Value, to: Value) -> None:
    """Planes of a panel as bfloat16; meanwhile those at `ahead` come to the cache."""

    def body(k: Value, carried: list[Value]) -> list[Value]:
        at, into = b.mul(k, const(Q8_WEIGHT_BYTES)), b.add(to, b.mul(k, const(UNPACKED_BYTES)))
        source = b.add(panel, at)
        for line in range(0, Q8_WEIGHT_BYTES, VECTOR_BYTES):
            emit_prefetch(b, offset(b, b.add(ahead, at), line))
        for lane in range(CODE_VECTORS):
            codes = load_from(b, offset(b, source, lane * VECTOR_BYTES), i32x16)
            for pair in range(PAIRS):
                store_to(b, offset(b, into, (PAIRS * lane + pair) * VECTOR_BYTES), _pair_of_codes(b, codes, pair))
        return carried

    loop(b, planes, [], body)

"""Products with weights of q8 on a CPU without tiles, for any number of rows."""

from __future__ import annotations

from headrace.ops.simd.inputs import Q8_VALUES_BYTES
from headrace.ops.simd.instructions import kernel
from headrace.ops.simd.q8 import PIECE_BYTES, PIECE_PLANES, Q8_WEIGHT_BYTES, groups_tile, unpack
from headrace.ops.simd.tiles import MAX_ROWS, PANELS, tile_height
from headrace.ops.simd.vector import F32_BYTES


@kernel
def multiply_groups(
    x: int,
    x_bytes: int,
    rows: int,
    weights: int,
    following: int,
    panel_bytes: int,
    groups: int,
    out: int,
    out_bytes: int,
    buffer: int,
) -> None:
    """`rows` rows times a tile of 64 columns → float32; `following`: the columns that this thread takes next.

    `panel_bytes`: of `groups` of one or two planes. `buffer`: 64 columns' `PIECE_BYTES` of this thread.
    """
    all_planes = panel_bytes // Q8_WEIGHT_BYTES
    in_two = 1 if all_planes > groups else 0
    sums_at = groups * Q8_VALUES_BYTES
    if rows <= MAX_ROWS:
        groups_tile(0, rows, x, x_bytes, sums_at, weights, 0, panel_bytes, all_planes, in_two, out, out_bytes)
        return
    for first in range(0, all_planes, PIECE_PLANES):
        planes, group, before = min(PIECE_PLANES, all_planes - first), first >> in_two, first * Q8_WEIGHT_BYTES
        here, inputs = weights + before, x + group * Q8_VALUES_BYTES
        further = sums_at - group * (Q8_VALUES_BYTES - F32_BYTES)
        for panel in range(PANELS):
            at = panel * panel_bytes
            unpack(here + at, following + before + at, planes, buffer + panel * PIECE_BYTES)
        row = 0
        while row < rows:
            height, of, to = tile_height(rows - row), inputs + row * x_bytes, out + row * out_bytes
            groups_tile(first, height, of, x_bytes, further, here, buffer, panel_bytes, planes, in_two, to, out_bytes)
            row += height

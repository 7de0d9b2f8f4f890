"""Products of rows of bfloat16 with packed weights in AMX tiles: 64 columns at a time, or 32.

    up to 16 rows   4 totals, one for each panel of 16 columns; or 2
    more            4 totals, of 32 rows (twice 16) times 2 panels, which stay in the first cache (36 kB where a sum has
                    576 places) while all rows of a block pass: a turn of the loop loads 4 tiles for 4 dots

32 rows are two tiles that overlap where there are fewer: the rows in both are computed twice, to the same bits. So
tiles have as many rows as the whole product, or 16, and are shaped once for all of it (`products.begin_products`).

A turn's tile loads stand between its dots: all of them before the dots, a fifth fewer operations a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.ops.simd.amx import (
    TILE_BYTES,
    TILE_ROW_BYTES,
    TILE_ROWS,
    emit_dot,
    emit_load_tile,
    emit_store_tile,
    emit_zero,
)
from headrace.ops.simd.instructions import (
    ADDRESS,
    INT,
    NOTHING,
    Builder,
    Value,
    by_case,
    const,
    instruction,
    kernel,
    loop,
    offset,
)
from headrace.ops.simd.target import AMX
from headrace.ops.simd.tiles import PANELS
from headrace.ops.simd.vector import LANE_BYTES, VECTOR_BYTES, emit_prefetch

PASS_ROWS: Final = 2 * TILE_ROWS
PASS_PANELS: Final = 2
_TILE_LINES: Final = TILE_BYTES // VECTOR_BYTES
_LEFT: Final = (4, 5)
_RIGHT: Final = (6, 7)
_FETCHED_LINES: Final = (32, 16, 8, 4)
"""Lines of the next two panels that a turn brings to the cache, where 1, 2, 4 or more passes share them."""


def _emit_totals(
    b: Builder,
    going_on: Value,
    steps: Value,
    lefts: Sequence[Value],
    x_bytes: Value,
    rights: Sequence[Value],
    ahead: Sequence[Value],
    lines: int,
    outs: Sequence[Value],
    out_bytes: Value,
) -> None:
    """All of `lefts`, tiles of rows, times all of `rights`, panels; added to what is there if `going_on`. `lines`: to
    fetch in a turn, from each of `ahead` on."""
    totals = [(row, panel) for row in range(len(lefts)) for panel in range(len(rights))]
    places = [offset(b, outs[row], panel * VECTOR_BYTES) for row, panel in totals]
    with b.if_else(b.icmp_signed("==", going_on, const(0))) as (anew, further):
        with anew:
            for total in range(len(totals)):
                emit_zero(b, total)
        with further:
            for total, place in enumerate(places):
                emit_load_tile(b, total, place, out_bytes)

    def turn(k: Value, carried: list[Value]) -> list[Value]:
        left_at, right_at = b.mul(k, const(TILE_ROW_BYTES)), b.mul(k, const(TILE_BYTES))
        firsts = [b.add(address, b.mul(k, const(lines * VECTOR_BYTES))) for address in ahead]
        # The panels' lines in turns: memory reads 5 % faster than from one panel after the other.
        for line in range(lines):
            for first in firsts:
                emit_prefetch(b, offset(b, first, line * VECTOR_BYTES))
        loaded = set[int]()
        for total, (row, panel) in enumerate(totals):
            left, right = _LEFT[row], _RIGHT[panel % PASS_PANELS]
            if panel == 0:
                emit_load_tile(b, left, b.add(lefts[row], left_at), x_bytes)
            if panel not in loaded:
                emit_load_tile(b, right, b.add(rights[panel], right_at), const(TILE_ROW_BYTES))
                loaded.add(panel)
            emit_dot(b, total, left, right)
        return carried

    loop(b, b.udiv(steps, const(TILE_ROW_BYTES // LANE_BYTES)), [], turn)
    for total, place in enumerate(places):
        emit_store_tile(b, total, place, out_bytes)


@instruction(NOTHING, INT, INT, ADDRESS, INT, ADDRESS, ADDRESS, INT, INT, ADDRESS, INT)
def _few_rows(
    b: Builder,
    going_on: Value,
    panels: Value,
    x: Value,
    x_bytes: Value,
    weights: Value,
    ahead: Value,
    panel_bytes: Value,
    steps: Value,
    out: Value,
    out_bytes: Value,
) -> None:
    """As many rows as tiles have, times 2 or 4 panels → float32."""

    def emit(count: int) -> None:
        rights, later = (
            [b.add(first, b.mul(panel_bytes, const(panel))) for panel in range(count)] for first in (weights, ahead)
        )
        _emit_totals(b, going_on, steps, [x], x_bytes, rights, later, _TILE_LINES, [out], out_bytes)

    if AMX:
        by_case(b, panels, (PASS_PANELS, PANELS), emit)


@instruction(NOTHING, INT, INT, ADDRESS, INT, ADDRESS, ADDRESS, INT, INT, INT, ADDRESS, INT)
def _pass(
    b: Builder,
    going_on: Value,
    rows: Value,
    x: Value,
    x_bytes: Value,
    weights: Value,
    ahead: Value,
    lines: Value,
    panel_bytes: Value,
    steps: Value,
    out: Value,
    out_bytes: Value,
) -> None:
    """16 to 32 rows times 2 panels → float32. `ahead`: where the lines begin that a turn fetches `lines` of."""
    if AMX:
        second = b.sub(rows, const(TILE_ROWS))
        lefts = [x, b.add(x, b.mul(second, x_bytes))]
        outs = [out, b.add(out, b.mul(second, out_bytes))]
        rights = [weights, b.add(weights, panel_bytes)]

        def emit(count: int) -> None:
            _emit_totals(b, going_on, steps, lefts, x_bytes, rights, [ahead], count, outs, out_bytes)

        by_case(b, lines, _FETCHED_LINES, emit)


@kernel
def multiply_in_tiles(
    going_on: bool,
    panels: int,
    x: int,
    x_bytes: int,
    rows: int,
    weights: int,
    following: int,
    panel_bytes: int,
    steps: int,
    out: int,
    out_bytes: int,
) -> None:
    """`rows` rows times 2 or 4 panels of columns → float32, added to what is there if `going_on`; `following`: what
    this thread reads next.

    `steps`: lanes along the sum, a multiple of 16. Tiles have their shapes: of `rows` rows, or of 16.
    """
    if rows <= TILE_ROWS:
        _few_rows(going_on, panels, x, x_bytes, weights, following, panel_bytes, steps, out, out_bytes)
        return
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    lines = 32 if passes == 1 else 16 if passes == 2 else 8 if passes <= 4 else 4
    fetched_bytes = lines * VECTOR_BYTES * (steps // TILE_ROWS)
    for pair in range(panels // PASS_PANELS):
        columns = weights + pair * PASS_PANELS * panel_bytes
        ahead = columns + PASS_PANELS * panel_bytes if (pair + 1) * PASS_PANELS < panels else following
        row = 0
        while row < rows:
            left = rows - row
            # 16 or more are always left: tiles have so many rows.
            height = left if left <= PASS_ROWS else TILE_ROWS if left < PASS_ROWS + TILE_ROWS else PASS_ROWS
            to = out + row * out_bytes + pair * PASS_PANELS * VECTOR_BYTES
            _pass(
                going_on, height, x + row * x_bytes, x_bytes, columns, ahead, lines, panel_bytes, steps, to, out_bytes
            )
            row, ahead = row + height, ahead + fetched_bytes

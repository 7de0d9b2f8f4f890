"""Products with weights of q8 in AMX tiles: codes become bfloat16 on their way there, and are then like any weights.

A weight is bfloat16(scale · code + minimum), rounded once and to nearest even from the float32 that a fused
multiplication and addition gives: of blocks that are kept as they are the very number that the bfloat16 mode holds, as
scale · code is exact in float32, so that products have its bits. Two vectors of weights become one of a tile's right
side, which holds places 2k and 2k + 1 of 16 columns side by side. So codes lie as the weights will, a group of 32
places of a panel after the other:

    4 bits  bytes [2, 2, 8, 2, 4]   rows 0..3 or 4..7, half of the columns, column, place, row: the code of this row of
                                    the tile in a byte's low half, that of the row 8 further in its high half
    8 bits  bytes [16, 16, 2]       row, column, place
    then    float32 [2, 16]         scales, minimums

16 weights take a shift, the code's number from a table (which looks at 4 bits only, so nothing is masked), a
multiplication with addition, and half of a conversion of two vectors.

    up to 32 rows   codes pass by once: a group of a panel is decoded while tiles multiply the one `DISTANCE` before it,
                    and its weights never leave the first cache; four panels take turns, which memory reads faster, or
                    two where rows take two tiles
    more            64 columns are decoded once, into a buffer in the second cache, `PIECE_GROUPS` at a time; then
                    all rows pass, as `amx_products` has it
"""

from __future__ import annotations

from typing import Final

from llvmlite import ir

from headrace.ops.simd.amx import (
    TILE_BYTES,
    TILE_ROW_BYTES,
    TILE_ROWS,
    emit_dot,
    emit_load_tile,
    emit_store_tile,
    emit_zero,
)
from headrace.ops.simd.amx_products import PASS_PANELS, PASS_ROWS, multiply_in_tiles
from headrace.ops.simd.instructions import (
    ADDRESS,
    INT,
    LANES,
    NOTHING,
    Builder,
    Value,
    bf16,
    by_case,
    call,
    const,
    every_int,
    f32x16,
    fused,
    i8x16,
    i32x16,
    instruction,
    kernel,
    load_from,
    offset,
    part,
    shuffled,
    store_to,
)
from headrace.ops.simd.target import AMX
from headrace.ops.simd.tiles import PANELS
from headrace.ops.simd.vector import VECTOR_BYTES, emit_prefetch

_NUMBERS_BYTES: Final = 2 * VECTOR_BYTES
FOUR_BITS_BYTES: Final = 4 * VECTOR_BYTES + _NUMBERS_BYTES
EIGHT_BITS_BYTES: Final = 8 * VECTOR_BYTES + _NUMBERS_BYTES
"""Of a group of a panel."""

PIECE_GROUPS: Final = 64
"""Of 32 places: the weights of 64 columns take 256 kB, an eighth of the second cache."""
PIECE_BYTES: Final = PANELS * PIECE_GROUPS * TILE_BYTES
DISTANCE: Final = 2
"""Groups from the one that is decoded to the one that is multiplied: a tile can't be loaded before what was stored for
it has reached the cache."""
_RING: Final = 4
"""Groups in the buffer: a power of two."""
_LEFT: Final = (4, 5)
_RIGHT: Final = 6


@instruction(NOTHING, ADDRESS, ADDRESS, ADDRESS)
def _decode_four_bits(b: Builder, group: Value, ahead: Value, to: Value) -> None:
    """A group of a panel → a tile's right side; a group at `ahead` comes to the cache meanwhile."""
    if not AMX:
        return
    table = ir.Constant(f32x16, [float(code) for code in range(LANES)])
    scales, minimums = _numbers(b, offset(b, group, FOUR_BITS_BYTES - _NUMBERS_BYTES))
    for quarter in range(2):
        at = [offset(b, group, (2 * quarter + half) * VECTOR_BYTES) for half in range(2)]
        codes = [load_from(b, address, i32x16) for address in at]
        for digit in range(8):
            _fetch(b, ahead, 8 * quarter + digit, FOUR_BITS_BYTES)
            row = 4 * quarter + digit // 2 + 8 * (digit % 2)
            indices = [b.lshr(lanes, every_int(4 * digit)) if digit else lanes for lanes in codes]
            found = [call(b, "llvm.x86.avx512.permvar.sf.512", f32x16, [table, index]) for index in indices]
            _store_row(b, found, scales, minimums, offset(b, to, row * TILE_ROW_BYTES))


@instruction(NOTHING, ADDRESS, ADDRESS, ADDRESS)
def _decode_eight_bits(b: Builder, group: Value, ahead: Value, to: Value) -> None:
    """The same."""
    if not AMX:
        return
    scales, minimums = _numbers(b, offset(b, group, EIGHT_BITS_BYTES - _NUMBERS_BYTES))
    for row in range(TILE_ROWS):
        _fetch(b, ahead, row, EIGHT_BITS_BYTES)
        at = [offset(b, group, (2 * row + half) * LANES) for half in range(2)]
        found = [b.sitofp(b.zext(load_from(b, address, i8x16), i32x16), f32x16) for address in at]
        _store_row(b, found, scales, minimums, offset(b, to, row * TILE_ROW_BYTES))


def _numbers(b: Builder, address: Value) -> list[list[Value]]:
    """Scales and minimums, each for the first and the last 8 columns, twice for each column."""
    vectors = [load_from(b, offset(b, address, part * VECTOR_BYTES), f32x16) for part in range(2)]
    return [
        [shuffled(b, vector, [8 * half + lane // 2 for lane in range(LANES)]) for half in range(2)]
        for vector in vectors
    ]


def _fetch(b: Builder, ahead: Value, row: int, size_bytes: int) -> None:
    """A line of `ahead`, as long as there are any: they come one by one."""
    if row * VECTOR_BYTES < size_bytes:
        emit_prefetch(b, offset(b, ahead, row * VECTOR_BYTES))


def _store_row(b: Builder, codes: list[Value], scales: list[Value], minimums: list[Value], to: Value) -> None:
    first, second = (fused(b, code, scale, minimum) for code, scale, minimum in zip(codes, scales, minimums))
    both = ir.VectorType(bf16, 2 * LANES)
    store_to(b, to, call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", both, [second, first]))


@kernel
def _decode(group_bytes: int, group: int, ahead: int, to: int) -> None:
    if group_bytes == FOUR_BITS_BYTES:
        _decode_four_bits(group, ahead, to)
    else:
        _decode_eight_bits(group, ahead, to)


@instruction(NOTHING)
def _clear_totals(b: Builder) -> None:
    if AMX:
        for total in range(PANELS):
            emit_zero(b, total)


@instruction(NOTHING, INT, ADDRESS, INT, INT, ADDRESS)
def _add_products(b: Builder, panel: Value, x: Value, x_bytes: Value, second: Value, weights: Value) -> None:
    """The panel's total += 32 places of the rows at `x`; and that of those `second` bytes further, of a pair of panels,
    where that is not 0."""

    def emit(here: int) -> None:
        emit_load_tile(b, _LEFT[0], x, x_bytes)
        emit_load_tile(b, _RIGHT, weights, const(TILE_ROW_BYTES))
        emit_dot(b, here, _LEFT[0], _RIGHT)
        if here < PASS_PANELS:
            with b.if_then(b.icmp_signed("!=", second, const(0))):
                emit_load_tile(b, _LEFT[1], b.add(x, second), x_bytes)
                emit_dot(b, PASS_PANELS + here, _LEFT[1], _RIGHT)

    if AMX:
        by_case(b, panel, range(PANELS), emit)


@instruction(NOTHING, INT, ADDRESS, INT, INT)
def _keep_totals(b: Builder, panels: Value, out: Value, out_bytes: Value, second: Value) -> None:
    def emit(count: int) -> None:
        for panel in range(count):
            emit_store_tile(b, panel, offset(b, out, panel * VECTOR_BYTES), out_bytes)
        if count == PASS_PANELS:
            with b.if_then(b.icmp_signed("!=", second, const(0))):
                for panel in range(PASS_PANELS):
                    here = offset(b, b.add(out, second), panel * VECTOR_BYTES)
                    emit_store_tile(b, PASS_PANELS + panel, here, out_bytes)

    if AMX:
        by_case(b, panels, (PASS_PANELS, PANELS), emit)


@kernel
def _multiply_once(
    panels: int,
    x: int,
    x_bytes: int,
    rows: int,
    weights: int,
    following: int,
    panel_bytes: int,
    groups: int,
    out: int,
    out_bytes: int,
    ring: int,
) -> None:
    """At most 32 rows times 2 panels, or at most 16 times 2 or 4: a group of each panel in turn."""
    group_bytes, after = panel_bytes // groups, max(rows - TILE_ROWS, 0)
    group, panel, decoded, ahead = 0, 0, 0, 0
    _clear_totals()
    for at in range(panels * groups + DISTANCE):
        if at < panels * groups:
            codes = ahead * panel_bytes + decoded * group_bytes
            _decode(group_bytes, weights + codes, following + codes, ring + at % _RING * TILE_BYTES)
            ahead += 1
            if ahead == panels:
                decoded, ahead = decoded + 1, 0
        if at >= DISTANCE:
            ready = ring + (at - DISTANCE) % _RING * TILE_BYTES
            _add_products(panel, x + group * TILE_ROW_BYTES, x_bytes, after * x_bytes, ready)
            panel += 1
            if panel == panels:
                group, panel = group + 1, 0
    _keep_totals(panels, out, out_bytes, after * out_bytes)


@part
def multiply_codes(
    panels: int,
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
    """`rows` rows of bfloat16 times 2 or 4 panels of columns → float32; `following`: what this thread reads next.
    `buffer`: `PIECE_BYTES` of this thread. Tiles have their shapes: of `rows` rows, or of 16."""
    group_bytes = panel_bytes // groups
    if rows <= PASS_ROWS:
        at_once = panels if rows <= TILE_ROWS else PASS_PANELS
        for panel in range(0, panels, at_once):
            codes, to = panel * panel_bytes, out + panel * VECTOR_BYTES
            columns, ahead = weights + codes, following + codes
            _multiply_once(at_once, x, x_bytes, rows, columns, ahead, panel_bytes, groups, to, out_bytes, buffer)
        return
    for first in range(0, groups, PIECE_GROUPS):
        count, before = min(PIECE_GROUPS, groups - first), first * group_bytes
        for panel in range(panels):
            for group in range(count):
                codes = weights + panel * panel_bytes + before + group * group_bytes
                _decode(group_bytes, codes, codes, buffer + (panel * count + group) * TILE_BYTES)
        multiply_in_tiles(
            first > 0,
            panels,
            x + first * TILE_ROW_BYTES,
            x_bytes,
            rows,
            buffer,
            following + panels * before,
            count * TILE_BYTES,
            count * TILE_ROWS,
            out,
            out_bytes,
        )

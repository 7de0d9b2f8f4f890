"""Products with weights of q8 in AMX tiles.

A dot of tiles is a group of 32 places: its sums are stored, and vectors scale them and add them up. For 3 rows or more
the codes are unpacked before, as right sides of tiles; 1 or 2 rows take no tiles, but end in the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llvmlite import ir
from numba.core import cgutils

from headrace.ops.simd.amx import (
    TILE_BYTES,
    TILE_ROW_BYTES,
    TILE_ROWS,
    emit_dot,
    emit_load_tile,
    emit_store_tile,
    emit_zero,
)
from headrace.ops.simd.inputs import GROUP, Q8_VALUES_BYTES
from headrace.ops.simd.instructions import (
    ADDRESS,
    INT,
    NOTHING,
    Builder,
    Value,
    by_case,
    call,
    const,
    every_int,
    every_lane,
    f32,
    f32x16,
    fused,
    i8,
    i32,
    i32x16,
    instruction,
    kernel,
    load_from,
    loop,
    offset,
    spread,
    store_to,
)
from headrace.ops.simd.q8 import (
    CODE_SHIFTS,
    CODE_VECTORS,
    FETCHED_BY_UNPACKING,
    PAIRS,
    PIECE_BYTES,
    PIECE_PLANES,
    Q8_WEIGHT_BYTES,
    SCALES,
    UNPACKED_BYTES,
    fetch_plane,
    so_far,
    unpack,
)
from headrace.ops.simd.target import AMX
from headrace.ops.simd.tiles import PANELS, addresses, keep
from headrace.ops.simd.vector import F32_BYTES, VECTOR_BYTES

FEW_ROWS_PLANES: Final = 24
"""Planes that are unpacked at a time for one tile of rows, of one panel: they stay in the first cache."""
_TILE_HEIGHTS: Final = (1, 2, 4, 8, TILE_ROWS)
AT_ONCE: Final = 4
"""Planes that tiles multiply at once, of up to 4 rows: one at a time, each waits for the one before it to be stored,
20 ns, not 13. Of more rows there is enough to scale meanwhile."""
SUMS: Final = PANELS * PIECE_BYTES
"""In the buffer: twice so many tiles of sums, behind the unpacked planes."""
WHOLES: Final = SUMS + 2 * AT_ONCE * TILE_BYTES
"""Then, for each plane, the sums of 16 rows of inputs."""
TOTALS: Final = WHOLES + PIECE_PLANES * VECTOR_BYTES
BUFFER_BYTES: Final = TOTALS + TILE_BYTES
"""What a thread needs of memory."""


@instruction(NOTHING, INT, INT, ADDRESS, INT, INT, INT, ADDRESS)
def _gather_sums(
    b: Builder, height: Value, rows: Value, sums: Value, x_bytes: Value, planes: Value, in_two: Value, to: Value
) -> None:
    """The groups' sums of `height` rows (`_amx_tile`) side by side, for each plane. For rows that are not there the
    last one stands in."""

    def emit(count: int) -> None:
        last = b.sub(rows, const(1))
        numbers = [b.select(b.icmp_signed("<", const(row), last), const(row), last) for row in range(count)]
        own = [b.add(sums, b.mul(number, x_bytes)) for number in numbers]

        def body(k: Value, carried: list[Value]) -> list[Value]:
            further, into = b.mul(b.lshr(k, in_two), const(F32_BYTES)), b.add(to, b.mul(k, const(VECTOR_BYTES)))
            for at, row in enumerate(own):
                store_to(b, offset(b, into, at * F32_BYTES), load_from(b, b.add(row, further), f32))
            return carried

        loop(b, planes, [], body)

    by_case(b, height, _TILE_HEIGHTS, emit)


@instruction(NOTHING, INT, INT, ADDRESS, INT, ADDRESS, ADDRESS, ADDRESS, INT, INT, ADDRESS, ADDRESS)
def _amx_tile(
    b: Builder,
    going_on: Value,
    height: Value,
    x: Value,
    x_bytes: Value,
    weights: Value,
    ahead: Value,
    unpacked: Value,
    planes: Value,
    in_two: Value,
    buffer: Value,
    totals: Value,
) -> None:
    """A tile of rows times a panel → `totals`, float32 [16, 16], of which 1, 2, 4, 8 or 16 (`height`) rows count; added
    to what is there if `going_on`. `ahead`: another panel's planes, to bring to the cache.

    While the sums of a plane are scaled, the tiles multiply the next one.
    """
    if not AMX:
        return
    sums, wholes = offset(b, buffer, SUMS), offset(b, buffer, WHOLES)

    def begin(turn: Value, first: Value, count: int) -> None:
        """The products of `count` planes, each in tiles of its own."""
        to = b.add(sums, b.mul(b.and_(turn, const(1)), const(AT_ONCE * TILE_BYTES)))
        for at in range(count):
            k = b.add(first, const(at))
            # After the last planes there are no next ones: the last is multiplied again, and not used.
            k = b.select(b.icmp_signed("<", k, planes), k, b.sub(planes, const(1)))
            fetch_plane(b, b.add(ahead, b.mul(k, const(Q8_WEIGHT_BYTES))), FETCHED_BY_UNPACKING, Q8_WEIGHT_BYTES)
            emit_zero(b, at)
            emit_load_tile(b, 4 + at % 2, b.add(x, b.mul(b.lshr(k, in_two), const(Q8_VALUES_BYTES))), x_bytes)
            emit_load_tile(b, 6 + at % 2, b.add(unpacked, b.mul(k, const(UNPACKED_BYTES))), const(TILE_ROW_BYTES))
            emit_dot(b, at, 4 + at % 2, 6 + at % 2)
        for at in range(count):
            emit_store_tile(b, at, offset(b, to, at * TILE_BYTES), const(TILE_ROW_BYTES))

    def scaled(turn: Value, first: Value, count: int, totals: list[Value]) -> list[Value]:
        """`totals` + the products of the planes that were begun for this turn."""
        here = b.add(sums, b.mul(b.and_(turn, const(1)), const(AT_ONCE * TILE_BYTES)))
        for at in range(count):
            k = b.add(first, const(at))
            numbers, whole_at = b.add(weights, b.mul(k, const(Q8_WEIGHT_BYTES))), b.mul(k, const(VECTOR_BYTES))
            scales, offsets = (
                load_from(b, offset(b, numbers, SCALES + part * VECTOR_BYTES), f32x16) for part in (0, 1)
            )
            after = []
            for row, total in enumerate(totals):
                whole = spread(b, load_from(b, offset(b, b.add(wholes, whole_at), row * F32_BYTES), f32))
                own = load_from(b, offset(b, here, at * TILE_BYTES + row * VECTOR_BYTES), f32x16)
                after.append(fused(b, own, scales, fused(b, whole, offsets, total)))
            totals = after
        return totals

    def emit(rows: int) -> None:
        at_once = AT_ONCE if rows <= 4 else 1
        turns, rest = b.udiv(planes, const(at_once)), b.urem(planes, const(at_once))

        def ahead_of_scaling(turn: Value, before: list[Value]) -> list[Value]:
            first = b.mul(turn, const(at_once))
            begin(b.add(turn, const(1)), b.add(first, const(at_once)), at_once)
            return scaled(turn, first, at_once, before)

        def one(at: Value, before: list[Value]) -> list[Value]:
            first = b.add(b.mul(turns, const(at_once)), at)
            begin(at, first, 1)
            return scaled(at, first, 1, before)

        places = [offset(b, totals, row * VECTOR_BYTES) for row in range(rows)]
        for place in places:
            store_to(b, place, so_far(b, going_on, place, 1)[0])
        for count, body in ((turns, ahead_of_scaling), (rest, one))[: 2 if at_once > 1 else 1]:
            with b.if_then(b.icmp_signed(">", count, const(0))):
                if body is ahead_of_scaling:
                    begin(const(0), const(0), at_once)
                start = [load_from(b, place, f32x16) for place in places]
                for place, total in zip(places, loop(b, count, start, body)):
                    store_to(b, place, total)

    by_case(b, height, _TILE_HEIGHTS, emit)


@instruction(NOTHING, INT, ADDRESS, INT, ADDRESS, INT)
def _copy_vectors(b: Builder, rows: Value, source: Value, source_bytes: Value, to: Value, to_bytes: Value) -> None:
    """A vector of each row, from rows so many bytes apart to others."""

    def body(row: Value, carried: list[Value]) -> list[Value]:
        vector = load_from(b, b.add(source, b.mul(row, source_bytes)), f32x16)
        store_to(b, b.add(to, b.mul(row, to_bytes)), vector)
        return carried

    loop(b, rows, [], body)


@instruction(NOTHING, INT, ADDRESS, INT, INT, ADDRESS, ADDRESS, INT, INT, INT, ADDRESS, INT, ADDRESS)
def groups_as_tiles_do(
    b: Builder,
    rows: Value,
    x: Value,
    x_bytes: Value,
    sums_at: Value,
    weights: Value,
    ahead: Value,
    panel_bytes: Value,
    planes: Value,
    in_two: Value,
    out: Value,
    out_bytes: Value,
    buffer: Value,
) -> None:
    """1 or 2 rows times 64 columns, without tiles, to the bits that tiles give (`amx`): the even and the odd places of
    a group are summed apart. Subnormal numbers are zero here too (`flush_subnormals`).

    A row takes 96 operations for 32 codes of 16 columns, less time than memory to bring them.
    """

    def emit_panels(height: int, first: int, width: int) -> None:
        inputs, outputs = addresses(b, x, x_bytes, height), addresses(b, out, out_bytes, height)
        panels, later = (
            [b.add(start, b.mul(panel_bytes, const(first + at))) for at in range(width)] for start in (weights, ahead)
        )

        def body(k: Value, before: list[Value]) -> list[Value]:
            group, plane_at = b.lshr(k, in_two), b.mul(k, const(Q8_WEIGHT_BYTES))
            here = [b.add(panel, plane_at) for panel in panels]
            for address in later:
                fetch_plane(b, b.add(address, plane_at), 0, Q8_WEIGHT_BYTES)
            wide = [
                _widened(b, row, group, offset(b, buffer, number * 2 * VECTOR_BYTES))
                for number, row in enumerate(inputs)
            ]
            places = _sums_by_place(b, wide, here)
            after = []
            for row, address in enumerate(inputs):
                whole_at = b.add(b.add(address, sums_at), b.mul(group, const(F32_BYTES)))
                whole = spread(b, load_from(b, whole_at, f32))
                for panel, numbers in enumerate(here):
                    scales, offsets = (
                        load_from(b, offset(b, numbers, SCALES + part * VECTOR_BYTES), f32x16) for part in (0, 1)
                    )
                    own = b.fadd(every_lane(0.0), b.fadd(*places[row][panel]))
                    after.append(fused(b, own, scales, fused(b, whole, offsets, before[row * width + panel])))
            return after

        flat = loop(b, planes, [every_lane(0.0)] * (height * width), body)
        keep(b, [flat[at : at + width] for at in range(0, len(flat), width)], outputs, first)

    def emit(height: int) -> None:
        width = PANELS // height
        for first in range(0, PANELS, width):
            emit_panels(height, first, width)

    if AMX:
        by_case(b, rows, (1, 2), emit)


def _widened(b: Builder, row: Value, group: Value, to: Value) -> Value:
    """A group's 32 values as float32, the 16 of even places first → where they are."""
    pairs = load_from(b, b.add(row, b.mul(group, const(Q8_VALUES_BYTES))), i32x16)
    store_to(b, to, b.shl(pairs, every_int(16)))
    store_to(b, offset(b, to, VECTOR_BYTES), b.and_(pairs, every_int(-65536)))
    return to


def _sums_by_place(b: Builder, wide: Sequence[Value], planes: Sequence[Value]) -> list[list[list[Value]]]:
    """[rows][panels][even, odd]: the products of `wide` rows and a plane's codes, each place summed by itself."""
    sums = [[[every_lane(0.0)] * 2 for _ in planes] for _ in wide]
    for lane in range(CODE_VECTORS):
        codes = [load_from(b, offset(b, plane, lane * VECTOR_BYTES), i32x16) for plane in planes]
        for pair in range(PAIRS):
            for place in range(2):
                ours = [_code(b, lanes, pair, place) for lanes in codes]
                number = place * GROUP // 2 + PAIRS * lane + pair
                for row, values in enumerate(wide):
                    value = spread(b, load_from(b, offset(b, values, number * F32_BYTES), f32))
                    for panel, code in enumerate(ours):
                        sums[row][panel][place] = fused(b, value, code, sums[row][panel][place])
    return sums


def _code(b: Builder, lanes: Value, pair: int, place: int) -> Value:
    """One code of each lane, even or odd, as the float32 16 + code."""
    by = CODE_SHIFTS[pair] + 16 * (1 - place)
    moved = b.shl(lanes, every_int(by)) if by > 0 else b.lshr(lanes, every_int(-by))
    return b.bitcast(b.or_(b.and_(moved, every_int(0x00780000)), every_int(0x41800000)), f32x16)


_NEAREST_WITHOUT_SUBNORMALS: Final = 0x9FC0
"""Of the register that says how numbers are rounded: to nearest, subnormal inputs and results as zero, no traps."""
_NEAREST: Final = 0x1F80


@instruction(NOTHING, INT)
def flush_subnormals(b: Builder, on: Value) -> None:
    """In this thread, where there are tiles: count subnormal numbers as zero, as tiles do, or as themselves again."""
    if not AMX:
        return
    word = cgutils.alloca_once(b, i32)
    chosen = b.select(b.icmp_signed("!=", on, const(0)), const(_NEAREST_WITHOUT_SUBNORMALS), const(_NEAREST))
    b.store(b.trunc(chosen, i32), word)
    call(b, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [b.bitcast(word, i8.as_pointer())])


@kernel
def _tile_height(rows: int) -> int:
    """Of `_amx_tile`, for so many rows."""
    height = 1
    while height < rows:
        height *= 2
    return height


@kernel
def multiply_few_groups(
    x: int,
    x_bytes: int,
    rows: int,
    sums_at: int,
    weights: int,
    following: int,
    panel_bytes: int,
    all_planes: int,
    in_two: int,
    out: int,
    out_bytes: int,
    buffer: int,
) -> None:
    """At most 16 rows: what is unpacked is used once, at once."""
    height, totals = _tile_height(rows), buffer + TOTALS
    for panel in range(PANELS):
        own, next_own = weights + panel * panel_bytes, following + panel * panel_bytes
        for first in range(0, all_planes, FEW_ROWS_PLANES):
            planes, group = min(FEW_ROWS_PLANES, all_planes - first), first >> in_two
            here, of = own + first * Q8_WEIGHT_BYTES, x + group * Q8_VALUES_BYTES
            sums = x + sums_at + group * F32_BYTES
            _gather_sums(height, rows, sums, x_bytes, planes, in_two, buffer + WHOLES)
            ahead = next_own + first * Q8_WEIGHT_BYTES
            unpack(here, ahead, planes, buffer)
            _amx_tile(first, height, of, x_bytes, here, ahead, buffer, planes, in_two, buffer, totals)
        _copy_vectors(rows, totals, VECTOR_BYTES, out + panel * VECTOR_BYTES, out_bytes)


@kernel
def multiply_piece(
    going_on: bool,
    x: int,
    x_bytes: int,
    rows: int,
    sums_at: int,
    weights: int,
    following: int,
    panel_bytes: int,
    planes: int,
    in_two: int,
    out: int,
    out_bytes: int,
    buffer: int,
) -> None:
    """Unpacked planes times all rows, 16 at a time."""
    tile_rows, totals = min(rows, TILE_ROWS), buffer + TOTALS
    for first in range(0, rows, TILE_ROWS):
        # The last tile begins before its rows, as tiles have 16: what is before them is not used.
        start, skipped = first, 0
        if first + tile_rows > rows:
            start, skipped = rows - tile_rows, first - rows + tile_rows
        count = tile_rows - skipped
        height, of = _tile_height(tile_rows), x + start * x_bytes
        _gather_sums(height, tile_rows, of + sums_at, x_bytes, planes, in_two, buffer + WHOLES)
        for panel in range(PANELS):
            to = out + first * out_bytes + panel * VECTOR_BYTES
            unpacked, numbers = buffer + panel * PIECE_BYTES, weights + panel * panel_bytes
            ahead = following + panel * panel_bytes if first == 0 else numbers
            if going_on:
                _copy_vectors(count, to, out_bytes, totals + skipped * VECTOR_BYTES, VECTOR_BYTES)
            _amx_tile(going_on, height, of, x_bytes, numbers, ahead, unpacked, planes, in_two, buffer, totals)
            _copy_vectors(count, totals + skipped * VECTOR_BYTES, VECTOR_BYTES, to, out_bytes)

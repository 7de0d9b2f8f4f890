"""AMX: products of small matrices of bfloat16 in tile registers, where `target.AMX` says that there are any.

A thread has eight tiles, each of up to 16 rows of 64 bytes. `dot` adds the product of two tiles to a third:

    total  [rows, columns]           float32                        rows, columns ≤ 16
    left   [rows, 2 · lanes]         bfloat16, rows any bytes apart  lanes ≤ 16
    right  [lanes, columns, 2]       bfloat16: *packed*, as weights, keys and values are (`vector`)

It takes 16 cycles whatever the shapes: 2.4 T operations a second at 2.6 GHz, 16 times what `vdpbf16ps` does there. Four
totals keep it busy, as its result is there after 52.

What a total's row holds depends on that row of `left`, on `right`, and on what it held before; on the number of lanes,
but on no other row, nor on how many there are. Within a dot the even and the odd places along the sum are added up
apart, each from the first lane to the last, by multiplications and additions that are rounded once; then their sum is
added to the total. Subnormal numbers count as zero.

Shapes are set for all tiles at once by `configure`, which takes 150 ns (as long as 24 dots) and zeroes them: once for a
phase of a layer, not for a tile of weights. Tiles belong to a thread; functions that are called may use them for
something else, so they are handed on in no way but through memory. Tile numbers are part of the instructions. So these
are words for emitting (`instructions`), not functions that a kernel calls with a number. `release` says that the tiles
hold nothing any more: until then the kernel saves 8 kB more whenever it takes the thread's core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from headrace.ops.simd.instructions import (
    INT,
    NOTHING,
    Builder,
    Value,
    call,
    const,
    i8,
    i64,
    instruction,
)
from headrace.ops.simd.target import AMX

TILES: Final = 8
TILE_ROWS: Final = 16
TILE_ROW_BYTES: Final = 64
TILE_BYTES: Final = TILE_ROWS * TILE_ROW_BYTES
"""Of a whole tile: 16 columns of a panel over 32 places along the sum, or 16 rows of 16 float32."""

_CONFIG_BYTES: Final = 64
_FIRST_WIDTH: Final = 16
"""In a configuration: the first tile's bytes in a row, two bytes each; then, from 48 on, its rows."""
_FIRST_ROWS: Final = 48


class TileShape(NamedTuple):
    """Rows and bytes of a row: int64 values, or numbers."""

    rows: Value | int
    row_bytes: Value | int = TILE_ROW_BYTES


def emit_configure(b: Builder, shapes: Sequence[TileShape]) -> None:
    """Set the shapes of tiles 0, 1, …; those beyond `shapes` can't be used. All tiles are zero."""
    assert AMX and len(shapes) <= TILES
    slot = cgutils.alloca_once(b, ir.VectorType(i64, _CONFIG_BYTES // 8))
    where = b.ptrtoint(slot, i64)
    words = [const(1), *[const(0)] * 7]
    for at, shape in enumerate(shapes):
        for first, size, value in ((_FIRST_WIDTH, 2, shape.row_bytes), (_FIRST_ROWS, 1, shape.rows)):
            word, byte = divmod(first + at * size, 8)
            value = const(value) if isinstance(value, int) else value
            words[word] = b.or_(words[word], b.shl(value, const(8 * byte)))
    for at, word in enumerate(words):
        b.store(word, b.inttoptr(b.add(where, const(8 * at)), i64.as_pointer()))
    call(b, "llvm.x86.ldtilecfg", ir.VoidType(), [b.inttoptr(where, i8.as_pointer())])


def emit_release(b: Builder) -> None:
    """No tile holds anything, or has a shape."""
    call(b, "llvm.x86.tilerelease", ir.VoidType(), [])


def emit_zero(b: Builder, tile: int) -> None:
    call(b, "llvm.x86.tilezero", ir.VoidType(), [_number(tile)])


def emit_load_tile(b: Builder, tile: int, address: Value, stride_bytes: Value) -> None:
    """Fill the tile with rows that lie `stride_bytes` apart. Bytes beyond the tile's shape are not read."""
    call(b, "llvm.x86.tileloadd64", ir.VoidType(), [_number(tile), _pointer(b, address), stride_bytes])


def emit_store_tile(b: Builder, tile: int, address: Value, stride_bytes: Value) -> None:
    """The reverse of `emit_load_tile`."""
    call(b, "llvm.x86.tilestored64", ir.VoidType(), [_number(tile), _pointer(b, address), stride_bytes])


def emit_dot(b: Builder, total: int, left: int, right: int) -> None:
    """total += left · right; `left` has as many lanes of four bytes in a row as `right` has rows."""
    call(b, "llvm.x86.tdpbf16ps", ir.VoidType(), [_number(total), _number(left), _number(right)])


def _number(tile: int) -> Value:
    assert 0 <= tile < TILES
    return ir.Constant(i8, tile)


def _pointer(b: Builder, address: Value) -> Value:
    return b.inttoptr(address, i8.as_pointer())


@instruction(NOTHING, INT)
def configure_rows(b: Builder, rows: Value) -> None:
    """Where there are tiles: totals (0 to 3) and left sides (4, 5) of `rows` rows, 1 to 16, and whole right sides (6,
    7)."""
    if AMX:
        emit_configure(b, [*[TileShape(rows)] * 6, *[TileShape(TILE_ROWS)] * 2])


@instruction(NOTHING)
def release_tiles(b: Builder) -> None:
    """Where there are tiles, give them back."""
    if AMX:
        emit_release(b)

"""Products of rows with packed weights, as phases that all threads of a team share: kept, added to, or gated."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba.core import types
from numba.extending import overload

from headrace.ops.simd.amx import TILE_ROWS, configure_rows, release_tiles
from headrace.ops.simd.amx_products import PASS_ROWS, multiply_in_tiles
from headrace.ops.simd.amx_q8 import PIECE_BYTES, multiply_codes
from headrace.ops.simd.inputs import store_group
from headrace.ops.simd.instructions import KERNEL_OPTIONS, kernel, part
from headrace.ops.simd.q8 import PIECE_BYTES as PANEL_PIECE_BYTES
from headrace.ops.simd.q8_products import multiply_groups
from headrace.ops.simd.tables import GELU
from headrace.ops.simd.target import AMX
from headrace.ops.simd.team import Member, claim_some, own_end
from headrace.ops.simd.tiles import PANELS, TILE_COLUMNS, fetched_beside, in_tiles, product_rows, tile_height
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    VECTOR_BYTES,
    add,
    divide,
    exp,
    fma,
    is_bf16,
    load,
    multiply,
    splat,
    store,
    subtract,
    value_bytes,
    zeros,
)

TILE_BYTES: Final = TILE_COLUMNS * F32_BYTES
BLOCK_ROWS: Final = 96
"""Rows that a tile of columns takes at a time: their inputs and the tile's weights fit the second cache together."""
MOST_BLOCK_ROWS: Final = 256
"""The same in AMX tiles, which need so many to compute while the next columns come from memory."""
MOST_BLOCK_ROWS_OF_Q8: Final = 512
"""There codes are decoded once for each block."""
LEAST_SHARE: Final = 128
"""Rows a thread from which on each reads all weights: fewer would wait for memory."""
BUFFER_BYTES: Final = PIECE_BYTES if AMX else PANELS * PANEL_PIECE_BYTES
"""For what q8 unpacks or decodes of 64 columns."""
PRODUCT_SCRATCH_BYTES: Final = BUFFER_BYTES + (MOST_BLOCK_ROWS_OF_Q8 + TILE_ROWS) * TILE_BYTES
"""Of a thread: that, and the sums of a block."""


@kernel
def block_rows(element: Any, rows: int, tiles: int, threads: int) -> int:
    """Rows of a piece of a phase's work. The last ones are up to 16 more, so that no piece has fewer than 16 unless the
    phase has."""
    if in_tiles(element) == 0:
        return BLOCK_ROWS
    block = MOST_BLOCK_ROWS_OF_Q8 if value_bytes(element) == 1 else MOST_BLOCK_ROWS
    # Of many rows each thread takes its own, which stay in its second cache from phase to phase.
    share = (rows + threads - 1) // threads
    if share >= LEAST_SHARE:
        block = min(block, share)
    # Enough pieces that threads end together.
    while block > 2 * PASS_ROWS and blocks_of(rows, block) * tiles < 4 * threads:
        block //= 2
    return block


@kernel
def blocks_of(rows: int, block: int) -> int:
    return max(rows - TILE_ROWS, 0) // block + 1


@part
def begin_products(element: Any, rows: int) -> None:
    """In every thread, before products of so many rows in all: shape the tiles, where products are made in them."""
    if in_tiles(element) != 0:
        # A step in which nobody wants an id has no rows behind its last attention, and a tile of none can't be shaped.
        configure_rows(max(1, min(rows, TILE_ROWS)))


@part
def end_products(element: Any) -> None:
    if in_tiles(element) != 0:
        release_tiles()


def _multiply(*arguments: Any) -> None:
    """`multiply_block`, of which numba compiles the one of four that the elements need: each takes it some seconds."""
    raise AssertionError("only kernels call this")


@overload(_multiply, jit_options=KERNEL_OPTIONS, strict=False)  # type: ignore[untyped-decorator]
def _multiply_of(
    element: Any,
    panels: Any,
    x: Any,
    x_bytes: Any,
    rows: Any,
    weights: Any,
    following: Any,
    panel_bytes: Any,
    steps: Any,
    out: Any,
    out_bytes: Any,
    buffer: Any,
) -> Any:
    def in_groups(element, panels, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer):  # type: ignore[no-untyped-def]
        multiply_groups(x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer)

    def of_codes(element, panels, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer):  # type: ignore[no-untyped-def]
        multiply_codes(panels, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer)

    def in_amx_tiles(element, panels, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer):  # type: ignore[no-untyped-def]
        multiply_in_tiles(False, panels, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes)

    def in_registers(element, panels, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer):  # type: ignore[no-untyped-def]
        row = 0
        while row < rows:
            height, to = tile_height(rows - row), out + row * out_bytes
            ahead = fetched_beside(row, rows, weights, following, panel_bytes)
            product_rows(element, height, x + row * x_bytes, x_bytes, weights, ahead, panel_bytes, steps, to, out_bytes)
            row += height

    if element == types.int8:
        return of_codes if AMX else in_groups
    return in_amx_tiles if AMX and is_bf16(element) else in_registers


@part
def multiply_block(
    element: Any,
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
    buffer: int,
) -> None:
    """`rows` rows times a tile of 64 columns → float32; `following`: the columns that this thread takes next.

    `steps`: lanes along the sum; groups in q8, whose bits `panel_bytes` tells. `buffer`: `BUFFER_BYTES`.
    """
    _multiply(element, panels, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer)


class Matrix(NamedTuple):
    """Packed weights of a product."""

    weights: int
    """Address of the first panel of 16 columns."""
    panel_bytes: int
    """From one panel to the next."""
    steps: int
    """Lanes along the sum; groups in q8."""
    tiles: int
    """Of 64 columns."""


class Piece(NamedTuple):
    """Some rows of a product times some columns."""

    first: int
    """Row."""
    rows: int
    panel: int
    panels: int
    """0 where no piece is left."""
    following: int
    """Address of the weights that this thread reads next."""


@kernel
def part_panels(element: Any, rows: int) -> int:
    """Panels that columns are divided by: half a tile where products can be cut so, of few rows, which wait for memory.
    Then two threads have 9 halves each, not 5 and 4 of 9 tiles. They take two at a time, but the last: memory is read a
    tenth faster from four panels beside each other than from two."""
    return PANELS // 2 if in_tiles(element) != 0 and rows <= PASS_ROWS else PANELS


@kernel
def first_columns(element: Any, member: Member, rows: int, matrix: Matrix, panels: int) -> int:
    """The address of the weights that a thread reads first in a product of so many rows, where columns are divided by
    so many panels."""
    columns = matrix.tiles * PANELS // panels
    pieces = columns * blocks_of(rows, block_rows(element, rows, matrix.tiles, member.threads))
    return matrix.weights + panels * (pieces * member.thread // member.threads % columns) * matrix.panel_bytes


@kernel
def next_piece(element: Any, member: Member, phase: int, rows: int, matrix: Matrix, panels: int, behind: int) -> Piece:
    """A thread's next piece, where columns are divided by so many panels. `behind`: the weights that the thread reads
    in the next phase that reads any."""
    block = block_rows(element, rows, matrix.tiles, member.threads)
    blocks, columns = blocks_of(rows, block), matrix.tiles * PANELS // panels
    at, end = claim_some(member, phase, columns * blocks, PANELS // panels)
    stride = panels * matrix.panel_bytes
    following = matrix.weights + end % columns * stride if end < own_end(member, columns * blocks) else behind
    first = at // columns * block
    height = rows - first if at // columns == blocks - 1 else block
    return Piece(first, height, at % columns * panels, (end - at) * panels, following)


@kernel
def product_phase(
    element: Any,
    member: Member,
    phase: int,
    x: int,
    x_bytes: int,
    rows: int,
    matrix: Matrix,
    scratch: int,
    out: int,
    out_bytes: int,
    behind: int,
) -> None:
    """out = x · weights. `behind`: as in `next_piece`."""
    begin_products(element, rows)
    panels = part_panels(element, rows)
    piece = next_piece(element, member, phase, rows, matrix, panels, behind)
    while piece.panels > 0:
        multiply_block(
            element,
            piece.panels,
            x + piece.first * x_bytes,
            x_bytes,
            piece.rows,
            matrix.weights + piece.panel * matrix.panel_bytes,
            piece.following,
            matrix.panel_bytes,
            matrix.steps,
            out + piece.first * out_bytes + piece.panel * VECTOR_BYTES,
            out_bytes,
            scratch,
        )
        piece = next_piece(element, member, phase, rows, matrix, panels, behind)
    end_products(element)


@part
def adding_phase(
    element: Any,
    member: Member,
    phase: int,
    x: int,
    x_bytes: int,
    rows: int,
    matrix: Matrix,
    scratch: int,
    out: int,
    out_bytes: int,
    behind: int,
) -> None:
    """out += x · weights. `behind`: as in `next_piece`."""
    sums = scratch + BUFFER_BYTES
    begin_products(element, rows)
    panels = part_panels(element, rows)
    piece = next_piece(element, member, phase, rows, matrix, panels, behind)
    while piece.panels > 0:
        multiply_block(
            element,
            piece.panels,
            x + piece.first * x_bytes,
            x_bytes,
            piece.rows,
            matrix.weights + piece.panel * matrix.panel_bytes,
            piece.following,
            matrix.panel_bytes,
            matrix.steps,
            sums,
            TILE_BYTES,
            scratch,
        )
        for row in range(piece.rows):
            here, to = sums + row * TILE_BYTES, out + (piece.first + row) * out_bytes + piece.panel * VECTOR_BYTES
            for column in range(0, piece.panels * VECTOR_BYTES, VECTOR_BYTES):
                store(F32, to + column, add(load(F32, to + column), load(F32, here + column)))
        piece = next_piece(element, member, phase, rows, matrix, panels, behind)
    end_products(element)


@kernel
def activated(activation: int, x: Any) -> Any:
    """x / (1 + exp(-y)): y is x in SiLU, and 2 · sqrt(2 / pi) · (x + 0.044715 · x³) in GELU's tanh form, because
    (1 + tanh(y / 2)) / 2 = 1 / (1 + exp(-y))."""
    y = x
    if activation == GELU:
        cubed = multiply(multiply(x, x), x)
        y = multiply(fma(cubed, splat(np.float32(0.044715)), x), splat(np.float32(1.5957691216057308)))
    return divide(x, add(splat(np.float32(1)), exp(subtract(zeros(), y))))


@part
def gated_phase(
    element: Any,
    activation: int,
    member: Member,
    phase: int,
    x: int,
    x_bytes: int,
    rows: int,
    matrix: Matrix,
    scratch: int,
    out: int,
    out_bytes: int,
    behind: int,
) -> None:
    """out = activation(x · gate) · (x · up), as inputs of the next product. A tile is 32 columns of gate, then the same
    of up. `behind`: as in `next_piece`."""
    sums = scratch + BUFFER_BYTES
    begin_products(element, rows)
    piece = next_piece(element, member, phase, rows, matrix, PANELS, behind)
    while piece.panels > 0:
        multiply_block(
            element,
            PANELS,
            x + piece.first * x_bytes,
            x_bytes,
            piece.rows,
            matrix.weights + piece.panel * matrix.panel_bytes,
            piece.following,
            matrix.panel_bytes,
            matrix.steps,
            sums,
            TILE_BYTES,
            scratch,
        )
        for row in range(piece.rows):
            here, to = sums + row * TILE_BYTES, out + (piece.first + row) * out_bytes
            low = multiply(activated(activation, load(F32, here)), load(F32, here + 2 * VECTOR_BYTES))
            high = multiply(activated(activation, load(F32, here + VECTOR_BYTES)), load(F32, here + 3 * VECTOR_BYTES))
            store_group(element, to, piece.panel // PANELS, matrix.tiles, low, high)
        piece = next_piece(element, member, phase, rows, matrix, PANELS, behind)
    end_products(element)

"""Products of rows with packed weights, as phases that all threads of a team share: kept, added to, or gated."""

from __future__ import annotations

from typing import Any, Final

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
from headrace.ops.simd.team import Member, claim
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
    def in_groups(element, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer):  # type: ignore[no-untyped-def]
        multiply_groups(x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer)

    def of_codes(element, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer):  # type: ignore[no-untyped-def]
        multiply_codes(x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer)

    def in_amx_tiles(element, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer):  # type: ignore[no-untyped-def]
        multiply_in_tiles(False, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes)

    def in_registers(element, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer):  # type: ignore[no-untyped-def]
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
    _multiply(element, x, x_bytes, rows, weights, following, panel_bytes, steps, out, out_bytes, buffer)


@kernel
def product_phase(
    element: Any,
    member: Member,
    phase: int,
    x: int,
    x_bytes: int,
    rows: int,
    weights: int,
    panel_bytes: int,
    steps: int,
    tiles: int,
    scratch: int,
    out: int,
    out_bytes: int,
) -> None:
    """out = x · weights."""
    block = block_rows(element, rows, tiles, member.threads)
    blocks = blocks_of(rows, block)
    pieces = tiles * blocks
    begin_products(element, rows)
    piece = claim(member, phase, pieces)
    while piece < pieces:
        tile, first = piece % tiles, piece // tiles * block
        height = rows - first if piece // tiles == blocks - 1 else block
        multiply_block(
            element,
            x + first * x_bytes,
            x_bytes,
            height,
            weights + PANELS * tile * panel_bytes,
            weights + PANELS * (tile + 1) * panel_bytes,
            panel_bytes,
            steps,
            out + first * out_bytes + tile * TILE_BYTES,
            out_bytes,
            scratch,
        )
        piece = claim(member, phase, pieces)
    end_products(element)


@part
def adding_phase(
    element: Any,
    member: Member,
    phase: int,
    x: int,
    x_bytes: int,
    rows: int,
    weights: int,
    panel_bytes: int,
    steps: int,
    tiles: int,
    scratch: int,
    out: int,
    out_bytes: int,
) -> None:
    """out += x · weights."""
    block = block_rows(element, rows, tiles, member.threads)
    blocks = blocks_of(rows, block)
    pieces = tiles * blocks
    sums = scratch + BUFFER_BYTES
    begin_products(element, rows)
    piece = claim(member, phase, pieces)
    while piece < pieces:
        tile, first = piece % tiles, piece // tiles * block
        height = rows - first if piece // tiles == blocks - 1 else block
        columns = weights + PANELS * tile * panel_bytes
        following = columns + PANELS * panel_bytes
        inputs = x + first * x_bytes
        multiply_block(
            element, inputs, x_bytes, height, columns, following, panel_bytes, steps, sums, TILE_BYTES, scratch
        )
        for row in range(height):
            here, to = sums + row * TILE_BYTES, out + (first + row) * out_bytes + tile * TILE_BYTES
            for column in range(0, TILE_BYTES, VECTOR_BYTES):
                store(F32, to + column, add(load(F32, to + column), load(F32, here + column)))
        piece = claim(member, phase, pieces)
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
    weights: int,
    panel_bytes: int,
    steps: int,
    tiles: int,
    scratch: int,
    out: int,
    out_bytes: int,
) -> None:
    """out = activation(x · gate) · (x · up), as inputs of the next product. A tile is 32 columns of gate, then the same
    of up."""
    block = block_rows(element, rows, tiles, member.threads)
    blocks = blocks_of(rows, block)
    pieces = tiles * blocks
    sums = scratch + BUFFER_BYTES
    begin_products(element, rows)
    piece = claim(member, phase, pieces)
    while piece < pieces:
        tile, first = piece % tiles, piece // tiles * block
        height = rows - first if piece // tiles == blocks - 1 else block
        columns = weights + PANELS * tile * panel_bytes
        following = columns + PANELS * panel_bytes
        inputs = x + first * x_bytes
        multiply_block(
            element, inputs, x_bytes, height, columns, following, panel_bytes, steps, sums, TILE_BYTES, scratch
        )
        for row in range(height):
            here = sums + row * TILE_BYTES
            low = multiply(activated(activation, load(F32, here)), load(F32, here + 2 * VECTOR_BYTES))
            high = multiply(activated(activation, load(F32, here + VECTOR_BYTES)), load(F32, here + 3 * VECTOR_BYTES))
            store_group(element, out + (first + row) * out_bytes, tile, tiles, low, high)
        piece = claim(member, phase, pieces)
    end_products(element)

"""Products of rows with packed weights, as phases that all threads of a team share: kept, added to, or gated."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from headrace.ops.simd.inputs import group_bytes, store_group
from headrace.ops.simd.instructions import kernel
from headrace.ops.simd.tables import GELU
from headrace.ops.simd.team import claim
from headrace.ops.simd.tiles import MAX_ROWS, PANELS, TILE_COLUMNS, fetched_beside, product_rows, tile_height
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    VECTOR_BYTES,
    add,
    divide,
    exp,
    fma,
    load,
    multiply,
    splat,
    store,
    subtract,
    zeros,
)

ROW_BLOCK: Final = 96
"""Rows that a tile of columns takes at a time: their inputs and the tile's weights fit the second cache together."""
TILE_BYTES: Final = TILE_COLUMNS * F32_BYTES
SCRATCH_TILE_BYTES: Final = MAX_ROWS * TILE_BYTES


@kernel
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
) -> None:
    """`rows` rows times a tile of 64 columns → float32; `following`: the columns that this thread takes next."""
    row = 0
    while row < rows:
        height, to = tile_height(rows - row), out + row * out_bytes
        ahead = fetched_beside(row, rows, weights, following, panel_bytes)
        product_rows(element, height, x + row * x_bytes, x_bytes, weights, ahead, panel_bytes, steps, to, out_bytes)
        row += height


@kernel
def product_phase(
    element: Any,
    cells: int,
    threads: int,
    phase: int,
    x: int,
    x_bytes: int,
    rows: int,
    weights: int,
    panel_bytes: int,
    steps: int,
    tiles: int,
    out: int,
    out_bytes: int,
) -> None:
    """out = x · weights."""
    blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
    piece = claim(cells, phase)
    while piece < tiles * blocks:
        tile, first = piece // blocks, piece % blocks * ROW_BLOCK
        multiply_block(
            element,
            x + first * x_bytes,
            x_bytes,
            min(ROW_BLOCK, rows - first),
            weights + PANELS * tile * panel_bytes,
            weights + PANELS * (tile + threads) * panel_bytes,
            panel_bytes,
            steps,
            out + first * out_bytes + tile * TILE_BYTES,
            out_bytes,
        )
        piece = claim(cells, phase)


@kernel
def adding_phase(
    element: Any,
    cells: int,
    threads: int,
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
    blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
    piece = claim(cells, phase)
    while piece < tiles * blocks:
        tile, first = piece // blocks, piece % blocks * ROW_BLOCK
        columns = weights + PANELS * tile * panel_bytes
        following = columns + PANELS * threads * panel_bytes
        row, end = first, min(first + ROW_BLOCK, rows)
        while row < end:
            height = tile_height(end - row)
            ahead = fetched_beside(row - first, end - first, columns, following, panel_bytes)
            product_rows(
                element, height, x + row * x_bytes, x_bytes, columns, ahead, panel_bytes, steps, scratch, TILE_BYTES
            )
            for at in range(height):
                here, to = scratch + at * TILE_BYTES, out + (row + at) * out_bytes + tile * TILE_BYTES
                for column in range(0, TILE_BYTES, VECTOR_BYTES):
                    store(F32, to + column, add(load(F32, to + column), load(F32, here + column)))
            row += height
        piece = claim(cells, phase)


@kernel
def activated(activation: int, x: Any) -> Any:
    """x / (1 + exp(-y)): y is x in SiLU, and 2 · sqrt(2 / pi) · (x + 0.044715 · x³) in GELU's tanh form, because
    (1 + tanh(y / 2)) / 2 = 1 / (1 + exp(-y))."""
    y = x
    if activation == GELU:
        cubed = multiply(multiply(x, x), x)
        y = multiply(fma(cubed, splat(np.float32(0.044715)), x), splat(np.float32(1.5957691216057308)))
    return divide(x, add(splat(np.float32(1)), exp(subtract(zeros(), y))))


@kernel
def gated_phase(
    element: Any,
    activation: int,
    cells: int,
    threads: int,
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
    blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
    piece = claim(cells, phase)
    while piece < tiles * blocks:
        tile, first = piece // blocks, piece % blocks * ROW_BLOCK
        columns = weights + PANELS * tile * panel_bytes
        following = columns + PANELS * threads * panel_bytes
        row, end = first, min(first + ROW_BLOCK, rows)
        while row < end:
            height = tile_height(end - row)
            ahead = fetched_beside(row - first, end - first, columns, following, panel_bytes)
            product_rows(
                element, height, x + row * x_bytes, x_bytes, columns, ahead, panel_bytes, steps, scratch, TILE_BYTES
            )
            for at in range(height):
                here = scratch + at * TILE_BYTES
                low = multiply(activated(activation, load(F32, here)), load(F32, here + 2 * VECTOR_BYTES))
                high = multiply(
                    activated(activation, load(F32, here + VECTOR_BYTES)), load(F32, here + 3 * VECTOR_BYTES)
                )
                store_group(element, out + (row + at) * out_bytes + tile * group_bytes(element), low, high)
            row += height
        piece = claim(cells, phase)

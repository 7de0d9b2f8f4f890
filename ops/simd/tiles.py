"""Register tiles: a few rows times 64 columns, summed in registers. The inner loops of every matrix product.

Both operands are packed in lanes of four bytes along the sum (`vector`). A step of a tile takes one lane of each row,
spread over a vector, and one vector of each panel of 16 columns; `dot` adds their products to the tile's sums. So each
sum runs from the first lane to the last, whatever the tile's height: a row's bits do not depend on its neighbours.

How many panels a tile takes at a time follows from the registers of the machine, and changes no sum either.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir
from numba.core import types

from headrace.ops.simd.instructions import (
    ADDRESS,
    ELEMENT,
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
    every_lane,
    f32x16,
    fused,
    i32,
    i32x16,
    i64,
    instruction,
    kernel,
    load_from,
    loop,
    offset,
    spread,
    store_to,
)
from headrace.ops.simd.target import AMX, WIDE, host_features
from headrace.ops.simd.vector import LANE_BYTES, VECTOR_BYTES, emit_prefetch, is_bf16

MAX_ROWS: Final = 6
"""More rows of fewer panels were slower: 12 of 2 by a fifth at 8 and 32 rows, and in Q8 at 512."""
PANELS: Final = 4
"""Panels of 16 columns that a tile has."""
AHEAD_PANELS: Final = 2
"""Panels that a tile brings to the cache for a later one."""
TILE_COLUMNS: Final = PANELS * LANES

Sums = list[list[Value]]
"""[rows][panels] of F32x16."""


@instruction(INT, ELEMENT)
def in_tiles(b: Builder, element: Any) -> Value:
    """1 if products of these elements are made in AMX tiles."""
    return const(int(AMX and element != types.float32))


def panels_at_once(height: int, registers: int = 1) -> int:
    """Panels of a tile whose sums fit the registers: 24 of 32, beside a vector of each panel and one of the rows.

    `registers`: of a sum.
    """
    if not WIDE:
        return 1
    return next(panels for panels in (4, 2, 1) if panels <= 24 // (height * registers))


def dot(b: Builder, element: Any, total: Value, row: Value, panel: Value) -> Value:
    """`total` + the products of the lanes of `row` and `panel`, int32 vectors that hold packed values."""
    if not is_bf16(element):
        return fused(b, b.bitcast(row, f32x16), b.bitcast(panel, f32x16), total)
    if "avx512bf16" in host_features():
        pairs = ir.VectorType(bf16, 2 * LANES)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return call(b, name, f32x16, [total, b.bitcast(row, pairs), b.bitcast(panel, pairs)])
    for take in (_first_of_pair, _second_of_pair):
        total = fused(b, take(b, row), take(b, panel), total)
    return total


def _first_of_pair(b: Builder, lanes: Value) -> Value:
    return b.bitcast(b.shl(lanes, every_int(16)), f32x16)


def _second_of_pair(b: Builder, lanes: Value) -> Value:
    return b.bitcast(b.and_(lanes, every_int(-65536)), f32x16)


def _accumulate(
    b: Builder,
    element: Any,
    steps: Value,
    rows: Sequence[Value],
    panels: Sequence[Value],
    ahead: Sequence[Value],
    step: Value,
    start: Sums,
) -> Sums:
    """`start` + the sum over `steps` lanes; rows advance by a lane at a time, panels by `step` bytes.

    `ahead`: what a later tile reads as this one reads its panels. Asked for a line at a time, it comes while this tile
    computes; all at once it would fill the CPU's queue of misses.
    """

    def body(k: Value, flat: list[Value]) -> list[Value]:
        row_at, panel_at = b.mul(k, const(LANE_BYTES)), b.mul(k, step)
        for address in ahead:
            emit_prefetch(b, b.add(address, panel_at))
        vectors = [load_from(b, b.add(panel, panel_at), i32x16) for panel in panels]
        totals = []
        for at, row in enumerate(rows):
            lane = spread(b, load_from(b, b.add(row, row_at), i32))
            for beside, vector in enumerate(vectors):
                totals.append(dot(b, element, flat[at * len(panels) + beside], lane, vector))
        return totals

    flat = loop(b, steps, [total for row in start for total in row], body)
    return [flat[at : at + len(panels)] for at in range(0, len(flat), len(panels))]


def addresses(b: Builder, first: Value, stride: Value, count: int) -> list[Value]:
    return [b.add(first, b.mul(stride, const(at))) for at in range(count)]


def keep(b: Builder, sums: Sums, rows: Sequence[Value], first_panel: int) -> None:
    for at, row in enumerate(rows):
        for beside, total in enumerate(sums[at]):
            store_to(b, offset(b, row, (first_panel + beside) * VECTOR_BYTES), total)


def nothing(rows: int, panels: int) -> Sums:
    return [[every_lane(0.0)] * panels for _ in range(rows)]


HEIGHTS: Final = tuple(range(1, MAX_ROWS + 1))


@instruction(NOTHING, ELEMENT, INT, ADDRESS, INT, ADDRESS, ADDRESS, INT, INT, ADDRESS, INT)
def product_tile(
    b: Builder,
    element: Any,
    rows: Value,
    x: Value,
    x_bytes: Value,
    weights: Value,
    ahead: Value,
    panel_bytes: Value,
    steps: Value,
    out: Value,
    out_bytes: Value,
) -> None:
    """1 to 6 rows times 64 columns → float32 [rows, 64]. `steps`: lanes along the sum.

    `ahead`: two panels to bring to the cache meanwhile.
    """

    def emit(height: int) -> None:
        inputs, outputs = addresses(b, x, x_bytes, height), addresses(b, out, out_bytes, height)
        width = panels_at_once(height)
        for first in range(0, PANELS, width):
            panels = [b.add(weights, b.mul(panel_bytes, const(first + at))) for at in range(width)]
            later = addresses(b, ahead, panel_bytes, AHEAD_PANELS) if first == 0 else []
            sums = _accumulate(b, element, steps, inputs, panels, later, const(VECTOR_BYTES), nothing(height, width))
            keep(b, sums, outputs, first)

    by_case(b, rows, HEIGHTS, emit)


def _four(b: Builder, table: Value, add: Value) -> list[Value]:
    """Four addresses from int64 `table`, `add` bytes further."""
    return [b.add(load_from(b, offset(b, table, 8 * at), i64, 8), add) for at in range(PANELS)]


@instruction(NOTHING, ELEMENT, INT, ADDRESS, INT, INT, ADDRESS, ADDRESS, ADDRESS)
def scores_tile(
    b: Builder,
    element: Any,
    rows: Value,
    queries: Value,
    query_bytes: Value,
    steps: Value,
    found: Value,
    ahead: Value,
    out: Value,
) -> None:
    """1 to 6 queries times 4 groups of 16 keys, each of `steps` vectors → float32 [rows, 64].

    `found`: address of the groups' addresses; `ahead`: of those to bring to the cache meanwhile.
    """
    groups, later = _four(b, found, const(0)), _four(b, ahead, const(0))

    def emit(height: int) -> None:
        inputs = addresses(b, queries, query_bytes, height)
        outputs = addresses(b, out, const(PANELS * VECTOR_BYTES), height)
        width = panels_at_once(height)
        for first in range(0, PANELS, width):
            here = slice(first, first + width)
            start = nothing(height, width)
            step = const(VECTOR_BYTES)
            sums = _accumulate(b, element, steps, inputs, groups[here], later[here], step, start)
            keep(b, sums, outputs, first)

    by_case(b, rows, HEIGHTS, emit)


@instruction(NOTHING, ELEMENT, INT, INT, ADDRESS, INT, ADDRESS, ADDRESS, INT, INT, ADDRESS, INT)
def mix_tile(
    b: Builder,
    element: Any,
    rows: Value,
    panels: Value,
    weights: Value,
    weight_bytes: Value,
    found: Value,
    ahead: Value,
    shift: Value,
    step_bytes: Value,
    out: Value,
    out_bytes: Value,
) -> None:
    """1 to 6 rows of 64 weights times the values of 4 groups of 16 tokens: added to float32 [rows, 16 · panels].

    `found`, `ahead`: as in `scores_tile`, the values `shift` bytes further; `panels`: 1 or 4, of 16 dimensions;
    `step_bytes`: from one lane of tokens to the next in the values of a group.
    """
    lanes = LANES // 2 if is_bf16(element) else LANES
    groups, later = _four(b, found, shift), _four(b, ahead, shift)

    def emit(height: int, count: int) -> None:
        inputs, outputs = addresses(b, weights, weight_bytes, height), addresses(b, out, out_bytes, height)
        width = min(panels_at_once(height), count)
        for first in range(0, count, width):
            here = range(first, first + width)
            sums = [[load_from(b, offset(b, row, at * VECTOR_BYTES), f32x16) for at in here] for row in outputs]
            for number, (group, next_group) in enumerate(zip(groups, later)):
                lanes_here = [offset(b, row, number * lanes * LANE_BYTES) for row in inputs]
                vectors, following = (
                    [offset(b, address, at * VECTOR_BYTES) for at in here] for address in (group, next_group)
                )
                sums = _accumulate(b, element, const(lanes), lanes_here, vectors, following, step_bytes, sums)
            keep(b, sums, outputs, first)

    def of_width(count: int) -> None:
        by_case(b, rows, HEIGHTS, functools.partial(emit, count=count))

    by_case(b, panels, (1, PANELS), of_width)


@kernel
def tile_height(rows: int) -> int:
    """Rows of the next tile, where so many are left: 8 are 4 and 4, not 6 and 2, as a small tile reads the weights as
    often as a large one and uses them less."""
    tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
    return (rows + tiles - 1) // tiles


@kernel
def fetched_beside(row: int, rows: int, weights: int, following: int, panel_bytes: int) -> int:
    """Which two panels of the `following` columns to fetch beside the tile that begins at `row` of `rows`.

    The first tile of some columns waits for memory, the second finds the weights in the cache and only computes: each
    fetches half of the next columns, so that memory and arithmetic are busy together. One tile alone (6 rows or less)
    is all memory, and needs no help; then, and from the third on, what is fetched is what is there.
    """
    if rows <= MAX_ROWS or row >= 2 * MAX_ROWS:
        return weights
    return following if row == 0 else following + AHEAD_PANELS * panel_bytes


@kernel
def product_rows(
    element: Any,
    rows: int,
    x: int,
    x_bytes: int,
    weights: int,
    ahead: int,
    panel_bytes: int,
    steps: int,
    out: int,
    out_bytes: int,
) -> None:
    """`product_tile` as a function: its six heights are compiled once, not where each phase of a layer needs them."""
    product_tile(element, rows, x, x_bytes, weights, ahead, panel_bytes, steps, out, out_bytes)

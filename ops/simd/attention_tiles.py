"""Scores and mixed values of attention in AMX's tiles, for KV in bfloat16; elsewhere `tiles` makes them in vectors.

Pages are packed as tiles want their right side. A group of 16 keys is a tile for each 32 dimensions, in one piece.
Values lie in pairs of tokens, so that a tile could take the 16 tokens of a group, but that takes as long as 32: the
values of 64 tokens are brought together first, which costs as much as 8 dots of the 48 that it saves.

    totals 0–3  of 16 rows: their scores with 4 groups of keys, or 64 dimensions that are mixed
    left   4    16 queries, 32 dimensions of each; or 16 rows of 32 weights
           5    16 queries, the last 16 dimensions of each
    right  6    16 keys, 32 dimensions; or 32 values, 16 dimensions
           7    16 keys, the last 16 dimensions

Of a block that has less than 16 rows, tiles have as many. Of one that has more, the last tile may have rows that mean
nothing: no row looks at another.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.ops.simd import amx
from headrace.ops.simd.instructions import (
    ADDRESS,
    INT,
    LANES,
    NOTHING,
    Builder,
    Value,
    by_case,
    const,
    i64,
    instruction,
    kernel,
    load_from,
    offset,
    part,
)
from headrace.ops.simd.softmax import KEYS, SCORE_BYTES, weigh_rows
from headrace.ops.simd.target import AMX
from headrace.ops.simd.tiles import PANELS
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    LANE_BYTES,
    VECTOR_BYTES,
    emit_prefetch,
    get_address,
    load,
    prefetch,
    store,
)

LEFT_VALUES: Final = amx.TILE_ROW_BYTES // 2
"""In a row of a left tile: dimensions, or keys."""
WEIGHT_BYTES: Final = KEYS * 2
"""Of a row of weights."""
_LEFT, _LAST_LEFT, _RIGHT, _LAST_RIGHT = 4, 5, 6, 7


@instruction(NOTHING, INT)
def shape_tiles(b: Builder, rows: Value) -> None:
    """For blocks of so many rows, 1 to 16 (16 for larger ones)."""
    if AMX:
        half = amx.TILE_ROW_BYTES // 2
        left, right = [amx.TileShape(rows), amx.TileShape(rows, half)], [amx.TileShape(16), amx.TileShape(8)]
        amx.emit_configure(b, [*[amx.TileShape(rows)] * PANELS, *left, *right])


@instruction(NOTHING)
def _clear_totals(b: Builder) -> None:
    if AMX:
        for total in range(PANELS):
            amx.emit_zero(b, total)


@instruction(NOTHING, INT, ADDRESS, INT)
def _load_totals(b: Builder, panels: Value, source: Value, row_bytes: Value) -> None:
    """16 columns of each of 1 to 4 panels, side by side."""

    def emit(count: int) -> None:
        for total in range(count):
            amx.emit_load_tile(b, total, offset(b, source, total * VECTOR_BYTES), row_bytes)

    if AMX:
        by_case(b, panels, range(1, PANELS + 1), emit)


@instruction(NOTHING, INT, ADDRESS, INT)
def _keep_totals(b: Builder, panels: Value, to: Value, row_bytes: Value) -> None:
    def emit(count: int) -> None:
        for total in range(count):
            amx.emit_store_tile(b, total, offset(b, to, total * VECTOR_BYTES), row_bytes)

    if AMX:
        by_case(b, panels, range(1, PANELS + 1), emit)


def _score_groups(b: Builder, left: int, right: int, queries: Value, row_bytes: Value, found: Value, at: Value) -> None:
    amx.emit_load_tile(b, left, queries, row_bytes)
    for group in range(PANELS):
        keys = b.add(load_from(b, offset(b, found, 8 * group), i64, 8), at)
        amx.emit_load_tile(b, right, keys, const(VECTOR_BYTES))
        amx.emit_dot(b, group, left, right)


@instruction(NOTHING, ADDRESS, INT, ADDRESS, INT)
def _score(b: Builder, queries: Value, row_bytes: Value, found: Value, at: Value) -> None:
    """Totals += 32 dimensions of queries · those of 4 groups of keys, `at` bytes into each."""
    if AMX:
        _score_groups(b, _LEFT, _RIGHT, queries, row_bytes, found, at)


@instruction(NOTHING, ADDRESS, INT, ADDRESS, INT)
def _score_last(b: Builder, queries: Value, row_bytes: Value, found: Value, at: Value) -> None:
    """The same for the last 16 dimensions."""
    if AMX:
        _score_groups(b, _LAST_LEFT, _LAST_RIGHT, queries, row_bytes, found, at)


@instruction(NOTHING, INT, ADDRESS, ADDRESS, INT)
def _mix(b: Builder, panels: Value, weights: Value, values: Value, pair_bytes: Value) -> None:
    """Totals += weights of 32 tokens · 16 dimensions of their values, for each panel."""

    def emit(count: int) -> None:
        amx.emit_load_tile(b, _LEFT, weights, const(WEIGHT_BYTES))
        for panel in range(count):
            amx.emit_load_tile(b, _RIGHT, offset(b, values, panel * VECTOR_BYTES), pair_bytes)
            amx.emit_dot(b, panel, _LEFT, _RIGHT)

    if AMX:
        by_case(b, panels, range(1, PANELS + 1), emit)


@instruction(NOTHING, ADDRESS, INT)
def _fetch(b: Builder, found: Value, at: Value) -> None:
    """Bring 1 kB of each of 4 groups to the cache, `at` bytes into each."""
    for group in range(PANELS):
        address = b.add(load_from(b, offset(b, found, 8 * group), i64, 8), at)
        for line in range(0, amx.TILE_BYTES, VECTOR_BYTES):
            emit_prefetch(b, offset(b, address, line))


@kernel
def score_tile(head_dim: int, queries: int, found: int, ahead: int, scores: int) -> None:
    """float32 scores [16, 64] of packed queries with the keys of 4 groups, `ahead` those to bring to the cache."""
    head_bytes, steps = head_dim * 2, head_dim // LEFT_VALUES
    _clear_totals()
    for step in range(steps):
        if ahead != found:
            _fetch(ahead, step * amx.TILE_BYTES)
        _score(queries + step * amx.TILE_ROW_BYTES, head_bytes, found, step * amx.TILE_BYTES)
    if head_dim % LEFT_VALUES > 0:
        _score_last(queries + steps * amx.TILE_ROW_BYTES, head_bytes, found, steps * amx.TILE_BYTES)
    _keep_totals(PANELS, scores, SCORE_BYTES)


@kernel
def bring_together(head_dim: int, found: int, ahead: int, across: int, values: int) -> None:
    """Copy the values of 4 groups, `across` bytes behind their keys; those that `ahead` says come to the cache."""
    group_bytes = LANES * head_dim * 2
    for group in range(PANELS):
        source, later = get_address(found + group * 8) + across, get_address(ahead + group * 8) + across
        to = values + group * group_bytes
        for at in range(0, group_bytes, VECTOR_BYTES):
            prefetch(later + at)
            store(F32, to + at, load(F32, source + at))


@kernel
def mix_tile(head_dim: int, tokens: int, weights: int, values: int, mixed: int) -> None:
    """float32 mixed [16, head_dim] += weights · values of the first `tokens` of 64, which lie together."""
    mixed_bytes, pair_bytes = head_dim * F32_BYTES, head_dim * LANE_BYTES
    for at in range(0, head_dim, PANELS * LANES):
        panels = min(PANELS, (head_dim - at) // LANES)
        here, to = values + at * LANE_BYTES, mixed + at * F32_BYTES
        _load_totals(panels, to, mixed_bytes)
        for token in range(0, tokens, LEFT_VALUES):
            _mix(panels, weights + token * 2, here + token // 2 * pair_bytes, pair_bytes)
        _keep_totals(panels, to, mixed_bytes)


@part
def attend_in_tiles(
    kv: Any,
    sight: Any,
    rows: int,
    head_dim: int,
    seen: int,
    tokens: int,
    found: int,
    ahead: int,
    parts: Any,
    values: int,
) -> None:
    """What 64 keys, the first `tokens` of them at most, add to a block's rows. `parts`: its `Scratch`.

    The next tile's scores are asked for before a tile's weights are computed: dots and vectors have units of their own.
    """
    score_tile(head_dim, parts.queries, found, ahead, parts.scores)
    for row in range(0, rows, amx.TILE_ROWS):
        after = row + amx.TILE_ROWS
        if after < rows:
            to = parts.scores + after % (2 * amx.TILE_ROWS) * SCORE_BYTES
            score_tile(head_dim, parts.queries + after * head_dim * 2, found, found, to)
        mixed = parts.mixed + row * head_dim * F32_BYTES
        weigh_rows(
            kv,
            sight,
            row,
            min(amx.TILE_ROWS, rows - row),
            seen,
            parts.scores + row % (2 * amx.TILE_ROWS) * SCORE_BYTES,
            parts.biases + row * F32_BYTES,
            parts.totals + row * VECTOR_BYTES,
            mixed,
            head_dim,
            parts.weights,
        )
        mix_tile(head_dim, tokens, parts.weights, values, mixed)

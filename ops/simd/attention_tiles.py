"""Scores and mixed values of attention in AMX's tiles, for KV in bfloat16; elsewhere `tiles` makes them in vectors.

Pages are packed as tiles want their right side. A group of 16 keys is a tile for each 32 dimensions, in one piece.
Values lie in pairs of tokens, so that a tile could take the 16 tokens of a group, but that takes as long as 32: values
are brought together first, once for the chunk of keys that all rows of a block go through, 16 rows after the other.

    0–3  what 16 rows have mixed, of 64 dimensions: in a head of no more they stay here along the chunk
    4–5  scores of 16 rows with 2 groups of keys
    6    left: 16 queries, 32 dimensions of each; or 16 rows of 32 weights
    7    right: 16 keys, 32 dimensions; or 32 values, 16 dimensions

While 16 rows are weighed, their scores with the next 64 keys are made, and what they weighed before is mixed; a row's
weights are emitted behind each dot. Vectors of float32 run at half their speed beside tiles (the CPU's second 512-bit
unit takes none while it loads tiles or multiplies them); still it takes a fifth less time than one after the other.

Of a block that has less than 16 rows, tiles have as many. Of one that has more, the last tile may have rows that mean
nothing: no row looks at another.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from headrace.ops.simd import amx
from headrace.ops.simd.head_pages import FOUND_BYTES, GROUPS, find_groups, gather_keys, gather_plane
from headrace.ops.simd.instructions import (
    ADDRESS,
    INT,
    LANES,
    NOTHING,
    Builder,
    F32x16,
    Value,
    by_case,
    const,
    i64,
    instruction,
    kernel,
    load_from,
    offset,
)
from headrace.ops.simd.softmax import KEYS, SCORE_BYTES, prepare_scores
from headrace.ops.simd.softmax_tiles import (
    LARGEST,
    STATE,
    WEIGHT_BYTES,
    Weighed,
    begin_tiled_rows,
    emit_row,
    first_biases,
    settle_rows,
    weigh,
)
from headrace.ops.simd.target import AMX
from headrace.ops.simd.tiles import PANELS
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    LANE_BYTES,
    VECTOR_BYTES,
    any_above,
    emit_prefetch,
    get_address,
    load,
    prefetch,
    splat,
    store,
    zeros,
)

LEFT_VALUES: Final = amx.TILE_ROW_BYTES // 2
"""In a row of a left tile: dimensions, or keys."""
HALVES: Final = KEYS // LEFT_VALUES
"""Scores are made, and values mixed, for half of 64 keys at a time."""
HALF_GROUPS: Final = GROUPS // HALVES
TILED_DIM: Final = PANELS * LANES
"""The largest head whose 16 rows are mixed in tiles."""
CHUNK_STEPS: Final = 8
"""Times 64 keys of a chunk: with their values, and these brought together, 192 kB at 64 dimensions."""
_SCORES, _LEFT, _RIGHT = 4, 6, 7
_SMALL_LEFT, _SMALL_RIGHT = 2, 3
"""Of heads of 16 dimensions: what mixes only one panel has these tiles left."""


@instruction(NOTHING, INT, INT)
def shape_tiles(b: Builder, rows: Value, head_dim: Value) -> None:
    """For blocks of so many rows, 1 to 16 (16 for larger ones)."""
    if AMX:
        small = b.icmp_signed("<", head_dim, const(LEFT_VALUES))
        width = b.select(small, const(amx.TILE_ROW_BYTES // 2), const(amx.TILE_ROW_BYTES))
        shapes = [amx.TileShape(rows)] * amx.TILES
        shapes[_SMALL_LEFT] = amx.TileShape(rows, width)
        shapes[_SMALL_RIGHT] = amx.TileShape(b.select(small, const(amx.TILE_ROWS // 2), rows))
        shapes[_RIGHT] = amx.TileShape(amx.TILE_ROWS)
        amx.emit_configure(b, shapes)


@instruction(NOTHING)
def _clear_scores(b: Builder) -> None:
    if AMX:
        for at in range(HALF_GROUPS):
            amx.emit_zero(b, _SCORES + at)


@instruction(NOTHING, ADDRESS)
def _keep_scores(b: Builder, to: Value) -> None:
    if AMX:
        for at in range(HALF_GROUPS):
            amx.emit_store_tile(b, _SCORES + at, offset(b, to, at * VECTOR_BYTES), const(SCORE_BYTES))


@instruction(NOTHING, INT, ADDRESS, INT)
def _load_mixed(b: Builder, panels: Value, source: Value, row_bytes: Value) -> None:
    """16 dimensions of each of 1 to 4 panels, side by side."""

    def emit(count: int) -> None:
        for panel in range(count):
            amx.emit_load_tile(b, panel, offset(b, source, panel * VECTOR_BYTES), row_bytes)

    if AMX:
        by_case(b, panels, range(1, PANELS + 1), emit)


@instruction(NOTHING, INT, ADDRESS, INT)
def _keep_mixed(b: Builder, panels: Value, to: Value, row_bytes: Value) -> None:
    def emit(count: int) -> None:
        for panel in range(count):
            amx.emit_store_tile(b, panel, offset(b, to, panel * VECTOR_BYTES), row_bytes)

    if AMX:
        by_case(b, panels, range(1, PANELS + 1), emit)


ROWS: Final = (INT, INT, F32x16, *STATE, F32x16)
"""Rows to be weighed, one behind each dot: the first, their end; the rest is `weigh`'s."""


@instruction(F32x16, ADDRESS, INT, ADDRESS, INT, *ROWS)
def _score(b: Builder, queries: Value, row_bytes: Value, found: Value, at: Value, *rows: Value) -> Value:
    """Scores += 32 dimensions of queries · those of 2 groups of keys, `at` bytes into each → `weigh`'s."""
    row, end, factor, *state, high = rows
    if AMX:
        amx.emit_load_tile(b, _LEFT, queries, row_bytes)
        for group in range(HALF_GROUPS):
            keys = b.add(load_from(b, offset(b, found, 8 * group), i64, 8), at)
            amx.emit_load_tile(b, _RIGHT, keys, const(VECTOR_BYTES))
            amx.emit_dot(b, _SCORES + group, _LEFT, _RIGHT)
            high = emit_row(b, b.add(row, const(group)), end, factor, state, high)
    return high


@instruction(NOTHING, ADDRESS, INT, ADDRESS)
def _score_small(b: Builder, queries: Value, row_bytes: Value, found: Value) -> None:
    """Scores += 16 dimensions of queries · those of 2 groups of keys."""
    if AMX:
        amx.emit_load_tile(b, _SMALL_LEFT, queries, row_bytes)
        for group in range(HALF_GROUPS):
            amx.emit_load_tile(b, _SMALL_RIGHT, load_from(b, offset(b, found, 8 * group), i64, 8), const(VECTOR_BYTES))
            amx.emit_dot(b, _SCORES + group, _SMALL_LEFT, _SMALL_RIGHT)


@instruction(NOTHING, INT, ADDRESS, ADDRESS, INT)
def _mix(b: Builder, panels: Value, weights: Value, values: Value, pair_bytes: Value) -> None:
    """Mixed += weights of 32 tokens · 16 dimensions of their values, for each of 1 to 3 panels."""

    def emit(count: int) -> None:
        amx.emit_load_tile(b, _LEFT, weights, const(WEIGHT_BYTES))
        for panel in range(count):
            amx.emit_load_tile(b, _RIGHT, offset(b, values, panel * VECTOR_BYTES), pair_bytes)
            amx.emit_dot(b, panel, _LEFT, _RIGHT)

    if AMX:
        by_case(b, panels, range(1, PANELS), emit)


@instruction(F32x16, ADDRESS, ADDRESS, INT, *ROWS)
def _mix_all(b: Builder, weights: Value, values: Value, pair_bytes: Value, *rows: Value) -> Value:
    """The same for 4 panels → `weigh`'s."""
    row, end, factor, *state, high = rows
    if AMX:
        amx.emit_load_tile(b, _LEFT, weights, const(WEIGHT_BYTES))
        for panel in range(PANELS):
            amx.emit_load_tile(b, _RIGHT, offset(b, values, panel * VECTOR_BYTES), pair_bytes)
            amx.emit_dot(b, panel, _LEFT, _RIGHT)
            high = emit_row(b, b.add(row, const(panel)), end, factor, state, high)
    return high


@instruction(NOTHING, ADDRESS, INT)
def _fetch(b: Builder, found: Value, at: Value) -> None:
    """Bring 1 kB of each of 4 groups to the cache, `at` bytes into each."""
    for group in range(PANELS):
        address = b.add(load_from(b, offset(b, found, 8 * group), i64, 8), at)
        for line in range(0, amx.TILE_BYTES, VECTOR_BYTES):
            emit_prefetch(b, offset(b, address, line))


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
def packed_bytes(head_dim: int) -> int:
    """Of a row of packed queries. Where the last 16 dimensions are over, they follow once more, behind 16 zeros: their
    tile of keys has the last 32 dimensions."""
    return head_dim * 2 + (amx.TILE_ROW_BYTES if head_dim > LEFT_VALUES and head_dim % LEFT_VALUES > 0 else 0)


@kernel
def attend_unit(
    head_dim: int,
    queries: int,
    found: int,
    ahead: int,
    scores: int,
    weights: int,
    values: int,
    mixed: int,
    weighed: Any,
) -> Any:
    """Scores of 16 rows, what they mix, and weights of 16 rows between → the largest sum of 4 weights.

    scores: float32 [16, 64] of packed `queries` with the keys of 4 groups; nothing if `found` is 0
    mixed:  float32 [16, head_dim] += `weights` · 64 `values`, which lie together; nothing if `weights` is 0. In tiles,
            where these have room for it
    """
    rows, factor = weighed.rows, weighed.factor
    state = weighed.scores, weighed.biases, weighed.totals, weighed.old_totals, weighed.weights
    row_bytes, pair_bytes = packed_bytes(head_dim), head_dim * LANE_BYTES
    row, high = 0, zeros()
    for half in range(HALVES):
        if found != 0:
            _clear_scores()
            groups = found + half * HALF_GROUPS * 8
            for step in range(head_dim // LEFT_VALUES):
                of, at = queries + step * amx.TILE_ROW_BYTES, step * amx.TILE_BYTES
                if ahead != 0 and half == 0:
                    _fetch(ahead, at)
                high = _score(of, row_bytes, groups, at, row, rows, factor, *state, high)
                row += HALF_GROUPS
            if head_dim < LEFT_VALUES:
                _score_small(queries, row_bytes, groups)
            elif head_dim % LEFT_VALUES > 0:
                at = (head_dim - LEFT_VALUES) // 2 * VECTOR_BYTES
                high = _score(queries + head_dim * 2, row_bytes, groups, at, row, rows, factor, *state, high)
                row += HALF_GROUPS
            _keep_scores(scores + half * HALF_GROUPS * VECTOR_BYTES)
        if weights != 0 and head_dim <= TILED_DIM:
            of, pairs, panels = weights + half * LEFT_VALUES * 2, values + half * LANES * pair_bytes, head_dim // LANES
            if panels == PANELS:
                high = _mix_all(of, pairs, pair_bytes, row, rows, factor, *state, high)
                row += PANELS
            else:
                _mix(panels, of, pairs, pair_bytes)
    if weights != 0 and head_dim > TILED_DIM:
        for at in range(0, head_dim, TILED_DIM):
            panels, to = min(PANELS, (head_dim - at) // LANES), mixed + at * F32_BYTES
            _load_mixed(panels, to, head_dim * F32_BYTES)
            for half in range(HALVES):
                of, pairs = weights + half * LEFT_VALUES * 2, values + at * LANE_BYTES + half * LANES * pair_bytes
                if panels == PANELS:
                    high = _mix_all(of, pairs, pair_bytes, row, rows, factor, *state, high)
                    row += PANELS
                else:
                    _mix(panels, of, pairs, pair_bytes)
            _keep_mixed(panels, to, head_dim * F32_BYTES)
    return weigh(row, rows, factor, *state, high)


@kernel
def take_mixed(head_dim: int, mixed: int) -> None:
    """What 16 rows have mixed, into tiles if these have room for it."""
    if head_dim <= TILED_DIM:
        _load_mixed(head_dim // LANES, mixed, head_dim * F32_BYTES)


@kernel
def put_mixed(head_dim: int, mixed: int) -> None:
    """The reverse."""
    if head_dim <= TILED_DIM:
        _keep_mixed(head_dim // LANES, mixed, head_dim * F32_BYTES)


@kernel
def find_keys(kv: Any, head: Any, start: int, steps: int, end: int, parts: Any) -> None:
    """Find the keys of `steps` times 64 from `start` on, and where pages are whole those of the next 64."""
    keys = parts.gathered + CHUNK_STEPS * KEYS * head.head_dim * 2
    if head.page_tokens % LANES == 0:
        for step in range(steps + 1):
            if start + step * KEYS < end:
                find_groups(kv, head, start + step * KEYS, end, parts.found + step * FOUND_BYTES)
    else:
        for step in range(steps):
            if start + step * KEYS < end:
                to = keys + step * KEYS * head.head_dim * 2
                gather_keys(kv, head, start + step * KEYS, end, parts.found + step * FOUND_BYTES, to)


@kernel
def bring_values(kv: Any, head: Any, start: int, steps: int, end: int, parts: Any) -> None:
    """Values of these keys, together."""
    for step in range(steps):
        at, to = start + step * KEYS, parts.gathered + step * KEYS * head.head_dim * 2
        if at < end:
            if head.page_tokens % LANES == 0:
                here = parts.found + step * FOUND_BYTES
                ahead = here + FOUND_BYTES if at + KEYS < end else here
                bring_together(head.head_dim, here, ahead, head.values - head.keys, to)
            else:
                gather_plane(kv, head, head.values, at, end, False, to)


@kernel
def attend_in_tiles(
    kv: Any, head: Any, sight: Any, tokens: int, position: int, first: int, end: int, goes_on: bool, parts: Any
) -> None:
    """What keys [first, end) add to a block's rows. `first` is a multiple of 64, and so is `end` if more keys follow.

    `goes_on`: the rows have seen the keys before. `parts`: their `Scratch`.
    """
    head_dim, rows, sharing = head.head_dim, tokens * sight.sharing, sight.sharing
    row_bytes, tile_rows = packed_bytes(head_dim), amx.TILE_ROWS
    if not goes_on:
        begin_tiled_rows(rows, parts.biases, parts.totals)
    idle = Weighed(0, splat(np.float32(0)), 0, 0, 0, 0, 0)
    steps = CHUNK_STEPS if rows > tile_rows else 1
    for chunk in range(first, end, steps * KEYS):
        find_keys(kv, head, chunk, steps, end, parts)
        bring_values(kv, head, chunk, steps, end, parts)
        unit, weights, values, mixed = 0, 0, 0, 0
        for top in range(0, rows, tile_rows):
            height = min(tile_rows, rows - top)
            begin, stop = chunk, min(chunk + steps * KEYS, end, position + (top + height - 1) // sharing + 1)
            if sight.window > 0:
                begin = max(chunk, (position + top // sharing + 1 - sight.window) // KEYS * KEYS)
            if begin >= stop:
                continue
            queries, found = parts.queries + top * row_bytes, parts.found + (begin - chunk) // KEYS * FOUND_BYTES
            scores = parts.scores + unit % 2 * tile_rows * SCORE_BYTES
            ahead = found + FOUND_BYTES if steps == 1 and chunk + KEYS < end else 0
            attend_unit(head_dim, queries, found, ahead, scores, weights, values, mixed, idle)
            if weights != 0:
                put_mixed(head_dim, mixed)
            weights, mixed = 0, parts.mixed + top * head_dim * F32_BYTES
            take_mixed(head_dim, mixed)
            for start in range(begin, stop, KEYS):
                scores = parts.scores + unit % 2 * tile_rows * SCORE_BYTES
                next_scores = parts.scores + (unit + 1) % 2 * tile_rows * SCORE_BYTES
                found = found + FOUND_BYTES if start + KEYS < stop else 0
                weighed = Weighed(
                    height,
                    splat(prepare_scores(sight, top, height, position + 1 - start, scores)),
                    scores,
                    parts.biases + top * F32_BYTES,
                    parts.totals + top * VECTOR_BYTES,
                    parts.old_totals,
                    parts.weights + unit % 2 * tile_rows * WEIGHT_BYTES,
                )
                if start == first and not goes_on:
                    first_biases(weighed)
                high = attend_unit(head_dim, queries, found, 0, next_scores, weights, values, mixed, weighed)
                if any_above(high, splat(LARGEST)):
                    put_mixed(head_dim, mixed)
                    settle_rows(weighed, mixed, head_dim)
                    take_mixed(head_dim, mixed)
                values = parts.gathered + (start - chunk) * head_dim * 2
                weights, unit = weighed.weights, unit + 1
        attend_unit(head_dim, 0, 0, 0, 0, weights, values, mixed, idle)
        put_mixed(head_dim, mixed)

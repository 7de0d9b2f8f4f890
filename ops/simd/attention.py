"""Flash attention (arXiv:2205.14135) over KV pages, for decode and prefill alike.

A block is a few tokens of one request with the query heads that share a KV head: 48 rows at most. It goes through the
keys 64 at a time, from a multiple of 64 on, with a running maximum and sum. Where those 64 keys begin follows from
their positions alone, and keys that a row may not see weigh exactly nothing: so a row's bits are the same whether it is
computed alone (decode), in a chunk, or in another chunk, from whatever pages.

    scores   float32 [rows, 64]  = queries · keys, float32 sums
    weights  of KV's elements    = exp(scores - maximum), rounded
    mixed    float32 [rows, head_dim] += weights · values
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from headrace.ops.simd.instructions import LANES, kernel
from headrace.ops.simd.tiles import TILE_COLUMNS, mix_tile, scores_tile, tile_height
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    LANE_BYTES,
    VECTOR_BYTES,
    add,
    copy_lane,
    copy_value,
    divide,
    exp,
    first_lane,
    get_f32,
    get_i32,
    lane_values,
    load,
    max_lanes,
    maximum,
    multiply,
    put_f32,
    put_zero_lane,
    splat,
    store,
    subtract,
    sum_lanes,
    value_bytes,
    where_between,
    zeros,
)

BLOCK_ROWS: Final = 48
"""Rows of a block: a whole number of tiles, whose scores and sums stay in the first cache (25 kB at 64 dimensions)."""
KEYS: Final = TILE_COLUMNS
"""Keys that a block looks at at a time."""
GROUPS: Final = KEYS // LANES
_LOWEST: Final = np.float32(-1e30)
"""Below every score. Not infinite, so that differences are numbers."""


def block_tokens(sharing: int) -> int:
    """Tokens of a block, where `sharing` query heads share a KV head."""
    return max(1, BLOCK_ROWS // sharing)


def scratch_bytes(sharing: int, head_dim: int) -> int:
    """Bytes that a thread needs for a block."""
    rows = block_tokens(sharing) * sharing
    # Queries, scores, weights, sums; maximum, total; keys and values that are gathered from small pages.
    return F32_BYTES * (rows * (2 * head_dim + 2 * KEYS + 2) + 2 * KEYS * head_dim) + 8 * VECTOR_BYTES


@kernel
def group_of(
    kv: Any, plane: int, head_dim: int, table: int, pages: int, page_bytes: int, page_tokens: int, first: int
) -> int:
    """The address of 16 tokens' packed keys or values, in pages that hold whole groups.

    `plane`: bytes from a page's start to the head's keys or values; `first`: the first token's position.
    """
    page = get_i32(table + first // page_tokens * 4)
    inside = first % page_tokens * head_dim * value_bytes(kv)
    address: int = pages + page * page_bytes + plane + inside
    return address


@kernel
def gather_group(
    kv: Any,
    plane: int,
    head_dim: int,
    table: int,
    pages: int,
    page_bytes: int,
    page_tokens: int,
    first: int,
    end: int,
    by_key: bool,
    to: int,
) -> None:
    """Pack 16 tokens, zeros from `end` on, from pages that hold them one after the other."""
    size, lane = value_bytes(kv), lane_values(kv)
    for at in range(0, LANES * head_dim * size, LANE_BYTES):
        put_zero_lane(to + at)
    for token in range(min(LANES, end - first)):
        position = first + token
        row = pages + get_i32(table + position // page_tokens * 4) * page_bytes + plane
        row += position % page_tokens * head_dim * size
        if by_key:
            for at in range(head_dim // lane):
                copy_lane(to + (at * LANES + token) * LANE_BYTES, row + at * LANE_BYTES)
        else:
            start = to + token // lane * head_dim * LANE_BYTES + token % lane * size
            for at in range(head_dim):
                copy_value(kv, start + at * LANE_BYTES, row + at * size)


@kernel
def capped(scores: Any, cap: float) -> Any:
    """cap · tanh(scores / cap)."""
    one = splat(np.float32(1))
    power = exp(multiply(scores, splat(np.float32(2) / np.float32(cap))))
    return multiply(splat(np.float32(cap)), divide(subtract(power, one), add(power, one)))


@kernel
def weigh_row(
    kv: Any, scores: int, low: int, high: int, scale: float, cap: float, state: int, mixed: int, dim: int, out: int
) -> None:
    """Softmax's running step for one row: scores of 64 keys, of which it sees low .. high - 1, → weights.

    `state`: the maximum and the sum so far; `mixed`, `dim` values, is scaled down when the maximum grows.
    """
    factor, lowest = splat(np.float32(scale)), splat(_LOWEST)
    a, b = multiply(load(F32, scores), factor), multiply(load(F32, scores + VECTOR_BYTES), factor)
    c = multiply(load(F32, scores + 2 * VECTOR_BYTES), factor)
    d = multiply(load(F32, scores + 3 * VECTOR_BYTES), factor)
    if cap > 0:
        a, b, c, d = capped(a, cap), capped(b, cap), capped(c, cap), capped(d, cap)
    partly = low > 0 or high < KEYS
    if partly:
        a, b = where_between(low, high, a, lowest), where_between(low - 16, high - 16, b, lowest)
        c, d = where_between(low - 32, high - 32, c, lowest), where_between(low - 48, high - 48, d, lowest)
    before, total = get_f32(state), get_f32(state + F32_BYTES)
    largest = max_lanes(maximum(maximum(a, b), maximum(c, d)))
    if largest > before:
        shrink = exp(splat(before - largest))
        total *= first_lane(shrink)
        for at in range(0, dim, LANES):
            store(F32, mixed + at * F32_BYTES, multiply(load(F32, mixed + at * F32_BYTES), shrink))
        before = largest
    top = splat(before)
    a, b, c, d = exp(subtract(a, top)), exp(subtract(b, top)), exp(subtract(c, top)), exp(subtract(d, top))
    if partly:
        none = zeros()
        a, b = where_between(low, high, a, none), where_between(low - 16, high - 16, b, none)
        c, d = where_between(low - 32, high - 32, c, none), where_between(low - 48, high - 48, d, none)
    put_f32(state, before)
    put_f32(state + F32_BYTES, total + sum_lanes(add(add(a, b), add(c, d))))
    step = LANES * value_bytes(kv)
    store(kv, out, a)
    store(kv, out + step, b)
    store(kv, out + 2 * step, c)
    store(kv, out + 3 * step, d)


@kernel
def attend_block(
    kv: Any,
    queries: int,
    query_bytes: int,
    tokens: int,
    position: int,
    sharing: int,
    head_dim: int,
    table: int,
    pages: int,
    page_bytes: int,
    page_tokens: int,
    key_plane: int,
    value_plane: int,
    scale: float,
    window: int,
    cap: float,
    scratch: int,
    out: int,
    out_bytes: int,
) -> None:
    """`tokens` tokens from `position` on, `sharing` query heads of each → the same shape in `out`, of `kv` values.

    `queries`, `out`: the first token's first head; tokens are `query_bytes` and `out_bytes` apart. `table`: int32, the
    request's pages. `window`: a token sees itself and so many - 1 before it; 0: all. `cap`: of scores, soft; 0: none.
    """
    size = value_bytes(kv)
    rows, head_bytes = tokens * sharing, head_dim * size
    packed_queries, scores = scratch, scratch + rows * head_dim * F32_BYTES
    weights = scores + rows * KEYS * F32_BYTES
    mixed = weights + rows * KEYS * F32_BYTES
    gathered = mixed + rows * head_dim * F32_BYTES
    state = gathered + 2 * KEYS * head_dim * F32_BYTES
    none = zeros()
    for row in range(rows):
        source = queries + row // sharing * query_bytes + row % sharing * head_bytes
        for at in range(0, head_bytes, LANE_BYTES):
            copy_lane(packed_queries + row * head_bytes + at, source + at)
        for at in range(0, head_dim, LANES):
            store(F32, mixed + (row * head_dim + at) * F32_BYTES, none)
        put_f32(state + row * 2 * F32_BYTES, _LOWEST)
        put_f32(state + row * 2 * F32_BYTES + F32_BYTES, np.float32(0))
    end = position + tokens
    first = max(0, position + 1 - window) // KEYS * KEYS if window > 0 else 0
    packed = page_tokens % LANES == 0
    group_bytes = LANES * head_bytes
    last_group = (end - 1) // LANES * LANES
    for start in range(first, end, KEYS):
        s0, s1 = start, min(start + 16, last_group)
        s2, s3 = min(start + 32, last_group), min(start + 48, last_group)
        if packed:
            k0 = group_of(kv, key_plane, head_dim, table, pages, page_bytes, page_tokens, s0)
            k1 = group_of(kv, key_plane, head_dim, table, pages, page_bytes, page_tokens, s1)
            k2 = group_of(kv, key_plane, head_dim, table, pages, page_bytes, page_tokens, s2)
            k3 = group_of(kv, key_plane, head_dim, table, pages, page_bytes, page_tokens, s3)
            across = value_plane - key_plane
            v0, v1, v2, v3 = k0 + across, k1 + across, k2 + across, k3 + across
        else:
            for group in range(GROUPS):
                here = min(start + group * LANES, last_group)
                to = gathered + group * group_bytes
                gather_group(kv, key_plane, head_dim, table, pages, page_bytes, page_tokens, here, end, True, to)
                to += GROUPS * group_bytes
                gather_group(kv, value_plane, head_dim, table, pages, page_bytes, page_tokens, here, end, False, to)
            k0, k1 = gathered, gathered + group_bytes
            k2, k3 = gathered + 2 * group_bytes, gathered + 3 * group_bytes
            across = GROUPS * group_bytes
            v0, v1, v2, v3 = k0 + across, k1 + across, k2 + across, k3 + across
        row = 0
        while row < rows:
            height = tile_height(rows - row)
            from_row = packed_queries + row * head_bytes
            steps = head_bytes // LANE_BYTES
            scores_tile(kv, height, from_row, head_bytes, steps, k0, k1, k2, k3, scores + row * KEYS * F32_BYTES)
            row += height
        for row in range(rows):
            high = position + row // sharing + 1 - start
            low = high - window if window > 0 else 0
            weigh_row(
                kv,
                scores + row * KEYS * F32_BYTES,
                low,
                high,
                scale,
                cap,
                state + row * 2 * F32_BYTES,
                mixed + row * head_dim * F32_BYTES,
                head_dim,
                weights + row * KEYS * size,
            )
        row = 0
        while row < rows:
            height = tile_height(rows - row)
            at = 0
            while at < head_dim:
                panels = 4 if at + TILE_COLUMNS <= head_dim else 1
                of, to = at * LANE_BYTES, mixed + (row * head_dim + at) * F32_BYTES
                mix_tile(
                    kv,
                    height,
                    panels,
                    weights + row * KEYS * size,
                    KEYS * size,
                    v0 + of,
                    v1 + of,
                    v2 + of,
                    v3 + of,
                    head_dim * LANE_BYTES,
                    to,
                    head_dim * F32_BYTES,
                )
                at += panels * LANES
            row += height
    for row in range(rows):
        to = out + row // sharing * out_bytes + row % sharing * head_bytes
        share = splat(np.float32(1) / get_f32(state + row * 2 * F32_BYTES + F32_BYTES))
        for at in range(0, head_dim, LANES):
            store(kv, to + at * size, multiply(load(F32, mixed + (row * head_dim + at) * F32_BYTES), share))

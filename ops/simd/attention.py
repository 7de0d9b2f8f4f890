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

from typing import Any, Final, NamedTuple

import numpy as np

from headrace.ops.simd.instructions import LANES, kernel
from headrace.ops.simd.team import LINE_BYTES
from headrace.ops.simd.tiles import PANELS, TILE_COLUMNS, mix_tile, scores_tile, tile_height
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
    put_address,
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
    # Maximum and total, queries, scores, weights, sums; keys and values that are gathered from small pages. Every part
    # is counted in float32.
    return LINE_BYTES + F32_BYTES * (rows * (2 + 2 * head_dim + 2 * KEYS) + 2 * KEYS * head_dim)


class HeadPages(NamedTuple):
    """Where the keys and values of one KV head of a request lie."""

    table: int
    """Address of int32: the request's pages, in order."""
    pages: int
    """Address of page 0 of the layer."""
    page_bytes: int
    page_tokens: int
    head_dim: int
    keys: int
    """Bytes from a page's start to the head's keys, and to its values."""
    values: int


@kernel
def group_of(kv: Any, head: Any, position: int) -> int:
    """The address of 16 tokens' packed keys, in pages that hold whole groups; `position`: of the first."""
    page = get_i32(head.table + position // head.page_tokens * 4)
    inside = position % head.page_tokens * head.head_dim * value_bytes(kv)
    address: int = head.pages + page * head.page_bytes + head.keys + inside
    return address


@kernel
def gather_group(kv: Any, head: Any, plane: int, first: int, end: int, by_key: bool, to: int) -> None:
    """Pack 16 tokens, zeros from `end` on, from pages that hold them one after the other.

    `plane`: `head.keys`, which are packed by key, or `head.values`.
    """
    size, lane, head_dim = value_bytes(kv), lane_values(kv), head.head_dim
    for at in range(0, LANES * head_dim * size, LANE_BYTES):
        put_zero_lane(to + at)
    for token in range(min(LANES, end - first)):
        position = first + token
        row = head.pages + get_i32(head.table + position // head.page_tokens * 4) * head.page_bytes + plane
        row += position % head.page_tokens * head_dim * size
        if by_key:
            for at in range(head_dim // lane):
                copy_lane(to + (at * LANES + token) * LANE_BYTES, row + at * LANE_BYTES)
        else:
            start = to + token // lane * head_dim * LANE_BYTES + token % lane * size
            for at in range(head_dim):
                copy_value(kv, start + at * LANE_BYTES, row + at * size)


@kernel
def find_groups(kv: Any, head: Any, start: int, end: int, found: int) -> None:
    """Put the addresses of the 4 groups of keys from position `start` on into int64 `found`. Past `end` the last group
    stands in."""
    last = (end - 1) // LANES * LANES
    for group in range(GROUPS):
        put_address(found + group * 8, group_of(kv, head, min(start + group * LANES, last)))


@kernel
def gather_groups(kv: Any, head: Any, start: int, end: int, found: int, gathered: int) -> None:
    """The same for pages that do not hold whole groups: keys and values are packed into `gathered`."""
    size_bytes = LANES * head.head_dim * value_bytes(kv)
    last = (end - 1) // LANES * LANES
    for group in range(GROUPS):
        first, to = min(start + group * LANES, last), gathered + group * size_bytes
        gather_group(kv, head, head.keys, first, end, True, to)
        gather_group(kv, head, head.values, first, end, False, to + GROUPS * size_bytes)
        put_address(found + group * 8, to)


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
def score_rows(kv: Any, rows: int, head_dim: int, queries: int, found: int, ahead: int, scores: int) -> None:
    """float32 scores [rows, 64] of packed queries with the keys of 4 groups, `ahead` those of the next block."""
    head_bytes = head_dim * value_bytes(kv)
    row = 0
    while row < rows:
        height, of, to = tile_height(rows - row), queries + row * head_bytes, scores + row * KEYS * F32_BYTES
        scores_tile(kv, height, of, head_bytes, head_bytes // LANE_BYTES, found, ahead, to)
        row, ahead = row + height, found


@kernel
def mix_rows(kv: Any, rows: int, head_dim: int, weights: int, found: int, ahead: int, across: int, mixed: int) -> None:
    """float32 mixed [rows, head_dim] += weights · values of 4 groups, which lie `across` bytes behind their keys."""
    weight_bytes, mixed_bytes, lane_bytes = KEYS * value_bytes(kv), head_dim * F32_BYTES, head_dim * LANE_BYTES
    row = 0
    while row < rows:
        height, of = tile_height(rows - row), weights + row * weight_bytes
        at = 0
        while at < head_dim:
            panels = PANELS if at + TILE_COLUMNS <= head_dim else 1
            shift, to = across + at * LANE_BYTES, mixed + row * mixed_bytes + at * F32_BYTES
            mix_tile(kv, height, panels, of, weight_bytes, found, ahead, shift, lane_bytes, to, mixed_bytes)
            at += panels * LANES
        row, ahead = row + height, found


@kernel
def attend_block(
    kv: Any,
    head: Any,
    queries: int,
    query_bytes: int,
    tokens: int,
    position: int,
    sharing: int,
    scale: float,
    window: int,
    cap: float,
    scratch: int,
    out: int,
    out_bytes: int,
) -> None:
    """`tokens` tokens from `position` on, `sharing` query heads of each → the same shape in `out`, of `kv` values.

    `head`: `HeadPages`. `queries`, `out`: the first token's first head; tokens are `query_bytes` and `out_bytes` apart.
    `window`: a token sees itself and so many - 1 before it; 0: all. `cap`: of scores, soft; 0: none.
    """
    size, head_dim = value_bytes(kv), head.head_dim
    rows, head_bytes, mixed_bytes = tokens * sharing, head_dim * size, head_dim * F32_BYTES
    found, state = scratch, scratch + LINE_BYTES
    packed = state + rows * 2 * F32_BYTES
    scores = packed + rows * mixed_bytes
    weights = scores + rows * KEYS * F32_BYTES
    mixed = weights + rows * KEYS * F32_BYTES
    gathered = mixed + rows * mixed_bytes
    end = position + tokens
    first = max(0, position + 1 - window) // KEYS * KEYS if window > 0 else 0
    whole_groups = head.page_tokens % LANES == 0
    if whole_groups:
        find_groups(kv, head, first, end, found + first // KEYS % 2 * GROUPS * 8)
    for row in range(rows):
        source = queries + row // sharing * query_bytes + row % sharing * head_bytes
        for at in range(0, head_dim, LANES):
            store(kv, packed + row * head_bytes + at * size, load(kv, source + at * size))
            store(F32, mixed + row * mixed_bytes + at * F32_BYTES, zeros())
        put_f32(state + row * 2 * F32_BYTES, _LOWEST)
        put_f32(state + row * 2 * F32_BYTES + F32_BYTES, np.float32(0))
    for start in range(first, end, KEYS):
        across, here = head.values - head.keys, found + start // KEYS % 2 * GROUPS * 8
        ahead = here
        if not whole_groups:
            across = GROUPS * LANES * head_bytes
            gather_groups(kv, head, start, end, here, gathered)
        elif start + KEYS < end:
            # Pages lie anywhere: no prefetcher of the CPU guesses the next one.
            ahead = found + (start // KEYS + 1) % 2 * GROUPS * 8
            find_groups(kv, head, start + KEYS, end, ahead)
        score_rows(kv, rows, head_dim, packed, here, ahead, scores)
        for row in range(rows):
            high = position + row // sharing + 1 - start
            low = high - window if window > 0 else 0
            of, to = scores + row * KEYS * F32_BYTES, weights + row * KEYS * size
            so_far = state + row * 2 * F32_BYTES
            weigh_row(kv, of, low, high, scale, cap, so_far, mixed + row * mixed_bytes, head_dim, to)
        mix_rows(kv, rows, head_dim, weights, here, ahead, across, mixed)
    for row in range(rows):
        to = out + row // sharing * out_bytes + row % sharing * head_bytes
        share = splat(np.float32(1) / get_f32(state + row * 2 * F32_BYTES + F32_BYTES))
        for at in range(0, head_dim, LANES):
            store(kv, to + at * size, multiply(load(F32, mixed + row * mixed_bytes + at * F32_BYTES), share))

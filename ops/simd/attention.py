"""Flash attention (arXiv:2205.14135) over KV pages, for decode and prefill alike.

A block is a few tokens of one request with the query heads that share a KV head: 48 rows at most. It goes through the
keys 64 at a time, from a multiple of 64 on. Where those 64 keys begin follows from their positions alone, and keys that
a row may not see weigh exactly nothing: so a row's bits are the same whether it is computed alone (decode), in a chunk,
or in another chunk, from whatever pages.

    scores   float32 [rows, 64]  = queries · keys, float32 sums            `attention_tiles`, or `tiles`
    weights  of KV's elements    = 2^(scores · log2 e - n), rounded        `softmax`
    mixed    float32 [rows, head_dim] += weights · values
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from numba.extending import overload

from headrace.ops.simd.amx import TILE_ROWS
from headrace.ops.simd.attention_tiles import attend_in_tiles, bring_together, shape_tiles
from headrace.ops.simd.instructions import KERNEL_OPTIONS, LANES, kernel
from headrace.ops.simd.softmax import KEYS, begin_rows, share_of, weigh_rows
from headrace.ops.simd.target import AMX
from headrace.ops.simd.team import LINE_BYTES
from headrace.ops.simd.tiles import PANELS, TILE_COLUMNS, in_tiles, mix_tile, scores_tile, tile_height
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    LANE_BYTES,
    VECTOR_BYTES,
    copy_lane,
    copy_value,
    get_i32,
    is_bf16,
    lane_values,
    load,
    multiply,
    put_address,
    put_zero_lane,
    store,
    value_bytes,
    zeros,
)

BLOCK_ROWS: Final = 48
"""Rows of a block: a whole number of tiles, whose scores and sums stay in the first cache (25 kB at 64 dimensions)."""
GROUPS: Final = KEYS // LANES


def block_tokens(sharing: int) -> int:
    """Tokens of a block, where `sharing` query heads share a KV head."""
    return max(1, BLOCK_ROWS // sharing)


class Scratch(NamedTuple):
    """Where the parts of a thread's scratch lie. Each is counted in float32, and in whole tiles of rows."""

    found: int
    """Of groups of this and the next 64 keys."""
    biases: int
    totals: int
    queries: int
    """Packed, as are weights."""
    scores: int
    weights: int
    mixed: int
    gathered: int
    """Keys and values from small pages, or values brought together."""


@kernel
def scratch_parts(scratch: int, rows: int, head_dim: int) -> Scratch:
    rows = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    biases = scratch + LINE_BYTES
    totals = biases + rows * F32_BYTES
    queries = totals + rows * VECTOR_BYTES
    scores = queries + rows * head_dim * F32_BYTES
    weights = scores + rows * KEYS * F32_BYTES
    mixed = weights + rows * KEYS * F32_BYTES
    return Scratch(scratch, biases, totals, queries, scores, weights, mixed, mixed + rows * head_dim * F32_BYTES)


def bytes_of_parts(rows: int, head_dim: int) -> int:
    """Of `Scratch`'s, for so many rows."""
    rows = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    row_values = 1 + LANES + 2 * head_dim + 2 * KEYS
    return LINE_BYTES + F32_BYTES * (rows * row_values + 2 * KEYS * head_dim)


part_bytes: Final = kernel(bytes_of_parts)


def scratch_bytes(sharing: int, head_dim: int) -> int:
    """Bytes that a thread needs: for a block, or a bundle and the rows of one token."""
    return bytes_of_parts(block_tokens(sharing) * sharing, head_dim) + bytes_of_parts(sharing, head_dim)


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
def attend_in_vectors(
    kv: Any, sight: Any, rows: int, head_dim: int, seen: int, found: int, ahead: int, across: int, parts: Any
) -> None:
    """What 64 keys add to a block's rows, the values `across` bytes behind their keys. `parts`: a `Scratch`."""
    score_rows(kv, rows, head_dim, parts.queries, found, ahead, parts.scores)
    state = parts.biases, parts.totals, parts.mixed
    weigh_rows(kv, sight, 0, rows, seen, parts.scores, *state, head_dim, parts.weights)
    mix_rows(kv, rows, head_dim, parts.weights, found, ahead, across, parts.mixed)


def _attend_keys(*arguments: Any) -> None:
    """What 64 keys add, of which numba compiles the one of two that the elements need."""
    raise AssertionError("only kernels call this")


@overload(_attend_keys, jit_options=KERNEL_OPTIONS, strict=False)  # type: ignore[untyped-decorator]
def _attend_keys_of(
    kv: Any,
    sight: Any,
    rows: Any,
    head_dim: Any,
    seen: Any,
    tokens: Any,
    found: Any,
    ahead: Any,
    across: Any,
    whole_groups: Any,
    parts: Any,
) -> Any:
    def by_tiles(kv, sight, rows, head_dim, seen, tokens, found, ahead, across, whole_groups, parts):  # type: ignore[no-untyped-def]
        values = parts.gathered
        if whole_groups:
            bring_together(head_dim, found, ahead, across, values)
        else:
            values += across
        attend_in_tiles(kv, sight, rows, head_dim, seen, tokens, found, ahead, parts, values)

    def by_vectors(kv, sight, rows, head_dim, seen, tokens, found, ahead, across, whole_groups, parts):  # type: ignore[no-untyped-def]
        attend_in_vectors(kv, sight, rows, head_dim, seen, found, ahead, across, parts)

    return by_tiles if AMX and is_bf16(kv) else by_vectors


@kernel
def shape_for(kv: Any, rows: int, shaped: int) -> int:
    """Shape the thread's tiles for so many rows, if it has any and they have another shape → the rows they have now."""
    if in_tiles(kv) != 0 and min(rows, TILE_ROWS) != shaped:
        shaped = min(rows, TILE_ROWS)
        shape_tiles(shaped)
    return shaped


@kernel
def attend_keys(kv: Any, head: Any, sight: Any, tokens: int, position: int, first: int, end: int, parts: Any) -> int:
    """What keys [first, end) add to the rows of `tokens` tokens from `position` on → where the totals of their weights
    are. `first` is a multiple of 64, and so is `end` if more keys follow. `parts`: the rows' `Scratch`."""
    head_dim, rows = head.head_dim, tokens * sight.sharing
    whole_groups, head_bytes = head.page_tokens % LANES == 0, head_dim * value_bytes(kv)
    if whole_groups:
        find_groups(kv, head, first, end, parts.found + first // KEYS % 2 * GROUPS * 8)
    for start in range(first, end, KEYS):
        across, here = head.values - head.keys, parts.found + start // KEYS % 2 * GROUPS * 8
        ahead = here
        if not whole_groups:
            across = GROUPS * LANES * head_bytes
            gather_groups(kv, head, start, end, here, parts.gathered)
        elif start + KEYS < end:
            # Pages lie anywhere: no prefetcher of the CPU guesses the next one.
            ahead = parts.found + (start // KEYS + 1) % 2 * GROUPS * 8
            find_groups(kv, head, start + KEYS, end, ahead)
        seen = position + 1 - start
        _attend_keys(kv, sight, rows, head_dim, seen, min(KEYS, end - start), here, ahead, across, whole_groups, parts)
    totals: int = parts.totals
    return totals


@kernel
def put_mixed(kv: Any, head_dim: int, totals: int, mixed: int, to: int) -> None:
    """A row's mixed values, over the sum of its weights."""
    share = share_of(totals)
    for at in range(0, head_dim, LANES):
        store(kv, to + at * value_bytes(kv), multiply(load(F32, mixed + at * F32_BYTES), share))


@kernel
def attend_block(
    kv: Any,
    head: Any,
    queries: int,
    query_bytes: int,
    tokens: int,
    position: int,
    sight: Any,
    scratch: int,
    out: int,
    out_bytes: int,
    shaped: int,
) -> int:
    """`tokens` tokens from `position` on, the query heads of each that share the KV head → the same shape in `out`.

    `head`: `HeadPages`. `queries`, `out`: the first token's first head, of `kv` values; tokens are `query_bytes` and
    `out_bytes` apart. `sight`: a `Sight`.
    `shaped`: rows that the thread's tiles have from the last block, 0 at first → what they have now. They are to be
    released in the end.
    """
    size, head_dim, sharing, window = value_bytes(kv), head.head_dim, sight.sharing, sight.window
    rows = tokens * sharing
    parts = scratch_parts(scratch, rows, head_dim)
    head_bytes, mixed_bytes = head_dim * size, head_dim * F32_BYTES
    first = max(0, position + 1 - window) // KEYS * KEYS if window > 0 else 0
    shaped = shape_for(kv, rows, shaped)
    for row in range(rows):
        source = queries + row // sharing * query_bytes + row % sharing * head_bytes
        for at in range(0, head_dim, LANES):
            store(kv, parts.queries + row * head_bytes + at * size, load(kv, source + at * size))
            store(F32, parts.mixed + row * mixed_bytes + at * F32_BYTES, zeros())
    begin_rows(rows, parts.biases, parts.totals)
    totals = attend_keys(kv, head, sight, tokens, position, first, position + tokens, parts)
    for row in range(rows):
        to = out + row // sharing * out_bytes + row % sharing * head_bytes
        put_mixed(kv, head_dim, totals + row * VECTOR_BYTES, parts.mixed + row * mixed_bytes, to)
    return shaped

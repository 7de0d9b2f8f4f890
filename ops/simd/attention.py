"""Flash attention (arXiv:2205.14135) over KV pages, for decode and prefill alike.

A block is some tokens of one request with the query heads that share a KV head. It goes through the keys 64 at a time,
from a multiple of 64 on. Where those 64 keys begin follows from their positions alone, and keys that
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
from headrace.ops.simd.attention_tiles import CHUNK_STEPS, attend_in_tiles, packed_bytes, shape_tiles
from headrace.ops.simd.head_pages import FOUND_BYTES, GROUPS, find_groups, gather_keys, gather_plane
from headrace.ops.simd.instructions import KERNEL_OPTIONS, LANES, kernel
from headrace.ops.simd.softmax import KEYS, SCORE_BYTES, begin_rows, share_of, weigh_rows
from headrace.ops.simd.target import AMX
from headrace.ops.simd.team import LINE_BYTES
from headrace.ops.simd.tiles import PANELS, TILE_COLUMNS, in_tiles, mix_tile, scores_tile, tile_height
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    LANE_BYTES,
    VECTOR_BYTES,
    is_bf16,
    load,
    multiply,
    store,
    value_bytes,
    zeros,
)

BLOCK_ROWS: Final = 48
"""Rows of a block in vectors, whose scores and sums stay in the first cache (25 kB at 64 dimensions)."""
TILED_BLOCK_ROWS: Final = 384
"""In tiles, where 16 rows after the other go through as many keys as stay in the second cache: so often is what comes
from beyond it used, where 8192 tokens' keys and values of a head are larger than it."""
FOUND_AT_ONCE: Final = CHUNK_STEPS + 1
"""Steps along the keys of which addresses are kept: this one's, and those of the next that are fetched meanwhile."""
FOUND_ROOM_BYTES: Final = -(-FOUND_AT_ONCE * FOUND_BYTES // LINE_BYTES) * LINE_BYTES


def block_tokens(sharing: int, tiled: bool) -> int:
    """Tokens of a block at most, where `sharing` query heads share a KV head; `tiled`: if KV are bfloat16 and there are
    tiles."""
    return max(1, (TILED_BLOCK_ROWS if tiled else BLOCK_ROWS) // sharing)


class Scratch(NamedTuple):
    """Where the parts of a thread's scratch lie. Each is counted in float32, and in whole tiles of rows."""

    found: int
    """Addresses of keys."""
    old_totals: int
    """Of a tile."""
    biases: int
    totals: int
    queries: int
    """Packed, as are weights."""
    scores: int
    """Of two tiles at least, as of weights: while one is looked at the next is made."""
    weights: int
    mixed: int
    gathered: int
    """Keys and values from small pages, or values brought together."""


@kernel
def scratch_parts(scratch: int, rows: int, head_dim: int) -> Scratch:
    rows = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    weighed = max(rows, 2 * TILE_ROWS)
    old_totals = scratch + FOUND_ROOM_BYTES
    biases = old_totals + TILE_ROWS * VECTOR_BYTES
    totals = biases + rows * F32_BYTES
    queries = totals + rows * VECTOR_BYTES
    scores = queries + rows * head_dim * F32_BYTES
    weights = scores + weighed * SCORE_BYTES
    mixed = weights + weighed * SCORE_BYTES
    gathered = mixed + rows * head_dim * F32_BYTES
    return Scratch(scratch, old_totals, biases, totals, queries, scores, weights, mixed, gathered)


def bytes_of_parts(rows: int, head_dim: int, tiled: bool) -> int:
    """Of `Scratch`'s, for so many rows."""
    rows = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    row_values = 1 + LANES + 2 * head_dim
    weighed_values = 2 * max(rows, 2 * TILE_ROWS) * KEYS
    gathered_values = (CHUNK_STEPS if tiled else 2) * KEYS * head_dim
    values = TILE_ROWS * LANES + rows * row_values + weighed_values + gathered_values
    return FOUND_ROOM_BYTES + F32_BYTES * values


part_bytes: Final = kernel(bytes_of_parts)


def scratch_bytes(sharing: int, head_dim: int, tiled: bool) -> int:
    """Bytes that a thread needs: for a block, or a bundle and the rows of one token."""
    most_rows = block_tokens(sharing, tiled) * sharing
    return bytes_of_parts(most_rows, head_dim, tiled) + bytes_of_parts(sharing, head_dim, tiled)


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
    kv: Any, head: Any, sight: Any, tokens: int, position: int, first: int, end: int, goes_on: bool, parts: Any
) -> None:
    """What keys [first, end) add to a block's rows. `first` is a multiple of 64, and so is `end` if more keys follow.

    `goes_on`: the rows have seen the keys before. `parts`: their `Scratch`.
    """
    head_dim, rows = head.head_dim, tokens * sight.sharing
    if not goes_on:
        begin_rows(rows, parts.biases, parts.totals)
    across = head.values - head.keys
    whole_groups = head.page_tokens % LANES == 0
    if whole_groups:
        find_groups(kv, head, first, end, parts.found + first // KEYS % 2 * FOUND_BYTES)
    else:
        across = GROUPS * LANES * head_dim * value_bytes(kv)
    for start in range(first, end, KEYS):
        here = parts.found + start // KEYS % 2 * FOUND_BYTES
        ahead = here
        if not whole_groups:
            gather_keys(kv, head, start, end, here, parts.gathered)
            gather_plane(kv, head, head.values, start, end, False, parts.gathered + across)
        elif start + KEYS < end:
            # Pages lie anywhere: no prefetcher of the CPU guesses the next one.
            ahead = parts.found + (start // KEYS + 1) % 2 * FOUND_BYTES
            find_groups(kv, head, start + KEYS, end, ahead)
        score_rows(kv, rows, head_dim, parts.queries, here, ahead, parts.scores)
        state = parts.biases, parts.totals, parts.mixed
        weigh_rows(kv, sight, rows, position + 1 - start, parts.scores, *state, head_dim, parts.weights)
        mix_rows(kv, rows, head_dim, parts.weights, here, ahead, across, parts.mixed)


def attend_keys(*arguments: Any) -> None:
    """`attend_in_vectors`, or in tiles: numba compiles the one of two that the elements need."""
    raise AssertionError("only kernels call this")


@overload(attend_keys, jit_options=KERNEL_OPTIONS, strict=False)  # type: ignore[untyped-decorator]
def _attend_keys_of(
    kv: Any, head: Any, sight: Any, tokens: Any, position: Any, first: Any, end: Any, goes_on: Any, parts: Any
) -> Any:
    def by_tiles(kv, head, sight, tokens, position, first, end, goes_on, parts):  # type: ignore[no-untyped-def]
        attend_in_tiles(kv, head, sight, tokens, position, first, end, goes_on, parts)

    def by_vectors(kv, head, sight, tokens, position, first, end, goes_on, parts):  # type: ignore[no-untyped-def]
        attend_in_vectors(kv, head, sight, tokens, position, first, end, goes_on, parts)

    return by_tiles if AMX and is_bf16(kv) else by_vectors


@kernel
def shape_for(kv: Any, rows: int, head_dim: int, shaped: int) -> int:
    """Shape the thread's tiles for so many rows, if it has any and they have another shape → the rows they have now."""
    if in_tiles(kv) != 0 and min(rows, TILE_ROWS) != shaped:
        shaped = min(rows, TILE_ROWS)
        shape_tiles(shaped, head_dim)
    return shaped


@kernel
def query_row_bytes(kv: Any, head_dim: int) -> int:
    """Of a packed row."""
    size_bytes: int = packed_bytes(head_dim) if in_tiles(kv) != 0 else head_dim * value_bytes(kv)
    return size_bytes


@kernel
def begin_row(kv: Any, head_dim: int, source: int, row: int, parts: Any) -> None:
    """Pack a row's query; it has mixed nothing."""
    size, row_bytes, mixed = value_bytes(kv), query_row_bytes(kv, head_dim), parts.mixed + row * head_dim * F32_BYTES
    to, head_bytes = parts.queries + row * row_bytes, head_dim * size
    for at in range(0, head_dim, LANES):
        store(kv, to + at * size, load(kv, source + at * size))
        store(F32, mixed + at * F32_BYTES, zeros())
    if row_bytes > head_bytes:
        store(kv, to + head_bytes, zeros())
        store(kv, to + head_bytes + LANES * size, load(kv, source + head_bytes - LANES * size))


@kernel
def end_row(kv: Any, head_dim: int, row: int, parts: Any, to: int) -> None:
    """What a row has mixed, over the sum of its weights."""
    share, mixed = share_of(parts.totals + row * VECTOR_BYTES), parts.mixed + row * head_dim * F32_BYTES
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
    head_dim, sharing, window = head.head_dim, sight.sharing, sight.window
    rows, head_bytes = tokens * sharing, head_dim * value_bytes(kv)
    parts = scratch_parts(scratch, rows, head_dim)
    first = max(0, position + 1 - window) // KEYS * KEYS if window > 0 else 0
    shaped = shape_for(kv, rows, head_dim, shaped)
    for row in range(rows):
        begin_row(kv, head_dim, queries + row // sharing * query_bytes + row % sharing * head_bytes, row, parts)
    attend_keys(kv, head, sight, tokens, position, first, position + tokens, False, parts)
    for row in range(rows):
        end_row(kv, head_dim, row, parts, out + row // sharing * out_bytes + row % sharing * head_bytes)
    return shaped

"""Attention of requests that begin with the same pages: those are read once for all of them, the rest for each.

A bundle is rows of one token each (`shared_prefixes`), with the query heads that share a KV head: at most as many as a
block has. What they share is a multiple of 64 keys, which all of them see: they go through it as the rows of one block.
Then each goes on alone, from its rows' state. A row's bits are the same as without a bundle, since no row of a block
looks at another, and its keys are added in the same order.

32 requests that share 7,808 of 7,900 tokens, 9 heads over 3 of 64 dimensions: a step takes 49 ms in place of 164.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.ops.simd.attention import (
    attend_keys,
    begin_row,
    end_row,
    part_bytes,
    query_row_bytes,
    scratch_parts,
    shape_for,
)
from headrace.ops.simd.head_pages import HeadPages
from headrace.ops.simd.instructions import kernel
from headrace.ops.simd.tiles import in_tiles
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    VECTOR_BYTES,
    get_f32,
    get_i32,
    load,
    put_f32,
    store,
    value_bytes,
)


class BatchRows(NamedTuple):
    """Addresses of what a batch says of its rows, int32 each: their first tokens, contexts, slots; page tables."""

    starts: int
    kv_lens: int
    slots: int
    tables: int
    table_bytes: int
    """From a slot's table to the next one's."""


@kernel
def table_of(rows: Any, row: int) -> int:
    """The address of a row's page table."""
    address: int = rows.tables + get_i32(rows.slots + row * 4) * rows.table_bytes
    return address


@kernel
def in_table(head: Any, table: int) -> HeadPages:
    """A head's keys and values in a request's pages."""
    return HeadPages(table, head.pages, head.page_bytes, head.page_tokens, head.head_dim, head.keys, head.values)


@kernel
def copy_bytes(source: int, size_bytes: int, to: int) -> None:
    """So many, up to the end of a vector: `Scratch` has room."""
    for at in range(0, size_bytes, VECTOR_BYTES):
        store(F32, to + at, load(F32, source + at))


@kernel
def attend_bundle(
    kv: Any,
    head: Any,
    rows: Any,
    members: int,
    count: int,
    shared: int,
    queries: int,
    query_bytes: int,
    sight: Any,
    scratch: int,
    out: int,
    out_bytes: int,
    shaped: int,
) -> int:
    """One token of each of `count` requests, the query heads of each that share the KV head → the same shape in `out`.

    `head`: `HeadPages` of any table. `rows`: `BatchRows`. `members`: address of the requests' rows, int32. `shared`:
    keys that they have in common. `queries`, `out`: of the batch's first token. The rest is `attend_block`'s.
    """
    dim, sharing, rows_together = head.head_dim, sight.sharing, count * sight.sharing
    head_bytes, mixed_bytes, row_bytes = dim * value_bytes(kv), dim * F32_BYTES, query_row_bytes(kv, dim)
    together = scratch_parts(scratch, rows_together, dim)
    alone = scratch_parts(scratch + part_bytes(rows_together, dim, in_tiles(kv) != 0), sharing, dim)
    shaped = shape_for(kv, rows_together, dim, shaped)
    for member in range(count):
        source = queries + get_i32(rows.starts + get_i32(members + member * 4) * 4) * query_bytes
        for row in range(sharing):
            begin_row(kv, dim, source + row * head_bytes, member * sharing + row, together)
    # They stand behind all that they share.
    pages = in_table(head, table_of(rows, get_i32(members)))
    attend_keys(kv, pages, sight, count, shared - 1, 0, shared, False, together)
    shaped = shape_for(kv, sharing, dim, shaped)
    for member in range(count):
        first, row = member * sharing, get_i32(members + member * 4)
        copy_bytes(together.queries + first * row_bytes, sharing * row_bytes, alone.queries)
        copy_bytes(together.mixed + first * mixed_bytes, sharing * mixed_bytes, alone.mixed)
        copy_bytes(together.totals + first * VECTOR_BYTES, sharing * VECTOR_BYTES, alone.totals)
        for head_row in range(sharing):
            put_f32(alone.biases + head_row * F32_BYTES, get_f32(together.biases + (first + head_row) * F32_BYTES))
        seen, pages = get_i32(rows.kv_lens + row * 4), in_table(head, table_of(rows, row))
        attend_keys(kv, pages, sight, 1, seen - 1, shared, seen, True, alone)
        to = out + get_i32(rows.starts + row * 4) * out_bytes
        for head_row in range(sharing):
            end_row(kv, dim, head_row, alone, to + head_row * head_bytes)
    return shaped

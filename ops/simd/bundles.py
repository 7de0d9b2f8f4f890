"""Attention of requests that begin with the same pages: those are read once for all of them, the rest for each.

A bundle is rows of one token each (`shared_prefixes`), with the query heads that share a KV head: at most as many as a
block has. What they share is a multiple of 64 keys, which all of them see: they go through it as the rows of one block.
Then each goes on alone, from its rows' state. A row's bits are the same as without a bundle, since no row of a block
looks at another, and its keys are added in the same order.

16 requests of 1104 tokens, 1008 of them shared, with 9 heads over 3 of 64 dimensions: 150 µs a layer in place of 380.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.ops.simd.attention import (
    HeadPages,
    attend_keys,
    part_bytes,
    put_mixed,
    scratch_parts,
    shape_for,
)
from headrace.ops.simd.instructions import LANES, kernel
from headrace.ops.simd.softmax import begin_rows
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
    zeros,
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
    size, dim, sharing = value_bytes(kv), head.head_dim, sight.sharing
    head_bytes, mixed_bytes = dim * size, dim * F32_BYTES
    together = scratch_parts(scratch, count * sharing, dim)
    alone = scratch_parts(scratch + part_bytes(count * sharing, dim), sharing, dim)
    shaped = shape_for(kv, count * sharing, shaped)
    for member in range(count):
        source = queries + get_i32(rows.starts + get_i32(members + member * 4) * 4) * query_bytes
        for row in range(member * sharing, (member + 1) * sharing):
            for at in range(0, dim, LANES):
                store(kv, together.queries + row * head_bytes + at * size, load(kv, source + at * size))
                store(F32, together.mixed + row * mixed_bytes + at * F32_BYTES, zeros())
            source += head_bytes
    begin_rows(count * sharing, together.biases, together.totals)
    # They stand behind all that they share.
    pages = in_table(head, table_of(rows, get_i32(members)))
    totals = attend_keys(kv, pages, sight, count, shared - 1, 0, shared, together)
    shaped = shape_for(kv, sharing, shaped)
    for member in range(count):
        row = get_i32(members + member * 4)
        for head_row in range(sharing):
            source = member * sharing + head_row
            for at in range(0, dim, LANES):
                query = load(kv, together.queries + source * head_bytes + at * size)
                store(kv, alone.queries + head_row * head_bytes + at * size, query)
                mixed = load(F32, together.mixed + source * mixed_bytes + at * F32_BYTES)
                store(F32, alone.mixed + head_row * mixed_bytes + at * F32_BYTES, mixed)
            put_f32(alone.biases + head_row * F32_BYTES, get_f32(together.biases + source * F32_BYTES))
            store(F32, alone.totals + head_row * VECTOR_BYTES, load(F32, totals + source * VECTOR_BYTES))
        seen = get_i32(rows.kv_lens + row * 4)
        pages = in_table(head, table_of(rows, row))
        own_totals = attend_keys(kv, pages, sight, 1, seen - 1, shared, seen, alone)
        to = out + get_i32(rows.starts + row * 4) * out_bytes
        for head_row in range(sharing):
            mixed_at = alone.mixed + head_row * mixed_bytes
            put_mixed(kv, dim, own_totals + head_row * VECTOR_BYTES, mixed_at, to + head_row * head_bytes)
    return shaped

"""Copies of pages between pools, whose parts in each layer lie anywhere: one pass, all threads.

A copy reads each byte once and writes it once. What is written goes past the caches: a store to a line that is not in
the cache would read it from memory first, a third of all traffic, and push out what steps will need.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from llvmlite import ir

from headrace.ops.simd.instructions import (
    ADDRESS,
    INT,
    NOTHING,
    Builder,
    Value,
    call,
    i1,
    i8,
    i32,
    i32x16,
    instruction,
    kernel,
    load_from,
    part,
)
from headrace.ops.simd.team import Member, claim, give_way
from headrace.ops.simd.vector import emit_prefetch, get_i32

LINE_BYTES: Final = 64
AHEAD_BYTES: Final = 2048
"""How far ahead of the copy lines are fetched: the CPU's own prefetcher stops at the end of every 4096 bytes, and the
host's pages are not huge."""


@instruction(NOTHING, ADDRESS, ADDRESS)
def stream_line(b: Builder, to: Value, source: Value) -> None:
    """64 bytes, past the caches; `to` is a multiple of 64."""
    emit_prefetch(b, b.add(source, ir.Constant(source.type, AHEAD_BYTES)))
    line = load_from(b, source, i32x16)
    stored = b.store(line, b.inttoptr(to, i32x16.as_pointer()), align=LINE_BYTES)
    stored.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(i32, 1)]))


@instruction(NOTHING, ADDRESS, ADDRESS, INT)
def copy_bytes(b: Builder, to: Value, source: Value, count: Value) -> None:
    """Bytes from anywhere to anywhere."""
    pointer = i8.as_pointer()
    arguments = [b.inttoptr(to, pointer), b.inttoptr(source, pointer), count, ir.Constant(i1, 0)]
    call(b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), arguments)


@instruction(NOTHING)
def settle(b: Builder) -> None:
    """What went past the caches is there for everybody."""
    b.fence("seq_cst")


class Pages(NamedTuple):
    """Pages of a pool, as addresses."""

    pool: int
    numbers: int
    """Of int32 [pages]."""
    page_bytes: int
    """From one page to the next."""
    layer_bytes: int
    """From a page's part in one layer to its part in the next."""


@kernel
def part_of(pages: Pages, page: int, layer: int) -> int:
    """The address of a page's part in a layer."""
    number: int = get_i32(pages.numbers + page * 4)
    return pages.pool + number * pages.page_bytes + layer * pages.layer_bytes


@kernel
def copy_block(to: int, source: int, size_bytes: int) -> None:
    """Bytes that lie side by side."""
    streamed = size_bytes // LINE_BYTES * LINE_BYTES if to % LINE_BYTES == 0 else 0
    for at in range(0, streamed, LINE_BYTES):
        stream_line(to + at, source + at)
    if streamed < size_bytes:
        copy_bytes(to + streamed, source + streamed, size_bytes - streamed)


@part
def copy_phase(
    member: Member, phase: int, pages: int, layers: int, size_bytes: int, to: Pages, source: Pages, run_bytes: int
) -> None:
    """Of so many pages, every layer's `size_bytes`. Others may have the core after each `run_bytes`."""
    copied = 0
    piece = claim(member, phase, pages * layers)
    while piece < pages * layers:
        page, layer = piece // layers, piece % layers
        copy_block(part_of(to, page, layer), part_of(source, page, layer), size_bytes)
        copied += size_bytes
        if copied >= run_bytes:
            give_way()
            copied = 0
        piece = claim(member, phase, pages * layers)
    settle()

"""Keys and values of one KV head in pages, as attention looks for them: 64 at a time, in 4 groups of 16.

Pages of 16 tokens, or of a multiple, hold whole groups, packed as products want them. Of other pages they are gathered.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from headrace.ops.simd.instructions import LANES, kernel
from headrace.ops.simd.softmax import KEYS
from headrace.ops.simd.vector import (
    LANE_BYTES,
    copy_lane,
    copy_value,
    get_i32,
    lane_values,
    put_address,
    put_zero_lane,
    value_bytes,
)

GROUPS: Final = KEYS // LANES
FOUND_BYTES: Final = GROUPS * 8
"""Of the addresses of 4 groups."""


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
def gather_plane(kv: Any, head: Any, plane: int, start: int, end: int, by_key: bool, to: int) -> None:
    """The 4 groups from position `start` on, packed from pages that do not hold whole groups."""
    size_bytes = LANES * head.head_dim * value_bytes(kv)
    last = (end - 1) // LANES * LANES
    for group in range(GROUPS):
        gather_group(kv, head, plane, min(start + group * LANES, last), end, by_key, to + group * size_bytes)


@kernel
def gather_keys(kv: Any, head: Any, start: int, end: int, found: int, gathered: int) -> None:
    """What `find_groups` does, for such pages: the keys are packed into `gathered`."""
    gather_plane(kv, head, head.keys, start, end, True, gathered)
    for group in range(GROUPS):
        put_address(found + group * 8, gathered + group * LANES * head.head_dim * value_bytes(kv))

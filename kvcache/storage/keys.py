"""What pages of a prefix are called in storage: by chain hash, layer group by layer group."""

from __future__ import annotations

from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.storage.client import PageSpan


def group_keys(hashes: list[bytes], group: int) -> bytes:
    """Keys of a group's pages: group 0's are the chain hashes; another's differ in their last byte."""
    if not group:
        return b"".join(hashes)
    return b"".join(page[:-1] + bytes([page[-1] ^ group]) for page in hashes)


def span_of(key: PrefixKey, start: int, end: int, group: int) -> PageSpan:
    """What the agent needs to know of pages [start, end) of a prefix."""
    hashes = key.page_hashes(end)
    parents = group_keys([hashes[start - 1] if start else key.namespace, *hashes[start : end - 1]], group)
    return PageSpan(key.namespace, parents, group_keys(hashes[start:end], group), key.raw(start, end))

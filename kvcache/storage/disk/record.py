"""One stored page: a header block of 4096 bytes, then the page. The format is in docs/disk-format.md.

A page counts as good only after `check` has found nothing: not its place in a file but its header says what it is, and
the checksums say whether header and page are what was written.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

HEADER_BYTES: Final = 4096
MAGIC: Final = b"HRpage\x00\x01"
FORMAT: Final = 1
"""Of the directory, its files and records: a store refuses a newer one."""

_FIXED: Final = struct.Struct("<8sIIIIQ16s16s16s16s")
"""magic, format, group, page_tokens, payload_bytes, generation, key, parent, namespace, model"""
_CHECKSUM_AT: Final = _FIXED.size
_TOKENS_AT: Final = _CHECKSUM_AT + 16
_HEADER_CHECKSUM: Final = struct.Struct("<Q")
_HEADER_CHECKSUM_AT: Final = HEADER_BYTES - _HEADER_CHECKSUM.size
MAX_PAGE_TOKENS: Final = (_HEADER_CHECKSUM_AT - _TOKENS_AT) // 4


class PageId(NamedTuple):
    """Everything that a record says about its page."""

    group: int
    page_tokens: int
    payload_bytes: int
    generation: int
    """Of the write: the journal names the same, so that an entry never fits the page that came before or after."""
    key: bytes
    parent: bytes
    namespace: bytes
    model: bytes
    tokens: bytes

    def fixed(self) -> bytes:
        return _FIXED.pack(MAGIC, FORMAT, *self[:-1])


def seal(header: memoryview, page: PageId, payload: memoryview) -> None:
    """Fill the header block of a page that is about to be written."""
    assert len(page.tokens) == page.page_tokens * 4 <= MAX_PAGE_TOKENS * 4 and len(payload) == page.payload_bytes
    end = _TOKENS_AT + len(page.tokens)
    header[:_CHECKSUM_AT] = page.fixed()
    header[_CHECKSUM_AT:_TOKENS_AT] = xxhash.xxh3_128_digest(payload)
    header[_TOKENS_AT:end] = page.tokens
    header[end:_HEADER_CHECKSUM_AT] = bytes(_HEADER_CHECKSUM_AT - end)
    _HEADER_CHECKSUM.pack_into(header, _HEADER_CHECKSUM_AT, xxhash.xxh3_64_intdigest(header[:_HEADER_CHECKSUM_AT]))


def check(header: memoryview, page: PageId, payload: memoryview) -> str:
    """What is wrong with a record that should hold this page; "" if nothing is."""
    fault = check_header(header)
    if fault:
        return fault
    if header[:_CHECKSUM_AT] != page.fixed():
        return _difference(header, page)
    if header[_TOKENS_AT : _TOKENS_AT + len(page.tokens)] != page.tokens:
        return "it has other tokens"
    return check_payload(header, payload)


def check_header(header: memoryview) -> str:
    """What is wrong with a header block itself."""
    if bytes(header[: len(MAGIC)]) != MAGIC:
        return "it has no page header"
    (checksum,) = _HEADER_CHECKSUM.unpack_from(header, _HEADER_CHECKSUM_AT)
    if checksum != xxhash.xxh3_64_intdigest(header[:_HEADER_CHECKSUM_AT]):
        return "its header's checksum is wrong"
    (form,) = struct.unpack_from("<I", header, len(MAGIC))
    return "" if form == FORMAT else f"it is of format {form}, not {FORMAT}"


def check_payload(header: memoryview, payload: memoryview) -> str:
    """What is wrong with a payload whose header is in order."""
    same = header[_CHECKSUM_AT:_TOKENS_AT] == xxhash.xxh3_128_digest(payload)
    return "" if same else "its checksum is wrong"


def read_header(header: memoryview) -> PageId:
    """What a header that is in order says."""
    _, _, group, page_tokens, payload_bytes, generation, key, parent, namespace, model = _FIXED.unpack_from(header)
    tokens = bytes(header[_TOKENS_AT : min(_TOKENS_AT + page_tokens * 4, _HEADER_CHECKSUM_AT)])
    return PageId(group, page_tokens, payload_bytes, generation, key, parent, namespace, model, tokens)


def _difference(header: memoryview, page: PageId) -> str:
    there = read_header(header)
    names = [name for name, a, b in zip(PageId._fields, there, page) if a != b]
    return f"it is another page (another {', '.join(name.replace('_', ' ') for name in names)})"

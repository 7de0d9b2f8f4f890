"""Chains of pages whose bytes follow from their keys, so that a wrong page shows at once."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import xxhash

from headrace.kvcache.storage.disk.record import HEADER_BYTES
from headrace.kvcache.storage.page_store import PageRun
from headrace.kvcache.storage.protocol import KEY_BYTES

PAGE_TOKENS = 4
PAGE_BYTES = 4096
RECORD_BYTES = HEADER_BYTES + PAGE_BYTES
MODEL = b"the first model."
OTHER_MODEL = b"the other model."


def namespace(name: str) -> bytes:
    return xxhash.xxh3_128_digest(name.encode())


def chain(name: str, pages: int, space: str = "space", group: int = 0, page_tokens: int = PAGE_TOKENS) -> PageRun:
    """A chain of so many pages; chains of other names have other tokens from the first page on."""
    root = namespace(space)
    seed = xxhash.xxh3_64_intdigest(name.encode())
    tokens = np.random.default_rng(seed).integers(0, 1 << 20, pages * page_tokens).astype("<i4").tobytes()
    links = [root]
    for at in range(0, len(tokens), page_tokens * 4):
        links.append(xxhash.xxh3_128_digest(links[-1] + tokens[at : at + page_tokens * 4]))
    return PageRun(group, root, b"".join(links[:-1]), b"".join(links[1:]), tokens)


def keys_of(run: PageRun) -> list[bytes]:
    return [run.keys[at : at + KEY_BYTES] for at in range(0, len(run.keys), KEY_BYTES)]


def payload(group: int, key: bytes, size_bytes: int = PAGE_BYTES) -> bytes:
    """What a page with this key holds."""
    words = np.frombuffer(key, "<u8")
    content: bytes = (np.arange(size_bytes // 8, dtype=np.uint64) * words[0] + words[1] + np.uint64(group)).tobytes()
    return content


def host_pages(count: int, size_bytes: int = PAGE_BYTES) -> list[memoryview]:
    """Pages in memory that a device can be given directly."""
    pool = memoryview(mmap.mmap(-1, max(1, count) * size_bytes))
    return [pool[at : at + size_bytes] for at in range(0, count * size_bytes, size_bytes)]


def filled(run: PageRun, size_bytes: int = PAGE_BYTES) -> list[memoryview]:
    """Host pages with what the run should hold."""
    pages = host_pages(run.count, size_bytes)
    for page, key in zip(pages, keys_of(run)):
        page[:] = payload(run.group, key, size_bytes)
    return pages


def empty(run: PageRun, size_bytes: int = PAGE_BYTES) -> list[memoryview]:
    """Host pages to be read into."""
    return host_pages(run.count, size_bytes)


def right(run: PageRun, pages: Sequence[memoryview | bytes], good: int) -> bool:
    """Whether the first `good` host pages hold what they should."""
    return all(bytes(page) == payload(run.group, key, len(page)) for key, page in zip(keys_of(run), pages[:good]))

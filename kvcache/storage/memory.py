"""Pages in the agent's own memory: the store of tests and simulations, and the smallest example of one.

in     pages to keep, keys to find
out    copies of pages
state  pages by key with what they are checked against, the longest unused first
owner  the one lane that calls it: it never blocks, so it needs no other
ready  a page is there when its `put` returns
end    a page goes when the capacity is needed or it is deleted; all with the process
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from headrace.kvcache.storage.page_store import Got, PageRun, Put, Removed
from headrace.kvcache.storage.protocol import KEY_BYTES, StoreStats

PAGE_OVERHEAD_BYTES: Final = 512
"""Counted with each page: what Python needs to keep it."""

_Key: TypeAlias = tuple[int, bytes]


class _Page(NamedTuple):
    namespace: bytes
    parent: bytes
    tokens: bytes
    payload: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.payload) + len(self.tokens) + PAGE_OVERHEAD_BYTES


class MemoryStore:
    """A `PageStore` over an ordered dict."""

    failure = ""
    untidy = False

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._pages: OrderedDict[_Key, _Page] = OrderedDict()
        self._size_bytes = 0
        self._read_pages = self._read_bytes = 0
        self._written_pages = self._written_bytes = 0
        self._evicted_pages = self._deleted_pages = self._corrupt_pages = self._failed_writes = 0

    def contains(self, group: int, keys: bytes) -> int:
        found = 0
        for key in _split(keys):
            if (group, key) not in self._pages:
                break
            found += 1
        return found

    def which(self, group: int, keys: bytes) -> bytes:
        return bytes((group, key) in self._pages for key in _split(keys))

    def touch(self, group: int, keys: bytes) -> None:
        # From the end of the chain on, so that its beginning, on which the rest depends, goes last.
        for key in reversed(_split(keys)):
            if (group, key) in self._pages:
                self._pages.move_to_end((group, key))

    def get(self, run: PageRun, into: Sequence[memoryview]) -> Got:
        for index, view in enumerate(into):
            wanted = run.part(index, index + 1)
            page = self._pages.get((run.group, wanted.keys))
            if page is None:
                return Got(index, missing=1)
            asked = (wanted.namespace, wanted.parents, wanted.tokens, len(view))
            if (page.namespace, page.parent, page.tokens, len(page.payload)) != asked:
                self._drop((run.group, wanted.keys))
                self._corrupt_pages += 1
                return Got(index, corrupt=1, message="a page under this key has other tokens or another parent")
            view[:] = page.payload
            self._read_pages += 1
            self._read_bytes += len(view)
        return Got(len(into))

    def put(self, run: PageRun, source: Sequence[memoryview]) -> Put:
        for index, view in enumerate(source):
            part = run.part(index, index + 1)
            key = (run.group, part.keys)
            if key in self._pages:
                self._pages.move_to_end(key)
                continue
            page = _Page(part.namespace, part.parents, part.tokens, bytes(view))
            if not self._make_room(page.size_bytes):
                self._failed_writes += len(source) - index
                return Put(tuple(range(index, len(source))), "a page is larger than the store")
            self._pages[key] = page
            self._size_bytes += page.size_bytes
            self._written_pages += 1
            self._written_bytes += len(view)
        return Put()

    def delete(self, namespace: bytes | None) -> Removed:
        gone = [key for key, page in self._pages.items() if namespace in (None, page.namespace)]
        size_bytes = sum(len(self._pages[key].payload) for key in gone)
        for key in gone:
            self._drop(key)
        self._deleted_pages += len(gone)
        return Removed(len(gone), size_bytes)

    def stats(self) -> StoreStats:
        return StoreStats(
            size_bytes=self._size_bytes,
            capacity_bytes=self._capacity_bytes,
            index_bytes=len(self._pages) * PAGE_OVERHEAD_BYTES,
            pages=len(self._pages),
            read_pages=self._read_pages,
            read_bytes=self._read_bytes,
            written_pages=self._written_pages,
            written_bytes=self._written_bytes,
            evicted_pages=self._evicted_pages,
            deleted_pages=self._deleted_pages,
            corrupt_pages=self._corrupt_pages,
            failed_writes=self._failed_writes,
        )

    def tidy(self) -> None:
        """Nothing is ever untidy."""

    def close(self) -> None:
        self._pages.clear()
        self._size_bytes = 0

    def _make_room(self, size_bytes: int) -> bool:
        while self._pages and self._size_bytes + size_bytes > self._capacity_bytes:
            self._drop(next(iter(self._pages)))
            self._evicted_pages += 1
        return self._size_bytes + size_bytes <= self._capacity_bytes

    def _drop(self, key: _Key) -> None:
        self._size_bytes -= self._pages.pop(key).size_bytes


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]

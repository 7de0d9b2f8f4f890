"""What a storage backend is: pages by key, in blocking calls that the agent makes a few at a time.

A backend knows nothing of requests, queues or deadlines: the agent cuts a request into pieces of about a megabyte and
calls `get` or `put` per piece, from several threads at once. A backend raises nothing: whatever goes wrong is a page
that was not read or not stored, with a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from headrace.kvcache.storage.protocol import KEY_BYTES, StoreStats


class StoreRefused(Exception):
    """A store can't be opened; the message says what to change."""


class PageRun(msgspec.Struct, frozen=True):
    """Pages of one group and namespace, with everything that a stored page is checked against."""

    group: int
    namespace: bytes
    parents: bytes
    """16 bytes a page."""
    keys: bytes
    """16 bytes a page."""
    tokens: bytes
    """Little-endian int32, as many a page as the store was opened with."""

    @property
    def count(self) -> int:
        return len(self.keys) // KEY_BYTES

    def part(self, start: int, end: int) -> PageRun:
        """The pages [start, end)."""
        keys = slice(start * KEY_BYTES, end * KEY_BYTES)
        page_bytes = len(self.tokens) // self.count
        return PageRun(
            self.group,
            self.namespace,
            self.parents[keys],
            self.keys[keys],
            self.tokens[start * page_bytes : end * page_bytes],
        )


class Got(NamedTuple):
    """What a `get` gave: the first `good` pages are there and verified. At most one more was looked at."""

    good: int
    missing: int = 0
    corrupt: int = 0
    message: str = ""


class Put(NamedTuple):
    """What a `put` gave: all pages but `dropped` (counted from 0) are stored."""

    dropped: tuple[int, ...] = ()
    message: str = ""


class Removed(NamedTuple):
    """What a `delete` removed."""

    pages: int
    size_bytes: int
    message: str = ""


class PageStore(Protocol):
    """A storage backend of one model. `get`, `put`, `delete` and `tidy` may block; the rest must not."""

    @property
    def failure(self) -> str:
        """Why the store can't go on; "" while it can."""

    @property
    def untidy(self) -> bool:
        """Whether `tidy` is due."""

    def contains(self, group: int, keys: bytes) -> int:
        """Pages that are stored, contiguous from the first key."""

    def which(self, group: int, keys: bytes) -> bytes:
        """A byte a key: 1 if its page is stored."""

    def touch(self, group: int, keys: bytes) -> None:
        """These pages, where stored, are the most recently used."""

    def get(self, run: PageRun, into: Sequence[memoryview]) -> Got:
        """Read and verify pages into host pages, up to the first that is not good."""

    def put(self, run: PageRun, source: Sequence[memoryview]) -> Put:
        """Store host pages. What the reply does not drop survives the end of this process."""

    def delete(self, namespace: bytes | None) -> Removed:
        """Delete the model's pages, of one namespace or of all. A `put` that began before may lose its pages too."""

    def stats(self) -> StoreStats:
        """Counts of now."""

    def tidy(self) -> None:
        """Housekeeping that is better done while nobody waits."""

    def close(self) -> None:
        """After the last other call has returned."""

"""KV events: which pages came into which tier and which left it, for whoever routes requests by what is cached.

in     changes of the index and acknowledgements of storage, while somebody listens
out    `Stored` and `Removed`, in order, to every reader; a `Gap` where a reader was too slow for them
state  one bounded ring a reader
owner  `KvCache` adds, one coroutine a reader takes; all on the loop
ready  an event is told when the index has changed
end    a reader ends with `close`; without readers the index tells nothing and no hash is computed
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Final, Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from headrace.kvcache.identity import PageHash, PrefixKey
from headrace.kvcache.radix_nodes import Change, Node, path_to

Tier: TypeAlias = Literal["device", "host", "storage"]

RING_EVENTS: Final = 1024
"""Kept for a reader: some 300 KB. What comes beyond pushes out the oldest."""
MAX_READERS: Final = 16


class TooManyReaders(Exception):
    """The event stream has as many readers as it may have."""


class Stored(msgspec.Struct, frozen=True, tag="stored", tag_field="type"):
    """Consecutive pages of one prefix are in a tier now."""

    seq: int
    tier: Tier
    pages: int
    first: str
    """Hex of the chain hash of the first of them."""
    parent: str
    """Hex of the hash before it; a prefix's first page has its namespace as parent."""


class Removed(msgspec.Struct, frozen=True, tag="removed", tag_field="type"):
    """Consecutive pages of one prefix have left a tier. Storage that was cleared names no page: `first` is ""."""

    seq: int
    tier: Tier
    pages: int
    first: str
    parent: str


class Gap(msgspec.Struct, frozen=True, tag="gap", tag_field="type"):
    """So many events before the next one were not kept for this reader, which was too slow."""

    lost: int


KvEvent: TypeAlias = Stored | Removed | Gap


class TellsChanges(Protocol):
    """The index."""

    listener: Callable[[Change, Node, int, int], None] | None


class EventReader:
    """One reader's ring."""

    def __init__(self, close: Callable[[EventReader], None], most: int) -> None:
        self._close = close
        self._most = most
        self._events: deque[KvEvent] = deque()
        self._lost = 0
        self._come = asyncio.Event()

    def put(self, event: KvEvent) -> None:
        if len(self._events) == self._most:
            self._events.popleft()
            self._lost += 1
        self._events.append(event)
        self._come.set()

    async def wait(self, timeout_s: float) -> bool:
        """Whether there is something to take, at the latest after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._come.wait()
        except TimeoutError:
            return False
        return True

    def take(self) -> list[KvEvent]:
        """All that has come, a `Gap` first if some was lost."""
        events, self._events = list(self._events), deque()
        if self._lost:
            events.insert(0, Gap(self._lost))
            self._lost = 0
        self._come.clear()
        return events

    def close(self) -> None:
        """Harmless twice."""
        self._close(self)


class KvEvents:
    """The events of one cache."""

    def __init__(self, index: TellsChanges, page_tokens: int, page_hash: PageHash) -> None:
        self._index = index
        self._page_tokens = page_tokens
        self._page_hash: PageHash = page_hash
        self._readers: list[EventReader] = []
        self._seq = 0

    @property
    def readers(self) -> int:
        return len(self._readers)

    def subscribe(self, ring_events: int = RING_EVENTS) -> EventReader:
        """A reader of all events from now on. Raises TooManyReaders."""
        if len(self._readers) >= MAX_READERS:
            raise TooManyReaders(f"{MAX_READERS} readers have the event stream open, which is all that may")
        reader = EventReader(self._end, ring_events)
        self._readers.append(reader)
        self._index.listener = self._changed
        return reader

    def stored_in_storage(self, key: PrefixKey, start: int, end: int, dropped: list[int]) -> None:
        """Storage has acknowledged the pages [start, end) of a prefix, but for `dropped` (counted from `start`)."""
        if not self._readers:
            return
        edges = [-1, *sorted(dropped), end - start]
        for before, after in pairwise(edges):
            if after - before > 1:
                first = start + before + 1
                hashes = key.page_hashes(first + 1)
                parent = hashes[first - 1] if first else key.namespace
                self._tell(Stored, "storage", after - before - 1, hashes[first].hex(), parent.hex())

    def removed_from_storage(self, namespace: bytes | None, pages: int) -> None:
        """Storage has deleted a namespace, or all of this model (None)."""
        if self._readers and pages:
            self._tell(Removed, "storage", pages, "", "" if namespace is None else namespace.hex())

    def _changed(self, change: Change, node: Node, start: int, end: int) -> None:
        """The index: pages [start, end) of a node, whose path to the root still stands."""
        first, parent = self._hashes(node, start)
        self._tell(Stored if change.stored else Removed, change.tier, end - start, first.hex(), parent.hex())

    def _hashes(self, node: Node, start: int) -> tuple[bytes, bytes]:
        root, *runs = path_to(node)
        tokens = np.frombuffer(b"".join(run.key for run in runs), np.int32)
        pages = sum(run.length for run in runs) - node.length + start + 1
        hashes = PrefixKey(root.key, self._page_tokens, tokens, len(tokens), self._page_hash).page_hashes(pages)
        return hashes[-1], hashes[-2] if pages > 1 else root.key

    def _tell(self, kind: type[Stored] | type[Removed], tier: Tier, pages: int, first: str, parent: str) -> None:
        self._seq += 1
        event = kind(self._seq, tier, pages, first, parent)
        for reader in self._readers:
            reader.put(event)

    def _end(self, reader: EventReader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
        if not self._readers:
            self._index.listener = None

"""Prefetches that wait for host room, against a storage client that answers when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from headrace.kvcache.host import HostTier
from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.pool import Owner
from headrace.kvcache.prefetch import Prefetcher, PrefetchOptions
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.storage.client import StorageClient
from headrace.kvcache.storage.protocol import ReadDone
from headrace.server.sim.virtual_loop import run

PAGE_TOKENS = 4
PAGE_BYTES = 4096


def key(first: int, pages: int) -> PrefixKey:
    tokens = np.arange(first, first + pages * PAGE_TOKENS + 1, dtype=np.int32)
    return PrefixKey(namespace(b"model", "", ""), PAGE_TOKENS, tokens, len(tokens))


class Storage:
    """What was asked of it and is not answered."""

    usable = True

    def __init__(self) -> None:
        self.lookups: list[Callable[[int], None]] = []
        self.reads: list[Callable[[ReadDone], None]] = []

    def lookup(self, group: int, keys: bytes, found: Callable[[int], None]) -> None:
        self.lookups.append(found)

    def read(self, group: int, span: object, host: object, read: Callable[[ReadDone], None]) -> int:
        self.reads.append(read)
        return len(self.reads)

    def cancel(self, operation: int) -> None:
        return

    def find(self, pages: int) -> None:
        self.lookups.pop(0)(pages)

    def bring(self, good: int) -> None:
        """The oldest read, of one page, ends."""
        self.reads.pop(0)(ReadDone(0, good))


def test_a_prefetch_that_was_cut_behind_another_and_asks_again_has_one_place_for_room() -> None:
    async def main() -> None:
        index, storage = RadixIndex(PAGE_TOKENS, 1), Storage()
        host = HostTier(index, 1, 2, "write_through")
        options = PrefetchOptions("wait_complete", threshold_tokens=4, piece_bytes=PAGE_BYTES, host_share=1.0)
        client = cast("StorageClient", storage)
        prefetcher = Prefetcher(index, host, client, options, PAGE_BYTES, 1, lambda: None)

        def waits(prefetch: Any) -> bool:
            return prefetcher.waits(prefetch, lambda tokens, context: 1.0)

        # The first has all the room for its first two pages; the other's turn comes, so it is the next to get some.
        first = prefetcher.begin(key(0, 3), 3, None)
        storage.find(3)
        other = prefetcher.begin(key(100, 3), 3, None)
        storage.find(3)
        assert first is not None and other is not None and waits(other)
        # A page of the first comes, and the next one is damaged. What came is evicted before its turn.
        storage.bring(1)
        storage.bring(0)
        assert first.done and first.decision == "cut_short"
        host.drop(index.evict_host(1))
        prefetcher.room_came()
        assert waits(first), "it asks once more"
        for _ in range(3):
            storage.bring(1)
            host.drop(index.evict_host(1))
            prefetcher.room_came()
        assert other.done
        # The answer takes longer than a prefetch may wait for room: this one does not wait for any yet.
        await asyncio.sleep(2 * options.room_timeout_ms / 1e3)
        assert not first.done
        storage.find(2)
        while storage.reads:
            storage.bring(1)
        assert (first.arrived, first.decision) == (2, "complete")
        prefetcher.release(first, 2)
        prefetcher.release(other, 3)
        assert not prefetcher.transferring
        assert not np.count_nonzero(host.pool.owner == Owner.TRANSFER)

    run(main())

"""The server's disk tier in a check's own process: the agent's service, its store and its threads.

What is left out is the pipe: a command is a call, and a reply an object. So this needs nothing that a machine with a
GPU may lack.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import xxhash

from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.storage.agent_lanes import ThreadLanes
from headrace.kvcache.storage.disk.opening import open_disk_store
from headrace.kvcache.storage.disk.store import DiskSettings
from headrace.kvcache.storage.page_store import PageStore
from headrace.kvcache.storage.protocol import Close, Opened, OpenStore, Read, ReadDone, StoreStats, Write, Written
from headrace.kvcache.storage.service import Lanes, StorageService

THREADS: Final = 4
"""A server's default."""
MODEL: Final = bytes(16)
_Reply = TypeVar("_Reply")


def verified_by() -> str:
    """What pages are verified by: the server's hash, or what stands for it here."""
    return "xxh3" if hasattr(xxhash, "VERSION") else "BLAKE2, which is slower than a server's xxh3"


def prefix_key(ids: list[int]) -> PrefixKey:
    """Of a prompt, as the server names its pages."""
    return PrefixKey(namespace(MODEL, "", ""), 16, np.array(ids, np.int32), len(ids))


class Disk:
    """A store in a folder, for a host pool with one group. As a context manager, so that no thread is left."""

    def __init__(self, folder: Path, host: mmap.mmap, slot_bytes: int) -> None:
        """`slot_bytes`: from page to page, a multiple of 4096. Raises RuntimeError where the folder is refused."""
        self.slot_bytes = slot_bytes
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._lanes = ThreadLanes(THREADS, self._wake)
        self._replies: list[Any] = []
        self._view = memoryview(host)
        self._service = StorageService(self._replies.append, self._view, self._open, lambda: time.monotonic() * 1e3)
        # Room for the pages, their headers, the journal, and segments that are made ahead.
        room_bytes = 2 * len(host) + (256 << 20)
        layout: dict[str, Any] = {
            "slot_bytes": [slot_bytes],
            "host_offsets": [0],
            "host_pages": [len(host) // slot_bytes],
        }
        command = OpenStore("disk", room_bytes, 16, **layout, model=MODEL, directory=str(folder), threads=THREADS)
        self._service.handle(command)
        if not isinstance(self._replies[0], Opened):
            raise RuntimeError(f"the store can't be opened: {self._replies[0]}")

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *raised: object) -> None:
        self._service.handle(Close())
        while not self._service.finished:
            self._deliver()
        self._lanes.close()
        self._view.release()
        os.close(self._wake)

    @property
    def stats(self) -> StoreStats:
        """Of the store."""
        stats: StoreStats = self._store.stats()
        return stats

    def write(self, key: PrefixKey, pages: int) -> Written:
        """Store the prompt's first pages, which are the first ones of the host pool."""
        hashes = key.page_hashes(pages)
        parents = [key.namespace, *hashes[:-1]]
        chain = b"".join(parents), b"".join(hashes), key.raw(0, pages)
        self._service.handle(Write(1, 0, key.namespace, *chain, list(range(pages))))
        return self._reply(Written)

    def read(self, key: PrefixKey, pages: int) -> ReadDone:
        """Read them into the same places; → when all of them are there, and verified."""
        chain = key.namespace, b"".join(key.page_hashes(pages)), key.raw(0, pages)
        self._service.handle(Read(2, 0, key.namespace, *chain, list(range(pages))))
        return self._reply(ReadDone)

    def _open(self, command: OpenStore) -> tuple[PageStore, Lanes]:
        """As the agent does it."""
        settings = DiskSettings(
            command.directory, command.capacity_bytes, command.page_tokens, tuple(command.slot_bytes), command.model
        )
        self._store = open_disk_store(settings)
        return self._store, self._lanes

    def _reply(self, kind: type[_Reply]) -> _Reply:
        """The next one of a kind; what else comes is forgotten."""
        while True:
            found = [reply for reply in self._replies if isinstance(reply, kind)]
            self._replies.clear()
            if found:
                return found[0]
            self._deliver()

    def _deliver(self) -> None:
        """Wait for a call to end, and act on it."""
        if not self._lanes.deliver():
            os.eventfd_read(self._wake)

"""A storage service whose lanes are stepped by hand, over a store that fails when told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from storage.pages import MODEL, PAGE_TOKENS, chain, keys_of, payload

from headrace.kvcache.storage.memory import MemoryStore
from headrace.kvcache.storage.page_store import Got, PageRun, Put
from headrace.kvcache.storage.protocol import (
    Opened,
    OpenStore,
    Read,
    Reply,
    Write,
    command_decoder,
    encoder,
    reply_decoder,
)
from headrace.kvcache.storage.service import StorageService

T = TypeVar("T")
HALF_MIB = 1 << 19
"""Of a page: two make a piece of a read, eight one of a write."""


class HandLanes:
    """Lanes whose calls run when the test says so."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.waiting: deque[Callable[[], None]] = deque()

    @property
    def idle(self) -> int:
        return self.count - len(self.waiting)

    def submit(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        assert self.idle
        self.waiting.append(lambda: done(job()))

    def step(self, which: int = 0) -> None:
        """Run one of the calls under way."""
        call = self.waiting[which]
        del self.waiting[which]
        call()

    def run(self) -> None:
        while self.waiting:
            self.step()


class BrittleStore(MemoryStore):
    """A store of which calls fail when told to."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.calls: list[tuple[str, bytes]] = []
        self.tidied = 0
        self.closed = False
        self.bad_key = b""
        self.raises: Exception | None = None

    def get(self, run: PageRun, into: Sequence[memoryview]) -> Got:
        self.calls.append(("get", run.keys[:16]))
        if self.raises:
            raise self.raises
        if self.bad_key in keys_of(run):
            good = keys_of(run).index(self.bad_key)
            return (
                super().get(run.part(0, good), into[:good])._replace(corrupt=1, message="bad")
                if good
                else Got(0, corrupt=1, message="bad")
            )
        return super().get(run, into)

    def put(self, run: PageRun, source: Sequence[memoryview]) -> Put:
        self.calls.append(("put", run.keys[:16]))
        return Put(tuple(range(run.count)), "full") if self.bad_key in keys_of(run) else super().put(run, source)

    def tidy(self) -> None:
        self.tidied += 1
        self.untidy = False

    def close(self) -> None:
        self.closed = True


class World:
    """A service over a memory store, with two host pages of half a MiB for each of 64 pages."""

    def __init__(self, lanes: int = 4, page_bytes: int = HALF_MIB, pages: int = 64) -> None:
        self.page_bytes = page_bytes
        self.pool = memoryview(bytearray(pages * page_bytes))
        self.lanes = HandLanes(lanes)
        self.store = BrittleStore()
        self.replies: list[Reply] = []
        self.now_ms = 0.0
        self.service = StorageService(self._reply, self.pool, lambda command: (self.store, self.lanes), self._clock_ms)
        self.open = OpenStore("memory", 1 << 30, PAGE_TOKENS, [page_bytes], [0], [pages], MODEL)
        self.service.handle(self.open)
        assert isinstance(self.take()[0], Opened)

    def _reply(self, reply: Reply) -> None:
        self.replies.append(reply_decoder.decode(encoder.encode(reply)))

    def _clock_ms(self) -> float:
        return self.now_ms

    def take(self) -> list[Reply]:
        replies, self.replies = self.replies, []
        return replies

    def view(self, page: int) -> memoryview:
        return self.pool[page * self.page_bytes : (page + 1) * self.page_bytes]

    def write(self, id: int, run: PageRun, first_page: int = 0) -> None:
        for at, key in enumerate(keys_of(run)):
            self.view(first_page + at)[:] = payload(0, key, self.page_bytes)
        pages = list(range(first_page, first_page + run.count))
        command = Write(id, run.group, run.namespace, run.parents, run.keys, run.tokens, pages)
        self.service.handle(command_decoder.decode(encoder.encode(command)))

    def read(self, id: int, run: PageRun, first_page: int = 0) -> None:
        pages = list(range(first_page, first_page + run.count))
        command = Read(id, run.group, run.namespace, run.parents[:16], run.keys, run.tokens, pages)
        self.service.handle(command_decoder.decode(encoder.encode(command)))

    def stored(self, name: str, pages: int) -> PageRun:
        """A chain that the store has."""
        run = chain(name, pages)
        self.store.put(run, [memoryview(payload(0, key, self.page_bytes)) for key in keys_of(run)])
        self.store.calls.clear()
        return run

    def right(self, run: PageRun, good: int, first_page: int = 0) -> bool:
        return all(
            bytes(self.view(first_page + at)) == payload(0, key, self.page_bytes)
            for at, key in enumerate(keys_of(run)[:good])
        )

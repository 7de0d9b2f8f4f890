"""The storage agent as a state machine: commands in, replies out, blocking calls on lanes.

The same code serves in the agent's process (lanes are I/O threads), in a simulation (lanes are virtual time) and in a
test (a lane runs a call at once).

in     commands, in order; results of the calls that ran on lanes
out    replies, through the `reply` that it was given
state  the open store, transfers on their way, deletes that wait
owner  the thread that calls `handle`; results come back on it too
ready  host pages of a read, up to `good`, with `ReadProgress` and `ReadDone`
end    a transfer's host pages are the server's again with its reply; after `Close`, `finished`

Every read is cut into pieces of a megabyte, every write into pieces of four. Reads take turns piece by piece, so that a
small one waits for one piece of a large one, not for all of it. Writes come one after the other (so that their pages
lie side by side), after reads, and never on the last lane.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias, TypeVar

from headrace.kvcache.storage.host_pages import HostPages
from headrace.kvcache.storage.page_store import Got, PageRun, PageStore, Put, Removed, StoreRefused
from headrace.kvcache.storage.protocol import (
    KEY_BYTES,
    MAX_READS,
    TOKEN_BYTES,
    Cancel,
    Close,
    Command,
    Delete,
    Deleted,
    Found,
    Lookup,
    Opened,
    OpenStore,
    Read,
    ReadDone,
    ReadProgress,
    Refused,
    Reply,
    Stats,
    StatsReply,
    StoreFailed,
    StoreStats,
    Touch,
    Write,
    Written,
)
from headrace.kvcache.storage.transfers import ReadTransfer, WriteTransfer

log = logging.getLogger(__name__)

T = TypeVar("T")

PIECE_BYTES: Final = 1 << 20
"""Of one call of the store: smaller pieces only add calls, larger ones only add wait."""
WRITE_PIECE_BYTES: Final = 4 << 20
"""Nobody waits for a write, and 350 µs of work for each `put` would cost a fast disk a third of its speed."""
MAX_PIECE_PAGES: Final = 256
"""A vectored call takes 1024 buffers, of which a page needs two."""
READS_PER_WRITE: Final = 7
"""Under steady reads every eighth piece is a write's: device and host pages wait for writes, so they may not starve."""
PROGRESS_BYTES: Final = 1 << 20
PROGRESS_MS: Final = 2.0
MAX_WRITES: Final = MAX_READS
MAX_DELETES: Final = 64


class Lanes(Protocol):
    """Where blocking calls run."""

    @property
    def count(self) -> int:
        """How many calls may run at a time."""

    @property
    def idle(self) -> int:
        """How many more calls may be submitted now."""

    def submit(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """Run `job`, which raises nothing; later, never inside this call, `done(its result)` on the owner's thread."""


OpenBackend: TypeAlias = Callable[[OpenStore], tuple[PageStore, Lanes]]
"""Raises StoreRefused."""


class StorageService:
    """One store, and everything that is under way in it."""

    def __init__(
        self,
        reply: Callable[[Reply], None],
        host_pool: memoryview,
        open_backend: OpenBackend,
        clock_ms: Callable[[], float],
    ) -> None:
        self.finished = False
        """Nothing more will be done: closed, or refused."""
        self._reply = reply
        self._host_pool = host_pool
        self._open_backend = open_backend
        self._clock_ms = clock_ms
        self._store: PageStore
        self._lanes: Lanes
        self._host: HostPages
        self._page_tokens = 0
        self._open = False
        self._failed = ""
        self._closing = False
        self._jobs = 0
        self._transfers: dict[int, ReadTransfer | WriteTransfer] = {}
        self._reads: deque[ReadTransfer] = deque()
        self._writes: deque[WriteTransfer] = deque()
        self._deletes: deque[Delete] = deque()
        self._write_pieces = 0
        self._reads_since_write = 0
        self._tidying = False

    def handle(self, command: Command) -> None:
        """Act on a command. What it asks for may be answered now or later."""
        match command:
            case OpenStore():
                self._open_store(command)
            case Lookup():
                self._reply(self._look_up(command))
            case Read():
                self._accept_read(command)
            case Write():
                self._accept_write(command)
            case Cancel():
                self._cancel(command.id)
            case Touch():
                if self._usable and self._well_formed(command.group, command.keys):
                    self._store.touch(command.group, command.keys)
            case Delete():
                self._accept_delete(command)
            case Stats():
                self._reply(StatsReply(command.id, self._store.stats() if self._open else StoreStats()))
            case Close():
                self._close()
        self._pump()

    def idle(self) -> None:
        """Nothing has come for a while: a good time to tidy up."""
        if self._usable and not self._jobs and self._lanes.idle:
            self._tidy()

    # -----------------------------------------------------------------------------------------------------------
    # Commands

    def _open_store(self, command: OpenStore) -> None:
        assert not self._open, "the store is opened once"
        began_ms = self._clock_ms()
        try:
            self._host = HostPages(self._host_pool, command)
            self._store, self._lanes = self._open_backend(command)
        except (StoreRefused, ValueError) as refusal:
            self._reply(Refused(str(refusal)))
            self.finished = True
            return
        self._page_tokens = command.page_tokens
        self._open = True
        self._reply(Opened(self._store.stats(), self._clock_ms() - began_ms))

    def _look_up(self, command: Lookup) -> Found:
        group, keys = command.group, command.keys
        if not self._usable or not self._well_formed(group, keys):
            return Found(command.id, 0)
        there = self._store.which(group, keys) if command.each else b""
        return Found(command.id, self._store.contains(group, keys), there)

    def _accept_read(self, command: Read) -> None:
        parents = (command.parent + command.keys)[: len(command.keys)]
        run = PageRun(command.group, command.namespace, parents, command.keys, command.tokens)
        pages, refusal = self._host_views(command.id, run, command.host_pages)
        if refusal:
            self._reply(ReadDone(command.id, 0, message=refusal))
            return
        stored = self._store.contains(run.group, run.keys)
        read = ReadTransfer(command.id, run, pages, self._piece_pages(run.group), stored)
        if not stored:
            self._reply(read.done(0.0))
            return
        # The whole chain at once: pages that are read piece by piece would otherwise age from the root on.
        self._store.touch(run.group, run.keys[: stored * KEY_BYTES])
        self._transfers[read.id] = read
        self._reads.append(read)

    def _accept_write(self, command: Write) -> None:
        run = PageRun(command.group, command.namespace, command.parents, command.keys, command.tokens)
        pages, refusal = self._host_views(command.id, run, command.host_pages)
        if refusal:
            self._reply(Written(command.id, 0, list(range(len(command.host_pages))), message=refusal))
            return
        write = WriteTransfer(command.id, run, pages, self._piece_pages(run.group, WRITE_PIECE_BYTES))
        self._transfers[write.id] = write
        self._writes.append(write)

    def _accept_delete(self, command: Delete) -> None:
        refusal = self._unusable or ("too many deletes wait" if len(self._deletes) >= MAX_DELETES else "")
        if refusal:
            self._reply(Deleted(command.id, 0, 0, refusal))
        else:
            self._deletes.append(command)

    def _cancel(self, id: int) -> None:
        transfer = self._transfers.get(id)
        if transfer is not None:
            transfer.cancel()
            transfer.message = transfer.message or "cancelled"
            self._end_if_ended(transfer)

    def _close(self) -> None:
        self._closing = True
        self._cancel_all("the store is closing")

    def _cancel_all(self, why: str) -> None:
        for delete in self._deletes:
            self._reply(Deleted(delete.id, 0, 0, why))
        self._deletes.clear()
        for transfer in list(self._transfers.values()):
            transfer.message = transfer.message or why
            self._cancel(transfer.id)

    # -----------------------------------------------------------------------------------------------------------
    # Is a command acceptable

    @property
    def _unusable(self) -> str:
        """Why nothing can be done, "" if it can."""
        if not self._open:
            return "the store is not open"
        return self._failed or ("the store is closing" if self._closing else "")

    @property
    def _usable(self) -> bool:
        return not self._unusable

    def _well_formed(self, group: int, keys: bytes) -> bool:
        return 0 <= group < self._host.groups and not len(keys) % KEY_BYTES

    def _host_views(self, id: int, run: PageRun, host_pages: list[int]) -> tuple[list[memoryview], str]:
        """The request's host pages, or why it can't be done."""
        if self._unusable:
            return [], self._unusable
        if len(self._transfers) >= MAX_READS + MAX_WRITES:
            return [], f"the storage agent has {len(self._transfers)} transfers already"
        count = len(host_pages)
        sizes = (count * KEY_BYTES, count * KEY_BYTES, count * self._page_tokens * TOKEN_BYTES)
        given = (len(run.parents), len(run.keys), len(run.tokens))
        if not count or sizes != given or len(run.namespace) != KEY_BYTES or not 0 <= run.group < self._host.groups:
            return [], f"malformed: {count} host pages of group {run.group}, fields of {given} bytes"
        if id in self._transfers:
            return [], f"transfer {id} is under way already"
        try:
            return self._host.views(run.group, host_pages), ""
        except ValueError as error:
            return [], f"malformed: {error}"

    def _piece_pages(self, group: int, piece_bytes: int = PIECE_BYTES) -> int:
        return max(1, min(piece_bytes // self._host.slot_bytes(group), MAX_PIECE_PAGES))

    # -----------------------------------------------------------------------------------------------------------
    # Work for the lanes

    def _pump(self) -> None:
        """Keep the lanes busy, in the order that is fair."""
        if self._open:
            while self._lanes.idle and self._begin_next():
                pass
            if self._closing and not self._jobs:
                self._open = False
                self._store.close()
        if self._closing and not self._open:
            self.finished = True

    def _begin_next(self) -> bool:
        """Submit the most urgent call, if there is one."""
        if self._deletes:
            self._begin_delete(self._deletes.popleft())
            return True
        if self._store.untidy and not self._tidying and self._usable:
            self._tidy()
            return True
        read, write = self._next_read(), self._next_write()
        if read is not None and (write is None or self._reads_since_write < READS_PER_WRITE):
            self._begin_read(read)
            return True
        if write is not None:
            self._begin_write(write)
            return True
        return False

    def _next_read(self) -> ReadTransfer | None:
        while self._reads and not self._reads[0].has_more:
            self._reads.popleft()
        return self._reads[0] if self._reads else None

    def _next_write(self) -> WriteTransfer | None:
        if self._write_pieces >= max(1, self._lanes.count - 1):
            return None
        while self._writes and not self._writes[0].has_more:
            self._writes.popleft()
        return self._writes[0] if self._writes else None

    def _begin_read(self, read: ReadTransfer) -> None:
        start, end = read.begin_piece(self._clock_ms())
        self._reads.rotate(-1)
        self._reads_since_write += 1
        run, into = read.run.part(start, end), read.pages[start:end]

        def ended(got: Got) -> None:
            read.end_piece(start, end, got)
            if not self._end_if_ended(read):
                self._tell_progress(read)

        self._submit(lambda: self._store.get(run, into), lambda bug: Got(0, message=bug), ended)

    def _begin_write(self, write: WriteTransfer) -> None:
        start, end = write.begin_piece(self._clock_ms())
        self._write_pieces += 1
        self._reads_since_write = 0
        run, source = write.run.part(start, end), write.pages[start:end]

        def ended(put: Put) -> None:
            self._write_pieces -= 1
            write.end_piece(start, end, put)
            self._end_if_ended(write)

        self._submit(lambda: self._store.put(run, source), lambda bug: Put(tuple(range(end - start)), bug), ended)

    def _begin_delete(self, delete: Delete) -> None:
        def ended(removed: Removed) -> None:
            self._reply(Deleted(delete.id, *removed))

        self._submit(lambda: self._store.delete(delete.namespace), lambda bug: Removed(0, 0, bug), ended)

    def _tidy(self) -> None:
        self._tidying = True

        def ended(bug: str) -> None:
            self._tidying = False

        def tidy() -> str:
            self._store.tidy()
            return ""

        self._submit(tidy, lambda bug: bug, ended)

    def _submit(self, call: Callable[[], T], failed: Callable[[str], T], ended: Callable[[T], None]) -> None:
        def job() -> T:
            try:
                return call()
            except Exception as error:
                # A bug in a store costs the pages of this call, and not the reply on which the server waits.
                log.exception("the page store failed in a way it should not")
                return failed(f"the page store failed: {type(error).__name__}: {error}")

        def done(result: T) -> None:
            self._jobs -= 1
            ended(result)
            self._check_store()
            self._pump()

        self._jobs += 1
        self._lanes.submit(job, done)

    # -----------------------------------------------------------------------------------------------------------
    # Results

    def _end_if_ended(self, transfer: ReadTransfer | WriteTransfer) -> bool:
        if not transfer.ended:
            return False
        del self._transfers[transfer.id]
        self._reply(transfer.done(self._clock_ms()))
        return True

    def _tell_progress(self, read: ReadTransfer) -> None:
        grown = (read.good - read.told) * self._host.slot_bytes(read.run.group)
        now_ms = self._clock_ms()
        if grown >= PROGRESS_BYTES or (grown and now_ms - read.told_ms >= PROGRESS_MS):
            read.told, read.told_ms = read.good, now_ms
            self._reply(ReadProgress(read.id, read.good))

    def _check_store(self) -> None:
        if self._store.failure and not self._failed:
            self._failed = self._store.failure
            self._reply(StoreFailed(self._failed))
            self._cancel_all(self._failed)

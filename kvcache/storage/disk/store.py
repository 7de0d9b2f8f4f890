"""The disk store: pages in segment files, found through an index in RAM that a journal brings back.

in     pages to store, read, find and delete, from several threads at once
out    verified pages in host pages
state  index, allocator, namespaces, journal, descriptors; counts
owner  its lock: held for work in RAM only, never over a call that may wait for the device
ready  a page counts when its record is written, then its journal entry; only then can it be found
end    a slot that is being read or written is pinned or taken, and not reused; the directory is given back by `close`

A page is found in the index, but only its record proves it: header, chain, tokens and checksums are verified in every
read. So whatever a crash, a disk or a stranger does to the files, a page is what was stored or it is missing.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from headrace.kvcache.storage.disk.allocation import Growth, SlotAllocator
from headrace.kvcache.storage.disk.entries import ENTRY_BYTES, FREE, new_entries
from headrace.kvcache.storage.disk.files import say
from headrace.kvcache.storage.disk.hashing import I64
from headrace.kvcache.storage.disk.journal import Journal
from headrace.kvcache.storage.disk.ownership import Claim
from headrace.kvcache.storage.disk.pace import Pace
from headrace.kvcache.storage.disk.record import HEADER_BYTES, PageId
from headrace.kvcache.storage.disk.records import Fault, Records
from headrace.kvcache.storage.disk.segments import Segment, Segments, make_segment
from headrace.kvcache.storage.disk.spaces import Space, Spaces
from headrace.kvcache.storage.disk.table import BROKEN, ERASING, LEAVING, LIVE, SLOT_BYTES, PageTable
from headrace.kvcache.storage.disk.upkeep import Upkeep
from headrace.kvcache.storage.page_store import Got, PageRun, Put, Removed
from headrace.kvcache.storage.protocol import KEY_BYTES, StoreStats

log = logging.getLogger(__name__)

GROWTH_RETRY_S: Final = 10.0
"""After a disk was full, growing is not tried again for so long: each try may take the file system a while."""
MAX_FAULTS_LOGGED: Final = 100
SMALL_FILES_BYTES: Final = 8192
"""Of the capacity: `format` and `owner`."""
_DELETE_WINDOW: Final = 65536


class DiskSettings(msgspec.Struct, frozen=True):
    """What a disk store is opened with."""

    directory: str
    capacity_bytes: int | None
    """None: what is there is all there may be (for tools)."""
    page_tokens: int
    payload_bytes: tuple[int, ...]
    """Of a page, per group."""
    model: bytes
    fsync: bool = False
    read_bytes_per_s: float = 0.0
    """A bound on reading; 0 for none."""


class DiskStore:
    """A `PageStore` in a directory that is ours. `opening.open_disk_store` makes one."""

    def __init__(
        self,
        claim: Claim,
        settings: DiskSettings,
        table: PageTable,
        segments: Segments,
        spaces: Spaces,
        allocator: SlotAllocator,
        journal: Journal,
        generation: int,
        clock_s: Callable[[], float],
    ) -> None:
        self.failure = ""
        self._claim = claim
        self._files = claim.files
        self._settings = settings
        self._table = table
        self._segments = segments
        self._spaces = spaces
        self._allocator = allocator
        self._journal = journal
        self._generation = generation
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        """One segment is made at a time. Taken before `_lock`; no reader passes here."""
        self._records = Records(self._files)
        self._pace = Pace(settings.read_bytes_per_s)
        self._upkeep = Upkeep(self._lock, table, segments, spaces, journal, clock_s)
        self._grow_not_before_s = 0.0
        self._growth_fault = ""
        self._faults_logged = 0
        self._tick_of_write = 0
        self._last_written = b""
        self._read_pages = self._read_bytes = self._written_pages = self._written_bytes = 0
        self._deleted_pages = self._corrupt_pages = self._failed_reads = self._failed_writes = 0

    @property
    def untidy(self) -> bool:
        return self._upkeep.due

    def contains(self, group: int, keys: bytes) -> int:
        with self._lock:
            return _prefix(self._table.find(group, keys))

    def which(self, group: int, keys: bytes) -> bytes:
        with self._lock:
            there: bytes = (self._table.find(group, keys) >= 0).tobytes()
        return there

    def touch(self, group: int, keys: bytes) -> None:
        with self._lock:
            slots = self._table.find(group, keys)
            self._use(slots[slots >= 0])

    # -----------------------------------------------------------------------------------------------------------
    # Reading

    def get(self, run: PageRun, into: Sequence[memoryview]) -> Got:
        with self._lock:
            slots = self._table.find(run.group, run.keys)
            slots = slots[: _prefix(slots)]
            np.add.at(self._table.pins, slots, np.uint16(1))
            generations = self._table.generations[slots].tolist()
        fault = None
        good = 0
        try:
            good, fault = self._read(run, slots, generations, into)
            if fault is not None:
                self._discard(int(slots[good]), generations[good], fault)
        finally:
            self._unpin(slots)
        size_bytes = good * self._settings.payload_bytes[run.group]
        self._pace.spend(size_bytes)
        with self._lock:
            self._read_pages += good
            self._read_bytes += size_bytes
        if fault is not None:
            return Got(good, corrupt=1, message=f"page {good} of the read is not good: {fault.what}")
        return Got(good, missing=run.count - good)

    def _read(
        self, run: PageRun, slots: I64, generations: list[int], into: Sequence[memoryview]
    ) -> tuple[int, Fault | None]:
        pages = self._pages(run, range(len(slots)), generations)
        record_bytes = self._record_bytes(run.group)
        with self._lock:
            parts = list(self._segments.runs(slots))
        for part in parts:
            if part.segment.record_bytes != record_bytes:
                return part.start, Fault("its record has another size", unreadable=False)
            here = slice(part.start, part.start + part.count)
            good, fault = self._records.read(part, pages[here], into[here])
            if fault is not None:
                return part.start + good, fault
        return len(slots), None

    def _discard(self, slot: int, generation: int, fault: Fault) -> None:
        """Let a page that is not good be found no more, now and after a restart."""
        entries = new_entries(0)
        with self._lock:
            if fault.unreadable:
                self._failed_reads += 1
            else:
                self._corrupt_pages += 1
            segment = self._segments.of(slot)
            here = np.array([slot])
            if self._table.states[slot] == LIVE and self._table.generations[slot] == generation:
                self._table.withdraw(here, BROKEN if fault.unreadable else LEAVING)
                entries = self._upkeep.entries(here)
                entries["op"] = FREE
                entries["generation"] = self._next_generation()
            log_it = self._faults_logged < MAX_FAULTS_LOGGED
            self._faults_logged += 1
        if log_it:
            last = "; more are only counted" if self._faults_logged == MAX_FAULTS_LOGGED else ""
            where = f"slot {slot - segment.base} of {segment.name}"
            log.warning("a cached page is dropped, %s: %s%s", where, fault.what, last)
        try:
            self._journal.append(entries)
        except OSError as error:
            # The page is met again after a restart, and found bad again.
            log.warning("the journal could not be told of it: %s", say(error))

    def _unpin(self, slots: I64) -> None:
        table = self._table
        with self._lock:
            np.subtract.at(table.pins, slots, np.uint16(1))
            if (table.states[slots] == LIVE).all():
                return
            last = np.unique(slots[table.pins[slots] == 0])
            self._allocator.give_back(last[table.states[last] == LEAVING])
            erasing = last[table.states[last] == ERASING]
        if len(erasing):
            self._erase(erasing)

    # -----------------------------------------------------------------------------------------------------------
    # Writing

    def put(self, run: PageRun, source: Sequence[memoryview]) -> Put:
        with self._lock:
            self._advance(run)
            slots = self._table.find(run.group, run.keys)
            there = slots[slots >= 0]
            self._table.ticks[there] = self._table.tick
        wanted = _firsts(run, np.flatnonzero(slots < 0).tolist())
        if not wanted:
            return Put()
        slots, message = self._reserve(self._record_bytes(run.group), len(wanted))
        dropped = wanted[len(slots) :]
        stored = wanted[: len(slots)]
        if stored:
            fault = self._store(run, stored, slots, source)
            if fault:
                message, dropped = fault, wanted
        with self._lock:
            written = len(wanted) - len(dropped)
            self._written_pages += written
            self._written_bytes += written * self._settings.payload_bytes[run.group]
            self._failed_writes += len(dropped)
        return Put(tuple(dropped), message)

    def _store(self, run: PageRun, indexes: list[int], slots: I64, source: Sequence[memoryview]) -> str:
        """Write these pages of a run into these slots, then into the journal: why they are not stored, or ""."""
        keys = b"".join(run.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES] for index in indexes)
        with self._lock:
            space = self._spaces.of(run.namespace, self._settings.model)
            generation = self._next_generation()
            self._table.fill(slots, run.group, keys, generation, space.number)
            entries = self._upkeep.entries(slots)
            parts = list(self._segments.runs(slots))
        pages = self._pages(run, indexes, [generation] * len(indexes))
        try:
            for part in parts:
                here = slice(part.start, part.start + part.count)
                self._records.write(part, pages[here], [source[index] for index in indexes[here]])
                if self._settings.fsync:
                    self._files.sync(part.segment.fd)
            self._check_linked([part.segment for part in parts])
            self._journal.append(entries if space.written else np.concatenate((space.entries(), entries)))
        except OSError as error:
            with self._lock:
                self._allocator.give_back(slots)
            return f"pages could not be written: {say(error)}"
        return self._publish(space, generation, slots, run.group, keys)

    def _publish(self, space: Space, generation: int, slots: I64, group: int, keys: bytes) -> str:
        with self._lock:
            space.written = True
            if generation < space.cleared:
                self._allocator.give_back(slots)
                return "the pages were deleted while they were written"
            # Another write of the same pages may have come first: then these are not needed.
            late = self._table.find(group, keys) >= 0
            if late.any():
                self._allocator.give_back(slots[late])
                slots = slots[~late]
            self._table.publish(slots)
        return ""

    def _reserve(self, record_bytes: int, count: int) -> tuple[I64, str]:
        """Up to `count` taken slots, and why they are fewer."""
        with self._lock:
            slots = self._allocator.take(record_bytes, count)
        if len(slots) == count:
            return slots, ""
        with self._growing:
            while True:
                with self._lock:
                    slots = np.concatenate((slots, self._allocator.take(record_bytes, count - len(slots))))
                    growth = None
                    if len(slots) < count and self._clock_s() >= self._grow_not_before_s:
                        growth = self._allocator.plan_growth(record_bytes)
                    if growth is None:
                        self._allocator.evict(record_bytes, count - len(slots))
                        slots = np.concatenate((slots, self._allocator.take(record_bytes, count - len(slots))))
                        break
                self._grow(growth)
        short = len(slots) < count
        return slots, (self._growth_fault or "no page can make room: those there are are being read") if short else ""

    def _grow(self, growth: Growth) -> None:
        """Make a segment. Where that fails, the store goes on with what it has."""
        try:
            self._remove(growth.drop)
            segment = make_segment(self._files, growth.id, growth.record_bytes, growth.slots, self._settings.fsync)
            with self._lock:
                added = self._segments.add(segment)
                if added:
                    self._allocator.add(segment)
            if not added:
                segment.close(self._files)
                self._files.remove(segment.name)
                raise OSError(errno.ENOSPC, "the slot numbers are used up")
        except OSError as error:
            self._grow_not_before_s = self._clock_s() + GROWTH_RETRY_S
            self._growth_fault = f"the disk cache can't grow: {say(error)}"
            log.warning("%s: free some space, or lower --disk-cache-size", self._growth_fault)
            return
        self._growth_fault = ""

    def _remove(self, segments: Sequence[Segment]) -> None:
        """Remove the files of dropped segments. Raises OSError; what remains counts against the capacity."""
        for segment in segments:
            segment.close(self._files)
            self._files.remove(segment.name)
            with self._lock:
                self._allocator.removed(segment)

    # -----------------------------------------------------------------------------------------------------------
    # Deleting

    def delete(self, namespace: bytes | None) -> Removed:
        return self.delete_of(self._settings.model, namespace)

    def delete_of(
        self, model: bytes | None, namespace: bytes | None, progress: Callable[[int, int], None] | None = None
    ) -> Removed:
        """Delete the pages of a model, or of all; of one namespace, or of all. `progress(slots looked at, of so
        many)`."""
        with self._lock:
            generation = self._next_generation()
            spaces = self._spaces.select(model, namespace)
            for space in spaces:
                space.cleared = generation
            entries = [space.entries() for space in spaces]
            high = max((segment.end for segment in self._segments), default=0)
        if not spaces:
            return Removed(0, 0)
        message = ""
        try:
            self._journal.append(np.concatenate(entries))
        except OSError as error:
            message = f"the pages are gone, but would be back after a restart: {say(error)}"
        pages = size_bytes = 0
        numbers = np.array([space.number for space in spaces])
        for start in range(0, high, _DELETE_WINDOW):
            slots, freed_bytes = self._withdraw_spaces(start, min(start + _DELETE_WINDOW, high), numbers, generation)
            pages += len(slots)
            size_bytes += freed_bytes
            message = self._erase_unpinned(slots) or message
            if progress is not None:
                progress(min(start + _DELETE_WINDOW, high), high)
        return Removed(pages, size_bytes, self._remove_empty() or message)

    def _withdraw_spaces(self, start: int, end: int, numbers: I64, generation: int) -> tuple[I64, int]:
        table = self._table
        with self._lock:
            gone = (table.states[start:end] == LIVE) & (table.generations[start:end] < generation)
            gone &= np.isin(table.spaces[start:end], numbers)
            slots = start + np.flatnonzero(gone)
            table.withdraw(slots, ERASING)
            self._deleted_pages += len(slots)
            parts = list(self._segments.runs(slots))
        return slots, sum((part.segment.record_bytes - HEADER_BYTES) * part.count for part in parts)

    def _erase_unpinned(self, slots: I64) -> str:
        with self._lock:
            slots = slots[self._table.pins[slots] == 0]
        return self._erase(slots) if len(slots) else ""

    def _erase(self, slots: I64) -> str:
        """Erase slots that are ERASING and give them back: prompts can be read from what would stay. What failed."""
        with self._lock:
            parts = list(self._segments.runs(slots))
        message = ""
        for part in parts:
            try:
                self._records.erase(part)
            except OSError as error:
                message = f"deleted pages could not be erased: {say(error)}"
                log.warning("%s", message)
        with self._lock:
            self._allocator.give_back(slots)
        return message

    def _remove_empty(self) -> str:
        """Give the space of segments without pages back to the file system. What failed."""
        with self._growing:
            with self._lock:
                empty = self._allocator.empty_segments()
                for segment in empty:
                    self._allocator.forget(segment)
            try:
                self._remove(empty)
            except OSError as error:
                return f"empty files could not be removed: {say(error)}"
        return ""

    # -----------------------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._lock:
            slots = sum(segment.slots for segment in self._segments)
            return StoreStats(
                size_bytes=self._allocator.segment_bytes + self._journal.size_bytes + SMALL_FILES_BYTES,
                capacity_bytes=self._settings.capacity_bytes or 0,
                index_bytes=slots * SLOT_BYTES + self._table.hash_bytes,
                pages=self._table.pages,
                read_pages=self._read_pages,
                read_bytes=self._read_bytes,
                written_pages=self._written_pages,
                written_bytes=self._written_bytes,
                evicted_pages=self._allocator.evicted_pages,
                deleted_pages=self._deleted_pages,
                corrupt_pages=self._corrupt_pages,
                failed_reads=self._failed_reads,
                failed_writes=self._failed_writes,
                direct_io=len(self._segments) > 0 and all(segment.direct for segment in self._segments),
            )

    def check_integrity(self) -> None:
        """Raise AssertionError unless index and allocator agree (invariant 1)."""
        with self._lock:
            self._table.check()
            self._allocator.check()

    def tidy(self) -> None:
        if not self.failure:
            self._upkeep.tidy()

    def compact_journal(self) -> None:
        """Write the journal anew now. Raises OSError."""
        self._upkeep.compact()

    def close(self) -> None:
        self.tidy()
        self._journal.close()
        for segment in self._segments:
            segment.close(self._files)
        self._claim.release()

    def _use(self, slots: I64) -> None:
        self._table.use(slots)
        self._upkeep.unsaved += len(slots)

    def _advance(self, run: PageRun) -> None:
        """Make a new chain younger than the one written before; pieces of one chain, and what a touch came before, are
        of one age, so that the beginning of a chain is never older than its end."""
        if self._tick_of_write == self._table.tick and run.parents[:KEY_BYTES] != self._last_written:
            self._table.use(np.zeros(0, np.int64))
        self._tick_of_write = self._table.tick
        self._last_written = run.keys[-KEY_BYTES:]

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def _record_bytes(self, group: int) -> int:
        return HEADER_BYTES + self._settings.payload_bytes[group]

    def _pages(self, run: PageRun, indexes: Sequence[int], generations: list[int]) -> list[PageId]:
        """What the records of these pages of a run must say."""
        settings = self._settings
        payload_bytes, token_bytes = settings.payload_bytes[run.group], settings.page_tokens * 4
        return [
            PageId(
                run.group,
                settings.page_tokens,
                payload_bytes,
                generation,
                run.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES],
                run.parents[index * KEY_BYTES : (index + 1) * KEY_BYTES],
                run.namespace,
                settings.model,
                run.tokens[index * token_bytes : (index + 1) * token_bytes],
            )
            for index, generation in zip(indexes, generations)
        ]

    def _check_linked(self, segments: list[Segment]) -> None:
        """What was written to a file that has no name is lost. Raises FileNotFoundError, and the store has failed."""
        if self._journal.is_linked and all(self._files.is_linked(segment.fd) for segment in segments):
            return
        self.failure = f"files of the cache directory {self._claim.path} were removed while it was in use"
        raise FileNotFoundError(errno.ENOENT, self.failure)


def journal_entries_for(pages: int) -> int:
    """Room that a journal needs for so many pages: twice as many entries before it is written anew, and the new one
    beside it."""
    return 4 * pages + 4096


def journal_bytes_for(pages: int) -> int:
    return journal_entries_for(pages) * ENTRY_BYTES


def _prefix(slots: I64) -> int:
    """How many are found, from the first on."""
    missing = slots < 0
    return int(missing.argmax()) if missing.any() else len(slots)


def _firsts(run: PageRun, indexes: list[int]) -> list[int]:
    """These pages of a run without those whose key has come before."""
    first = {run.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]: index for index in reversed(indexes)}
    return sorted(first.values())

"""Opening a disk store: claim the directory, number the slots of its segments, replay the journal, fit the capacity."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from headrace.kvcache.storage.disk.allocation import SlotAllocator
from headrace.kvcache.storage.disk.files import Files, MakeFiles, say
from headrace.kvcache.storage.disk.journal import NAME as JOURNAL
from headrace.kvcache.storage.disk.journal import NEW_NAME, Journal, read_journal
from headrace.kvcache.storage.disk.ownership import Claim, claim
from headrace.kvcache.storage.disk.record import HEADER_BYTES, MAX_PAGE_TOKENS
from headrace.kvcache.storage.disk.replay import Replay
from headrace.kvcache.storage.disk.segments import (
    BLOCK_BYTES,
    Segment,
    Segments,
    is_unfinished,
    open_segment,
    parse_name,
    segment_name,
)
from headrace.kvcache.storage.disk.spaces import Spaces
from headrace.kvcache.storage.disk.store import (
    SMALL_FILES_BYTES,
    DiskSettings,
    DiskStore,
    journal_bytes_for,
    journal_entries_for,
)
from headrace.kvcache.storage.disk.table import PageTable
from headrace.kvcache.storage.page_store import StoreRefused

_ENTRY_SHARE_BYTES: Final = journal_bytes_for(1) - journal_bytes_for(0)


def open_disk_store(
    settings: DiskSettings, make_files: MakeFiles = Files, clock_s: Callable[[], float] = time.monotonic
) -> DiskStore:
    """Open the store in a directory, or make one. Raises StoreRefused."""
    _check(settings)
    ours = claim(settings.directory, make_files)
    segments: list[Segment] = []
    try:
        return _open(ours, settings, segments, clock_s)
    except MemoryError as error:
        refusal = StoreRefused("the index of the disk cache does not fit into memory: lower --disk-cache-size")
        _undo(ours, segments)
        raise refusal from error
    except OSError as error:
        _undo(ours, segments)
        raise StoreRefused(f"the cache directory {settings.directory} can't be opened: {say(error)}") from error
    except BaseException:
        _undo(ours, segments)
        raise


def scan(files: Files, read_only: bool = False) -> list[Segment]:
    """All segment files of a directory that have a slot, by id. Raises OSError."""
    found = sorted(parsed for parsed in map(parse_name, files.names()) if parsed is not None)
    segments: list[Segment] = []
    try:
        for id, record_bytes in found:
            segments.append(open_segment(files, id, record_bytes, read_only))
    except OSError as error:
        for segment in segments:
            segment.close(files)
        raise OSError(error.errno, f"{error.strerror}: {segment_name(id, record_bytes)}") from error
    for segment in segments:
        if not segment.slots:
            segment.close(files)
    return [segment for segment in segments if segment.slots]


def _check(settings: DiskSettings) -> None:
    if settings.page_tokens > MAX_PAGE_TOKENS:
        raise StoreRefused(
            f"the disk cache stores pages of at most {MAX_PAGE_TOKENS} tokens, not {settings.page_tokens}: "
            "lower --page-size"
        )
    for payload_bytes in settings.payload_bytes:
        if payload_bytes <= 0 or payload_bytes % BLOCK_BYTES:
            raise StoreRefused(f"a page of {payload_bytes} bytes is not a multiple of {BLOCK_BYTES}")


def _open(ours: Claim, settings: DiskSettings, segments: list[Segment], clock_s: Callable[[], float]) -> DiskStore:
    files = ours.files
    for name in files.names():
        # What a killed process was in the middle of making.
        if is_unfinished(name) or name == NEW_NAME:
            files.remove(name)
    segments += scan(files)
    there = sum(segment.slots for segment in segments)
    sizes = [HEADER_BYTES + size for size in settings.payload_bytes] + [segment.record_bytes for segment in segments]
    pages, segments_bytes = _room(settings, min(sizes, default=HEADER_BYTES), segments)
    # Twice as many numbers as slots, so that segments of different lengths find a gap; none costs memory until used.
    table = PageTable(2 * max(pages, there), max(pages, there))
    numbered = Segments(2 * max(pages, there))
    numbered.add_all(segments)
    spaces = Spaces()
    replay = Replay(table, numbered, spaces)
    numbered.next_id = max((parsed[0] + 1 for parsed in map(parse_name, files.names()) if parsed), default=0)
    if JOURNAL in files.names():
        replay.take(read_journal(files, ours.store_id))
    replay.finish()
    allocator = SlotAllocator(table, numbered, segments_bytes)
    for segment in segments:
        allocator.add(segment)
    _shrink(files, allocator)
    journal = Journal(files, ours.store_id, journal_entries_for(pages), settings.fsync)
    generation = replay.generation
    store = DiskStore(ours, settings, table, numbered, spaces, allocator, journal, generation, clock_s)
    if journal.entries > journal.max_entries // 2:
        # It was made for a larger capacity, and there is no room to write it anew within this one.
        journal.max_entries, max_entries = 2 * journal.entries + table.pages + journal.max_entries, journal.max_entries
        store.compact_journal()
        journal.max_entries = max_entries
    return store


def _room(settings: DiskSettings, record_bytes: int, segments: list[Segment]) -> tuple[int, int]:
    """(pages that there may be, bytes that segments may take): the capacity is for the journal too."""
    if settings.capacity_bytes is None:
        return sum(segment.slots for segment in segments), sum(segment.size_bytes for segment in segments)
    left = settings.capacity_bytes - SMALL_FILES_BYTES - journal_bytes_for(0)
    pages = left // (record_bytes + _ENTRY_SHARE_BYTES)
    if settings.payload_bytes and pages < len(settings.payload_bytes):
        needed = max(settings.payload_bytes) + HEADER_BYTES
        raise StoreRefused(
            f"a disk cache of {settings.capacity_bytes} bytes has no room for pages of {needed}: "
            "raise --disk-cache-size"
        )
    return pages, left - pages * _ENTRY_SHARE_BYTES


def _shrink(files: Files, allocator: SlotAllocator) -> None:
    """Where the capacity is less than it was, give up the segments that were used the longest ago."""
    while allocator.excess_bytes > 0 and (segment := allocator.coldest()) is not None:
        allocator.empty(segment)
        allocator.forget(segment)
        segment.close(files)
        files.remove(segment.name)
        allocator.removed(segment)


def _undo(ours: Claim, segments: list[Segment]) -> None:
    for segment in segments:
        segment.close(ours.files)
    ours.release()

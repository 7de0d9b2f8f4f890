"""Segment files: preallocated, full of slots of one size, each slot a record that starts on a 4096-byte boundary.

Slots of all segments are numbered through: a segment has the numbers [base, base + slots). Nothing is written in a
segment but records; its name says its id and the size of its records. An id is not used twice, so an entry of an older
journal never speaks of a newer file.

in     a directory with segment files; sizes of new ones
out    descriptors; where a slot lies
state  the open segments, the ranges of slot numbers that none has
owner  `DiskStore`, under its lock; descriptors are used outside of it while a slot of the segment is pinned or taken
ready  a segment, when it has been added
end    a segment is closed and its file removed when it was dropped: none of its slots is pinned or taken
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from headrace.kvcache.storage.disk.files import Files
from headrace.kvcache.storage.disk.hashing import I64
from headrace.kvcache.storage.disk.record import HEADER_BYTES

_NAME: Final = re.compile(r"pages-([0-9a-f]{8})-([0-9]{4,10})")
_NEW_NAME: Final = re.compile(_NAME.pattern + r"\.new")
BLOCK_BYTES: Final = 4096


class Segment:
    """One file. `fd` is direct where the file system can."""

    def __init__(self, id: int, record_bytes: int, slots: int, size_bytes: int, fd: int, direct: bool) -> None:
        self.id = id
        self.record_bytes = record_bytes
        self.slots = slots
        self.size_bytes = size_bytes
        self.fd = fd
        self.direct = direct
        self.base = -1
        """Number of its first slot, once it has been added."""
        self.retired_fds: list[int] = []
        """Replaced, but perhaps still in use by a call under way."""

    @property
    def name(self) -> str:
        return segment_name(self.id, self.record_bytes)

    @property
    def end(self) -> int:
        return self.base + self.slots

    def offset(self, slot: int) -> int:
        """Where in the file the record of this slot begins."""
        assert self.base <= slot < self.end
        return (slot - self.base) * self.record_bytes

    def close(self, files: Files) -> None:
        """Harmless twice."""
        for fd in (self.fd, *self.retired_fds):
            if fd >= 0:
                files.close(fd)
        self.fd = -1
        self.retired_fds.clear()


class Run(msgspec.Struct, frozen=True):
    """Adjacent slots of one segment; `places[i]` of the slots asked for is `first + i`."""

    segment: Segment
    first: int
    start: int
    """Where in what was asked for the run begins."""
    count: int


class Segments:
    """The open segments of a store, and the numbers of their slots."""

    def __init__(self, max_slots: int) -> None:
        self._by_base: list[Segment] = []
        self._bases: I64 = np.zeros(0, np.int64)
        self._ids: I64 = np.zeros(0, np.int64)
        self._id_bases: I64 = np.zeros(0, np.int64)
        self._id_slots: I64 = np.zeros(0, np.int64)
        self._gaps: list[tuple[int, int]] = [(0, max_slots)]
        self.next_id = 0

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._by_base)

    def __len__(self) -> int:
        return len(self._by_base)

    def add(self, segment: Segment) -> bool:
        """Number its slots; False if there is no room for so many numbers in a row."""
        placed = self._place(segment)
        self._number()
        return placed

    def add_all(self, segments: Sequence[Segment]) -> None:
        """Number the slots of many: a thousand at once in the time of a few."""
        for segment in segments:
            if not self._place(segment):
                raise ValueError(f"no room for the slots of {segment.name}")
        self._number()

    def drop(self, segment: Segment) -> None:
        """Take it out; its numbers may be given to another."""
        self._by_base.remove(segment)
        gaps = sorted([*self._gaps, (segment.base, segment.slots)])
        self._gaps = []
        for start, count in gaps:
            if self._gaps and sum(self._gaps[-1]) == start:
                self._gaps[-1] = (self._gaps[-1][0], self._gaps[-1][1] + count)
            else:
                self._gaps.append((start, count))
        self._number()

    def of(self, slot: int) -> Segment:
        return self._by_base[int(np.searchsorted(self._bases, slot, "right")) - 1]

    def place(self, slots: I64) -> tuple[I64, I64]:
        """(segment id, slot in it) of each slot."""
        which = np.searchsorted(self._bases, slots, "right") - 1
        ids = np.array([segment.id for segment in self._by_base], np.int64)
        return ids[which], slots - self._bases[which]

    def numbers(self, ids: I64, slots: I64) -> I64:
        """The slot at each (segment id, slot in it), -1 where there is no such segment or slot."""
        if not len(self._ids):
            return np.full(len(ids), -1, np.int64)
        which = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        known = (self._ids[which] == ids) & (slots < self._id_slots[which])
        return np.where(known, self._id_bases[which] + slots, -1)

    def runs(self, slots: I64) -> Iterator[Run]:
        """Cut slots, in their order, where they stop being adjacent or the segment changes."""
        if not len(slots):
            return
        which = np.searchsorted(self._bases, slots, "right") - 1
        cuts = np.flatnonzero((slots[1:] != slots[:-1] + 1) | (which[1:] != which[:-1])) + 1
        for start, end in pairwise([0, *cuts.tolist(), len(slots)]):
            yield Run(self._by_base[int(which[start])], int(slots[start]), start, end - start)

    def _place(self, segment: Segment) -> bool:
        for index, (start, count) in enumerate(self._gaps):
            if count >= segment.slots:
                segment.base = start
                self._gaps[index] = (start + segment.slots, count - segment.slots)
                self._by_base.append(segment)
                return True
        return False

    def _number(self) -> None:
        self._by_base.sort(key=lambda segment: segment.base)
        self._bases = np.array([segment.base for segment in self._by_base], np.int64)
        by_id = sorted(self._by_base, key=lambda segment: segment.id)
        self._ids = np.array([segment.id for segment in by_id], np.int64)
        self._id_bases = np.array([segment.base for segment in by_id], np.int64)
        self._id_slots = np.array([segment.slots for segment in by_id], np.int64)


def segment_name(id: int, record_bytes: int) -> str:
    return f"pages-{id:08x}-{record_bytes}"


def parse_name(name: str) -> tuple[int, int] | None:
    """(id, record_bytes) of a segment's file name, None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    id, record_bytes = int(match[1], 16), int(match[2])
    if record_bytes <= HEADER_BYTES or record_bytes % BLOCK_BYTES or name != segment_name(id, record_bytes):
        return None
    return id, record_bytes


def is_unfinished(name: str) -> bool:
    """Whether this is the name of a segment that was being made when its maker was killed."""
    return _NEW_NAME.fullmatch(name) is not None


def make_segment(files: Files, id: int, record_bytes: int, slots: int, fsync: bool) -> Segment:
    """Make a file with room for so many records. Raises OSError, and leaves nothing behind."""
    name = segment_name(id, record_bytes)
    new = name + ".new"
    fd = files.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        files.preallocate(fd, slots * record_bytes)
        if fsync:
            files.sync(fd)
        files.rename(new, name)
        if fsync:
            files.sync_directory()
    except OSError:
        _remove_if_there(files, new)
        raise
    finally:
        files.close(fd)
    segment = open_segment(files, id, record_bytes)
    assert segment.slots == slots
    return segment


def open_segment(files: Files, id: int, record_bytes: int, read_only: bool = False) -> Segment:
    """Open an existing file. Raises OSError."""
    name = segment_name(id, record_bytes)
    direct = None if read_only else files.open_direct(name)
    fd = files.open(name, os.O_RDONLY if read_only else os.O_RDWR) if direct is None else direct
    size_bytes = files.size_bytes(fd)
    return Segment(id, record_bytes, size_bytes // record_bytes, size_bytes, fd, direct is not None)


def _remove_if_there(files: Files, name: str) -> None:
    try:
        files.remove(name)
    except OSError:
        # The directory may be gone altogether; the failure that led here is the one to tell.
        return

"""The journal: an append-only file of entries, compacted into a new one while it is in use.

in     sealed entries, always after the data that they speak of
out    all entries that a file holds, in pieces; the size for the capacity's sake
state  the file, and during a compaction the new one
owner  any thread: a lock orders the appends
ready  an entry counts when `append` returns; it survives the end of this process, with fsync a power cut
end    `close`

During a compaction whatever is appended goes to both files, so that either is complete when it ends or is given up.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final

from headrace.kvcache.storage.disk.entries import ENTRY_BYTES, Entries, entry_bytes, new_entries, seal, sound
from headrace.kvcache.storage.disk.files import Files, write_all

NAME: Final = "journal"
NEW_NAME: Final = "journal.new"
_READ_ENTRIES: Final = 1 << 18
"""12 MiB at a time: what is made of them stays in the processor's cache."""


class JournalFull(OSError):
    """The journal has reached its part of the capacity."""


class _File:
    """An open journal file and the entries that it has."""

    def __init__(self, fd: int, entries: int) -> None:
        self.fd = fd
        self.entries = entries


class Journal:
    """The journal of an open store."""

    def __init__(self, files: Files, store_id: int, max_entries: int, fsync: bool) -> None:
        """Opens the file, or makes it. Raises OSError."""
        self._files = files
        self._store_id = store_id
        self.max_entries = max_entries
        """Of both files together."""
        self._fsync = fsync
        self._lock = threading.Lock()
        fd = files.open(NAME, os.O_RDWR | os.O_CREAT)
        # What a killed process left of an entry is not whole; the next append goes over it.
        self._file = _File(fd, files.size_bytes(fd) // ENTRY_BYTES)
        self._new: _File | None = None
        self._given_up: _File | None = None
        """A new file that could not be written to; it is closed by whoever is compacting."""
        if fsync:
            files.sync_directory()

    @property
    def entries(self) -> int:
        """Of the current file."""
        return self._file.entries

    @property
    def size_bytes(self) -> int:
        """Of both files."""
        new = self._new
        return (self._file.entries + (new.entries if new is not None else 0)) * ENTRY_BYTES

    @property
    def is_linked(self) -> bool:
        """Whether the file is still in its directory. Raises OSError."""
        with self._lock:
            return self._files.is_linked(self._file.fd)

    def append(self, entries: Entries) -> None:
        """Seal entries and add them. Raises OSError: then none of them counts."""
        if not len(entries):
            return
        seal(entries, self._store_id)
        with self._lock:
            self._check_room(len(entries))
            if self._new is not None:
                try:
                    self._write(self._new, entries)
                except OSError:
                    self._given_up, self._new = self._new, None
            self._write(self._file, entries)

    def begin_compaction(self) -> None:
        """Start a new file. Raises OSError."""
        with self._lock:
            assert self._new is None
            self._new = _File(self._files.open(NEW_NAME, os.O_RDWR | os.O_CREAT | os.O_TRUNC), 0)

    def copy(self, entries: Entries) -> bool:
        """Put entries into the new file alone. False if there is none any more. Raises OSError."""
        seal(entries, self._store_id)
        with self._lock:
            if self._new is None:
                return False
            self._check_room(len(entries))
            self._write(self._new, entries)
            return True

    def end_compaction(self) -> bool:
        """Let the new file take the old one's place. False if there is none any more. Raises OSError."""
        new = self._new
        if new is None:
            return False
        # Or a power cut might leave a short file under the name of the long one. Most of it before the lock, for which
        # writes would wait.
        self._files.sync(new.fd)
        with self._lock:
            if self._new is None:
                return False
            self._files.sync(self._new.fd)
            self._files.rename(NEW_NAME, NAME)
            self._files.close(self._file.fd)
            self._file, self._new = self._new, None
            self._files.sync_directory()
        return True

    def abandon_compaction(self) -> None:
        """Go on with the old file, if the new one has not taken its place. Raises OSError."""
        with self._lock:
            given_up = self._new or self._given_up
            self._new = self._given_up = None
        if given_up is not None:
            self._files.close(given_up.fd)
            if NEW_NAME in self._files.names():
                self._files.remove(NEW_NAME)

    def close(self) -> None:
        self.abandon_compaction()
        self._files.close(self._file.fd)

    def _check_room(self, count: int) -> None:
        if self.size_bytes // ENTRY_BYTES + count * (2 if self._new else 1) > self.max_entries:
            raise JournalFull(errno.ENOSPC, "the journal has reached its part of the capacity")

    def _write(self, file: _File, entries: Entries) -> None:
        # At the place of the last whole entry: what a failed append left behind is written over.
        write_all(self._files, file.fd, [entry_bytes(entries)], file.entries * ENTRY_BYTES)
        if self._fsync:
            self._files.sync(file.fd)
        file.entries += len(entries)


def read_journal(
    files: Files, store_id: int, name: str = NAME, progress: Callable[[int, int], None] | None = None
) -> Iterator[Entries]:
    """All sound entries of a journal file, in pieces. Raises OSError; FileNotFoundError if there is none.

    `progress(bytes, of so many)` is told when a piece has been taken in.
    """
    fd = files.open(name, os.O_RDONLY)
    try:
        offset = 0
        size_bytes = files.size_bytes(fd)
        while True:
            piece = new_entries(min(_READ_ENTRIES, (size_bytes - offset) // ENTRY_BYTES))
            count = _read_piece(files, fd, entry_bytes(piece), offset) // ENTRY_BYTES
            if not count:
                return
            yield sound(piece[:count], store_id)
            offset += count * ENTRY_BYTES
            if progress is not None:
                progress(offset, size_bytes)
    finally:
        files.close(fd)


def _read_piece(files: Files, fd: int, buffer: memoryview, offset: int) -> int:
    filled = 0
    while filled < len(buffer):
        count = files.read(fd, [buffer[filled:]], offset + filled)
        if count <= 0:
            break
        filled += count
    return filled

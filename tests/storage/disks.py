"""Disk stores for tests: small, in a temporary directory, over a file layer that can be made to fail."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from storage.pages import MODEL, PAGE_BYTES, PAGE_TOKENS, empty, filled, right

from headrace.kvcache.storage.disk.files import Files
from headrace.kvcache.storage.disk.opening import open_disk_store
from headrace.kvcache.storage.disk.store import DiskSettings, DiskStore
from headrace.kvcache.storage.page_store import Got, PageRun, Put

CAPACITY_BYTES = 8 << 20


def settings(
    directory: Path,
    capacity_bytes: int = CAPACITY_BYTES,
    payload_bytes: tuple[int, ...] = (PAGE_BYTES,),
    model: bytes = MODEL,
    page_tokens: int = PAGE_TOKENS,
    fsync: bool = False,
) -> DiskSettings:
    return DiskSettings(str(directory), capacity_bytes, page_tokens, payload_bytes, model, fsync)


def opened(directory: Path, capacity_bytes: int = CAPACITY_BYTES) -> DiskStore:
    return open_disk_store(settings(directory, capacity_bytes))


def store(disk: DiskStore, run: PageRun, size_bytes: int = PAGE_BYTES) -> Put:
    return disk.put(run, filled(run, size_bytes))


def fetch(disk: DiskStore, run: PageRun, size_bytes: int = PAGE_BYTES) -> Got:
    """Read a run. What counts as good must be right, whatever the test is about."""
    pages = empty(run, size_bytes)
    got = disk.get(run, pages)
    assert right(run, pages, got.good), "a wrong page counted as good"
    return got


def directory_bytes(directory: Path) -> int:
    """What all files of a directory take, by length and by blocks."""
    stats = []
    for name in os.listdir(directory):
        # A file may be renamed or removed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            stats.append((directory / name).stat())
    return max(sum(stat.st_size for stat in stats), sum(stat.st_blocks * 512 for stat in stats))


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("pages-*"))


class FaultyFiles(Files):
    """Files of which calls fail when told to."""

    def __init__(self, directory_fd: int) -> None:
        super().__init__(directory_fd)
        self.preallocate_errno = 0
        self.write_errno = 0
        self.read_errno_at: dict[int, int] = {}
        """Offsets whose reading fails."""
        self.rename_errno = 0
        self.direct_errno = 0
        self.before_read: Callable[[], None] | None = None
        self.most_bytes_written = 0
        """0: no bound; else one write call writes no more."""

    def open_direct(self, name: str) -> int | None:
        if self.direct_errno == errno.EINVAL:
            return None
        return super().open_direct(name)

    def preallocate(self, fd: int, size_bytes: int) -> None:
        _fail(self.preallocate_errno)
        super().preallocate(fd, size_bytes)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        _fail(self.write_errno)
        if self.most_bytes_written:
            buffers = [buffers[0][: self.most_bytes_written]]
        return super().write(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.before_read is not None:
            hook, self.before_read = self.before_read, None
            hook()
        end = offset + sum(len(buffer) for buffer in buffers)
        for at, number in self.read_errno_at.items():
            if offset <= at < end:
                _fail(number)
        return super().read(fd, buffers, offset)

    def rename(self, name: str, new_name: str) -> None:
        _fail(self.rename_errno)
        super().rename(name, new_name)


class FaultyDisk:
    """A store, and the file layer below it."""

    def __init__(self, wanted: DiskSettings) -> None:
        self.now_s = 0.0
        self.files: FaultyFiles
        self.store = open_disk_store(wanted, self._make, lambda: self.now_s)

    def _make(self, directory_fd: int) -> FaultyFiles:
        self.files = FaultyFiles(directory_fd)
        return self.files


def _fail(number: int) -> None:
    if number:
        raise OSError(number, os.strerror(number))

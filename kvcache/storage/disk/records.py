"""Records on their way between segment files and host pages: one vectored call for a run of adjacent slots.

in     runs of slots, the pages that they should hold, host pages
out    verified host pages, written records
state  memory for header blocks, lent to one call at a time
owner  any thread of the agent
ready  when a call returns
end    with the store
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from headrace.kvcache.storage.disk.files import Files, say, write_all
from headrace.kvcache.storage.disk.record import HEADER_BYTES, PageId, check, seal
from headrace.kvcache.storage.disk.segments import Run, Segment

log = logging.getLogger(__name__)

MAX_RUN_PAGES: Final = 256
"""A vectored call takes 1024 buffers, of which a page needs two."""
WRITE_BYTES: Final = 1 << 20
"""A read that comes meanwhile waits for no more of each write under way."""
_ZEROS: Final = 1 << 20


class Fault(NamedTuple):
    """Why a page is not good."""

    what: str
    unreadable: bool
    """The device could not read it, as against: it read something else."""


class Records:
    """Reads and writes records of a store's segments."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._spare: deque[mmap.mmap] = deque()
        self._zeros = mmap.mmap(-1, _ZEROS)
        self._said_buffered = False
        self._reopening = threading.Lock()

    def read(self, run: Run, pages: Sequence[PageId], into: Sequence[memoryview]) -> tuple[int, Fault | None]:
        """Read a run into host pages and verify it: how many are good from the first on, and what ails the next."""
        assert len(pages) == len(into) == run.count <= MAX_RUN_PAGES
        block = self._borrow()
        try:
            headers = _headers(block, run.count)
            good = 0
            while good < run.count:
                whole, fault = self._read_some(run, good, headers, into)
                for index in range(good, good + whole):
                    what = check(headers[index], pages[index], into[index])
                    if what:
                        return index, Fault(what, unreadable=False)
                good += whole
                if fault is not None:
                    return good, fault
            return good, None
        finally:
            self._spare.append(block)

    def write(self, run: Run, pages: Sequence[PageId], source: Sequence[memoryview]) -> None:
        """Write a run of records from host pages, about a megabyte a call. Raises OSError."""
        assert len(pages) == len(source) == run.count <= MAX_RUN_PAGES
        block = self._borrow()
        try:
            headers = _headers(block, run.count)
            for header, page, payload in zip(headers, pages, source):
                seal(header, page, payload)
            record_bytes = run.segment.record_bytes
            offset = run.segment.offset(run.first)
            each = max(1, WRITE_BYTES // record_bytes)
            for start in range(0, run.count, each):
                end = min(start + each, run.count)
                buffers = [part for pair in zip(headers[start:end], source[start:end]) for part in pair]
                self._write(run.segment, buffers, offset + start * record_bytes)
        finally:
            self._spare.append(block)

    def erase(self, run: Run) -> None:
        """Overwrite a run with zeros. Raises OSError."""
        offset, left = run.segment.offset(run.first), run.count * run.segment.record_bytes
        try:
            self._files.zero(run.segment.fd, offset, left)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        zeros = memoryview(self._zeros)
        while left:
            size_bytes = min(left, _ZEROS)
            self._write(run.segment, [zeros[:size_bytes]], offset)
            offset += size_bytes
            left -= size_bytes

    def _read_some(
        self, run: Run, start: int, headers: list[memoryview], into: Sequence[memoryview]
    ) -> tuple[int, Fault | None]:
        """Read records from `start` on: how many came whole, and why no more will."""
        end = run.count
        record_bytes = run.segment.record_bytes
        offset = run.segment.offset(run.first + start)
        while True:
            buffers = [part for pair in zip(headers[start:end], into[start:end]) for part in pair]
            try:
                whole = self._read(run.segment, buffers, offset) // record_bytes
            except OSError as error:
                if end - start == 1:
                    return 0, Fault(say(error), unreadable=True)
                # One bad block fails the whole call: page by page, those before it still count.
                end = start + 1
                continue
            if whole:
                return whole, None
            if end - start == 1:
                return 0, Fault("its file ends before it", unreadable=False)
            end = start + 1

    def _read(self, segment: Segment, buffers: Sequence[memoryview], offset: int) -> int:
        fd = segment.fd
        try:
            return self._files.read(fd, buffers, offset)
        except OSError as error:
            self._go_buffered(segment, fd, error)
        return self._files.read(segment.fd, buffers, offset)

    def _write(self, segment: Segment, buffers: Sequence[memoryview], offset: int) -> None:
        fd = segment.fd
        try:
            write_all(self._files, fd, buffers, offset)
            return
        except OSError as error:
            self._go_buffered(segment, fd, error)
        write_all(self._files, segment.fd, buffers, offset)

    def _go_buffered(self, segment: Segment, fd: int, error: OSError) -> None:
        """If the error says that direct access is refused, go through the page cache from now on; else raise it."""
        if error.errno != errno.EINVAL:
            raise error
        with self._reopening:
            if segment.fd != fd:
                return
            if not segment.direct:
                raise error
            segment.retired_fds.append(fd)
            segment.fd = self._files.open(segment.name)
            segment.direct = False
            if not self._said_buffered:
                self._said_buffered = True
                log.warning("the file system refuses direct access: the cache goes through the page cache")

    def _borrow(self) -> mmap.mmap:
        """Aligned memory for the headers of one run."""
        try:
            return self._spare.pop()
        except IndexError:
            return mmap.mmap(-1, MAX_RUN_PAGES * HEADER_BYTES)


def _headers(block: mmap.mmap, count: int) -> list[memoryview]:
    view = memoryview(block)
    return [view[at : at + HEADER_BYTES] for at in range(0, count * HEADER_BYTES, HEADER_BYTES)]

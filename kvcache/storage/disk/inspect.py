"""Looking into a cache directory from outside: what is in it, whether it is sound, taking things out.

`summary` and `verify` only read, and may do so while a server has the directory; damage is something they report, not
something that stops them. `remove` needs the directory for itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeAlias

import msgspec
import numpy as np

from headrace.kvcache.storage.disk.files import Files, say
from headrace.kvcache.storage.disk.hashing import I64
from headrace.kvcache.storage.disk.journal import read_journal
from headrace.kvcache.storage.disk.opening import open_disk_store, scan
from headrace.kvcache.storage.disk.ownership import current_owner, is_ours, open_directory, read_format
from headrace.kvcache.storage.disk.record import (
    HEADER_BYTES,
    PageId,
    check_header,
    check_payload,
    read_header,
)
from headrace.kvcache.storage.disk.replay import Replay
from headrace.kvcache.storage.disk.segments import Segment, Segments, is_unfinished, parse_name
from headrace.kvcache.storage.disk.spaces import Spaces
from headrace.kvcache.storage.disk.store import DiskSettings
from headrace.kvcache.storage.disk.table import LIVE, PageTable
from headrace.kvcache.storage.page_store import Removed, StoreRefused

Progress: TypeAlias = Callable[[str, int, int], None]
"""(what is done, how many of them, of so many)"""
_INDEX_READ: Final = "bytes of the index read"


class SpaceSummary(msgspec.Struct, frozen=True):
    """The pages of one namespace: one model, adapter and salt."""

    model: str
    """Hex, as is `namespace`."""
    namespace: str
    pages: int
    size_bytes: int


class Summary(msgspec.Struct, frozen=True):
    """What is in a cache directory."""

    directory: str
    format: int
    """0 where it is unknown."""
    in_use_by: str
    """The process that has it, "" if none does."""
    size_bytes: int
    """Of all files of the store."""
    segments: int
    slots: int
    pages: int
    spaces: list[SpaceSummary]
    foreign: list[str]
    """Files that no store made."""
    faults: list[str]
    """What is wrong with the directory as a whole."""


class BadPage(msgspec.Struct, frozen=True):
    """A page that is not what was stored."""

    file: str
    slot: int
    what: str


class Verified(msgspec.Struct, frozen=True):
    """What a look at every page found."""

    pages: int
    good: int
    changed: int
    """Written anew by the server while this went on."""
    bad: list[BadPage]
    faults: list[str]


class _Contents:
    """An index made from a directory, for looking only."""

    def __init__(self, path: str, files: Files, progress: Progress | None) -> None:
        self.path = path
        self.files = files
        self.faults: list[str] = []
        self.format = 0
        self.segments = scan(files, read_only=True)
        slots = sum(segment.slots for segment in self.segments)
        self.table = PageTable(slots, slots)
        self.numbered = Segments(slots)
        self.numbered.add_all(self.segments)
        self.spaces = Spaces()
        self.indexed = self._read_index(None if progress is None else partial(progress, _INDEX_READ))

    def live(self) -> I64:
        return np.flatnonzero(self.table.states == LIVE)

    def _read_index(self, progress: Callable[[int, int], None] | None) -> bool:
        """Whether format and journal could be read."""
        try:
            form = read_format(self.files, self.path)
            if form is None:
                self.faults.append("the file 'format' is missing: no store opens this directory")
                return False
            self.format = form.format
            replay = Replay(self.table, self.numbered, self.spaces)
            replay.take(read_journal(self.files, form.store, progress=progress))
            replay.finish()
        except FileNotFoundError:
            self.faults.append("the journal is missing: no page can be found")
        except (OSError, StoreRefused) as error:
            self.faults.append(say(error) if isinstance(error, OSError) else str(error))
            return False
        return True


def summary(directory: str, progress: Progress | None = None) -> Summary:
    """What is in a directory. Raises StoreRefused where there is no directory that can be looked into."""
    with _contents(directory, progress) as contents:
        names = contents.files.names()
        ours = [name for name in names if is_ours(name) or is_unfinished(name) or parse_name(name) is not None]
        live = contents.live()
        return Summary(
            directory=directory,
            format=contents.format,
            in_use_by=current_owner(contents.files),
            size_bytes=sum(_size_bytes(contents.files, name) for name in ours),
            segments=len(contents.segments),
            slots=sum(segment.slots for segment in contents.segments),
            pages=len(live),
            spaces=_spaces(contents, live),
            foreign=sorted(set(names) - set(ours)),
            faults=contents.faults,
        )


def verify(directory: str, progress: Progress | None = None) -> Verified:
    """Read every page and check it against its own header and the index.

    Without an index every slot is looked at, and those with a header that is in order count as pages.
    """
    with _contents(directory, progress) as contents:
        slots = contents.live() if contents.indexed else np.arange(len(contents.table.states))
        good, seen = 0, 0
        bad: list[BadPage] = []
        changed = 0
        for done, slot in enumerate(slots.tolist()):
            what = _verify_slot(contents, slot)
            if what is not None:
                seen += 1
                good += not what
                if what == _CHANGED:
                    changed += 1
                elif what:
                    segment = contents.numbered.of(slot)
                    bad.append(BadPage(segment.name, slot - segment.base, what))
            if progress is not None:
                progress("pages checked", done + 1, len(slots))
        return Verified(seen, good, changed, bad, contents.faults)


def remove(
    directory: str, model: bytes | None = None, namespace: bytes | None = None, progress: Progress | None = None
) -> Removed:
    """Delete the pages of a model, or of all; of one namespace, or of all. Nothing but pages is touched.

    Raises StoreRefused, as DirectoryOwned where a server has the directory.
    """
    with _contents(directory, progress) as contents:
        if not contents.indexed:
            raise StoreRefused(f"{directory} holds no page cache that can be changed: {'; '.join(contents.faults)}")
    store = open_disk_store(DiskSettings(directory, None, 1, (), bytes(16)))
    try:
        return store.delete_of(model, namespace, None if progress is None else partial(progress, "slots looked at"))
    finally:
        store.close()


_CHANGED = "changed"


@contextmanager
def _contents(directory: str, progress: Progress | None) -> Iterator[_Contents]:
    try:
        fd = open_directory(directory)
    except OSError as error:
        raise StoreRefused(f"{directory} can't be looked into: {say(error)} (--disk-cache-dir names it)") from error
    segments: list[Segment] = []
    files = Files(fd)
    try:
        contents = _Contents(directory, files, progress)
        segments = contents.segments
        yield contents
    except OSError as error:
        raise StoreRefused(f"{directory} can't be looked into: {say(error)} (--disk-cache-dir names it)") from error
    finally:
        for segment in segments:
            segment.close(files)
        os.close(fd)


def _spaces(contents: _Contents, live: I64) -> list[SpaceSummary]:
    if not len(live):
        return []
    numbers = contents.table.spaces[live]
    payloads = np.zeros(len(live), np.int64)
    for run in contents.numbered.runs(live):
        payloads[run.start : run.start + run.count] = run.segment.record_bytes - HEADER_BYTES
    found = []
    for number in np.unique(numbers).tolist():
        space, mine = contents.spaces[number], numbers == number
        found.append(
            SpaceSummary(
                space.model.hex(), space.namespace.hex(), int(np.count_nonzero(mine)), int(payloads[mine].sum())
            )
        )
    return sorted(found, key=lambda space: (space.model, -space.size_bytes, space.namespace))


def _verify_slot(contents: _Contents, slot: int) -> str | None:
    """What is wrong with a slot's page, "" if nothing is; None for a slot without a page that no index speaks of."""
    segment = contents.numbered.of(slot)
    record = memoryview(bytearray(segment.record_bytes))
    try:
        if contents.files.read(segment.fd, [record], segment.offset(slot)) < segment.record_bytes:
            return "its file ends before it"
    except OSError as error:
        return say(error)
    header, payload = record[:HEADER_BYTES], record[HEADER_BYTES:]
    what = check_header(header)
    if not contents.indexed:
        return None if what else check_payload(header, payload)
    if what:
        return what
    page = read_header(header)
    if page.generation > int(contents.table.generations[slot]):
        return _CHANGED
    return _difference(contents, slot, page, segment) or check_payload(header, payload)


def _difference(contents: _Contents, slot: int, page: PageId, segment: Segment) -> str:
    """In what a record differs from what the index says of it."""
    table = contents.table
    entry = table.entries(np.array([slot]))[0]
    space = contents.spaces[int(table.spaces[slot])]
    asked = (entry["key"].tobytes(), int(entry["group"]), int(entry["generation"]), space.namespace, space.model)
    there = (page.key, page.group, page.generation, page.namespace, page.model)
    if asked != there:
        return "it is another page than the journal says"
    return "" if page.payload_bytes == segment.record_bytes - HEADER_BYTES else "it has another size"


def _size_bytes(files: Files, name: str) -> int:
    try:
        fd = files.open(name, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return files.size_bytes(fd)
    finally:
        files.close(fd)

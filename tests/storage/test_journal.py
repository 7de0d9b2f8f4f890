"""The journal: wherever it is cut or damaged, what it says afterwards was true, and no page is wrong."""

from __future__ import annotations

import errno
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from storage.disks import FaultyDisk, fetch, opened, settings, store
from storage.pages import chain, namespace

from headrace.kvcache.storage.disk.entries import ENTRY_BYTES
from headrace.kvcache.storage.disk.journal import NAME


def filled_directory(directory: Path) -> int:
    """A store with two chains, of which one was deleted and stored again; pages that are there."""
    disk = opened(directory)
    for space in ("kept", "gone"):
        store(disk, chain(space, 3, space))
    disk.delete(namespace("gone"))
    store(disk, chain("gone", 2, "gone"))
    disk.close()
    return 5


def found(directory: Path) -> int:
    """Open a directory; every page that is found must be right."""
    disk = opened(directory)
    pages = 0
    for space in ("kept", "gone"):
        run = chain(space, 3, space)
        for page in range(3):
            got = fetch(disk, run.part(page, page + 1))
            pages += got.good
            # Without the entry of its deletion a page is looked for, and its record found erased.
            assert got.corrupt == 0 or space == "gone", got
    disk.close()
    return pages


def test_cut_at_any_byte_it_loses_only_what_was_cut_off(tmp_path: Path) -> None:
    pages = filled_directory(tmp_path)
    journal = (tmp_path / NAME).read_bytes()
    counts = []
    for size_bytes in range(len(journal) + 1):
        (tmp_path / NAME).write_bytes(journal[:size_bytes])
        counts.append(found(tmp_path))
    assert counts[0] == 0 and counts[-1] == pages
    assert counts == sorted(counts)


def test_wrong_bytes_anywhere_lose_pages_and_make_none_wrong(tmp_path: Path) -> None:
    pages = filled_directory(tmp_path)
    journal = (tmp_path / NAME).read_bytes()
    rng = random.Random(7)
    for _ in range(60):
        damaged = bytearray(journal)
        at = rng.randrange(len(damaged))
        damaged[at : at + rng.randrange(1, 60)] = rng.randbytes(rng.randrange(0, 60))
        (tmp_path / NAME).write_bytes(damaged)
        assert found(tmp_path) <= pages
        (tmp_path / NAME).write_bytes(journal)


def test_without_a_journal_the_store_is_empty_and_works(tmp_path: Path) -> None:
    filled_directory(tmp_path)
    (tmp_path / NAME).unlink()
    assert found(tmp_path) == 0
    filled_directory(tmp_path)
    assert found(tmp_path) == 5


def test_an_append_that_failed_halfway_is_written_over(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path))
    store(disk.store, chain("a", 3))
    with (tmp_path / NAME).open("ab") as journal:
        journal.write(b"half an entry")
    store(disk.store, chain("b", 3))
    disk.store.close()
    again = opened(tmp_path)
    assert (fetch(again, chain("a", 3)).good, fetch(again, chain("b", 3)).good) == (3, 3)
    again.close()


def test_it_is_written_anew_when_it_has_grown_and_says_the_same(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    run = chain("a", 50)
    store(disk, run)
    for _ in range(30):
        disk.touch(0, run.keys)
        disk.tidy()
    assert not disk.untidy
    assert (tmp_path / NAME).stat().st_size < (2 * 50 + 1024 + 100) * ENTRY_BYTES
    longest = (tmp_path / NAME).stat().st_size
    disk.compact_journal()
    assert (tmp_path / NAME).stat().st_size == (50 + 2) * ENTRY_BYTES < longest
    disk.close()
    disk = opened(tmp_path)
    assert fetch(disk, run).good == 50
    disk.close()


def test_writing_it_anew_forgets_namespaces_without_pages(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for name in ("a", "b", "c"):
        store(disk, chain(name, 2, name))
    disk.delete(namespace("a"))
    disk.delete(namespace("b"))
    disk.compact_journal()
    assert (tmp_path / NAME).stat().st_size == (2 + 2) * ENTRY_BYTES
    disk.close()
    disk = opened(tmp_path)
    assert (disk.stats().pages, fetch(disk, chain("c", 2, "c")).good) == (2, 2)
    disk.close()


def test_what_was_deleted_stays_deleted_when_it_is_written_anew(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    old, new = chain("old", 4, "space"), chain("new", 4, "space")
    store(disk, old)
    disk.delete(namespace("space"))
    store(disk, new)
    disk.compact_journal()
    disk.close()
    disk = opened(tmp_path)
    assert (disk.contains(0, old.keys), fetch(disk, new).good) == (0, 4)
    disk.close()


@pytest.mark.parametrize("fails", ["the new file", "the renaming"])
def test_where_it_can_not_be_written_anew_the_old_one_goes_on(tmp_path: Path, fails: str) -> None:
    disk = FaultyDisk(settings(tmp_path))
    run = chain("a", 50)
    store(disk.store, run)
    if fails == "the renaming":
        disk.files.rename_errno = errno.EIO
    else:
        disk.files.write_errno = errno.ENOSPC
    with pytest.raises(OSError, match=r"error|space"):
        disk.store.compact_journal()
    disk.files.rename_errno = disk.files.write_errno = 0
    store(disk.store, chain("b", 5))
    assert not (tmp_path / "journal.new").exists()
    disk.store.close()
    again = opened(tmp_path)
    assert (fetch(again, run).good, fetch(again, chain("b", 5)).good) == (50, 5)
    again.close()


def test_a_new_journal_that_a_killed_process_left_is_not_used(tmp_path: Path) -> None:
    filled_directory(tmp_path)
    shutil.copy(tmp_path / NAME, tmp_path / "journal.new")
    os.truncate(tmp_path / "journal.new", 2 * ENTRY_BYTES)
    assert found(tmp_path) == 5
    assert not (tmp_path / "journal.new").exists()


def test_one_damaged_namespace_entry_loses_nothing_after_the_journal_was_written_anew(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    run = chain("a", 5)
    store(disk, run)
    disk.compact_journal()
    disk.close()
    journal = bytearray((tmp_path / NAME).read_bytes())
    journal[3] ^= 1
    (tmp_path / NAME).write_bytes(journal)
    disk = opened(tmp_path)
    assert fetch(disk, run).good == 5
    disk.close()


def test_it_is_written_anew_while_writes_go_on_and_none_is_lost(tmp_path: Path) -> None:
    disk = opened(tmp_path, 32 << 20)
    compactions = 0

    def write(name: str) -> None:
        for number in range(60):
            put = store(disk, chain(f"{name}{number}", 6))
            assert put.dropped == (), put.message

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, name) for name in "abc"]
        while not all(writer.done() for writer in writers):
            disk.compact_journal()
            compactions += 1
        for writer in writers:
            writer.result()
    disk.close()
    assert compactions > 3
    disk = opened(tmp_path, 32 << 20)
    assert disk.stats().pages == 3 * 60 * 6
    for name in "abc":
        for number in range(60):
            assert fetch(disk, chain(f"{name}{number}", 6)).good == 6
    disk.close()

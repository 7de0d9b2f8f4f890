"""A disk that is full, broken, read-only or gone: a defined answer, no exception, no wrong page."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from storage.disks import FaultyDisk, fetch, opened, segment_files, settings, store
from storage.pages import RECORD_BYTES, chain


def test_b12_a_full_disk_that_lets_no_segment_grow_drops_the_write_and_says_so(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path))
    disk.files.preallocate_errno = errno.ENOSPC
    put = store(disk.store, chain("a", 5))
    assert put.dropped == (0, 1, 2, 3, 4)
    assert "No space left" in put.message
    assert disk.store.stats().failed_writes == 5
    assert list(tmp_path.glob("pages-*")) == []
    disk.store.close()


def test_b12_a_store_that_can_not_grow_goes_on_with_the_room_it_has(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path))
    store(disk.store, chain("a", 5))
    disk.files.preallocate_errno = errno.ENOSPC
    for number in range(20):
        assert store(disk.store, chain(str(number), 10)).dropped == ()
    assert fetch(disk.store, chain("19", 10)).good == 10
    assert len(segment_files(tmp_path)) == 1
    disk.store.close()


def test_a_store_that_could_not_grow_tries_again_after_a_while(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path))
    disk.files.preallocate_errno = errno.ENOSPC
    assert store(disk.store, chain("a", 5)).dropped
    disk.files.preallocate_errno = 0
    assert store(disk.store, chain("a", 5)).dropped, "not at once: each try may take a while"
    disk.now_s += 11
    assert store(disk.store, chain("a", 5)).dropped == ()
    disk.store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EFBIG])
def test_a_write_that_fails_is_not_stored_and_the_store_keeps_serving(tmp_path: Path, number: int) -> None:
    disk = FaultyDisk(settings(tmp_path))
    a, b = chain("a", 5), chain("b", 5)
    store(disk.store, a)
    disk.files.write_errno = number
    put = store(disk.store, b)
    assert put.dropped == (0, 1, 2, 3, 4)
    assert os.strerror(number) in put.message
    assert disk.store.contains(0, b.keys) == 0
    assert fetch(disk.store, a).good == 5
    disk.files.write_errno = 0
    assert store(disk.store, b).dropped == ()
    disk.store.close()
    again = opened(tmp_path)
    assert (fetch(again, a).good, fetch(again, b).good) == (5, 5)
    again.close()


def test_a_write_whose_journal_entry_fails_is_not_stored(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path))
    run = chain("a", 5)
    store(disk.store, run.part(0, 1))
    write = disk.files.write

    def journal_fails(fd: int, buffers: list[memoryview], offset: int) -> int:
        if "journal" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, buffers, offset)

    disk.files.write = journal_fails  # type: ignore[assignment]
    assert store(disk.store, run).dropped == (1, 2, 3, 4)
    assert disk.store.contains(0, run.keys) == 1
    disk.store.close()
    again = opened(tmp_path)
    assert again.contains(0, run.keys) == 1
    again.close()


def test_an_unreadable_page_is_a_miss_and_those_before_it_count(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path))
    run = chain("a", 8)
    store(disk.store, run)
    disk.files.read_errno_at = {5 * RECORD_BYTES + 4096: errno.EIO}
    got = fetch(disk.store, run)
    assert (got.good, got.corrupt) == (5, 1)
    assert "Input/output error" in got.message
    assert disk.store.stats().failed_reads == 1
    assert disk.store.contains(0, run.keys) == 5
    disk.store.close()


def test_a_slot_that_can_not_be_read_is_not_written_again(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path))
    store(disk.store, chain("a", 8))
    disk.files.preallocate_errno = errno.ENOSPC
    disk.files.read_errno_at = {5 * RECORD_BYTES: errno.EIO}
    assert fetch(disk.store, chain("a", 8)).good == 5
    for number in range(30):
        run = chain(str(number), 8)
        assert store(disk.store, run).dropped == ()
        assert fetch(disk.store, run).good == 8
    assert disk.store.stats().evicted_pages > 100
    disk.store.close()


@pytest.mark.parametrize("damage", ["header", "payload", "zeros"])
def test_b11_a_damaged_page_is_a_miss_counted_and_freed(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = chain("a", 8)
    disk = opened(tmp_path)
    store(disk, run)
    disk.close()
    (segment,) = segment_files(tmp_path)
    with segment.open("r+b") as file:
        file.seek(3 * RECORD_BYTES + (100 if damage == "header" else 5000))
        file.write(bytes(3192) if damage == "zeros" else b"\xff")
    disk = opened(tmp_path)
    got = fetch(disk, run)
    assert (got.good, got.corrupt) == (3, 1)
    assert disk.stats().corrupt_pages == 1
    assert [f"slot 3 of {segment.name}" in record.message for record in caplog.records] == [True]
    assert disk.contains(0, run.part(3, 8).keys) == 0
    assert fetch(disk, run.part(4, 8)).good == 4, "pages behind it are there for whoever asks for them"
    store(disk, run.part(3, 4))
    assert fetch(disk, run).good == 8
    disk.close()


def test_a_page_that_was_found_damaged_is_not_found_after_a_restart(tmp_path: Path) -> None:
    run = chain("a", 4)
    disk = opened(tmp_path)
    store(disk, run)
    (segment,) = segment_files(tmp_path)
    with segment.open("r+b") as file:
        file.seek(RECORD_BYTES)
        file.write(b"damage")
    fetch(disk, run)
    disk.close()
    disk = opened(tmp_path)
    assert disk.contains(0, run.keys) == 1
    assert disk.stats().corrupt_pages == 0
    disk.close()


def test_swapped_pages_are_misses(tmp_path: Path) -> None:
    run = chain("a", 4)
    disk = opened(tmp_path)
    store(disk, run)
    (segment,) = segment_files(tmp_path)
    content = bytearray(segment.read_bytes())
    one, two = slice(RECORD_BYTES, 2 * RECORD_BYTES), slice(2 * RECORD_BYTES, 3 * RECORD_BYTES)
    content[one], content[two] = content[two], content[one]
    segment.write_bytes(content)
    assert fetch(disk, run).good == 1
    disk.close()


def test_a_truncated_segment_loses_what_was_cut_off(tmp_path: Path) -> None:
    run = chain("a", 8)
    disk = opened(tmp_path)
    store(disk, run)
    disk.close()
    (segment,) = segment_files(tmp_path)
    os.truncate(segment, 3 * RECORD_BYTES + 5000)
    disk = opened(tmp_path)
    assert disk.contains(0, run.keys) == 3
    assert fetch(disk, run).good == 3
    assert store(disk, run).dropped == ()
    assert fetch(disk, run).good == 8
    disk.close()


@pytest.mark.parametrize("what", ["the journal", "a segment", "the directory"])
def test_where_files_vanish_the_store_says_that_it_has_failed(tmp_path: Path, what: str) -> None:
    directory = tmp_path / "cache"
    disk = opened(directory)
    store(disk, chain("a", 3))
    if what == "the directory":
        shutil.rmtree(directory)
    else:
        (directory / "journal" if what == "the journal" else segment_files(directory)[0]).unlink()
    put = store(disk, chain("b", 3))
    assert put.dropped == (0, 1, 2)
    assert "were removed" in put.message and str(directory) in disk.failure
    disk.close()


def test_a_segment_that_vanished_before_the_start_is_a_miss(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, chain("a", 3))
    disk.close()
    segment_files(tmp_path)[0].unlink()
    disk = opened(tmp_path)
    assert disk.contains(0, chain("a", 3).keys) == 0
    store(disk, chain("b", 3))
    disk.close()
    disk = opened(tmp_path)
    assert (disk.contains(0, chain("a", 3).keys), fetch(disk, chain("b", 3)).good) == (0, 3)
    disk.close()

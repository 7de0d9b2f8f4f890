"""The disk store: what was stored is found and read back, also by the next process; nothing else is."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest
from storage.disks import FaultyDisk, directory_bytes, fetch, opened, segment_files, settings, store
from storage.pages import OTHER_MODEL, PAGE_BYTES, chain, empty, filled, host_pages, namespace, payload, right

from headrace.kvcache.storage.disk.opening import open_disk_store
from headrace.kvcache.storage.disk.record import MAX_PAGE_TOKENS
from headrace.kvcache.storage.page_store import StoreRefused


def test_what_was_stored_is_read_back(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    run = chain("a", 20)
    assert store(disk, run).dropped == ()
    assert disk.contains(0, run.keys) == 20
    assert fetch(disk, run).good == 20
    disk.close()


def test_b10_what_was_stored_is_read_back_after_a_restart(tmp_path: Path) -> None:
    run = chain("a", 20)
    disk = opened(tmp_path)
    store(disk, run)
    disk.close()
    disk = opened(tmp_path)
    assert disk.contains(0, run.keys) == 20
    assert fetch(disk, run).good == 20
    disk.close()


def test_only_the_contiguous_prefix_is_found(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    run = chain("a", 10)
    store(disk, run.part(0, 4))
    store(disk, run.part(5, 10))
    assert disk.contains(0, run.keys) == 4
    assert disk.contains(0, run.part(5, 10).keys) == 5
    assert disk.which(0, run.keys) == bytes([1, 1, 1, 1, 0, 1, 1, 1, 1, 1])
    assert disk.which(1, run.keys) == bytes(10) and disk.which(0, b"") == b""
    got = fetch(disk, run)
    assert (got.good, got.missing, got.corrupt) == (4, 6, 0)
    disk.close()


def test_nothing_is_found_in_an_empty_store(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    assert disk.contains(0, chain("a", 3).keys) == 0
    assert disk.contains(0, b"") == 0
    assert fetch(disk, chain("a", 3)).missing == 3
    disk.close()


def test_a_page_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    run = chain("a", 10)
    store(disk, run.part(0, 6))
    assert store(disk, run).dropped == ()
    assert disk.stats().written_pages == disk.stats().pages == 10
    disk.close()


def test_a_page_twice_in_one_write_is_written_once(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    once = chain("a", 1)
    twice = msgspec.structs.replace(once, parents=once.parents * 2, keys=once.keys * 2, tokens=once.tokens * 2)
    assert store(disk, twice).dropped == ()
    assert disk.stats().pages == 1
    disk.close()


def test_pages_of_one_write_lie_side_by_side(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    run = chain("a", 12)
    for start in range(0, 12, 3):
        store(disk, run.part(start, start + 3))
    (segment,) = segment_files(tmp_path)
    records = np.fromfile(segment, np.uint8).reshape(-1, 4096 + PAGE_BYTES)[:12, 4096:]
    keys = [run.part(page, page + 1).keys for page in range(12)]
    assert [record.tobytes() for record in records] == [payload(0, key) for key in keys]
    disk.close()


def test_groups_with_pages_of_other_sizes_share_a_directory(tmp_path: Path) -> None:
    sizes = (4096, 12288)
    disk = open_disk_store(settings(tmp_path, payload_bytes=sizes))
    runs = [chain("a", 9, group=group) for group in (0, 1)]
    for run, size_bytes in zip(runs, sizes):
        store(disk, run, size_bytes)
    disk.close()
    disk = open_disk_store(settings(tmp_path, payload_bytes=sizes))
    assert [fetch(disk, run, size_bytes).good for run, size_bytes in zip(runs, sizes)] == [9, 9]
    assert {path.name.rpartition("-")[2] for path in segment_files(tmp_path)} == {"8192", "16384"}
    disk.close()


def test_a_key_of_one_group_is_not_found_in_another(tmp_path: Path) -> None:
    disk = open_disk_store(settings(tmp_path, payload_bytes=(4096, 4096)))
    store(disk, chain("a", 3, group=0))
    assert disk.contains(1, chain("a", 3, group=1).keys) == 0
    disk.close()


@pytest.mark.parametrize("field", ["parents", "tokens", "namespace"])
def test_a_page_under_the_right_key_with_another_chain_is_a_miss_and_goes(tmp_path: Path, field: str) -> None:
    disk = opened(tmp_path)
    run = chain("a", 3)
    store(disk, run)
    value = bytearray(getattr(run, field))
    value[-1] ^= 1
    asked = msgspec.structs.replace(run, **{field: bytes(value)})
    got = disk.get(asked, empty(run))
    wrong = 0 if field == "namespace" else 2
    assert (got.good, got.corrupt) == (wrong, 1)
    assert disk.contains(0, run.keys) == wrong
    disk.close()


def test_b15_a_page_of_another_model_under_the_same_key_is_a_miss(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    run = chain("a", 2)
    store(disk, run)
    disk.close()
    disk = open_disk_store(settings(tmp_path, model=OTHER_MODEL))
    assert fetch(disk, run).good == 0
    assert disk.stats().corrupt_pages == 1
    disk.close()


def test_b15_a_page_of_another_size_under_the_same_key_is_a_miss(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    run = chain("a", 2)
    store(disk, run)
    disk.close()
    disk = open_disk_store(settings(tmp_path, payload_bytes=(8192,)))
    got = fetch(disk, run, 8192)
    assert (got.good, got.corrupt) == (0, 1)
    disk.close()


def test_b14_clearing_takes_this_models_pages_and_no_others(tmp_path: Path) -> None:
    theirs, ours = chain("theirs", 5, "their space"), chain("ours", 5, "our space")
    disk = open_disk_store(settings(tmp_path, model=OTHER_MODEL))
    store(disk, theirs)
    disk.close()
    (tmp_path / "notes.txt").write_text("a user's file")
    disk = opened(tmp_path)
    store(disk, ours)
    assert disk.delete(None).pages == 5
    assert disk.contains(0, ours.keys) == 0
    disk.close()
    disk = open_disk_store(settings(tmp_path, model=OTHER_MODEL))
    assert fetch(disk, theirs).good == 5
    assert disk.contains(0, ours.keys) == 0
    assert (tmp_path / "notes.txt").read_text() == "a user's file"
    disk.close()


def test_b16_clearing_one_namespace_leaves_the_others(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    a, b = chain("a", 5, "tenant a"), chain("b", 5, "tenant b")
    store(disk, a)
    store(disk, b)
    removed = disk.delete(namespace("tenant a"))
    assert (removed.pages, removed.size_bytes, removed.message) == (5, 5 * PAGE_BYTES, "")
    disk.close()
    disk = opened(tmp_path)
    assert disk.contains(0, a.keys) == 0
    assert fetch(disk, b).good == 5
    disk.close()


def test_a_namespace_that_was_cleared_can_be_filled_again(tmp_path: Path) -> None:
    run = chain("a", 5)
    disk = opened(tmp_path)
    store(disk, run)
    disk.delete(None)
    store(disk, run)
    disk.close()
    disk = opened(tmp_path)
    assert fetch(disk, run).good == 5
    disk.close()


def test_deleted_pages_can_not_be_read_from_the_files(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    gone, kept = chain("gone", 3, "a"), chain("kept", 3, "b")
    store(disk, gone)
    store(disk, kept)
    disk.delete(namespace("a"))
    disk.close()
    content = b"".join(path.read_bytes() for path in segment_files(tmp_path))
    assert kept.tokens[:16] in content and filled(kept)[0][:64].tobytes() in content
    assert gone.tokens[:16] not in content and filled(gone)[0][:64].tobytes() not in content


def test_deleted_pages_are_overwritten_where_the_file_system_can_not_erase(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path))

    def zero(fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no such thing")

    disk.files.zero = zero  # type: ignore[method-assign]
    gone, kept = chain("gone", 3, "a"), chain("kept", 3, "b")
    store(disk.store, gone)
    store(disk.store, kept)
    disk.store.delete(namespace("a"))
    disk.store.close()
    content = b"".join(path.read_bytes() for path in segment_files(tmp_path))
    assert gone.tokens[:16] not in content and kept.tokens[:16] in content


def test_segments_that_are_empty_after_clearing_are_removed(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, chain("a", 100))
    before = directory_bytes(tmp_path)
    disk.delete(None)
    assert directory_bytes(tmp_path) < before / 4
    disk.close()


def test_files_and_directory_are_the_owners_alone(tmp_path: Path) -> None:
    disk = opened(tmp_path / "new")
    store(disk, chain("a", 3))
    disk.close()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()} == {0o600}


@pytest.mark.parametrize("refused", ["at once", "in a call"])
def test_without_direct_access_the_page_cache_does(tmp_path: Path, refused: str) -> None:
    disk = FaultyDisk(settings(tmp_path))
    if refused == "at once":
        disk.files.direct_errno = errno.EINVAL
        pages = filled(chain("a", 8))
    else:
        # Memory that is not aligned: what a kernel says of it is what it says of a file system without direct access.
        pages = [page[1 : PAGE_BYTES + 1] for page in host_pages(8, 2 * PAGE_BYTES)]
        for page, full in zip(pages, filled(chain("a", 8))):
            page[:] = full
    run = chain("a", 8)
    assert disk.store.put(run, pages).dropped == ()
    assert fetch(disk.store, run).good == 8
    assert not disk.store.stats().direct_io
    disk.store.close()


def test_with_direct_access_the_page_cache_is_left_alone(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path))
    store(disk.store, chain("a", 8))
    (segment,) = segment_files(tmp_path)
    assert disk.store.stats().direct_io == (disk.files.open_direct(segment.name) is not None)
    disk.store.close()


def test_a_write_that_the_system_cuts_short_is_completed(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path))
    disk.files.direct_errno = errno.EINVAL
    disk.files.most_bytes_written = 1000
    run = chain("a", 8)
    assert store(disk.store, run).dropped == ()
    assert fetch(disk.store, run).good == 8
    disk.store.close()


def test_with_fsync_every_page_is_synced_before_it_counts(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path, fsync=True))
    synced: list[str] = []
    sync = disk.files.sync

    def noting(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).partition("-")[0])
        sync(fd)

    disk.files.sync = noting  # type: ignore[method-assign]
    store(disk.store, chain("a", 3))
    assert synced[-2:] == ["pages", "journal"]
    disk.store.close()


def test_pages_too_large_for_the_header_are_refused_with_the_bound(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match=f"at most {MAX_PAGE_TOKENS} tokens.*--page-size"):
        open_disk_store(settings(tmp_path, page_tokens=MAX_PAGE_TOKENS + 1))


def test_the_largest_pages_that_fit_are_stored(tmp_path: Path) -> None:
    run = chain("a", 2, page_tokens=MAX_PAGE_TOKENS)
    disk = open_disk_store(settings(tmp_path, page_tokens=MAX_PAGE_TOKENS))
    store(disk, run)
    assert fetch(disk, run).good == 2
    disk.close()


def test_a_capacity_without_room_for_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="raise --disk-cache-size"):
        opened(tmp_path, capacity_bytes=20000)


def test_the_index_takes_less_than_64_bytes_a_page(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    slots = 8_000_000 // 8192
    while disk.stats().evicted_pages == 0:
        store(disk, chain(str(disk.stats().written_pages), 64))
    stats = disk.stats()
    assert stats.pages > slots * 0.8
    assert stats.index_bytes / stats.pages < 64
    disk.close()


def test_a_read_counts_what_it_read(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    run = chain("a", 5)
    store(disk, run)
    pages = empty(run)
    assert disk.get(run, pages).good == 5 and right(run, pages, 5)
    stats = disk.stats()
    assert (stats.read_pages, stats.read_bytes) == (5, 5 * PAGE_BYTES)
    assert (stats.written_pages, stats.written_bytes, stats.pages) == (5, 5 * PAGE_BYTES, 5)
    disk.close()

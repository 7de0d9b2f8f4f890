"""Capacity and eviction: a hard bound, the longest unused go first, and no reader is disturbed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from storage.disks import FaultyDisk, directory_bytes, fetch, opened, segment_files, settings, store
from storage.pages import OTHER_MODEL, PAGE_BYTES, chain, empty, right

from headrace.kvcache.storage.disk.opening import open_disk_store

SMALL = 2 << 20


def test_b12_the_directory_never_takes_more_than_its_capacity(tmp_path: Path) -> None:
    disk = opened(tmp_path, SMALL)
    largest = 0

    def write(name: str) -> None:
        for round_ in range(30):
            run = chain(f"{name}{round_}", 20)
            put = store(disk, run)
            assert put.dropped == (), put.message
            fetch(disk, run)
            disk.tidy()

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, name) for name in "abc"]
        while not all(writer.done() for writer in writers):
            largest = max(largest, directory_bytes(tmp_path))
        for writer in writers:
            writer.result()
    assert largest <= SMALL
    assert disk.stats().size_bytes <= SMALL
    assert disk.stats().evicted_pages > 1000
    assert disk.stats().pages > SMALL / 8192 * 0.7
    disk.close()
    assert directory_bytes(tmp_path) <= SMALL


def fill(disk_path: Path, chains: int) -> int:
    """Chains of ten pages that fit, each a little younger; how many there are when nothing was evicted."""
    disk = opened(disk_path, SMALL)
    for number in range(chains):
        store(disk, chain(str(number), 10))
        disk.touch(0, chain(str(number), 10).keys)
    assert disk.stats().evicted_pages == 0
    disk.close()
    return chains


def test_the_longest_unused_pages_go_first(tmp_path: Path) -> None:
    fill(tmp_path, 18)
    disk = opened(tmp_path, SMALL)
    disk.touch(0, chain("0", 10).keys)
    disk.touch(0, chain("2", 10).keys)
    for number in range(9):
        store(disk, chain(f"new {number}", 10))
    there = [disk.contains(0, chain(str(number), 10).keys) == 10 for number in range(18)]
    assert disk.stats().evicted_pages >= 20
    assert there[0] and there[2], "what was used lately stays"
    assert not there[1] and not there[3], "what was not goes"
    assert all(there[12:]), "the young stay"
    disk.close()


def test_of_chains_that_are_only_written_the_first_go_first(tmp_path: Path) -> None:
    disk = opened(tmp_path, SMALL)
    for number in range(60):
        store(disk, chain(str(number), 10))
    there = [disk.contains(0, chain(str(number), 10).keys) for number in range(60)]
    assert there[:30] == [0] * 30
    assert there[45:] == [10] * 15
    disk.close()


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    fill(tmp_path, 18)
    disk = opened(tmp_path, SMALL)
    disk.touch(0, chain("0", 10).keys)
    disk.close()
    disk = opened(tmp_path, SMALL)
    for number in range(7):
        store(disk, chain(f"new {number}", 10))
    assert disk.stats().evicted_pages > 0
    assert disk.contains(0, chain("0", 10).keys) == 10
    assert disk.contains(0, chain("1", 10).keys) < 10
    disk.close()


def test_of_one_chain_the_end_goes_first(tmp_path: Path) -> None:
    disk = opened(tmp_path, SMALL)
    long = chain("long", 150)
    store(disk, long)
    disk.touch(0, long.keys)
    for number in range(6):
        store(disk, chain(f"new {number}", 20))
        disk.touch(0, chain(f"new {number}", 20).keys)
    gone = disk.stats().evicted_pages
    assert 0 < gone < 150
    assert disk.contains(0, long.keys) == 150 - gone
    disk.close()


def test_a_page_that_is_read_is_not_evicted_under_its_reader(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path, SMALL))
    run = chain("read", 5)
    store(disk.store, run)

    def fill_up() -> None:
        for number in range(40):
            store(disk.store, chain(str(number), 20))

    disk.files.before_read = fill_up
    pages = empty(run)
    assert disk.store.get(run, pages).good == 5
    assert right(run, pages, 5)
    assert disk.store.stats().evicted_pages > 500
    disk.store.close()


def test_a_page_that_is_deleted_while_it_is_read_is_read_and_then_gone(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path))
    run = chain("read", 5)
    store(disk.store, run)

    def delete() -> None:
        assert disk.store.delete(None).pages == 5
        store(disk.store, chain("other", 20))

    disk.files.before_read = delete
    pages = empty(run)
    assert disk.store.get(run, pages).good == 5
    assert right(run, pages, 5)
    assert disk.store.contains(0, run.keys) == 0
    disk.store.close()
    assert b"".join(path.read_bytes() for path in segment_files(tmp_path)).find(run.tokens) < 0


def test_where_every_page_is_being_read_a_write_is_declined(tmp_path: Path) -> None:
    disk = FaultyDisk(settings(tmp_path, 500_000))
    run = chain("read", 40)
    count = 40 - len(store(disk.store, run).dropped)
    assert 10 < count < 40
    there = run.part(0, disk.store.contains(0, run.keys))
    declined = []
    disk.files.before_read = lambda: declined.append(store(disk.store, chain("other", 30)))
    assert fetch(disk.store, there).good == there.count
    assert len(declined[0].dropped) >= 30 - (count - there.count)
    assert "being read" in declined[0].message
    disk.store.close()


def test_a_smaller_capacity_at_the_next_start_is_kept(tmp_path: Path) -> None:
    disk = opened(tmp_path, 8 << 20)
    for number in range(40):
        store(disk, chain(str(number), 20))
        disk.touch(0, chain(str(number), 20).keys)
    for _ in range(5):
        disk.touch(0, b"".join(chain(str(number), 20).keys for number in range(40)))
        disk.tidy()
    for number in range(40):
        disk.touch(0, chain(str(number), 20).keys)
    disk.close()
    assert directory_bytes(tmp_path) > 4 << 20
    disk = opened(tmp_path, 4 << 20)
    assert directory_bytes(tmp_path) <= 4 << 20
    assert disk.contains(0, chain("39", 20).keys) == 20, "the youngest are still there"
    assert disk.contains(0, chain("0", 20).keys) < 20
    disk.close()


def test_a_new_model_gets_the_room_of_one_that_is_not_used_any_more(tmp_path: Path) -> None:
    disk = open_disk_store(settings(tmp_path, SMALL, payload_bytes=(8192,), model=OTHER_MODEL))
    for number in range(15):
        store(disk, chain(str(number), 10), 8192)
    assert disk.stats().pages > 100
    disk.close()
    disk = opened(tmp_path, SMALL)
    for number in range(40):
        assert store(disk, chain(f"new {number}", 10)).dropped == ()
        disk.touch(0, chain(f"new {number}", 10).keys)
        assert directory_bytes(tmp_path) <= SMALL
    there = sum(disk.contains(0, chain(f"new {number}", 10).keys) for number in range(40))
    assert there > SMALL / 8192 * 0.6
    disk.close()


def test_two_groups_in_use_both_keep_a_part_of_the_room(tmp_path: Path) -> None:
    disk = open_disk_store(settings(tmp_path, SMALL, payload_bytes=(PAGE_BYTES, 12288)))
    for number in range(60):
        for group, size_bytes in enumerate((PAGE_BYTES, 12288)):
            run = chain(str(number), 10, group=group)
            assert store(disk, run, size_bytes).dropped == ()
            disk.touch(group, run.keys)
        assert directory_bytes(tmp_path) <= SMALL
    for group, size_bytes in enumerate((PAGE_BYTES, 12288)):
        assert fetch(disk, chain("59", 10, group=group), size_bytes).good == 10
    disk.close()


@pytest.mark.parametrize("capacity_bytes", [400_000, 1 << 20, 3_333_333])
def test_any_capacity_is_kept_and_used(tmp_path: Path, capacity_bytes: int) -> None:
    disk = opened(tmp_path, capacity_bytes)
    for number in range(100):
        assert store(disk, chain(str(number), 8)).dropped == ()
    assert directory_bytes(tmp_path) <= capacity_bytes
    assert disk.stats().pages >= (capacity_bytes - 4096 * 48 - 8192) / (8192 + 192) * 0.85
    disk.close()

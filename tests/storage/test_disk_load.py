"""Everything at once on a small disk: no wrong page, the sums add up, what is there is there after a restart."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from storage.disks import CAPACITY_BYTES, FaultyDisk, directory_bytes, fetch, settings, store
from storage.pages import chain, namespace

from headrace.kvcache.storage.disk.opening import open_disk_store
from headrace.kvcache.storage.disk.store import DiskStore

SIZES = (4096, 12288)
TENANTS = ("a", "b", "c")


def work(disk: DiskStore, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        group = rng.randrange(len(SIZES))
        run = chain(str(rng.randrange(60)), rng.randrange(1, 40), rng.choice(TENANTS), group)
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                store(disk, run, SIZES[group])
            case 4 | 5 | 6:
                fetch(disk, run, SIZES[group])
            case 7:
                disk.touch(group, run.keys)
                assert disk.contains(group, run.keys) <= run.count
            case 8:
                disk.tidy()
            case _:
                if rng.random() < 0.2:
                    disk.delete(namespace(rng.choice(TENANTS)))


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_do_everything_at_once(tmp_path: Path, seed: int) -> None:
    small = CAPACITY_BYTES // 4
    disk = open_disk_store(settings(tmp_path, small, SIZES))
    with ThreadPoolExecutor() as pool:
        for running in [pool.submit(work, disk, 10 * seed + worker, 60) for worker in range(4)]:
            running.result()
    disk.check_integrity()
    assert directory_bytes(tmp_path) <= small
    there = disk.stats().pages
    assert disk.stats().corrupt_pages == 0
    disk.close()
    disk = open_disk_store(settings(tmp_path, small, SIZES))
    disk.check_integrity()
    # Those that were evicted, and whose slots nobody has written since, come back.
    assert disk.stats().pages >= there
    work(disk, seed, 60)
    disk.check_integrity()
    assert disk.stats().corrupt_pages == 0
    disk.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_disk_that_fails_now_and_then(tmp_path: Path, seed: int) -> None:
    disk = FaultyDisk(settings(tmp_path, CAPACITY_BYTES // 4, SIZES))
    rng = random.Random(seed)
    for round_ in range(40):
        disk.files.write_errno = rng.choice((0, 0, 0, 5, 28))
        disk.files.preallocate_errno = rng.choice((0, 0, 28))
        disk.files.read_errno_at = {rng.randrange(1 << 18): 5} if rng.random() < 0.2 else {}
        disk.now_s += rng.choice((0, 11))
        work(disk.store, 100 * seed + round_, 3)
        disk.store.check_integrity()
    assert disk.store.failure == ""
    assert disk.store.stats().failed_writes > 0
    disk.store.close()
    again = open_disk_store(settings(tmp_path, CAPACITY_BYTES // 4, SIZES))
    work(again, seed, 40)
    again.check_integrity()
    again.close()

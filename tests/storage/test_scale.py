"""A store of very many pages: few files, little RAM a page, and a start that reads its journal and no page."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from bench.disk import MODEL, PAGE_BYTES, PAGE_TOKENS, RECORD_BYTES, synthetic

from headrace.kvcache.storage.disk.allocation import MAX_SEGMENTS, SlotAllocator
from headrace.kvcache.storage.disk.opening import open_disk_store
from headrace.kvcache.storage.disk.segments import Segments
from headrace.kvcache.storage.disk.store import DiskSettings
from headrace.kvcache.storage.disk.table import PageTable

PAGES = 200_000


def test_b13_many_pages_are_few_files_and_are_found_without_a_look_into_them(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    keys = synthetic(directory, PAGES)  # every segment is one hole: a record that is looked at is none
    disk = open_disk_store(
        DiskSettings(str(directory), (PAGES + 4096) * (RECORD_BYTES + 400), PAGE_TOKENS, (PAGE_BYTES,), MODEL)
    )
    stats = disk.stats()
    assert stats.pages == PAGES
    assert stats.index_bytes / PAGES < 64
    assert len(os.listdir(directory)) < MAX_SEGMENTS
    for start in np.random.default_rng(3).integers(0, PAGES - 512, 20).tolist():
        assert disk.contains(0, keys[start : start + 512].tobytes()) == 512
    disk.close()


@pytest.mark.parametrize("capacity_bytes", [10**9, 20 * 10**9, 10**12, 10**14])
def test_b13_any_capacity_is_at_most_a_thousand_files_and_some(capacity_bytes: int) -> None:
    growth = SlotAllocator(PageTable(1, 1), Segments(1), capacity_bytes).plan_growth(RECORD_BYTES)
    assert growth is not None and growth.record_bytes == RECORD_BYTES
    assert capacity_bytes / (growth.slots * RECORD_BYTES) < MAX_SEGMENTS * 1.01

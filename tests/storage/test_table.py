"""The index: finds what a dict would find, whatever is put in and taken out."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvcache.storage.disk.hashing import BUCKET_CELLS, HashTable
from headrace.kvcache.storage.disk.table import FREE, LIVE, MAX_TICK, TAKEN, PageTable

SLOTS = 64


def key(number: int) -> bytes:
    return np.array([number * 0x9E3779B97F4A7C15 & (1 << 64) - 1, number], "<u8").tobytes()


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=20, unique=True), max_size=20), st.integers(1, SLOTS)
)
def test_it_finds_what_a_dict_finds(batches: list[list[int]], max_pages: int) -> None:
    # Made for `max_pages`, it holds up to 64: a table that is too small still finds everything.
    table = PageTable(SLOTS, max_pages)
    model: dict[int, int] = {}
    for batch in batches:
        new = [number for number in batch if number not in model]
        there = [number for number in batch if number in model]
        if there:
            table.withdraw(np.array([model.pop(number) for number in there]), FREE)
        slots = np.flatnonzero(table.states == FREE)[: len(new)]
        new = new[: len(slots)]
        table.states[slots] = TAKEN
        table.fill(slots, 0, b"".join(map(key, new)), 1, 0)
        table.publish(slots)
        model |= dict(zip(new, slots.tolist()))
        asked = list(range(201))
        found = table.find(0, b"".join(map(key, asked)))
        assert found.tolist() == [model.get(number, -1) for number in asked]
        assert table.pages == len(model) == np.count_nonzero(table.states == LIVE)


def test_keys_that_all_want_the_same_buckets_are_found() -> None:
    keys = np.zeros((100, 2), np.uint64)
    keys[:, 1] = np.arange(100)
    table = HashTable(1000, keys)
    table.insert(np.arange(100))
    assert table.find(keys).tolist() == list(range(100))
    table.remove(np.arange(0, 100, 2))
    assert table.find(keys).tolist() == [slot if slot % 2 else -1 for slot in range(100)]
    table.insert(np.arange(0, 100, 2))
    assert table.find(keys).tolist() == list(range(100))


def test_at_its_load_hardly_a_key_finds_both_buckets_full() -> None:
    count = 200_000
    keys = np.random.default_rng(1).integers(0, 1 << 63, (count, 2), dtype=np.uint64)
    keys[:, 0] *= np.uint64(3)
    table = HashTable(count, keys)
    table.insert(np.arange(count))
    assert (table.find(keys) == np.arange(count)).all()
    assert len(table._overflow) < 10
    assert table.size_bytes / count < 12 and BUCKET_CELLS == 8


def test_the_order_of_use_outlives_the_end_of_the_counter() -> None:
    table = PageTable(4, 4)
    table.states[:] = TAKEN
    table.fill(np.arange(4), 0, b"".join(map(key, range(4))), 1, 0)
    table.publish(np.arange(4))
    table.tick = MAX_TICK - 2
    for slot in (2, 0, 3, 1):
        table.use(np.array([slot]))
    assert np.argsort(table.ticks).tolist() == [2, 0, 3, 1]
    assert table.tick < MAX_TICK

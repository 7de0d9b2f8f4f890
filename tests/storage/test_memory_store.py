"""The memory store: the same promises as the disk store, without a disk."""

from __future__ import annotations

import msgspec
import pytest
from storage.pages import PAGE_BYTES, PAGE_TOKENS, chain, empty, filled, namespace, right

from headrace.kvcache.storage.memory import PAGE_OVERHEAD_BYTES, MemoryStore

EACH_BYTES = PAGE_BYTES + PAGE_TOKENS * 4 + PAGE_OVERHEAD_BYTES


def test_what_was_stored_is_read_back_up_to_the_first_gap() -> None:
    store = MemoryStore(1 << 20)
    run = chain("a", 10)
    store.put(run.part(0, 4), filled(run.part(0, 4)))
    store.put(run.part(5, 10), filled(run.part(5, 10)))
    assert store.contains(0, run.keys) == 4
    assert store.which(0, run.keys) == bytes([1, 1, 1, 1, 0, 1, 1, 1, 1, 1]) and not any(store.which(1, run.keys))
    pages = empty(run)
    got = store.get(run, pages)
    assert (got.good, got.missing) == (4, 1) and right(run, pages, 4)


def test_pages_are_copies() -> None:
    store = MemoryStore(1 << 20)
    run = chain("a", 1)
    source, into = filled(run), empty(run)
    store.put(run, source)
    source[0][:] = bytes(PAGE_BYTES)
    assert store.get(run, into).good == 1 and right(run, into, 1)


def test_the_capacity_holds_and_the_longest_unused_go_first() -> None:
    store = MemoryStore(10 * EACH_BYTES)
    for name in "abc":
        run = chain(name, 4)
        store.put(run, filled(run))
        store.touch(0, chain("a", 4).keys)
    assert [store.contains(0, chain(name, 4).keys) for name in "abc"] == [4, 0, 4]
    assert store.stats().size_bytes <= 10 * EACH_BYTES
    assert store.stats().evicted_pages == 2


def test_of_one_chain_the_end_goes_first() -> None:
    store = MemoryStore(6 * EACH_BYTES)
    run = chain("a", 6)
    store.put(run, filled(run))
    store.touch(0, run.keys)
    other = chain("b", 2)
    store.put(other, filled(other))
    assert store.contains(0, run.keys) == 4


def test_a_page_larger_than_the_store_is_dropped() -> None:
    store = MemoryStore(PAGE_BYTES)
    run = chain("a", 2)
    assert store.put(run, filled(run)).dropped == (0, 1)


@pytest.mark.parametrize("field", ["parents", "tokens", "namespace"])
def test_a_page_with_another_chain_is_a_miss_and_goes(field: str) -> None:
    store = MemoryStore(1 << 20)
    run = chain("a", 1)
    store.put(run, filled(run))
    asked = msgspec.structs.replace(run, **{field: bytes(len(getattr(run, field)))})
    assert store.get(asked, empty(run)).corrupt == 1
    assert store.contains(0, run.keys) == 0


def test_deleting_one_namespace_leaves_the_others() -> None:
    store = MemoryStore(1 << 20)
    for space in "ab":
        run = chain(space, 3, space)
        store.put(run, filled(run))
    removed = store.delete(namespace("a"))
    assert (removed.pages, removed.size_bytes) == (3, 3 * PAGE_BYTES)
    assert [store.contains(0, chain(space, 3, space).keys) for space in "ab"] == [0, 3]
    assert store.delete(None).pages == 3
    assert store.stats().size_bytes == 0

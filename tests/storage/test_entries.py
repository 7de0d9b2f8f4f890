"""Journal entries: each stands for itself, and a wrong one is seen."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.storage.disk.entries import (
    CLEARED,
    ENTRY_BYTES,
    PAGE,
    SPACE,
    Entries,
    entry_bytes,
    model_of,
    new_entries,
    seal,
    sound,
    space_entry,
)

STORE = 0x1234_5678_9ABC_DEF0


def page_entries(count: int) -> Entries:
    entries = new_entries(count)
    rng = np.random.default_rng(1)
    entries["key"] = rng.integers(0, 1 << 63, (count, 2), dtype=np.uint64)
    for name in ("generation", "segment", "slot", "tick", "space"):
        entries[name] = rng.integers(0, 1000, count)
    entries["op"] = PAGE
    return seal(entries, STORE)


def test_sealed_entries_are_sound_in_any_order_and_number() -> None:
    entries = page_entries(1000)
    assert len(sound(entries, STORE)) == len(sound(entries[::-1].copy(), STORE)) == 1000
    assert len(sound(entries[7:8], STORE)) == 1


def test_every_single_wrong_bit_of_an_entry_is_seen() -> None:
    entry = page_entries(1)
    flipped = np.repeat(entry, 8 * ENTRY_BYTES)
    raw = np.frombuffer(entry_bytes(flipped), np.uint8).reshape(-1, ENTRY_BYTES)
    for bit in range(8 * ENTRY_BYTES):
        raw[bit, bit // 8] ^= 1 << bit % 8
    # Only the two bytes that nothing is kept in may differ, and they don't, since they are hashed too.
    assert len(sound(flipped, STORE)) == 0


@given(st.integers(0, ENTRY_BYTES - 1), st.integers(0, 255))
def test_an_entry_that_was_torn_is_seen(at: int, rest: int) -> None:
    entry = page_entries(1)
    torn = entry.copy()
    np.frombuffer(entry_bytes(torn), np.uint8)[at:] = rest
    assert len(sound(torn, STORE)) == (torn == entry).sum()


def test_zeros_and_another_stores_entries_are_not_sound() -> None:
    assert len(sound(new_entries(10), STORE)) == 0
    assert len(sound(page_entries(1000), STORE + 1)) == 0


def test_a_namespace_entry_carries_its_model() -> None:
    namespace, model = bytes(range(16)), bytes(range(100, 116))
    known, cleared = seal(space_entry(5, namespace, model, cleared=9), STORE)
    assert (known["op"], known["space"], known["key"].tobytes(), model_of(known)) == (SPACE, 5, namespace, model)
    assert (cleared["op"], cleared["space"], cleared["generation"]) == (CLEARED, 5, 9)

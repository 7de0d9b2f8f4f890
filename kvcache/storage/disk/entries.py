"""Journal entries: 48 bytes each, made, checked and read by the array.

An entry says what one slot holds, or something about a namespace. Entries need no order: each carries the number of the
write that it speaks of (its generation), and for every slot the highest counts. So a journal may be cut, repeated or
mixed with another of the same store, and says nothing that was not true once; what is true now, the records say.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

U64: TypeAlias = NDArray[np.uint64]
Entries: TypeAlias = NDArray[np.void]

PAGE: Final = 1
"""Slot `slot` of segment `segment` holds the page `key` of namespace `space` and `group`, last used at `tick`."""
FREE: Final = 2
"""That slot holds nothing that counts."""
SPACE: Final = 3
"""`space` is the namespace `key`, of the model whose 16 bytes stand in `generation`, `segment` and `slot`."""
CLEARED: Final = 4
"""Nothing that was written to `space` before `generation` counts."""

ENTRY: Final = np.dtype(
    [
        ("key", "<u8", (2,)),
        ("generation", "<u8"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("tick", "<u4"),
        ("space", "<u4"),
        ("op", "u1"),
        ("group", "u1"),
        ("unused", "<u2"),
        ("check", "<u4"),
    ]
)
ENTRY_BYTES: Final = ENTRY.itemsize
_WORDS: Final = ENTRY_BYTES // 8

# A multilinear hash over the words of an entry, of which the high half is kept: every entry has its own check, and ten
# million are checked in a third of a second. The constants are the fractional parts of square roots of primes (as in
# SHA-512), made odd, so that a single wrong bit always shows.
_ADD: Final = np.array(
    [
        *(0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B),
        *(0xA54FF53A5F1D36F1, 0x510E527FADE682D1, 0x9B05688C2B3E6C1F),
    ],
    np.uint64,
)
_MULTIPLY: Final = np.array(
    [
        *(0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179, 0xCBBB9D5DC1059ED9),
        *(0x629A292A367CD507, 0x9159015A3070DD17, 0x152FECD8F70E5939),
    ],
    np.uint64,
)

_STORE_MULTIPLY: Final = 0x8EB44A8768581511


def new_entries(count: int) -> Entries:
    """Entries to be filled, then sealed."""
    return np.zeros(count, ENTRY)


def entry_bytes(entries: Entries) -> memoryview:
    """The memory of entries that lie one after another."""
    return entries.view(np.uint8).data


def seal(entries: Entries, store_id: int) -> Entries:
    """Write each entry's check; an entry of another store has another."""
    entries["check"] = _checks(entries, store_id)
    return entries


def sound(entries: Entries, store_id: int) -> Entries:
    """Those entries that are what was written: neither torn, nor zero, nor another store's."""
    good = entries["check"] == _checks(entries, store_id)
    return entries if good.all() else entries[good]


def space_entry(space: int, namespace: bytes, model: bytes, cleared: int) -> Entries:
    """What a namespace needs in the journal, to be sealed."""
    entries = new_entries(2 if cleared else 1)
    entries["key"] = np.frombuffer(namespace, "<u8")
    entries["space"] = space
    entries["op"] = SPACE
    words = np.frombuffer(model, "<u4")
    entries["generation"] = int.from_bytes(model[:8], "little")
    entries["segment"], entries["slot"] = words[2], words[3]
    if cleared:
        entries["generation"][1] = cleared
        entries["op"][1] = CLEARED
        entries["segment"][1] = entries["slot"][1] = 0
    return entries


def model_of(entry: np.void) -> bytes:
    """The model that a SPACE entry names."""
    parts = ((entry["generation"], 8), (entry["segment"], 4), (entry["slot"], 4))
    return b"".join(int(value).to_bytes(size, "little") for value, size in parts)


def _checks(entries: Entries, store_id: int) -> NDArray[np.uint32]:
    words = np.ascontiguousarray(entries).view("<u8").reshape(-1, _WORDS)
    total = np.full(len(words), store_id * _STORE_MULTIPLY & 0xFFFF_FFFF_FFFF_FFFF, np.uint64)
    for word in range(_WORDS):
        column = words[:, word]
        if word == _WORDS - 1:
            column = column & np.uint64(0xFFFFFFFF)
        total += (column + _ADD[word]) * _MULTIPLY[word]
    # The low half of a product depends on the low bits alone: it is folded in, so that it counts too.
    total ^= total << np.uint64(29)
    return (total >> np.uint64(32)).astype(np.uint32)

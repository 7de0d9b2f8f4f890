"""The index of a disk store: what every slot holds, and which slot holds a key. 47 bytes of RAM a page, in arrays.

in     what replay and writes say that slots hold; reads that begin and end
out    slots of keys
state  per slot: key, generation, last use, namespace, group, state, pins; the hash table
owner  `DiskStore`, under its lock
ready  a page can be found from `publish` on
end    a slot is reused when it is FREE: nothing finds it, nothing reads or writes it

The life of a slot::

    FREE ─► LISTED ─► TAKEN ─ publish ─► LIVE ─ withdraw ─► LEAVING or ERASING ─ (no pins) ─► FREE
                        └───────────────── (the write failed) ──────────────────────────────────┘
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.storage.disk.entries import PAGE, Entries, new_entries
from headrace.kvcache.storage.disk.hashing import I64, U64, HashTable

FREE: Final = 0
LISTED: Final = 1
"""Free, and in the allocator's list of runs."""
TAKEN: Final = 2
"""Being written."""
LIVE: Final = 3
LEAVING: Final = 4
"""Found by nobody; free when its readers have ended."""
ERASING: Final = 5
"""The same, but its bytes are to be erased first."""
BROKEN: Final = 6
"""The device can't read it: not used again before the next start."""

MAX_TICK: Final = 0xFFFFFFFF
SLOT_BYTES: Final = 37
"""RAM of the arrays below, a slot."""
_GROUP_MIX: Final = 0x9E3779B97F4A7C15


class PageTable:
    """Slots 0..max_slots - 1 and the pages in them. Keys of different groups are different keys."""

    def __init__(self, max_slots: int, max_pages: int) -> None:
        """`max_pages` of the slots may be live at once. Raises MemoryError. Memory is taken as slots are used."""
        self.keys: U64 = np.zeros((max_slots, 2), np.uint64)
        """With the group mixed in."""
        self.generations: U64 = np.zeros(max_slots, np.uint64)
        self.ticks: NDArray[np.uint32] = np.zeros(max_slots, np.uint32)
        self.spaces: NDArray[np.uint32] = np.zeros(max_slots, np.uint32)
        self.pins: NDArray[np.uint16] = np.zeros(max_slots, np.uint16)
        self.groups: NDArray[np.uint8] = np.zeros(max_slots, np.uint8)
        self.states: NDArray[np.uint8] = np.zeros(max_slots, np.uint8)
        self.unsaved: NDArray[np.bool_] = np.zeros(max_slots, np.bool_)
        """Used since the journal was last told."""
        self.pages = 0
        self.tick = 1
        """Of the latest use."""
        self._hash = HashTable(max_pages, self.keys)

    @property
    def hash_bytes(self) -> int:
        """RAM of the hash table; the slots that are in use take `SLOT_BYTES` each."""
        return self._hash.size_bytes

    def find(self, group: int, keys: bytes) -> I64:
        """The live slot of each 16-byte key, -1 where there is none."""
        return self._hash.find(mixed(group, keys))

    def use(self, slots: I64) -> None:
        """These pages were used last of all, and all at once."""
        if self.tick == MAX_TICK:
            # After four thousand million uses: what is older than half of them is equally old from now on.
            half = np.uint32(MAX_TICK // 2)
            self.ticks -= np.minimum(self.ticks, half)
            self.tick -= int(half)
        self.tick += 1
        self.ticks[slots] = self.tick
        self.unsaved[slots] = True

    def fill(self, slots: I64, group: int, keys: bytes, generation: int, space: int) -> None:
        """Note what is being written into taken slots."""
        assert (self.states[slots] == TAKEN).all()
        self.keys[slots] = mixed(group, keys)
        self.generations[slots] = generation
        self.spaces[slots] = space
        self.groups[slots] = group
        self.ticks[slots] = self.tick
        self.unsaved[slots] = False

    def publish(self, slots: I64) -> None:
        """Let filled slots be found. None of their keys may be found already."""
        assert (self.states[slots] == TAKEN).all()
        self.states[slots] = LIVE
        self.pages += len(slots)
        self._hash.insert(slots)

    def withdraw(self, slots: I64, state: int = LEAVING) -> None:
        """Let live slots be found no more."""
        assert (self.states[slots] == LIVE).all()
        self._hash.remove(slots)
        self.states[slots] = state
        self.unsaved[slots] = False
        self.pages -= len(slots)

    def entries(self, slots: I64) -> Entries:
        """What the journal should say of these slots, but for where they lie: `segment` and `slot` are 0."""
        entries = new_entries(len(slots))
        groups = self.groups[slots]
        keys = self.keys[slots]
        keys[:, 1] ^= group_mix(groups)
        entries["key"] = keys
        entries["generation"] = self.generations[slots]
        entries["tick"] = self.ticks[slots]
        entries["space"] = self.spaces[slots]
        entries["group"] = groups
        entries["op"] = PAGE
        return entries

    def check(self) -> None:
        """Raise AssertionError unless every live page, and nothing else, is found under its key."""
        live = np.flatnonzero(self.states == LIVE)
        assert len(live) == self.pages, f"{len(live)} pages are live, {self.pages} were counted"
        assert (self._hash.find(self.keys[live]) == live).all(), "a live page is not found"
        assert self._hash.entries == len(live), "the hash table has a key of no page"
        assert not self.pins[self.states < LIVE].any(), "a slot without a page is pinned"
        assert not self.unsaved[self.states != LIVE].any()


def mixed(group: int, keys: bytes) -> U64:
    """16-byte keys as two words each, the group mixed in: uint64 [n, 2]."""
    words = np.frombuffer(keys, "<u8").reshape(-1, 2).astype(np.uint64)
    words[:, 1] ^= group_mix(np.full(1, group, np.uint8))
    return words


def group_mix(groups: NDArray[np.uint8]) -> U64:
    """What a group adds to the second word of its keys; nothing for group 0."""
    return groups.astype(np.uint64) * np.uint64(_GROUP_MIX)

"""From keys to slots: a hash table in arrays, looked up, filled and emptied by the batch.

A key may stand in one of two buckets of eight cells and goes to the emptier one, so buckets hardly ever overflow at the
load that the table is made for, a lookup never looks further than two buckets, and a removal leaves nothing behind. A
cell is a slot number and 16 bits of the key; whole keys are compared where the slots keep them.

in     keys and slots to put in and take out
out    the slot of each key
state  cells, how many of each bucket are used, the few keys that found both buckets full
owner  `PageTable`, under the store's lock
ready  at once
end    with the store
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

I64: TypeAlias = NDArray[np.int64]
U64: TypeAlias = NDArray[np.uint64]

BUCKET_CELLS: Final = 8
MAX_LOAD: Final = 0.6
"""Entries per cell at which, with two choices of eight, about one key in a hundred million finds no place."""
CELL_BYTES: Final = 6
_LOW: Final = np.uint64(0xFFFFFFFF)
_HIGH: Final = np.uint64(32)


class HashTable:
    """Slots by key. `keys`: uint64 [slots, 2], where the owner keeps the key of each slot."""

    def __init__(self, max_entries: int, keys: U64) -> None:
        """Raises MemoryError."""
        self._keys = keys
        self._buckets = np.uint64(max(1, int(max_entries / MAX_LOAD / BUCKET_CELLS) + 1))
        cells = int(self._buckets) * BUCKET_CELLS
        self._cells: NDArray[np.uint32] = np.zeros(cells, np.uint32)
        """Slot number + 1; 0 is an empty cell."""
        self._tags: NDArray[np.uint16] = np.zeros(cells, np.uint16)
        self._used: NDArray[np.uint8] = np.zeros(int(self._buckets), np.uint8)
        self._overflow: dict[bytes, int] = {}

    @property
    def size_bytes(self) -> int:
        return self._cells.nbytes + self._tags.nbytes + self._used.nbytes

    @property
    def entries(self) -> int:
        """How many keys are in it."""
        return int(np.count_nonzero(self._cells)) + len(self._overflow)

    def find(self, keys: U64) -> I64:
        """The slot of each key, -1 where there is none. `keys`: [n, 2]."""
        found = np.full(len(keys), -1, np.int64)
        if not len(keys):
            return found
        tags = keys[:, 1].astype(np.uint16)
        first, second = self._choices(keys)
        self._find_in(first, keys, tags, np.arange(len(keys)), found)
        left = np.flatnonzero(found < 0)
        if len(left):
            self._find_in(second[left], keys[left], tags[left], left, found)
        if self._overflow:
            for index in np.flatnonzero(found < 0).tolist():
                found[index] = self._overflow.get(keys[index].tobytes(), -1)
        return found

    def _find_in(self, buckets: I64, keys: U64, tags: NDArray[np.uint16], places: I64, found: I64) -> None:
        """Look in one bucket for each key; what is there goes to `found[places]`."""
        key, cell = np.nonzero(self._tags.reshape(-1, BUCKET_CELLS)[buckets] == tags[:, None])
        slots = self._cells[buckets[key] * BUCKET_CELLS + cell].astype(np.int64) - 1
        there = slots >= 0
        key, slots = key[there], slots[there]
        equal = (self._keys[slots] == keys[key]).all(axis=1)
        found[places[key[equal]]] = slots[equal]

    def insert(self, slots: I64) -> None:
        """Put in slots whose keys are not there yet."""
        keys = self._keys[slots]
        first, second = self._choices(keys)
        tags = keys[:, 1].astype(np.uint16)
        pending = np.arange(len(slots))
        while len(pending):
            one, two = first[pending], second[pending]
            bucket = np.where(self._used[one] <= self._used[two], one, two)
            full = self._used[bucket] >= BUCKET_CELLS
            if full.any():
                for index in pending[full].tolist():
                    self._overflow[keys[index].tobytes()] = int(slots[index])
                pending, bucket = pending[~full], bucket[~full]
            row = self._cells.reshape(-1, BUCKET_CELLS)[bucket]
            cell = bucket * BUCKET_CELLS + (row == 0).argmax(axis=1)
            # Of several keys that want one cell, the last to be written has it; the others try again.
            values = (slots[pending] + 1).astype(np.uint32)
            self._cells[cell] = values
            won = self._cells[cell] == values
            self._tags[cell[won]] = tags[pending[won]]
            self._used[bucket[won]] += 1
            pending = pending[~won]

    def remove(self, slots: I64) -> None:
        """Take out slots that are there."""
        keys = self._keys[slots]
        wanted = (slots + 1).astype(np.uint32)
        left = np.ones(len(slots), np.bool_)
        rows = self._cells.reshape(-1, BUCKET_CELLS)
        for buckets in self._choices(keys):
            hit = rows[buckets] == wanted[:, None]
            there = hit.any(axis=1) & left
            cell = buckets[there] * BUCKET_CELLS + hit[there].argmax(axis=1)
            self._cells[cell] = 0
            self._tags[cell] = 0
            np.subtract.at(self._used, buckets[there], np.uint8(1))
            left &= ~there
        for index in np.flatnonzero(left).tolist():
            del self._overflow[keys[index].tobytes()]

    def _choices(self, keys: U64) -> tuple[I64, I64]:
        """The two buckets of each key, from the two halves of its first word: a multiplication scales each half."""
        word = keys[:, 0]
        one = ((word & _LOW) * self._buckets) >> _HIGH
        two = ((word >> _HIGH) * self._buckets) >> _HIGH
        return one.astype(np.int64), two.astype(np.int64)

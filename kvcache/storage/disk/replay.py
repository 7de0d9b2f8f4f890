"""From a journal to an index. Entries are taken as they come, by the array; for every slot the latest write counts.

Nothing here is proof: an entry says where a page was put, the record says whether it is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from headrace.kvcache.storage.disk.entries import CLEARED, FREE, PAGE, SPACE, Entries, model_of
from headrace.kvcache.storage.disk.hashing import I64
from headrace.kvcache.storage.disk.segments import Segments
from headrace.kvcache.storage.disk.spaces import Spaces
from headrace.kvcache.storage.disk.table import FREE as SLOT_FREE
from headrace.kvcache.storage.disk.table import LIVE, TAKEN, PageTable, group_mix

_PIECE: Final = 1 << 18


class Replay:
    """What a journal says, put into a table that knows the segments' slots."""

    def __init__(self, table: PageTable, segments: Segments, spaces: Spaces) -> None:
        self._table = table
        self._segments = segments
        self._spaces = spaces
        self._cleared: dict[int, int] = {}
        self.generation = 0
        """The highest that was met."""

    def take(self, pieces: Iterable[Entries]) -> None:
        """Take in a journal, piece by piece."""
        for piece in pieces:
            ops = piece["op"]
            pages = (ops == PAGE) | (ops == FREE)
            self._take_slots(piece if pages.all() else piece[pages])
            for entry in piece[ops == SPACE]:
                self._spaces.restore(int(entry["space"]), entry["key"].tobytes(), model_of(entry))
            for entry in piece[ops == CLEARED]:
                number, generation = int(entry["space"]), int(entry["generation"])
                self._cleared[number] = max(self._cleared.get(number, 0), generation)
                self.generation = max(self.generation, generation)

    def finish(self) -> None:
        """Let what counts be found."""
        for number, generation in self._cleared.items():
            self._spaces.clear(number, generation)
        table = self._table
        table.tick = max(1, int(table.ticks.max(initial=0)))
        self._drop_cleared()
        live = self._drop_duplicates(np.flatnonzero(table.states == LIVE))
        table.states[live] = TAKEN
        for start in range(0, len(live), _PIECE):
            table.publish(live[start : start + _PIECE])

    def _take_slots(self, entries: Entries) -> None:
        if not len(entries):
            return
        ids = entries["segment"].astype(np.int64)
        self._segments.next_id = max(self._segments.next_id, int(ids.max()) + 1)
        self.generation = max(self.generation, int(entries["generation"].max()))
        self._spaces.skip(int(entries["space"].max()))
        slots = self._segments.numbers(ids, entries["slot"].astype(np.int64))
        if slots.min() < 0:
            entries, slots = entries[slots >= 0], slots[slots >= 0]
        table = self._table
        generations = entries["generation"].astype(np.uint64)
        before = table.generations[slots]
        np.maximum.at(table.generations, slots, generations)
        latest = table.generations[slots]
        table.ticks[slots[latest > before]] = 0
        counts = generations == latest
        if not counts.all():
            entries, slots = entries[counts], slots[counts]
        groups = entries["group"]
        keys = entries["key"].astype(np.uint64)
        keys[:, 1] ^= group_mix(groups)
        table.keys[slots] = keys
        table.groups[slots] = groups
        table.spaces[slots] = entries["space"]
        table.states[slots] = np.where(entries["op"] == PAGE, LIVE, SLOT_FREE)
        np.maximum.at(table.ticks, slots, entries["tick"].astype(np.uint32))

    def _drop_cleared(self) -> None:
        """Free the slots whose namespace nobody knows or has been cleared since."""
        table = self._table
        numbers, cleared = self._spaces.cleared()
        high = max((segment.end for segment in self._segments), default=0)
        for start in range(0, high, _PIECE):
            piece = slice(start, min(start + _PIECE, high))
            if not len(numbers):
                table.states[piece] = SLOT_FREE
                continue
            spaces = table.spaces[piece].astype(np.int64)
            which = np.minimum(np.searchsorted(numbers, spaces), len(numbers) - 1)
            counts = (numbers[which] == spaces) & (table.generations[piece] >= cleared[which].astype(np.uint64))
            table.states[piece][~counts] = SLOT_FREE

    def _drop_duplicates(self, live: I64) -> I64:
        """Where several slots have one key (one was evicted, which no entry says, and the page written again), the
        latest counts."""
        table = self._table
        words = np.sort(table.keys[live, 1])
        twice = np.unique(words[1:][words[1:] == words[:-1]])
        if not len(twice):
            return live
        suspects = live[np.isin(table.keys[live, 1], twice)]
        keys = table.keys[suspects]
        order = np.lexsort((table.generations[suspects], keys[:, 0], keys[:, 1]))
        sorted_keys = keys[order]
        older = suspects[order[:-1][(sorted_keys[1:] == sorted_keys[:-1]).all(axis=1)]]
        table.states[older] = SLOT_FREE
        kept: I64 = live[table.states[live] == LIVE]
        return kept

"""Which slots of a disk store are written next: free ones, those of a new segment, those of the longest unused pages.

Slots of one size are a class; a class has segments. A hand goes round each class and lists the free slots that it
passes as runs, from which writes take: so pages that are written one after another lie side by side. When a class is
full and the store may not grow, the hand takes from their slots the pages that are among the least recently used.

in     slots to take and to give back; segments that were made
out    taken slots; what segment to make; segments to remove
state  per class its segments, listed runs, the hand; the bytes of all segments
owner  `DiskStore`, under its lock
ready  a taken slot may be written at once
end    a slot that is read is pinned, and neither evicted nor its segment dropped
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import numpy as np

from headrace.kvcache.storage.disk.hashing import I64
from headrace.kvcache.storage.disk.segments import Segment, Segments
from headrace.kvcache.storage.disk.table import ERASING, FREE, LEAVING, LISTED, LIVE, TAKEN, PageTable

MAX_SEGMENTS: Final = 1024
"""About so many make up a full store: few enough to keep open, many enough to give up singly."""
SEGMENT_BYTES: Final = 64 << 20
MIN_SEGMENTS: Final = 32
_WINDOW: Final = 16384
"""Slots that the hand looks at in one step, in some 50 µs."""
_SAMPLE: Final = 4096
_EVICT_PART: Final = 32
"""One part in so many of a class is evicted before the least recently used are determined anew."""


class Growth(NamedTuple):
    """A segment to be made, after others were removed to make room."""

    id: int
    record_bytes: int
    slots: int
    drop: tuple[Segment, ...]


class SlotClass:
    """All slots of one size."""

    def __init__(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.segments: list[Segment] = []
        self.slots = 0
        self.free = 0
        """Slots that are FREE, not LISTED."""
        self.runs: deque[tuple[int, int]] = deque()
        """(first slot, count) of LISTED slots."""
        self.hand = (0, 0)
        """Index of a segment, slot in it."""
        self.threshold = (0, 0)
        """(tick, slot): pages before this tick go next, and those of it from this slot on."""
        self.allowance = 0
        """Pages that may still be evicted before the threshold is determined anew."""
        self.compare_in = 0
        """Pages that may still be evicted before other classes' pages are looked at."""


class SlotAllocator:
    """Slots of all classes, within the bytes that the segments may take."""

    def __init__(self, table: PageTable, segments: Segments, max_bytes: int) -> None:
        self._table = table
        self._segments = segments
        self._max_bytes = max_bytes
        self._classes: dict[int, SlotClass] = {}
        self.segment_bytes = 0
        """Of all files, those being removed included."""
        self.evicted_pages = 0

    @property
    def excess_bytes(self) -> int:
        """By how much the segments are too large."""
        return self.segment_bytes - self._max_bytes

    def add(self, segment: Segment) -> None:
        """A segment that `segments` has; its slots are as their states say."""
        slot_class = self._class(segment.record_bytes)
        slot_class.segments.append(segment)
        slot_class.slots += segment.slots
        slot_class.free += int(np.count_nonzero(self._table.states[segment.base : segment.end] == FREE))
        self.segment_bytes += segment.size_bytes

    def take(self, record_bytes: int, count: int) -> I64:
        """Up to `count` free slots, now TAKEN, in runs."""
        slot_class = self._class(record_bytes)
        taken: list[I64] = []
        while count and (slot_class.runs or self._list_free(slot_class)):
            first, length = slot_class.runs.popleft()
            if length > count:
                slot_class.runs.appendleft((first + count, length - count))
                length = count
            taken.append(np.arange(first, first + length))
            count -= length
        slots = np.concatenate(taken) if taken else np.zeros(0, np.int64)
        self._table.states[slots] = TAKEN
        return slots

    def evict(self, record_bytes: int, count: int) -> None:
        """Free at least `count` slots of the least recently used pages of the class, as far as they are not pinned."""
        slot_class = self._class(record_bytes)
        # Two rounds: the pages that the first threshold named may have been used since.
        for _ in range(2 if slot_class.segments else 0):
            for _ in range(self._windows(slot_class) + 1):
                if slot_class.free >= count:
                    return
                if slot_class.allowance <= 0:
                    self._set_threshold(slot_class, count)
                start, end = self._next_window(slot_class)
                self._evict_window(slot_class, start, end)
            slot_class.allowance = 0

    def give_back(self, slots: I64) -> None:
        """Slots that hold nothing that counts and that nobody reads or writes are FREE."""
        self._table.states[slots] = FREE
        for run in self._segments.runs(np.sort(slots)):
            self._class(run.segment.record_bytes).free += run.count

    def plan_growth(self, record_bytes: int) -> Growth | None:
        """The next segment of a class, None if it has to do with what it has."""
        slot_class = self._class(record_bytes)
        wanted_bytes = min(self._max_bytes // MIN_SEGMENTS, max(SEGMENT_BYTES, self._max_bytes // MAX_SEGMENTS))
        room_bytes = self._max_bytes - self.segment_bytes
        drop: tuple[Segment, ...] = ()
        if room_bytes < record_bytes or (slot_class.segments and room_bytes < wanted_bytes // 8):
            drop = self._coldest_elsewhere(slot_class, max(wanted_bytes, record_bytes) - room_bytes)
            room_bytes += sum(segment.size_bytes for segment in drop)
        slots = min(max(wanted_bytes // record_bytes, 1), room_bytes // record_bytes)
        if slots < 1 or (slot_class.segments and slots * record_bytes < wanted_bytes // 8):
            return None
        for segment in drop:
            self.empty(segment)
            self.forget(segment)
        self._segments.next_id += 1
        return Growth(self._segments.next_id - 1, record_bytes, slots, drop)

    def coldest(self) -> Segment | None:
        """The segment whose pages were used the longest ago, of those that can be given up now."""
        return min(filter(self._can_drop, self._segments), key=self._mean_tick, default=None)

    def empty_segments(self) -> list[Segment]:
        """Segments without anything in them."""
        states = self._table.states
        return [s for s in self._segments if np.isin(states[s.base : s.end], (FREE, LISTED)).all()]

    def empty(self, segment: Segment) -> None:
        """Withdraw all pages of a segment that is about to be dropped."""
        slots = segment.base + np.flatnonzero(self._table.states[segment.base : segment.end] == LIVE)
        self._table.withdraw(slots, FREE)
        self.evicted_pages += len(slots)

    def forget(self, segment: Segment) -> None:
        """Drop a segment; its bytes count until `removed`."""
        states = self._table.states[segment.base : segment.end]
        slot_class = self._class(segment.record_bytes)
        index = slot_class.segments.index(segment)
        del slot_class.segments[index]
        slot_class.runs = deque(run for run in slot_class.runs if not segment.base <= run[0] < segment.end)
        slot_class.slots -= segment.slots
        # `empty` has made pages FREE without counting them.
        slot_class.free = sum(
            int(np.count_nonzero(self._table.states[s.base : s.end] == FREE)) for s in slot_class.segments
        )
        slot_class.hand = (0, 0)
        slot_class.allowance = 0
        states[:] = FREE
        self._segments.drop(segment)
        if not slot_class.segments:
            del self._classes[segment.record_bytes]

    def removed(self, segment: Segment) -> None:
        """A dropped segment's file is gone."""
        self.segment_bytes -= segment.size_bytes

    def check(self) -> None:
        """Raise AssertionError unless every slot is where its state says, once, and the bytes are counted."""
        states = self._table.states
        for slot_class in self._classes.values():
            mine = [states[segment.base : segment.end] for segment in slot_class.segments]
            free = sum(int(np.count_nonzero(part == FREE)) for part in mine)
            listed = sum(int(np.count_nonzero(part == LISTED)) for part in mine)
            assert free == slot_class.free, f"{free} slots are free, {slot_class.free} were counted"
            runs = [np.arange(first, first + count) for first, count in slot_class.runs]
            in_runs = np.concatenate(runs) if runs else np.zeros(0, np.int64)
            assert len(np.unique(in_runs)) == len(in_runs) == listed, "a slot is listed twice, or lost"
            assert (states[in_runs] == LISTED).all(), "a listed slot is in use"
        assert sum(slot_class.slots for slot_class in self._classes.values()) == sum(s.slots for s in self._segments)
        assert self.segment_bytes >= sum(segment.size_bytes for segment in self._segments)

    def _class(self, record_bytes: int) -> SlotClass:
        return self._classes.setdefault(record_bytes, SlotClass(record_bytes))

    def _windows(self, slot_class: SlotClass) -> int:
        return sum(-(-segment.slots // _WINDOW) for segment in slot_class.segments)

    def _next_window(self, slot_class: SlotClass) -> tuple[int, int]:
        """Slots [start, end) that the hand passes now."""
        index, at = slot_class.hand
        segment = slot_class.segments[index]
        start, end = segment.base + at, min(segment.base + at + _WINDOW, segment.end)
        last = end == segment.end
        slot_class.hand = ((index + 1) % len(slot_class.segments), 0) if last else (index, at + _WINDOW)
        return start, end

    def _list_free(self, slot_class: SlotClass) -> bool:
        """List some free slots, if there are any."""
        for _ in range(self._windows(slot_class) + 1 if slot_class.free else 0):
            start, end = self._next_window(slot_class)
            free = start + np.flatnonzero(self._table.states[start:end] == FREE)
            if len(free):
                self._table.states[free] = LISTED
                slot_class.free -= len(free)
                slot_class.runs.extend((run.first, run.count) for run in self._segments.runs(free))
                return True
        return False

    def _set_threshold(self, slot_class: SlotClass, count: int) -> None:
        """Find, from a sample, which pages go next.

        Of pages of one age those with higher numbers go first: they are the later ones of a chain, which is of use as
        far as its beginning is there.
        """
        slots = self._sample(slot_class.segments)
        slot_class.allowance = max(count, slot_class.slots // _EVICT_PART)
        if not len(slots):
            return
        ticks = self._table.ticks[slots]
        each = max(1, slot_class.slots // _SAMPLE)
        rank = min(len(slots), -(-slot_class.allowance // each)) - 1
        last = slots[np.lexsort((-slots, ticks))[rank]]
        slot_class.threshold = (int(self._table.ticks[last]), int(last))

    def _sample(self, segments: list[Segment], most: int = _SAMPLE) -> I64:
        """Live pages of these segments that nobody reads, evenly taken; all of them where they are few."""
        table = self._table
        step = max(1, sum(segment.slots for segment in segments) // most)
        samples = []
        for segment in segments:
            slots = slice(segment.base, segment.end, step)
            live = (table.states[slots] == LIVE) & (table.pins[slots] == 0)
            samples.append(segment.base + step * np.flatnonzero(live))
        return np.concatenate(samples) if samples else np.zeros(0, np.int64)

    def _evict_window(self, slot_class: SlotClass, start: int, end: int) -> None:
        table = self._table
        tick, first = slot_class.threshold
        ticks = table.ticks[start:end]
        old = (ticks < tick) | ((ticks == tick) & (np.arange(start, end) >= first))
        old &= (table.states[start:end] == LIVE) & (table.pins[start:end] == 0)
        slots = start + np.flatnonzero(old)
        if len(slots) > slot_class.allowance:
            slots = np.sort(slots[np.lexsort((-slots, table.ticks[slots]))[: slot_class.allowance]])
        table.withdraw(slots, FREE)
        slot_class.free += len(slots)
        slot_class.allowance -= len(slots)
        slot_class.compare_in -= len(slots)
        self.evicted_pages += len(slots)

    def _coldest_elsewhere(self, slot_class: SlotClass, need_bytes: int) -> tuple[Segment, ...]:
        """Segments of other classes to give up for this one: pages that were used before those that it would evict
        from itself. A class that has none to evict gets room in any case."""
        if len(self._classes) == 1:
            return ()
        others = [s for s in self._segments if s.record_bytes != slot_class.record_bytes]
        has_pages = len(self._sample(slot_class.segments)) > 0
        if has_pages and slot_class.compare_in > 0:
            return ()
        slot_class.compare_in = slot_class.slots // _EVICT_PART
        self._set_threshold(slot_class, 1)
        ages = sorted(((self._mean_tick(s), s.id, s) for s in others if self._can_drop(s)), key=lambda age: age[:2])
        drop: list[Segment] = []
        for tick, _, segment in ages:
            if need_bytes <= 0 or (has_pages and tick >= slot_class.threshold[0]):
                break
            drop.append(segment)
            need_bytes -= segment.size_bytes
        return tuple(drop) if need_bytes <= 0 or not has_pages else ()

    def _can_drop(self, segment: Segment) -> bool:
        states = self._table.states[segment.base : segment.end]
        busy = np.isin(states, (TAKEN, LEAVING, ERASING)) | (self._table.pins[segment.base : segment.end] > 0)
        return not busy.any()

    def _mean_tick(self, segment: Segment) -> float:
        """Of its live pages; -1 where there are none."""
        slots = self._sample([segment], 256)
        return float(self._table.ticks[slots].mean()) if len(slots) else -1.0

"""What keeps a journal short and its recency fresh, on a thread that nobody waits for.

The journal is told of uses in batches, since to tell it of each would double every read's work: a kill loses the uses
of the last moments, and no page. When a journal has twice as many entries as there are pages, those that count are
copied into a new one, a few thousand under the lock at a time, while writes go on into both.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from headrace.kvcache.storage.disk.entries import Entries
from headrace.kvcache.storage.disk.files import say
from headrace.kvcache.storage.disk.hashing import I64
from headrace.kvcache.storage.disk.journal import Journal
from headrace.kvcache.storage.disk.segments import Segments
from headrace.kvcache.storage.disk.spaces import Spaces
from headrace.kvcache.storage.disk.table import LEAVING, LIVE, TAKEN, PageTable

log = logging.getLogger(__name__)

MAX_UNSAVED: Final = 8192
"""Uses that a kill may lose."""
SPARE_ENTRIES: Final = 1024
RETRY_S: Final = 10.0
_SLICE: Final = 8192
"""Slots looked at under the lock at a time: some 200 µs."""


class Upkeep:
    """Housekeeping of one store, whose lock, index and journal it shares."""

    def __init__(
        self,
        lock: threading.Lock,
        table: PageTable,
        segments: Segments,
        spaces: Spaces,
        journal: Journal,
        clock_s: Callable[[], float],
    ) -> None:
        self._lock = lock
        self._table = table
        self._segments = segments
        self._spaces = spaces
        self._journal = journal
        self._clock_s = clock_s
        self._not_before_s = 0.0
        self._doing = threading.Lock()
        self.unsaved = 0
        """Uses since the journal was last told, roughly."""

    @property
    def due(self) -> bool:
        return (self.unsaved >= MAX_UNSAVED or self._is_long) and self._clock_s() >= self._not_before_s

    @property
    def _is_long(self) -> bool:
        return self._journal.entries > 2 * self._table.pages + SPARE_ENTRIES

    def tidy(self) -> None:
        """Tell the journal of what was used, and write it anew if it is long. A failure is tried again later."""
        with self._doing:
            try:
                self._save_uses()
                if self._is_long:
                    self.compact()
            except OSError as error:
                self._not_before_s = self._clock_s() + RETRY_S
                log.warning("the journal of the disk cache could not be tidied: %s", say(error))

    def compact(self) -> None:
        """Write the journal anew. Raises OSError: then the old one goes on."""
        self._journal.begin_compaction()
        try:
            with self._lock:
                self._spaces.forget_all_but(self._spaces_in_use())
                spaces = self._spaces.entries()
            copied = self._journal.copy(spaces)
            for start, end in self._slices():
                with self._lock:
                    slots = start + np.flatnonzero(self._table.states[start:end] == LIVE)
                    entries = self.entries(slots)
                copied = copied and self._journal.copy(entries)
            # Once more: without its namespace a page does not count, so one damaged entry must not lose them all.
            if not (copied and self._journal.copy(spaces) and self._journal.end_compaction()):
                raise OSError(errno.EIO, "writes could not be entered into the new one")
        finally:
            self._journal.abandon_compaction()

    def entries(self, slots: I64) -> Entries:
        """What the journal should say of these slots. Under the lock."""
        entries = self._table.entries(slots)
        entries["segment"], entries["slot"] = self._segments.place(slots)
        return entries

    def _save_uses(self) -> None:
        self.unsaved = 0
        for start, end in self._slices():
            with self._lock:
                used = self._table.unsaved[start:end]
                if not used.any():
                    continue
                slots = start + np.flatnonzero(used & (self._table.states[start:end] == LIVE))
                used[:] = False
                entries = self.entries(slots)
            self._journal.append(entries)

    def _slices(self) -> list[tuple[int, int]]:
        """Of all slots that have numbers now. A segment that comes later brings its own entries."""
        with self._lock:
            ranges = [(segment.base, segment.end) for segment in self._segments]
        return [(at, min(at + _SLICE, end)) for start, end in ranges for at in range(start, end, _SLICE)]

    def _spaces_in_use(self) -> I64:
        states = self._table.states
        parts = [
            np.unique(self._table.spaces[s.base : s.end][np.isin(states[s.base : s.end], (TAKEN, LIVE, LEAVING))])
            for s in self._segments
        ]
        return np.unique(np.concatenate(parts)).astype(np.int64) if parts else np.zeros(0, np.int64)

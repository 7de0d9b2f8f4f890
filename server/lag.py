"""How long the loop is held, and the garbage collector kept from holding it.

in     the loop's own clock; the collector's callbacks; whether requests are being answered
out    histograms and maxima for `/metrics`
state  when the next tick is due, the longest lag since the last scrape; the collector's thresholds
owner  itself; `run` is a stage of the server
ready  at once
end    `run` is cancelled: automatic collection is on again

A tick is due every `TICK_S` while requests are being answered, and every `IDLE_S` while none is. How late it comes is
how long a client's event may have waited for its turn: the lag. It costs 8 µs a tick, 0.2 % of the loop.

The collector runs by itself after 700 new objects, and now and then over all objects: 18 ms for 100,000. So it is
switched off, and the tick calls it: for the young objects after `YOUNG_OBJECTS` (they are few, and most are dead), and
for all of them when nobody waits, or after ten minutes without a break. What survives that is frozen: no later
collection looks at it again.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Final, Literal

from headrace.server.metrics import Metrics

TICK_S: Final = 0.005
IDLE_S: Final = 0.25
YOUNG_OBJECTS: Final = 5_000
"""A collection of so many takes 0.3 ms."""
MIDDLE_COLLECTIONS: Final = 8
"""Of the young, before what has survived them is collected."""
MOST_OBJECTS: Final = 50_000
"""More young ones, which a large request makes between two ticks, would hold the loop for 1.5 ms and longer: they are
frozen unseen, and looked at when nobody waits."""
LONGEST_S: Final = 600.0
"""A server that is never quiet collects everything all the same, so that its memory stays flat; it shows as lag."""
QUIET_TICKS: Final = 4
"""Idle ticks, a second in all, before a collection of everything."""


class LagProbe:
    """One server's."""

    def __init__(self, metrics: Metrics, busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        """`busy`: whether a request is being answered."""
        self._metrics = metrics
        self._busy = busy
        self._clock = clock
        self._began_s = 0.0
        self._quiet = 0
        self._dirty = False
        self._unseen = False
        """Garbage may be frozen."""
        self._collected_s = 0.0

    async def run(self) -> None:
        """Tick until cancelled."""
        self._collected_s = self._clock()
        gc.callbacks.append(self._collecting)
        gc.disable()
        try:
            while True:
                period_s = TICK_S if self._busy() else IDLE_S
                due_s = self._clock() + period_s
                await asyncio.sleep(period_s)
                # uvloop counts whole milliseconds, and may be half of one early.
                self._metrics.lag(max(0.0, self._clock() - due_s))
                self._collect()
        finally:
            gc.enable()
            gc.callbacks.remove(self._collecting)

    def _collect(self) -> None:
        young, middle, _ = gc.get_count()
        if self._busy():
            self._quiet, self._dirty = 0, True
            if self._clock() - self._collected_s > LONGEST_S:
                self._collect_all()
            elif young > MOST_OBJECTS:
                gc.freeze()
                self._unseen = True
            elif young >= YOUNG_OBJECTS:
                gc.collect(1 if middle >= MIDDLE_COLLECTIONS else 0)
            return
        self._quiet += 1
        if self._dirty and self._quiet >= QUIET_TICKS:
            self._dirty = False
            self._collect_all()

    def _collect_all(self) -> None:
        if self._unseen:
            gc.unfreeze()
            self._unseen = False
        gc.collect()
        gc.freeze()
        self._collected_s = self._clock()

    def _collecting(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = self._clock()
        else:
            self._metrics.collected(info["generation"], self._clock() - self._began_s)

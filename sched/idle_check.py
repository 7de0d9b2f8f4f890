"""The integrity check of a serving engine: in slices, while nothing runs. A violation is an alarm, never the end.

in     launched steps; "nothing runs now" once a second
out    a metric and a log line with the evidence: what, which page, the counts, the last steps
state  whether anything was launched since the last check, the last steps, alarms so far
owner  the engine, whose `watch` stage awaits `check`
ready  a check counts when it has seen everything with nothing changed in between; else it is made again
end    with the engine

One slice is `kvcache.integrity.RUN_NODES` nodes of the index, 0.3 ms; the last ones look at a whole pool's owner bytes,
1 ms at 100k pages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from headrace.kvcache.cache import KvCache

log = logging.getLogger(__name__)

STEPS_KEPT: Final = 16
"""In the log of an alarm."""


class _Step(NamedTuple):
    step: int
    decode_rows: int
    prefill_tokens: int

    def __str__(self) -> str:
        return f"{self.step}: {self.decode_rows} decode rows, {self.prefill_tokens} prefill tokens"


class IdleCheck:
    """One engine's."""

    def __init__(self, cache: KvCache, check_lists: Callable[[], None], busy: Callable[[], bool]) -> None:
        """`check_lists` looks at what is not about pages; while `busy` nothing is checked."""
        self.alarms = 0
        self._cache = cache
        self._check_lists = check_lists
        self._busy = busy
        self._steps: deque[_Step] = deque(maxlen=STEPS_KEPT)
        self._due = False

    def launched(self, step: int, decode_rows: int, prefill_tokens: int) -> None:
        """Something will have changed."""
        self._steps.append(_Step(step, decode_rows, prefill_tokens))
        self._due = True

    async def check(self) -> None:
        """Look at everything that was launched since the last time, giving way to the loop after each slice."""
        if not self._due or self._busy():
            return
        begun = self._cache.changes
        try:
            self._check_lists()
            for _ in self._cache.checking():
                await asyncio.sleep(0)
                if self._busy() or self._cache.changes != begun:
                    return
        except Exception as violation:
            # Whatever it is: a state so broken that looking at it fails is a violation too.
            self._raise_alarm(violation)
        self._due = False

    def _raise_alarm(self, violation: Exception) -> None:
        self.alarms += 1
        what = str(violation) or f"{type(violation).__name__} in {_where(violation)}"
        steps = "; ".join(map(str, self._steps))
        log.critical("integrity check failed: %s; %s; the last steps: %s", what, self._cache.stats(), steps)


def _where(error: Exception) -> str:
    """The line that failed: most checks are an `assert` that says it all."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_name}, line {trace.tb_lineno}"

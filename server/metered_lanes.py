"""The grammar worker's lanes, and what each job of theirs takes of a core.

in     jobs, with what they may take
out    their results; who has taken too much
state  the clocks of the jobs that run
owner  the worker's main thread; a lane's thread sets the clock of its own job, once
ready  `check` says
end    with the process
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.kvcache.storage.service import Lanes

T = TypeVar("T")


class _Meter:
    """One job's."""

    def __init__(self, limit_s: float, spent: Callable[[], None]) -> None:
        self.limit_s = limit_s
        self.spent = spent
        self._begun: tuple[int, float] | None = None
        """The clock of the thread that runs it, and what it said then."""

    def begin(self) -> None:
        """Called from the thread that runs the job."""
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._begun = clock, time.clock_gettime(clock)

    @property
    def is_over(self) -> bool:
        return self._begun is not None and time.clock_gettime(self._begun[0]) - self._begun[1] > self.limit_s


class MeteredLanes:
    """A `Lane` over lanes that know no limit. Time of a core counts: a busy machine makes no grammar bad."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._meters: list[_Meter] = []

    @property
    def running(self) -> bool:
        """Whether a job with a limit is not done."""
        return bool(self._meters)

    def submit(
        self, job: Callable[[], T], done: Callable[[T], None], limit_s: float | None, spent: Callable[[], None]
    ) -> None:
        if limit_s is None:
            self._lanes.submit(job, done)
            return
        meter = _Meter(limit_s, spent)
        self._meters.append(meter)

        def run() -> T:
            meter.begin()
            return job()

        def ended(result: T) -> None:
            if meter in self._meters:
                self._meters.remove(meter)
            done(result)

        self._lanes.submit(run, ended)

    def check(self) -> None:
        """Tell of every job that has taken too much, once."""
        for meter in [meter for meter in self._meters if meter.is_over]:
            self._meters.remove(meter)
            meter.spent()

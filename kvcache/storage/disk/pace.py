"""A bound on read bandwidth, for a disk that is shared with others.

in     bytes that a lane has just read
out    that lane sleeps until the bound allows them
state  the time up to which the bandwidth is spent
owner  all lanes, under one lock
ready  at once
end    with the store
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """So many bytes a second, all lanes together; what was not used is not saved up."""

    def __init__(
        self,
        bytes_per_s: float,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """0 for no bound."""
        self._bytes_per_s = bytes_per_s
        self._clock_s = clock_s
        self._sleep = sleep
        self._spent_until_s = 0.0
        self._lock = threading.Lock()

    def spend(self, size_bytes: int) -> None:
        """Return when these bytes are within the bound."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = self._clock_s()
            self._spent_until_s = max(now_s, self._spent_until_s) + size_bytes / self._bytes_per_s
            wait_s = self._spent_until_s - now_s
        self._sleep(wait_s)

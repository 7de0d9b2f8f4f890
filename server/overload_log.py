"""What the log is told of requests that are answered 503: at most one line a second.

in     refusals
out    the first one's line at once; after that a line a second that counts the others
state  how many came since the last line, and the last of them
owner  the middleware
ready  at once
end    `close` tells what has not been told

An overloaded server refuses thousands of requests a second: a line for each would take more of the loop than they do,
and bury everything else.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

_log = logging.getLogger("headrace.http")

PERIOD_S: Final = 1.0


class OverloadLog:
    """One server's."""

    def __init__(self) -> None:
        self._untold = 0
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None

    def refused(self, line: str) -> None:
        """A request was answered 503."""
        if self._timer is None:
            _log.warning("%s", line)
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._pass_period)
        else:
            self._untold += 1
            self._last = line

    def close(self) -> None:
        """The server is about to end."""
        if self._timer is not None:
            self._timer.cancel()
        self._tell()

    def _tell(self) -> None:
        if self._untold:
            _log.warning("503 for %d more requests within %g s, the last: %s", self._untold, PERIOD_S, self._last)
            self._untold = 0

    def _pass_period(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._pass_period) if self._untold else None
        self._tell()

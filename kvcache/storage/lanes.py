"""A lane without a thread: a call runs when it is submitted, its result is delivered when it is asked for.

For stores that never block, and for tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class InlineLanes:
    """`Lanes` whose calls run at once, in the caller's thread."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._ended: deque[Callable[[], None]] = deque()

    @property
    def idle(self) -> int:
        return self.count - len(self._ended)

    def submit(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        assert self.idle, "more calls than lanes"
        result = job()
        self._ended.append(lambda: done(result))

    def deliver(self) -> bool:
        """Hand out the results that wait, and those of the calls that this starts. Whether there were any."""
        some = bool(self._ended)
        while self._ended:
            self._ended.popleft()()
        return some

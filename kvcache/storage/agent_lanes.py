"""The agent's I/O threads.

in     calls that may block
out    their results, on the thread that asks for them
state  the threads, results that have not been fetched
owner  the agent's main thread; a lane thread touches nothing but its call and the two queues
ready  `wake` becomes readable when a result is there
end    `close`, after the last call

A waiting lane costs nothing, and a call that waits for the device holds no lock of the interpreter.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class ThreadLanes:
    """`Lanes` of so many threads."""

    def __init__(self, count: int, wake: int) -> None:
        """`wake`: an eventfd that is written to with every result."""
        self.count = count
        self._wake = wake
        self._running = 0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended: deque[Callable[[], None]] = deque()
        self._threads = [threading.Thread(target=self._run, name=f"lane-{lane}", daemon=True) for lane in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def idle(self) -> int:
        return self.count - self._running

    def submit(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        assert self.idle, "more calls than lanes"
        self._running += 1

        def run() -> None:
            result = job()
            self._ended.append(lambda: done(result))

        self._jobs.put(run)

    def deliver(self) -> bool:
        """Hand out the results that are there. Whether there were any."""
        some = bool(self._ended)
        while self._ended:
            ended = self._ended.popleft()
            self._running -= 1
            ended()
        return some

    def close(self) -> None:
        """End the threads. Every result has been delivered."""
        assert not self._running
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (run := self._jobs.get()) is not None:
            run()
            os.eventfd_write(self._wake, 1)

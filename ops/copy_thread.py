"""A CPU's copies to the host, made beside its steps by a thread of their own.

What is copied is full, filled by steps that have completed, and stays as it is until the copy is acknowledged. So a
copy needs no order among the steps that run meanwhile; what it must not do is to delay them. It lets others have its
core every 20 µs (`kv_copy.RUN_BYTES`): with as many of the model's threads as cores it takes what those leave. It holds
the interpreter's lock for some 20 µs, and is one foreign call. And none begins while a step brings pages from the host.

The thread has no lower priority than others. With the lowest, giving way every 2 µs, steps of two threads on two cores
were delayed by 0.3 ms at most, and not by 0.9; but where other programs kept the cores busy no copy was ever made.

in     work, events of the worker's other streams
out    events
state  work that is not done yet, what has failed
owner  the worker's main thread gives work and asks; the thread does it, in order
ready  when `query` of an event that was recorded behind the work says so
end    `close`, which waits for the copy that is being made and gives up the others
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Final

import torch

from headrace.ops.streams import Event, Streams, Unseen, in_order_streams

LOOK_S: Final = 1e-3
"""How often a worker that has nothing else to do looks whether a copy has been made: it takes 1 to 4 ms."""


def cpu_streams() -> Streams:
    """Steps and loads in the caller's thread, copies to the host beside them. For a worker, which closes them."""
    copies = CopyThread()
    return in_order_streams()._replace(backup=copies, held=copies.held, close=copies.close, look_s=LOOK_S)


class CopyEvent:
    """A place in the thread's work."""

    def __init__(self, thread: CopyThread) -> None:
        self._thread = thread
        self._done_s: float | None = None

    def query(self) -> bool:
        # In this order: what failed after the event does not concern it.
        problem = self._thread.problem
        if self._done_s is None and problem is not None:
            raise problem
        return self._done_s is not None

    def ms_until(self, later: Event) -> float:
        assert isinstance(later, CopyEvent) and later._done_s is not None and self._done_s is not None
        return (later._done_s - self._done_s) * 1e3

    def happen(self) -> None:
        """All before it is done."""
        self._done_s = time.perf_counter()


class CopyThread(Unseen):
    """A stream; its thread begins with the first work."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        """What work has raised; nothing is done after that."""
        # Those of the process: the model's threads are each bound to one later.
        self._cores = os.sched_getaffinity(0)
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._may_begin = threading.Event()
        self._may_begin.set()
        self._closed = False

    def run(self, work: Callable[[], object]) -> None:
        assert not self._closed, "the worker has ended"
        if self._thread is None:
            self._thread = threading.Thread(target=self._do_work, name="copies", daemon=True)
            self._thread.start()
        self._work.put(work)

    def record(self) -> CopyEvent:
        event = CopyEvent(self)
        self.run(event.happen)
        return event

    def wait(self, event: Event) -> None:
        # The other streams are the caller's thread: it does what the event waits for.
        assert event.query(), "a copy waits for what nobody has done"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile no work begins; what has begun goes on."""
        self._may_begin.clear()
        try:
            yield
        finally:
            self._may_begin.set()

    def close(self) -> None:
        """Harmless twice."""
        self._closed = True
        if self._thread is not None:
            self._work.put(lambda: None)
            self._may_begin.set()
            self._thread.join()

    def _do_work(self) -> None:
        try:
            os.sched_setaffinity(threading.get_native_id(), self._cores)
            # Both are a thread's own: torch would start a team for this one, and refuse to write to the pools.
            torch.set_num_threads(1)
            with torch.inference_mode():
                while True:
                    work = self._work.get()
                    self._may_begin.wait()
                    if self._closed:
                        return
                    work()
        except Exception as problem:
            self.problem = problem

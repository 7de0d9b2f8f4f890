"""Streams that take their time: work of each is done in its order, but how far each has got is drawn from a seed.

Each stream is a thread, for the sake of its stack only: exactly one thread runs at a time, and hands over to the next
one at every operation, wait and event. So work can stop in the middle of a step, as it does on a device. Time passes
when the host gives work to a stream or asks for an event.

Between them stands `happens_before`: every operation is checked against what others have done to the same places.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import torch
from ops.frozen_work import frozen
from ops.happens_before import Accesses, Clock

from headrace.ops.streams import Event, Operation, Region, Streams

HOST = "host"


class FakeDevice:
    """Three streams, and the host among the actors. As a context manager, so that no thread outlives the test."""

    def __init__(self, seed: int) -> None:
        self.accesses = Accesses()
        self.trace: list[str] = []
        """Names of operations, in the order in which they were done."""
        self.ticks = 0
        self.clock = Clock()
        """What the host knows."""
        self._rng = np.random.default_rng(seed)
        names = ("compute", "load", "backup")
        # Far apart, so that with some seed each stream is far behind each of the others.
        self._weights = 10.0 ** self._rng.permutation([0, 1, 2])
        self._pace = int(self._rng.choice([1, 3, 30]))
        self._all = [FakeStream(self, name) for name in names]
        self.compute, self.load, self.backup = self._all
        self.streams = Streams(self.compute, self.load, self.backup, self, frozen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._all:
            stream.close()

    def host_uses(self, name: str, reads: Sequence[Region] = (), writes: Sequence[Region] = ()) -> None:
        """The host, or whoever acts on its word, touches memory itself."""
        self.accesses.note(HOST, self.clock, Operation(name, reads, writes))

    def uses(self, operation: Callable[[], Operation]) -> None:
        """The host's, as the worker declares it."""
        described = operation()
        self.trace.append(described.name)
        self.accesses.note(HOST, self.clock, described)

    def pass_time(self, event: FakeEvent | None = None) -> None:
        """Let streams go on for a while. Raises AssertionError if nothing can, though somebody waits for `event`."""
        for _ in range(int(self._rng.integers(0 if event is None else 1, self._pace + 1))):
            ready = [at for at, stream in enumerate(self._all) if stream.ready]
            if not ready:
                wanted = event is not None and event.known is None and event.stream.problem is None
                assert not wanted, f"nothing can go on: {self.trace[-5:]}"
                return
            weights = self._weights[ready]
            self._all[self._rng.choice(ready, p=weights / weights.sum())].go_on()
            self.ticks += 1


class FakeEvent:
    """Done when its stream has got there."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.known: Clock | None = None
        """What the stream knew when it got there."""
        self._ticks = 0

    def query(self) -> bool:
        """Takes a while; raises what stopped the stream before it got here."""
        if self.known is None:
            if self.stream.problem is not None:
                raise self.stream.problem
            self.stream.device.pass_time(self)
        if self.known is None:
            return False
        self.stream.device.clock.learn(self.known)
        return True

    def ms_until(self, later: Event) -> float:
        assert isinstance(later, FakeEvent) and self.known is not None and later.known is not None
        return float(later._ticks - self._ticks)

    def happen(self, clock: Clock) -> None:
        self.known, self._ticks = clock.copy(), self.stream.device.ticks


class _Closed(BaseException):
    """Ends a stream's thread wherever it is."""


class FakeStream:
    """One stream. What it is told from within its own work it does at once, all else goes to the end of its queue."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.problem: Exception | None = None
        """What its work raised; it does nothing after that."""
        self._clock = Clock()
        self._queue: deque[tuple[Clock, Callable[[], object]]] = deque()
        self._at_work = False
        self._awaited: FakeEvent | None = None
        self._closing = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        self._stopped.acquire()

    # What the worker calls

    def run(self, work: Callable[[], object]) -> None:
        self._do(work)

    def record(self) -> FakeEvent:
        event = FakeEvent(self)
        self._do(lambda: event.happen(self._clock))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self._do(lambda: self._wait(event))

    def uses(self, operation: Callable[[], Operation]) -> None:
        self._do(lambda: self._use(operation))

    def _do(self, work: Callable[[], object]) -> None:
        if threading.current_thread() is self._thread:
            work()
            return
        assert threading.current_thread() is threading.main_thread(), "streams give no work to each other"
        self._queue.append((self.device.clock.copy(), work))
        self.device.pass_time()

    # Inside its thread

    def _work(self) -> None:
        # Both are a thread's own. With another number of threads sums may have other bits.
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                while True:
                    self._pause()
                    known, work = self._queue.popleft()
                    self._clock.learn(known)
                    self._at_work = True
                    work()
                    self._at_work = False
        except Exception as problem:
            self.problem = problem
        except _Closed:
            return
        self._stopped.release()

    def _pause(self) -> None:
        self._stopped.release()
        self._go.acquire()
        if self._closing:
            raise _Closed

    def _wait(self, event: FakeEvent) -> None:
        self._awaited = event
        self._pause()
        self._awaited = None
        if event.known is None:
            assert event.stream.problem is not None
            raise event.stream.problem
        self._clock.learn(event.known)

    def _use(self, operation: Callable[[], Operation]) -> None:
        self._pause()
        described = operation()
        self.device.trace.append(described.name)
        self.device.accesses.note(self.name, self._clock, described)

    # Outside it

    @property
    def ready(self) -> bool:
        """Whether it could go on."""
        if self.problem is not None:
            return False
        if self._awaited is not None:
            return self._awaited.known is not None or self._awaited.stream.problem is not None
        return self._at_work or bool(self._queue)

    def go_on(self) -> None:
        """Until its next operation, wait, or piece of work."""
        self._go.release()
        self._stopped.acquire()

    def close(self) -> None:
        self._closing = True
        self._go.release()
        self._thread.join(10)
        assert not self._thread.is_alive(), f"stream {self.name} did not end"

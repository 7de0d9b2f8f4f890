"""Streams and events: what orders the work of a device worker, on any device.

A worker has three streams. Work in one of them runs in the order in which it was given; between two of them nothing is
ordered but by events: whoever uses what another stream makes waits for an event recorded behind it.

    load      copy layer 0 ─ e0 ─ copy layer 1 ─ e1 ─ …
    compute   embed ─ wait e0 ─ layer 0 ─ wait e1 ─ layer 1 ─ … ─ logits ─ sample ─ done
    backup                                                          wait done ─ copy pages

The host, which gives out the work, is ordered behind what it has seen an event say, and only then tells the server;
so nothing that the server sends because of a reply needs another wait.

On a CPU compute and load are one thread. Steps run in the moment they are given; a load is put off until somebody asks
for its event: right before its layer, while its bytes will still be in the cache. Nothing overlaps there, and nothing
is lost: what a wait costs is a call. Copies to the host are made beside it (`copy_thread`).

in     work, events to wait for
out    events
state  what nobody has waited for yet
owner  the worker's main thread
ready  when `query` of an event that was recorded behind the work says so
end    with the worker
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple, Protocol, TypeAlias

from headrace.ops.wire import I32

LOOK_S: Final = 50e-6
"""How often events are looked at while a device computes."""


class Region(NamedTuple):
    """A part of some memory: pages of a pool in one layer, slots of the ring."""

    memory: str
    layer: int
    """0 where memory has no layers."""
    places: Sequence[int] | I32


class Operation(NamedTuple):
    """A kernel or a copy, and what it touches."""

    name: str
    reads: Sequence[Region]
    writes: Sequence[Region]


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether all work before it is done. May raise what that work raised."""

    def ms_until(self, later: Event) -> float:
        """Between two events that `query` has said are done."""


class Actor(Protocol):
    """Whoever touches memory."""

    def uses(self, operation: Callable[[], Operation]) -> None:
        """Declares what it does next. Devices don't ask; streams that check the order of things do."""


class Stream(Actor, Protocol):
    """Work in order. What is called from inside work of the same stream happens there and then."""

    def run(self, work: Callable[[], None]) -> None:
        """May raise what `work` raises; or else `query` of a later event does."""

    def record(self) -> Event:
        """An event behind all work so far."""

    def wait(self, event: Event) -> None:
        """Work from here on begins when `event`, of any stream, is done."""


Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Work of the compute stream that will be done again and again → what does it once. A device may run the work now, and
keep nothing of it but operations on the same memory: later runs see other bytes, and all else as it was."""


class Unseen:
    """Of whom nobody asks what it does."""

    def uses(self, operation: Callable[[], Operation]) -> None:
        pass


class Streams(NamedTuple):
    """The streams of one worker."""

    compute: Stream
    load: Stream
    backup: Stream
    host: Actor = Unseen()
    """The worker's thread, where it touches memory that streams touch too."""
    capture: Capture = lambda work: work
    held: Callable[[], AbstractContextManager[None]] = nullcontext
    """While a step's loads come in the host's own time no copy to the host begins."""
    look_s: float = LOOK_S
    """How often the host should ask for events while it has nothing else to do."""
    close: Callable[[], None] = lambda: None
    """Nothing is given to them any more."""


def in_order_streams() -> Streams:
    """All in the caller's thread: steps at once, copies when they are waited for."""
    return Streams(CpuStream(at_once=True), CpuStream(at_once=False), CpuStream(at_once=False))


class CpuEvent:
    """What puts off work does it when it is asked for."""

    def __init__(self, stream: CpuStream) -> None:
        self._stream = stream
        self._done_s: float | None = None

    def query(self) -> bool:
        while self._done_s is None:
            self._stream.run_next()
        return True

    def ms_until(self, later: Event) -> float:
        assert isinstance(later, CpuEvent) and later._done_s is not None and self._done_s is not None
        return (later._done_s - self._done_s) * 1e3

    def happen(self) -> None:
        """All before it is done."""
        self._done_s = time.perf_counter()


class CpuStream(Unseen):
    """Work of one thread, at once or put off."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._put_off: deque[Callable[[], object]] = deque()

    def run(self, work: Callable[[], object]) -> None:
        if self._at_once:
            work()
        else:
            self._put_off.append(work)

    def record(self) -> CpuEvent:
        event = CpuEvent(self)
        self.run(event.happen)
        return event

    def wait(self, event: Event) -> None:
        self.run(event.query)

    def run_next(self) -> None:
        """One piece of what was put off."""
        self._put_off.popleft()()

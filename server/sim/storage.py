"""The storage agent in virtual time: the real service over the memory store, behind a seeded link.

The store outlives the agents that open it, as a disk does. A command takes its time before it acts: a fixed latency,
and for reads and writes so much a page. A cancellation acts at once, on what waits: as with the real agent, what is
under way is not stopped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import xxhash

from headrace.kvcache.storage.lanes import InlineLanes
from headrace.kvcache.storage.memory import MemoryStore
from headrace.kvcache.storage.page_store import Got, PageRun, Put
from headrace.kvcache.storage.protocol import Cancel, OpenStore, Read, Write, command_decoder, encoder
from headrace.kvcache.storage.service import StorageService
from headrace.ops.transport import Transport
from headrace.server.sim.transport import SimLink, SimServer


class StorageTimes(msgspec.Struct, frozen=True):
    """How long the simulated store takes."""

    latency_us: int = 100
    page_us: int = 100
    lanes: int = 4


class LastingStore(MemoryStore):
    """It outlives the agents that open it, as a disk does."""

    def close(self) -> None:
        return


class StoreFaults(msgspec.Struct, frozen=True):
    """How often a call of the store goes wrong, 0..1 each."""

    damages: float = 0.0
    """A page that is read has got one wrong byte, or is another's."""
    fails: float = 0.0
    """A read or a write ends with an error."""
    raises: float = 0.0
    """A bug: an exception."""
    slow: float = 0.0
    """A call takes a thousand times its time."""


class FaultyStore(LastingStore):
    """The memory store on bad memory: it keeps a checksum with each page, as the disk store does."""

    def __init__(self, capacity_bytes: int, rng: random.Random, faults: StoreFaults) -> None:
        super().__init__(capacity_bytes)
        self._rng = rng
        self._faults = faults
        self._sums: dict[tuple[int, bytes], int] = {}
        self.damaged = self.failed = self.raised = 0

    def get(self, run: PageRun, into: Sequence[memoryview]) -> Got:
        if self._happens(self._faults.raises):
            self.raised += 1
            raise OSError("a seeded bug of the store")
        if self._happens(self._faults.fails):
            self.failed += 1
            end = self._rng.randrange(len(into))
            begun = self._verified(run.part(0, end), into[:end])
            return begun._replace(message=begun.message or "a seeded error")
        if self._happens(self._faults.damages):
            self._damage(run, self._rng.randrange(len(into)))
        return self._verified(run, into)

    def _verified(self, run: PageRun, into: Sequence[memoryview]) -> Got:
        got = super().get(run, into)
        for index in range(got.good):
            key = (run.group, run.part(index, index + 1).keys)
            if not self.verifies(key, into[index]):
                self._drop(key)
                self._corrupt_pages += 1
                return Got(index, corrupt=1, message="the checksum is not the page's")
        return got

    def put(self, run: PageRun, source: Sequence[memoryview]) -> Put:
        if self._happens(self._faults.raises):
            self.raised += 1
            raise OSError("a seeded bug of the store")
        if self._happens(self._faults.fails):
            self.failed += 1
            kept = self._rng.randrange(len(source))
            put = self.put(run.part(0, kept), source[:kept]) if kept else Put()
            return Put((*put.dropped, *range(kept, len(source))), "a seeded error")
        for index, view in enumerate(source):
            key = (run.group, run.part(index, index + 1).keys)
            if key not in self._pages:
                self._sums[key] = xxhash.xxh3_64_intdigest(view)
        return super().put(run, source)

    def verifies(self, key: tuple[int, bytes], view: memoryview) -> bool:
        """Whether a page that was read is what was written."""
        return xxhash.xxh3_64_intdigest(view) == self._sums[key]

    def _damage(self, run: PageRun, index: int) -> None:
        key = (run.group, run.part(index, index + 1).keys)
        page = self._pages.get(key)
        if page is None:
            return
        self.damaged += 1
        if self._rng.random() < 0.5:
            # What the device reads lies at the beginning of a slot.
            at = self._rng.randrange(min(len(page.payload), 64))
            wrong = bytes([page.payload[at] ^ 1 << self._rng.randrange(8)])
            self._pages[key] = page._replace(payload=page.payload[:at] + wrong + page.payload[at + 1 :])
        else:
            other = self._rng.choice(list(self._pages.values()))
            self._pages[key] = other._replace(namespace=page.namespace)
            self._size_bytes += other.size_bytes - page.size_bytes

    def _happens(self, share: float) -> bool:
        return share > 0 and self._rng.random() < share


class SimAgent:
    """One life of the agent: a `StorageConnection`."""

    def __init__(
        self, link: SimLink, store: MemoryStore, host_pool: bytearray, times: StorageTimes, slow: float = 0.0
    ) -> None:
        self._link = link
        self._times = times
        self._slow = slow
        self._server = SimServer(link.loop, link.far, self._cost_ns, times.lanes, _is_cancel)
        lanes = InlineLanes()
        service = StorageService(
            lambda reply: self._server.reply(encoder.encode(reply)),
            memoryview(host_pool),
            lambda command: (store, lanes),
            lambda: link.loop.time_ns() / 1e6,
        )

        def handle(message: bytes) -> None:
            command = command_decoder.decode(message)
            if isinstance(command, Cancel):
                queued = self._server.withdraw(lambda other: _is_transfer(other, command.id))
                if queued is not None:
                    # All lanes are busy: it is accepted, and not begun.
                    lanes.count = 0
                    service.handle(command_decoder.decode(queued))
                    lanes.count = 1
            service.handle(command)
            lanes.deliver()
            if service.finished:
                link.far.close()

        self._server.serve(handle)

    @property
    def transport(self) -> Transport:
        return self._link.near

    @property
    def stopped(self) -> bool:
        return self._server.stopped

    def kill(self) -> None:
        self._link.far.kill("the storage agent ended with SIGKILL")

    def hang(self, duration_ns: int) -> None:
        self._link.far.hang(duration_ns)

    def close(self) -> None:
        self._link.near.close()
        self._server.stop()

    def _cost_ns(self, message: bytes) -> int:
        times, pages = self._times, 0
        match command_decoder.decode(message):
            case OpenStore():
                return 10_000_000
            case Read() | Write() as transfer:
                pages = len(transfer.host_pages)
            case _:
                pages = 0
        cost_us = times.latency_us + pages * times.page_us
        if self._slow and self._link.rng.random() < self._slow:
            cost_us *= 1000
        return int(cost_us * 1000 * (0.5 + self._link.rng.random()))


def _is_cancel(message: bytes) -> bool:
    return isinstance(command_decoder.decode(message), Cancel)


def _is_transfer(message: bytes, id: int) -> bool:
    command = command_decoder.decode(message)
    return isinstance(command, Read | Write) and command.id == id

"""The storage agent in virtual time: the real service over the memory store, behind a seeded link.

The store outlives the agents that open it, as a disk does. A command takes its time before it acts: a fixed latency,
and for reads and writes so much a page.
"""

from __future__ import annotations

import msgspec

from headrace.kvcache.storage.lanes import InlineLanes
from headrace.kvcache.storage.memory import MemoryStore
from headrace.kvcache.storage.protocol import OpenStore, Read, Write, command_decoder, encoder
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


class SimAgent:
    """One life of the agent: a `StorageConnection`."""

    def __init__(self, link: SimLink, store: MemoryStore, host_pool: bytearray, times: StorageTimes) -> None:
        self._link = link
        self._times = times
        self._server = SimServer(link.loop, link.far, self._cost_ns, times.lanes)
        lanes = InlineLanes()
        service = StorageService(
            lambda reply: self._server.reply(encoder.encode(reply)),
            memoryview(host_pool),
            lambda command: (store, lanes),
            lambda: link.loop.time_ns() / 1e6,
        )

        def handle(message: bytes) -> None:
            service.handle(command_decoder.decode(message))
            lanes.deliver()
            if service.finished:
                link.far.close()

        self._server.serve(handle)

    @property
    def transport(self) -> Transport:
        return self._link.near

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
        return int((times.latency_us + pages * times.page_us) * 1000 * (0.5 + self._link.rng.random()))

"""A storage agent that keeps the names of pages, not their bytes, and takes the time that a disk would.

in     commands of `kvcache.storage.protocol`, over a simulated link
out    its replies, in virtual time
state  transfers under way; stored keys by last use, in a `StoredKeys` that outlives the agent as a disk does
owner  the link's deliveries, and the channels' timers
ready  a page can be found when its write has been moved
end    `close`: nothing more is answered; what had been stored stays

Reads share one channel, writes another: n at a time get 1/n of the bandwidth each. Before its bytes move, an operation
waits for a latency drawn log-normally; a seeded few hang, and a seeded few reads find a damaged page.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import msgspec

from headrace.kvcache.storage.protocol import (
    KEY_BYTES,
    Cancel,
    Close,
    Command,
    Delete,
    Deleted,
    Found,
    Lookup,
    Opened,
    OpenStore,
    Read,
    ReadDone,
    Reply,
    Stats,
    StatsReply,
    StoreStats,
    Touch,
    Write,
    Written,
    command_decoder,
    encoder,
)
from headrace.ops.transport import Transport, TransportClosed
from headrace.server.sim.bandwidth import SharedBandwidth
from headrace.server.sim.transport import SimLink


class StoreTimes(msgspec.Struct, frozen=True):
    """How fast and how reliable the store is."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_us: float
    """Median, of every operation."""
    latency_sigma: float = 0.5
    """Of its logarithm: 0.5 makes the 99th of a hundred 3.2 times the median."""
    hang_rate: float = 0.0
    """Share of reads and writes that take `hang_s` more."""
    hang_s: float = 1.0
    error_rate: float = 0.0
    """Share of reads that find a damaged page."""


class StoredKeys:
    """What the store has: 16-byte keys in the order of their last use, each standing for a page."""

    def __init__(self, capacity_pages: int) -> None:
        self.capacity_pages = capacity_pages
        self.evicted_pages = 0
        # A plain dict looks for its first key past all that were deleted before it.
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def contains(self, keys: bytes) -> int:
        """How many are stored, from the first on."""
        known = self._keys
        for at in range(0, len(keys), KEY_BYTES):
            if keys[at : at + KEY_BYTES] not in known:
                return at // KEY_BYTES
        return len(keys) // KEY_BYTES

    def touch(self, keys: bytes) -> None:
        """From the end of a chain on, so that its beginning, on which the rest depends, goes last."""
        known = self._keys
        for at in range(len(keys) - KEY_BYTES, -1, -KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            if key in known:
                known.move_to_end(key)

    def add(self, keys: bytes) -> None:
        """Store them, evicting the longest unused."""
        known = self._keys
        for at in range(len(keys) - KEY_BYTES, -1, -KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            known[key] = None
            known.move_to_end(key)
        over = len(known) - self.capacity_pages
        for _ in range(over):
            known.popitem(last=False)
        self.evicted_pages += max(0, over)

    def drop(self, key: bytes) -> None:
        """Forget one."""
        self._keys.pop(key, None)


class CostStore:
    """One life of the agent: a `StorageConnection`."""

    def __init__(self, link: SimLink, keys: StoredKeys, times: StoreTimes, page_bytes: int) -> None:
        self._link = link
        self._loop = link.loop
        self._keys = keys
        self._times = times
        self._page_bytes = page_bytes
        self._reading = SharedBandwidth(link.loop, times.read_bytes_per_s)
        self._writing = SharedBandwidth(link.loop, times.write_bytes_per_s)
        self._transfers: dict[int, tuple[Read | Write, int, int]] = {}
        """By operation: the command, its number in its channel (0 before it has begun), and when it came."""
        link.far.open(lambda message: self._handle(command_decoder.decode(message)), lambda reason: self._stop())

    @property
    def transport(self) -> Transport:
        return self._link.near

    def close(self) -> None:
        self._stop()
        self._link.near.close()

    def _stop(self) -> None:
        self._reading.stop()
        self._writing.stop()
        self._transfers.clear()

    def _handle(self, command: Command) -> None:
        match command:
            case OpenStore():
                self._later(10_000_000, Opened(self._stats(), 10.0))
            case Lookup():
                self._later(self._latency_ns(), Found(command.id, self._keys.contains(command.keys)))
            case Read() | Write():
                self._transfers[command.id] = (command, 0, self._loop.time_ns())
                self._loop.call_later_ns(self._latency_ns() + self._hang_ns(), self._begin, command)
            case Cancel():
                self._cancel(command.id)
            case Touch():
                self._keys.touch(command.keys)
            case Delete():
                self._reply(Deleted(command.id, 0, 0, "a simulated store deletes nothing"))
            case Stats():
                self._later(self._latency_ns(), StatsReply(command.id, self._stats()))
            case Close():
                self._stop()
                self._link.far.close()

    def _begin(self, command: Read | Write) -> None:
        """Its latency is over: its bytes begin to move."""
        if command.id not in self._transfers:
            return
        _, _, came_ns = self._transfers[command.id]
        if isinstance(command, Read):
            good = self._keys.contains(command.keys)
            self._keys.touch(command.keys[: good * KEY_BYTES])
            corrupt = 0
            if good and self._link.rng.random() < self._times.error_rate:
                good, corrupt = self._link.rng.randrange(good), 1
                self._keys.drop(command.keys[good * KEY_BYTES : (good + 1) * KEY_BYTES])
            moved = self._reading.begin(good * self._page_bytes, lambda: self._read(command.id, good, corrupt))
        else:
            size_bytes = len(command.host_pages) * self._page_bytes
            moved = self._writing.begin(size_bytes, lambda: self._written(command))
        self._transfers[command.id] = (command, moved, came_ns)

    def _read(self, id: int, good: int, corrupt: int) -> None:
        command, _, came_ns = self._transfers.pop(id)
        missing = len(command.host_pages) - good - corrupt
        read_ms = (self._loop.time_ns() - came_ns) / 1e6
        self._reply(ReadDone(id, good, missing, corrupt, good * self._page_bytes, read_ms))

    def _written(self, command: Write) -> None:
        _, _, came_ns = self._transfers.pop(command.id)
        self._keys.add(command.keys)
        pages = len(command.host_pages)
        write_ms = (self._loop.time_ns() - came_ns) / 1e6
        self._reply(Written(command.id, pages, [], pages * self._page_bytes, write_ms))

    def _cancel(self, id: int) -> None:
        """What has been moved counts, as in an agent that cuts transfers into pieces."""
        if id not in self._transfers:
            return
        command, moved, came_ns = self._transfers.pop(id)
        pages, took_ms = len(command.host_pages), (self._loop.time_ns() - came_ns) / 1e6
        if isinstance(command, Read):
            stored = self._keys.contains(command.keys)
            good = int(stored * self._reading.cancel(moved)) if moved else 0
            self._reply(ReadDone(id, good, 0, 0, good * self._page_bytes, took_ms, "cancelled"))
        else:
            good = int(pages * self._writing.cancel(moved)) if moved else 0
            self._keys.add(command.keys[: good * KEY_BYTES])
            dropped = list(range(good, pages))
            self._reply(Written(id, good, dropped, good * self._page_bytes, took_ms, "cancelled"))

    def _latency_ns(self) -> int:
        times = self._times
        return int(times.latency_us * 1e3 * math.exp(self._link.rng.gauss(0.0, times.latency_sigma)))

    def _hang_ns(self) -> int:
        return int(self._times.hang_s * 1e9) if self._link.rng.random() < self._times.hang_rate else 0

    def _stats(self) -> StoreStats:
        pages = len(self._keys)
        return StoreStats(
            size_bytes=pages * self._page_bytes,
            capacity_bytes=self._keys.capacity_pages * self._page_bytes,
            pages=pages,
            evicted_pages=self._keys.evicted_pages,
        )

    def _later(self, delay_ns: int, reply: Reply) -> None:
        self._loop.call_later_ns(delay_ns, self._reply, reply)

    def _reply(self, reply: Reply) -> None:
        try:
            self._link.far.send(encoder.encode(reply))
        except TransportClosed:
            self._stop()  # nobody hears it any more

"""A device in the server's own process, in real time: for the oracle.

Each command is handled in a turn of the loop of its own, and each reply delivered in one, as with a real device; only
the process boundary is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.ops.transport import TransportClosed
from headrace.ops.wire import BatchRing, Command, Reply, command_decoder, encoder, reply_decoder

Handler = Callable[[Command], None]
MakeDevice = Callable[[BatchRing, Callable[[Reply], None]], Handler]
"""(ring, reply) → the state machine's `handle`."""


class LocalTransport:
    """The client's end. Messages are encoded and decoded, so that what a real pipe can't carry fails here too."""

    def __init__(self, ring: BatchRing, make_device: MakeDevice) -> None:
        self._loop = asyncio.get_running_loop()
        self._handle = make_device(ring, self._reply)
        self._on_message: Callable[[bytes], None] | None = None
        self._on_close: Callable[[str], None] | None = None
        self._closed = False

    def open(self, on_message: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        self._on_message, self._on_close = on_message, on_close

    def send(self, message: bytes) -> None:
        if self._closed:
            raise TransportClosed
        self._loop.call_soon(self._run, message)

    def close(self) -> None:
        self._closed = True

    def _run(self, message: bytes) -> None:
        if not self._closed:
            self._handle(command_decoder.decode(message))

    def _reply(self, reply: Reply) -> None:
        self._loop.call_soon(self._deliver, encoder.encode(reply))

    def _deliver(self, message: bytes) -> None:
        if not self._closed:
            assert self._on_message is not None
            reply_decoder.decode(message)
            self._on_message(message)


class LocalConnection:
    """A `Connection` to a device made by `make_device`."""

    pid = 0

    def __init__(self, ring: BatchRing, make_device: MakeDevice) -> None:
        self.ring = ring
        self.transport = LocalTransport(ring, make_device)

    def close(self) -> None:
        self.transport.close()

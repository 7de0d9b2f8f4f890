"""How two processes, or two state machines in one process, exchange messages.

A `Transport` carries whole messages of bytes, in order. In production it is one end of a SEQPACKET socket pair whose
other end a child process holds; in the server's process under test it may be a direct call; in simulation it is a
seeded queue that delays, drops and kills. Client and server code is the same in all three.

in     messages to send; packets that the socket holds
out    `on_message` per packet, inside the event loop's reader callback; `on_close` once
state  the socket and messages that it had no room for (bounded)
owner  the client that opened it; nobody else sends
ready  a message is whole when it arrives
end    `close`, or the peer's end of file: `on_close(reason)`, then nothing more
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

SOCKET_BUFFER_BYTES: Final = 4 << 20
MAX_BACKLOG_MESSAGES: Final = 4096


class TransportClosed(Exception):
    """The peer is gone; `on_close` has said why or is about to."""


class Transport(Protocol):
    """One end of an ordered, message-preserving connection."""

    def open(self, on_message: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        """Begin to receive. Both callbacks are plain functions: they change state, they do not wait."""

    def send(self, message: bytes) -> None:
        """Queue a message behind those sent before. Raises TransportClosed."""

    def close(self) -> None:
        """Stop at once, without `on_close`. Harmless twice."""


class SocketTransport:
    """A `Transport` over a non-blocking SEQPACKET socket in the running event loop."""

    def __init__(self, sock: socket.socket, max_message_bytes: int) -> None:
        sock.setblocking(False)
        _raise_buffers(sock)
        self._sock = sock
        self._max_message_bytes = max_message_bytes
        self._backlog: deque[bytes] = deque()
        self._loop = asyncio.get_running_loop()
        self._on_message: Callable[[bytes], None] | None = None
        self._on_close: Callable[[str], None] | None = None
        self._closed = False

    def open(self, on_message: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        assert self._on_message is None, "opened twice"
        self._on_message, self._on_close = on_message, on_close
        self._loop.add_reader(self._sock, self._readable)

    def send(self, message: bytes) -> None:
        assert len(message) <= self._max_message_bytes, f"a message of {len(message)} bytes must be cut by its sender"
        if self._closed:
            raise TransportClosed
        if self._backlog:
            self._keep(message)
            return
        try:
            self._sock.send(message)
        except BlockingIOError:
            self._keep(message)
            self._loop.add_writer(self._sock, self._writable)
        except OSError as error:
            self._lose(f"sending failed: {error}")
            raise TransportClosed from error

    def close(self) -> None:
        self._on_close = None
        self._shut()

    def _shut(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def drain(self) -> None:
        """Deliver what has arrived, without waiting for the loop: the last words of a peer that has ended."""
        if not self._closed:
            self._readable()

    def _keep(self, message: bytes) -> None:
        if len(self._backlog) >= MAX_BACKLOG_MESSAGES:
            self._lose(f"the peer has not read {MAX_BACKLOG_MESSAGES} messages")
            raise TransportClosed
        self._backlog.append(message)

    def _writable(self) -> None:
        try:
            while self._backlog:
                self._sock.send(self._backlog[0])
                self._backlog.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"sending failed: {error}")
            return
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        assert self._on_message is not None
        # Everything that is there is taken in one turn of the loop: a second turn would cost a slice of other work.
        while not self._closed:
            try:
                message = self._sock.recv(self._max_message_bytes)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"receiving failed: {error}")
                return
            if not message:
                self._lose("the other end closed")
                return
            self._on_message(message)

    def _lose(self, reason: str) -> None:
        if not self._closed:
            self._shut()
            self._loop.call_soon(self._report, reason)

    def _report(self, reason: str) -> None:
        if self._on_close is not None:
            self._on_close(reason)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected SEQPACKET ends: a message is received whole or not at all."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _raise_buffers(theirs)
    return ours, theirs


def _raise_buffers(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)

"""Server-sent events: one response that carries events until its end, to a client that may be slow or gone.

in     whole events, as bytes; the end
out    an HTTP response in the `text/event-stream` form; `Stalled` when the client did not read for `stall_s`
state  the response, and whether it has been opened
owner  the handler of the request
ready  `open` sends the headers; every `send` after it hands the bytes to the socket at once
end    `close`, or cancellation when the client has gone
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.http_writer import StreamWriter

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
SILENCE_S: Final = 10.0
"""After this long without an event a comment is sent: proxies cut connections that are silent for a minute."""


class Stalled(Exception):
    """The client has not read what was sent for longer than the time limit."""


class EventStream:
    """An SSE response in the making."""

    def __init__(self, request: web.Request, stall_s: float) -> None:
        self._request = request
        self._stall_s = stall_s
        self._writer: StreamWriter | None = None
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # nginx would otherwise collect events before it passes them on.
                "X-Accel-Buffering": "no",
            }
        )

    @property
    def opened(self) -> bool:
        """The status line is out: from now on errors are events."""
        return self._writer is not None

    async def open(self) -> None:
        writer = await self.response.prepare(self._request)
        assert isinstance(writer, StreamWriter)
        self._writer = writer

    async def send(self, events: bytes) -> None:
        """Write whole events. Raises Stalled, or ConnectionError when the client has gone."""
        writer = self._writer
        assert writer is not None, "opened before the first event"
        await writer.write(events, drain=False)
        if not writer.protocol.writing_paused:
            return
        try:
            async with asyncio.timeout(self._stall_s):
                await writer.drain()
        except TimeoutError:
            raise Stalled from None

    async def close(self, last_events: bytes) -> None:
        """The last events and the end of the response."""
        await self.send(last_events)
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write_eof()
        except TimeoutError:
            raise Stalled from None

    async def cut(self, last_events: bytes) -> None:
        """End a stalled stream: the last events go behind what the socket still holds, for a client that wakes up
        within another `stall_s`; then the connection is dropped, whatever it holds."""
        writer, transport = self._writer, self._request.transport
        assert writer is not None
        if transport is None:
            return
        await writer.write(last_events, drain=False)
        writer.set_eof()
        self._request.protocol.close()
        transport.close()  # flushes first, which a client that reads nothing would let take for ever
        asyncio.get_running_loop().call_later(self._stall_s, transport.abort)


class EventTemplate:
    """An event of which only one JSON string changes: 0.2 µs to fill, where encoding the whole takes 0.5."""

    _SLOT: Final = "\x00slot\x00"
    _ENCODED_SLOT: Final = msgspec.json.encode(_SLOT)

    def __init__(self, build: msgspec.Struct) -> None:
        """`build` holds `EventTemplate.slot()` where the string goes."""
        head, _, tail = msgspec.json.encode(build).partition(self._ENCODED_SLOT)
        assert tail, "the template has a slot"
        self._head = b"data: " + head
        self._tail = tail + b"\n\n"

    @classmethod
    def slot(cls) -> str:
        return cls._SLOT

    def fill(self, text: str) -> bytes:
        return self._head + msgspec.json.encode(text) + self._tail


def event(payload: msgspec.Struct | dict[str, object]) -> bytes:
    """One `data:` event. JSON holds no newline, so that one line is enough."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"

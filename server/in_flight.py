"""The HTTP requests that are being answered: how many, how much of their bodies is held, and when there are none left.

in     requests as they come and go; the bytes of their bodies
out    a refusal when there are too many or too much; `idle`, for a drain
state  one entry a request, with the bytes it holds
owner  the middleware enters and leaves; `read_body` adds bytes
ready  at once
end    an entry goes when its request has been answered, or its client has left
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web
from prometheus_client import Gauge

from headrace.server.errors import overloaded

MAX_REQUESTS: Final = 4096
"""More than run and wait in the engine: the rest are being read or tokenized."""
MAX_BODY_BYTES: Final = 256 << 20
"""Of all bodies together. They are held until their requests have been answered."""
_RETRY_AFTER_S: Final = 2


class InFlight:
    """The requests of one server."""

    def __init__(self, gauge: Gauge, max_requests: int = MAX_REQUESTS, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._gauge = gauge
        self._max_requests = max_requests
        self._max_body_bytes = max_body_bytes
        # By identity: aiohttp's requests have no hash.
        self._bytes: dict[int, int] = {}
        self._total_bytes = 0
        self._nobody = asyncio.Event()
        self._nobody.set()

    def __len__(self) -> int:
        return len(self._bytes)

    def enter(self, request: web.BaseRequest) -> None:
        """Raises ApiError 503."""
        if len(self._bytes) >= self._max_requests:
            raise overloaded(f"{len(self._bytes)} requests are being answered, which is all that may.", _RETRY_AFTER_S)
        self._bytes[id(request)] = 0
        self._nobody.clear()
        self._gauge.inc()

    def grow(self, request: web.BaseRequest, size_bytes: int) -> None:
        """More of a request's body has come. Raises ApiError 503."""
        if self._total_bytes + size_bytes > self._max_body_bytes:
            raise overloaded(f"Request bodies of {self._total_bytes} bytes are held, no more fit.", _RETRY_AFTER_S)
        self._bytes[id(request)] += size_bytes
        self._total_bytes += size_bytes

    def leave(self, request: web.BaseRequest) -> None:
        """No effect for one that never entered."""
        held_bytes = self._bytes.pop(id(request), None)
        if held_bytes is None:
            return
        self._total_bytes -= held_bytes
        self._gauge.dec()
        if not self._bytes:
            self._nobody.set()

    async def idle(self) -> None:
        """Returns when no request is being answered."""
        await self._nobody.wait()

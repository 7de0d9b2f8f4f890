"""Requests that arrive together begin one after the other: a few in each turn of the loop.

in     handlers that are about to read, tokenize and submit
out    their turn
state  how many have begun in this turn of the loop, and who waits, in the order of arrival
owner  the middleware
ready  when `begin` returns
end    with the server; a handler that is cancelled while it waits is passed over

64 clients that come in one instant are 64 handlers in one turn of the loop, up to a millisecond each: nobody else's
token would be sent for 20 ms.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

PER_TURN: Final = 4
"""A short prompt takes 0.3 ms to decode, tokenize and submit, the longest that is not given to a worker 1 ms."""


class Turns:
    """One server's."""

    def __init__(self) -> None:
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def begin(self) -> None:
        """Wait for a turn in which not too many have begun."""
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next)
        if self._begun < PER_TURN and not self._waiting:
            self._begun += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < PER_TURN:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._begun += 1
        self._scheduled = self._begun > 0
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next)

"""What the tests of the link and of its far side have in common."""

from __future__ import annotations

import random
from collections.abc import Callable

from headrace.server.sim.transport import SimEnd
from headrace.server.sim.virtual_loop import running_loop

MS = 1_000_000


def fixed(delay_ns: int) -> Callable[[random.Random], int]:
    return lambda rng: delay_ns


def scattered(rng: random.Random) -> int:
    return rng.randrange(10 * MS)


class Heard:
    """What an end's owner was told, with the time in ns."""

    def __init__(self, end: SimEnd, on_message: Callable[[bytes], None] | None = None) -> None:
        self.messages: list[tuple[int, bytes]] = []
        self.closings: list[tuple[int, str]] = []
        self._and_then = on_message
        end.open(self._message, self._close)

    @property
    def texts(self) -> list[bytes]:
        return [message for _, message in self.messages]

    def _message(self, message: bytes) -> None:
        assert not self.closings, "a message after the stream's end"
        self.messages.append((running_loop().time_ns(), message))
        if self._and_then is not None:
            self._and_then(message)

    def _close(self, reason: str) -> None:
        self.closings.append((running_loop().time_ns(), reason))


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]

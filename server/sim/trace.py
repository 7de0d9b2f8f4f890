"""What happened in a simulated run, line by line, and a hash of it all: two runs compare by 16 bytes.

in     a kind and details, from whoever has something to tell; the virtual time is added
out    the digest and the number of all lines; the last lines themselves
state  a running xxh3-128, a count, the newest `keep` lines
owner  whoever made it; it is only ever appended to
ready  a line counts when `record` returns
end    with its owner; it holds no resource
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec
import xxhash

Detail: TypeAlias = int | float | str | bytes | None
Line: TypeAlias = tuple[int, str, tuple[Detail, ...]]

DEFAULT_KEEP: Final = 10_000

_encode: Final = msgspec.msgpack.Encoder().encode


class Trace:
    """A line is `(virtual ns, kind, details)`; details are plain values, whose encoding depends on nothing else."""

    def __init__(self, time_ns: Callable[[], int], keep: int = DEFAULT_KEEP) -> None:
        self._time_ns = time_ns
        self._hash = xxhash.xxh3_128()
        self.count = 0
        self.newest: deque[Line] = deque(maxlen=keep)

    def record(self, kind: str, *details: Detail) -> None:
        line = (self._time_ns(), kind, details)
        self._hash.update(_encode(line))
        self.count += 1
        self.newest.append(line)

    def digest(self) -> str:
        """32 hex digits over all lines so far."""
        return self._hash.hexdigest()

    def text(self) -> str:
        """The kept lines, one each, for a person."""
        return "\n".join(f"{ns / 1e9:.9f} {kind} {' '.join(map(str, details))}" for ns, kind, details in self.newest)


def fingerprint(message: bytes) -> int:
    """A message as a detail: its xxh3-64, so that kept lines do not hold a megabyte each."""
    return xxhash.xxh3_64_intdigest(message)

"""Pins: prefixes that somebody asked to keep, whoever uses the cache meanwhile.

in     prefixes to pin, pins to let go
out    how many pages they hold, and may
state  a lease a pin
owner  `KvCache`; `sched.cache_control` ends them when their time is up
ready  at once
end    `unpin`; over the loss of a device a pin goes on with what the host has of its prefix
"""

from __future__ import annotations

from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.radix_nodes import Lease, path_of
from headrace.kvcache.windows import Windows


class Pins:
    """The leases that pins hold."""

    def __init__(self, index: RadixIndex, windows: Windows | None = None) -> None:
        self._index = index
        self._windows = windows
        self._leases: dict[int, Lease] = {}
        self._last = 0

    @property
    def leases(self) -> list[Lease]:
        """For the integrity check."""
        return list(self._leases.values())

    @property
    def num_pages(self) -> int:
        """Pages that pins hold; one that two pins hold counts twice."""
        return sum(lease.num_pages for lease in self._leases.values())

    def pages_of(self, pin: int) -> int:
        """Fewer than at first when the device has been lost since."""
        return self._leases[pin].num_pages

    def pin(self, key: PrefixKey, pages: int | None = None) -> tuple[int, int]:
        """Keep what device and host have of a prefix, or of its first `pages` pages, until `unpin`: `(pin, pages)`. Of
        window groups that is what somebody who goes on from there needs."""
        pages = key.length // key.page_tokens if pages is None else pages
        lease, _, _ = self._index.acquire(key.namespace, key.raw(0, pages))
        self._last += 1
        self._hold(self._last, lease)
        return self._last, lease.num_pages

    def unpin(self, pin: int) -> None:
        """Its pages may be evicted again, as if just used."""
        if self._windows is not None:
            self._windows.unpin(pin)
        self._index.release(self._leases.pop(pin), -1)

    def let_go(self) -> dict[int, tuple[bytes, bytes]]:
        """Release every lease, for now → by pin, the path that it held."""
        paths = {pin: path_of(lease) for pin, lease in self._leases.items()}
        for pin, lease in self._leases.items():
            if self._windows is not None:
                self._windows.unpin(pin)
            self._index.release(lease, -1, touch=False)
        self._leases.clear()
        return paths

    def hold(self, paths: dict[int, tuple[bytes, bytes]]) -> None:
        """Lease what is left of these paths."""
        for pin, path in paths.items():
            self._hold(pin, self._index.acquire(*path).lease)

    def _hold(self, pin: int, lease: Lease) -> None:
        self._leases[pin] = lease
        if self._windows is not None:
            self._windows.pin(pin, lease)

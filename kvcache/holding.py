"""What one request holds of the cache, and what the cache says about itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.radix_nodes import Lease
from headrace.ops.wire import I32


class Repointed(NamedTuple):
    """Places in a request's page table and the pages that they show from now on."""

    indices: I32
    """int32 [n]"""
    pages: I32
    """int32 [groups, n]"""


_NONE: I32 = np.zeros(0, np.int32)


class WindowHold:
    """What one request holds of one window group: pages [first, end) of its prefix."""

    __slots__ = ("claim", "end", "first", "host", "is_short", "lacking", "pages", "places")

    def __init__(self, capacity: int, first: int, end: int) -> None:
        self.first, self.end = first, end
        self.pages: I32 = np.full(capacity, -1, np.int32)
        """[capacity] device pages."""
        self.places: I32 = np.full(capacity, -1, np.int32)
        """[capacity] whose page it is, which the request has pinned; -1 where it is the request's own."""
        self.lacking: I32 = _NONE
        """Pages of the prefix that its first step loads ..."""
        self.host: I32 = _NONE
        """... from these host pages."""
        self.is_short = False
        """The full groups have more of the prefix; pages of this group are missing there."""
        self.claim = 0
        """Device pages that nobody else may be promised, once it runs."""


class Holding:
    """What one request holds: a leased prefix and pages of its own. `pages`: int32 [full groups, capacity]."""

    __slots__ = (
        *("count", "device_pages", "duplicates", "ends", "handle", "host", "lease", "matched_pages", "pages"),
        "windows",
    )

    def __init__(
        self, handle: int, lease: Lease, device: I32, host: I32, capacity: int, windows: Sequence[WindowHold] = ()
    ) -> None:
        groups, count = device.shape
        self.handle = handle
        self.lease = lease
        self.device_pages = count
        """Pages that were on the device at `open`."""
        self.host = host
        """int32 [groups, k]: host pages that follow, and that the request's first step loads."""
        self.matched_pages = count + host.shape[1]
        """Pages that need not be computed."""
        self.count: int = count
        self.pages: I32 = np.empty((groups, capacity), np.int32)
        """The first `count` are set."""
        self.pages[:, :count] = device
        self.duplicates: list[Repointed] = []
        """Leased pages of the index that it has a copy of, which it still reads."""
        self.windows = windows
        """What it holds of each window group."""
        self.ends: list[int] = []
        """Pages of its prefix, not published yet, behind which somebody may go on."""

    @property
    def own_runs(self) -> list[I32]:
        """The pages that the request owns, int32 [groups, n] each: what it has not published, and its duplicates."""
        unpublished = self.pages[:, self.lease.num_pages : self.count]
        return [unpublished, *(self.pages[:, some.indices] for some in self.duplicates)]

    @property
    def own_pages(self) -> int:
        """How many these are."""
        return max(0, self.count - self.lease.num_pages) + sum(len(some.indices) for some in self.duplicates)

    @property
    def num_loads(self) -> int:
        """Host pages that the request's first step loads, of all groups."""
        return self.host.size + sum(len(window.host) for window in self.windows)


class Filled(NamedTuple):
    """Full pages of a request's first `tokens` known tokens are to be matchable; `step` is the last launched step that
    fills any of them."""

    holding: Holding
    key: PrefixKey
    tokens: int
    step: int


class WindowStats(msgspec.Struct, frozen=True):
    """Pages of one window group."""

    window_tokens: int
    pages_total: int
    pages_free: int
    pages_cached: int
    """Device pages that only the index holds."""
    pages_claimed: int
    """What running requests may need at once."""
    host_pages_total: int
    host_pages_cached: int
    copied_pages: int
    """Pages ever copied from the device to the host."""
    short_matches: int
    """How often a request could reuse less than the full groups had, for want of pages of this one."""
    saved_bytes: int
    """Of device memory: what a page of the group for every one of a full group would take more."""


class CacheStats(msgspec.Struct, frozen=True):
    """Pages of the smallest device pool, and of the host's (per group)."""

    total: int
    free: int
    fenced: int
    indexed: int
    evictable: int
    nodes: int
    holdings: int
    host_total: int
    host_free: int
    host_indexed: int
    host_copied: int
    """Pages ever copied from the device to the host."""
    host_skipped: int
    """Copies not made for lack of host room."""
    windows: list[WindowStats]
    """Of each window group."""


class Held(NamedTuple):
    """Pages of a prefix in the full groups: from the first on, on the device and on the host, and in either; and those
    that a request could go on from, since window groups have what it needs too."""

    device: int
    host: int
    indexed: int
    usable: int


class Cleared(NamedTuple):
    """Pages dropped from each tier, and pages of it that stay because something holds them."""

    device: int
    device_kept: int
    host: int
    host_kept: int

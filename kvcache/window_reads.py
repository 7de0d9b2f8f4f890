"""What a prefetch does for window groups: how long a prefix is worth reading, and the windows at its end.

in     prefetches that ask storage; what it has of their windows, key by key; pages that were read
out    the longest prefix that will be usable; host pages at their places
state  reads under way, by group and page
owner  `read_ahead.Prefetcher`
ready  as a read is acknowledged, if the index still has the place
end    as the full groups' reads

The full groups' pages are read first, from the first that is missing. Then, of each window group, the pages behind
which the prefix goes on are read, where no tier here has them::

    full     |== indexed ==|-- read --------------------|
    window                          .. |-- read, last --|   never read: what stands before the window
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.pool import Fence, Owner
from headrace.kvcache.prefetch import Prefetch
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.storage.client import StorageClient
from headrace.kvcache.storage.keys import group_keys, span_of
from headrace.kvcache.storage.protocol import ReadDone
from headrace.kvcache.window_group import WindowGroup
from headrace.ops.wire import I32

if TYPE_CHECKING:
    from headrace.kvcache.windows import Windows


class WindowPiece:
    """Pages [start, end) of a prefix in one group, which one read brings to host pages."""

    __slots__ = ("end", "group", "host", "operation", "start")

    def __init__(self, group: WindowGroup, start: int, end: int, host: I32) -> None:
        self.group = group
        self.start, self.end = start, end
        self.host = host
        self.operation = -1


class WindowReads:
    """Of all prefetches of one cache."""

    def __init__(
        self, index: RadixIndex, windows: Windows, client: StorageClient, full_bytes: int, page_bytes: Sequence[int]
    ) -> None:
        """`full_bytes`: of a page of every full group; `page_bytes`: of a page of each window group."""
        self._index = index
        self._windows = windows
        self._client = client
        self._costs = [size_bytes / full_bytes for size_bytes in page_bytes]
        self._reading: dict[tuple[int, bytes], None] = {}
        self._pieces: list[WindowPiece] = []

    @property
    def num_groups(self) -> int:
        """Window groups."""
        return len(self._costs)

    def transferring(self, group: WindowGroup) -> list[I32]:
        """Host pages that reads write to."""
        return [piece.host for piece in self._pieces if piece.group is group]

    def ask(self, prefetch: Prefetch, answered: Callable[[], None]) -> None:
        """Look up all that the windows of a longer prefix than the usable one may need; `answered` once for each
        group."""
        prefetch.window_stored = [np.zeros(prefetch.wanted, np.bool_) for _ in self._windows.groups]
        hashes = prefetch.key.page_hashes(prefetch.wanted)
        for group, stored in zip(self._windows.groups, prefetch.window_stored):
            first = group.end_from(prefetch.usable)

            def found(there: bytes, stored: NDArray[np.bool_] = stored, first: int = first) -> None:
                stored[first : first + len(there)] = np.frombuffer(there, np.bool_)
                answered()

            self._client.lookup_each(group.number, group_keys(hashes[first:], group.number), found)

    def usable_end(self, prefetch: Prefetch, pages: int) -> int:
        """Of the first `pages` pages, whose full groups' are here or in storage, those of the longest prefix that will
        be usable when all that storage has is here."""
        places = self._places(prefetch, pages)
        end = self._windows.usable_with(places, prefetch.window_stored, pages)
        prefetch.window_cost = sum(
            cost * len(self._lacking(group, end, places)) for cost, group in zip(self._costs, self._windows.groups)
        )
        return end

    def begin(self, prefetch: Prefetch, ended: Callable[[], None]) -> bool:
        """Read the windows of the prefix up to its end, which the full groups have reached; once. False if there is
        nothing to wait for; else `ended` is called when there isn't any more."""
        if prefetch.window_pieces:
            return True
        if prefetch.windows_read:
            return False
        places = self._places(prefetch, prefetch.end)
        hashes = prefetch.key.page_hashes(prefetch.end)
        lacking = [self._lacking(group, prefetch.end, places) for group in self._windows.groups]
        for group, pages in zip(self._windows.groups, lacking):
            if any((group.number, hashes[page]) in self._reading for page in pages):
                # Another reads them: this one looks again when they are here.
                return True
        prefetch.windows_read = True
        for group, pages in zip(self._windows.groups, lacking):
            for start, end in _runs(pages):
                host = group.take_host(end - start)
                if host is None:
                    prefetch.short = True
                else:
                    self._read(prefetch, WindowPiece(group, start, end, host), hashes, ended)
        return bool(prefetch.window_pieces)

    def cancel(self, prefetch: Prefetch) -> None:
        """Nobody waits for it."""
        for piece in prefetch.window_pieces:
            self._client.cancel(piece.operation)

    def _read(self, prefetch: Prefetch, piece: WindowPiece, hashes: list[bytes], ended: Callable[[], None]) -> None:
        prefetch.window_pieces.append(piece)
        self._pieces.append(piece)
        names = [(piece.group.number, name) for name in hashes[piece.start : piece.end]]
        self._reading |= dict.fromkeys(names)

        def read(done: ReadDone) -> None:
            prefetch.window_pieces.remove(piece)
            self._pieces.remove(piece)
            for name in names:
                self._reading.pop(name, None)
            self._put(prefetch, piece, done.good)
            ended()

        span = span_of(prefetch.key, piece.start, piece.end, piece.group.number)
        piece.operation = self._client.read(piece.group.number, span, piece.host, read)

    def _put(self, prefetch: Prefetch, piece: WindowPiece, good: int) -> None:
        """Give pages that hold what they should their places, those that the index still has, and has no page for."""
        group = piece.group
        places = self._places(prefetch, piece.start + good)[piece.start :]
        taken = np.zeros(len(piece.host), np.bool_)
        taken[: len(places)] = group.host.pages[places] < 0
        group.put_host(places[taken[: len(places)]], piece.host[taken])
        group.host_pool.give_back(piece.host[~taken], Owner.TRANSFER, Fence())

    def _lacking(self, group: WindowGroup, end: int, places: I32) -> list[int]:
        """Pages that a prefix of `end` pages needs of a group, and that no tier here has."""
        first = group.first_page(end * self._windows.page_tokens)
        here = group.has(places[first:end])
        return [page for page in range(first, end) if page - first >= len(here) or not here[page - first]]

    def _places(self, prefetch: Prefetch, pages: int) -> I32:
        return self._index.places_of(prefetch.key.namespace, prefetch.key.raw(0, pages))


def _runs(pages: list[int]) -> list[tuple[int, int]]:
    """Pages in order → runs [start, end)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][1] == page:
            runs[-1] = runs[-1][0], page + 1
        else:
            runs.append((page, page + 1))
    return runs

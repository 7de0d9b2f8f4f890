"""Which requests of a step have the same pages at their beginning, so that attention reads those once for all of them.

    a  ■■■■■■□□        bundle {a, b, c}: what all three share, to a multiple of `step_tokens`, is read once for all
    b  ■■■■■■▤▤▤      their rows, and then what each has alone
    c  ■■■■■■▥
    d  ▦▦▦▦

A page at the same place of two page tables has the same tokens before it, or it would not have been matched. That is
not taken for granted: all pages up to there are compared.

in     rows of a batch that compute one token, their page tables and contexts
out    `Bundles`
state  the last step's, which most steps have again: then their pages are compared, and nothing is sought
owner  the model, in its process's main thread
ready  when `find` has returned
end    with the model
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.ops.wire import I32

LEAST_SHARED: Final = 128
"""Tokens that are worth a bundle."""
MOST_FORKS: Final = 32
"""On the way to a bundle. Without a bound a thousand requests that leave one text each at another page would be as many
calls within each other, more than Python has; and 256 of them take 40 ms."""


class Bundles(NamedTuple):
    """Bundle i is the rows `rows[start[i]:start[i + 1]]`, of one token each, which share `shared[i]` tokens."""

    rows: I32
    start: I32
    shared: I32
    bundled: I32
    """For each row of the batch, 1 if it is in a bundle."""


_NOBODY: Final = np.zeros(0, np.int32)
NO_BUNDLES: Final = Bundles(_NOBODY, np.zeros(1, np.int32), _NOBODY, _NOBODY)


class SharedPrefixes:
    """Finds a step's bundles."""

    def __init__(self, step_tokens: int, most_rows: int, least_parts: int) -> None:
        """Bundles share a multiple of `step_tokens` and have `most_rows` at most; who shares a prefix is divided into
        `least_parts` bundles where they are enough, so that there is something to do for all threads."""
        self._step_tokens = step_tokens
        self._most_rows = most_rows
        self._least_parts = least_parts
        self._asked: tuple[bytes, bytes] = b"", b""
        self._found = NO_BUNDLES

    def find(self, slots: I32, kv_len: I32, singles: NDArray[np.intp], table: I32, page_tokens: int) -> Bundles:
        """`slots`, `kv_len`: int32 [rows] of the batch; `singles`: the rows with one token; `table`: int32 [all slots,
        pages]."""
        if len(singles) < 2:
            return NO_BUNDLES
        asked = slots.tobytes(), singles.tobytes()
        if asked != self._asked or not _share(self._found, slots, table, page_tokens):
            self._asked = asked
            self._found = self._seek(slots, kv_len, singles, table, page_tokens)
        return self._found

    def _seek(self, slots: I32, kv_len: I32, singles: NDArray[np.intp], table: I32, page_tokens: int) -> Bundles:
        prefixes = _Prefixes(table[slots], kv_len // page_tokens, page_tokens, self._step_tokens)
        bundles: list[tuple[NDArray[np.intp], int]] = []
        for rows, shared in prefixes.best(singles, 0, MOST_FORKS).sharing:
            parts = max(-(-len(rows) // self._most_rows), min(self._least_parts, len(rows) // 2))
            bundles += [(part, shared) for part in np.array_split(rows, parts) if len(part) > 1]
        if not bundles:
            return NO_BUNDLES
        start: I32 = np.cumsum([0, *(len(rows) for rows, _ in bundles)], dtype=np.int32)
        members: I32 = np.concatenate([rows for rows, _ in bundles]).astype(np.int32)
        bundled = np.zeros(len(slots), np.int32)
        bundled[members] = 1
        return Bundles(members, start, np.array([shared for _, shared in bundles], np.int32), bundled)


def _share(bundles: Bundles, slots: I32, table: I32, page_tokens: int) -> bool:
    """Whether the rows have the same pages as before, as far as bundles depend on it."""
    rows, start, shared, _ = bundles
    for first, end, tokens in zip(start.tolist(), start[1:].tolist(), shared.tolist()):
        pages = table[slots[rows[first:end]], : -(-tokens // page_tokens)]
        if not (pages == pages[0]).all():
            return False
    return True


class _Best(NamedTuple):
    """How some rows are bundled best."""

    saved: int
    """Tokens that are not read again."""
    sharing: list[tuple[NDArray[np.intp], int]]
    """Rows, and the tokens that they share."""


class _Prefixes:
    """The tree that page tables make."""

    def __init__(self, pages: I32, full_pages: I32, page_tokens: int, step_tokens: int) -> None:
        """`pages`: int32 [rows, pages]; `full_pages`: int32 [rows], those that have all their tokens."""
        self._pages = pages
        self._full_pages = full_pages
        self._page_tokens = page_tokens
        self._step_tokens = step_tokens

    def best(self, rows: NDArray[np.intp], known: int, forks: int) -> _Best:
        """Of rows that have their `known` first pages in common. Those who share more among themselves are a bundle of
        their own where that saves more than being in the large one; they are sought past so many forks."""
        limit = int(self._full_pages[rows].min())
        pages = self._pages[rows, known:limit]
        other = np.flatnonzero((pages != pages[0]).any(axis=0))
        common = known + int(other[0]) if len(other) else max(known, limit)
        shared = common * self._page_tokens // self._step_tokens * self._step_tokens
        if shared < LEAST_SHARED:
            shared = 0
        ends_here = self._full_pages[rows] <= common
        saved, sharing, together = 0, list[tuple[NDArray[np.intp], int]](), [rows[ends_here]]
        for child in self._by_page(rows[~ends_here], common):
            best = self.best(child, common + 1, forks - 1) if forks and len(child) > 1 else _Best(0, [])
            if best.saved > len(child) * shared:
                saved, sharing = saved + best.saved, sharing + best.sharing
            else:
                together.append(child)
        joined = np.concatenate(together)
        if shared and len(joined) > 1:
            saved, sharing = saved + (len(joined) - 1) * shared, [*sharing, (joined, shared)]
        return _Best(saved, sharing)

    def _by_page(self, rows: NDArray[np.intp], page: int) -> list[NDArray[np.intp]]:
        """The rows in groups whose page at this place is the same."""
        if not len(rows):
            return []
        numbers = self._pages[rows, page]
        order = np.argsort(numbers, kind="stable")
        return np.split(rows[order], np.flatnonzero(np.diff(numbers[order])) + 1)

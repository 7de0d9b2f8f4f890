"""The scheduler's side of window groups: how far a chunk may reach, what rows have passed.

in     chunks and admissions that are being prepared; launched batches
out    edits of page tables; window pages that go, behind the step that was launched last
state  per slot, at how many tokens its request has passed another page
owner  the scheduler
ready  an edit counts from its own batch on
end    with a request's pages, when `KvCache.close` gives them back

A full group's pages are a request's from its admission on, for all tokens that it knows. A window group's are taken
chunk by chunk, and go as the window moves on: a prompt of any length needs a window and a chunk of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.holding import Holding
from headrace.kvcache.layout import KvLayout
from headrace.kvcache.windows import Windows
from headrace.sched.batch import ScheduleBatch, WindowEdit
from headrace.sched.request import Request, SlotTable, Stage

_NEVER: Final = np.iinfo(np.int64).max


class WindowPages:
    """Of the running requests of one scheduler."""

    def __init__(self, windows: Windows, layout: KvLayout, table: SlotTable) -> None:
        self._windows = windows
        self._layout = layout
        self._table = table
        self._spans = [group.window_tokens for group in layout.groups[layout.full_groups :]]
        self._passes_at: NDArray[np.int64] = np.full(table.max_slots, _NEVER, np.int64)

    def admits(self, holding: Holding, leaving: Iterable[Request] = ()) -> bool:
        """Whether the request gets on beside those that run, whatever they do, but for those that leave."""
        held = [other.holding.windows for other in leaving if other.holding is not None]
        return self._windows.admits(holding.windows, held)

    def can_begin(self, holding: Holding) -> bool:
        """Whether there is room, now, for what it loads and for its first tokens."""
        start = holding.matched_pages * self._layout.page_tokens
        return bool(self._windows.reach(holding.windows, start + 1) > start)

    def reach(self, holding: Holding, tokens: int) -> int:
        """Up to which token, at most `tokens`, the request can compute now."""
        return self._windows.reach(holding.windows, tokens)

    def edits(self, holding: Holding, tokens: int, enters: bool) -> int:
        """How many entries of page tables a chunk up to `tokens` changes."""
        end = self._layout.pages(tokens)
        return sum(max(end, hold.end) - (hold.first if enters else hold.end) for hold in holding.windows)

    def grow(self, batch: ScheduleBatch, request: Request, holding: Holding, tokens: int, enters: bool) -> None:
        """Take the pages of a chunk up to `tokens` that has been added to the batch; one that enters shows all of its
        pages in the table."""
        grown = self._windows.grow(holding.windows, tokens)
        for group, (hold, pages) in enumerate(zip(holding.windows, grown), self._layout.full_groups):
            if enters:
                pages = hold.pages[hold.first : hold.end].copy()
            if len(pages):
                batch.window_edits.append(WindowEdit(request, group, hold.end - len(pages), pages))

    def launched(self, batch: ScheduleBatch, step: int) -> None:
        """The batch has been sent as `step`, and the table says so: let go of what its rows have passed."""
        table, decode = self._table, batch.decode
        due = decode[table.computed[decode] >= self._passes_at[decode]].tolist()
        for slot in [*due, *(chunk.request.slot for chunk in batch.chunks)]:
            request = table.requests[slot]
            assert request is not None and request.holding is not None
            windows = request.holding.windows
            self._windows.passed(windows, int(table.computed[slot]), step)
            page_tokens = self._layout.page_tokens
            self._passes_at[slot] = min(
                (hold.first + 1) * page_tokens + span for hold, span in zip(windows, self._spans)
            )

    def check(self) -> None:
        """Raise AssertionError unless every request has what its next token looks at."""
        for request in self._table.requests:
            if request is None or request.holding is None:
                continue
            computed = int(self._table.computed[request.slot])
            for group, hold in zip(self._windows.groups, request.holding.windows):
                assert hold.first <= group.first_page(computed), "a page has gone that the next token looks at"
                assert hold.end * self._layout.page_tokens >= computed
                assert (hold.pages[hold.first : hold.end] >= 0).all()
                if request.stage is Stage.DECODE:
                    assert hold.end == request.holding.count, "a window group has not grown with the others"

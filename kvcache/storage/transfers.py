"""A read or a write on its way through the agent: which pieces have begun, which have ended, what counts.

A request is cut into pieces of consecutive pages. Pieces end in any order; of a read, only what is contiguous from its
first page counts::

    | good | ended, but behind a gap | in flight | not begun |     | missing, or behind a bad page |
    0                                            next_page         stop
"""

from __future__ import annotations

from headrace.kvcache.storage.page_store import Got, PageRun, Put
from headrace.kvcache.storage.protocol import ReadDone, Written


class Transfer:
    """What a read and a write share. The host pages are the agent's as long as this is in its hands."""

    def __init__(self, id: int, run: PageRun, pages: list[memoryview], piece_pages: int) -> None:
        assert run.count == len(pages)
        self.id = id
        self.run = run
        self.pages = pages
        self.piece_pages = piece_pages
        self.next_page = 0
        self.stop = run.count
        """No piece reaches past this page."""
        self.in_flight = 0
        self.began_ms: float | None = None
        self.message = ""

    @property
    def has_more(self) -> bool:
        """Whether a piece can begin."""
        return self.next_page < self.stop

    @property
    def ended(self) -> bool:
        """Whether nothing touches its pages, nor will."""
        return not self.in_flight and not self.has_more

    def begin_piece(self, now_ms: float) -> tuple[int, int]:
        """Pages [start, end) of the next piece, now in flight."""
        start = self.next_page
        end = min(start + self.piece_pages, self.stop)
        if self.began_ms is None:
            self.began_ms = now_ms
        self.next_page = end
        self.in_flight += 1
        return start, end

    def took_ms(self, now_ms: float) -> float:
        """Since its first piece began."""
        return 0.0 if self.began_ms is None else now_ms - self.began_ms

    def cancel(self) -> None:
        """Begin no more pieces."""
        self.stop = min(self.stop, self.next_page)


class ReadTransfer(Transfer):
    """Pages on their way from the store to host pages."""

    def __init__(self, id: int, run: PageRun, pages: list[memoryview], piece_pages: int, stored: int) -> None:
        """`stored`: pages that the store has, from the first on."""
        super().__init__(id, run, pages, piece_pages)
        self.stop = stored
        self.good = 0
        self.told = 0
        """Good pages that the server knows of."""
        self.told_ms = 0.0
        self._missing = run.count - stored
        self._corrupt = 0
        self._ends: dict[int, int] = {}
        """Start of a piece that has ended, and the page up to which it is good."""

    def end_piece(self, start: int, end: int, got: Got) -> None:
        self.in_flight -= 1
        self._missing += got.missing
        self._corrupt += got.corrupt
        self.message = self.message or got.message
        self._ends[start] = start + got.good
        if start + got.good < end:
            self.stop = min(self.stop, start + got.good)
        while (upto := self._ends.pop(self.good, self.good)) > self.good:
            self.good = upto

    def done(self, now_ms: float) -> ReadDone:
        return ReadDone(
            self.id,
            good=self.good,
            missing=self._missing,
            corrupt=self._corrupt,
            size_bytes=sum(len(page) for page in self.pages[: self.good]),
            read_ms=self.took_ms(now_ms),
            message=self.message,
        )


class WriteTransfer(Transfer):
    """Pages on their way from host pages to the store."""

    def __init__(self, id: int, run: PageRun, pages: list[memoryview], piece_pages: int) -> None:
        super().__init__(id, run, pages, piece_pages)
        self._dropped: list[int] = []

    def end_piece(self, start: int, end: int, put: Put) -> None:
        self.in_flight -= 1
        self._dropped.extend(start + page for page in put.dropped)
        self.message = self.message or put.message
        if put.dropped:
            # What kept one piece from being stored keeps the next ones too, perhaps after a long wait each.
            self.cancel()

    def done(self, now_ms: float) -> Written:
        dropped = sorted(self._dropped) + list(range(self.next_page, self.run.count))
        lost = frozenset(dropped)
        return Written(
            self.id,
            stored=self.run.count - len(dropped),
            dropped=dropped,
            size_bytes=sum(len(page) for index, page in enumerate(self.pages) if index not in lost),
            write_ms=self.took_ms(now_ms),
            message=self.message,
        )

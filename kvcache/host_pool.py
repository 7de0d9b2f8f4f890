"""Host pages of one or several layer groups, some of which storage is reading.

in     what `PagePool` takes; writes to storage that begin and end
out    what `PagePool` gives
state  for each page, the write by which storage reads it
owner  `HostTier`, or a window group
ready  as `PagePool`
end    a page that storage reads may leave the index, but is free only when that write has ended
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.pool import Fence, Owner, PagePool
from headrace.ops.wire import I32


class HostPool(PagePool):
    """Pages 0..num_pages - 1 of a part of the host's memory."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.writer: NDArray[np.int64] = np.zeros(num_pages, np.int64)
        """The transfer by which storage reads a page; 0 for none."""

    def begin_write(self, pages: I32, transfer: int) -> None:
        """Storage reads these pages (int32 [k]) until `end_write`: they may leave the index, but are not used again."""
        self.open_transfer(transfer)
        self.writer[pages] = transfer

    def end_write(self, pages: I32, transfer: int) -> None:
        """Storage has acknowledged, or its agent has been reaped."""
        self.writer[pages] = 0
        self.complete_transfer(transfer)

    def drop(self, pages: I32, last_step: int) -> None:
        """Pages (int32 [k]) that left the index: free when their last reader has completed, and storage has read
        them."""
        if not len(pages):
            return
        writers = self.writer[pages]
        # `unique` takes 10 µs, and few pages are being read when they go.
        reading = tuple(np.unique(writers[writers > 0]).tolist()) if writers.any() else ()
        self.give_back(pages, Owner.INDEX, Fence(last_step, reading))

    def check(self) -> None:
        """The same for storage: raise AssertionError if it reads a page that may be written."""
        super().check()
        owners = self.owner[self.writer > 0]
        read = (owners == Owner.INDEX) | (owners == Owner.FENCED)
        assert read.all(), "storage reads a page that is free or written to"

"""The device's KV pages of one layer group, and the page table that says whose they are.

A layer's keys and values of one page lie side by side, head by head:

    pages: [layers, num_pages, 2 (keys, values), kv_heads, page_tokens, head_dim]

so that attention gathers runs of `page_tokens · head_dim` values per head, and one page of all layers, layer by layer,
is what a host page holds (`kv_copy`).

in     page-table edits, KV of a step's tokens (written by `attention`), pages from the host
out    views of one layer's pages; the table
state  `pages`, `table` int32 [slots, pages of the longest context], -1 where there is no page; in a window group what
       stands before a request's window is never looked at
owner  the step that is running, in the worker's main thread; which page is whose is the server's decision
ready  in command order: what a command wrote is there for the next one
end    with the process
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from headrace.ops.wire import I32, GroupShape
from headrace.ops.zeroed_memory import ZeroedMemory

CPU: Final = torch.device("cpu")


class KvPool:
    """Pages and page table of one group."""

    def __init__(
        self,
        shape: GroupShape,
        num_pages: int,
        page_tokens: int,
        slots: int,
        context_tokens: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        """The table is the host's on any device. Raises OSError, or torch.OutOfMemoryError, when memory lacks."""
        self.shape = shape
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        dimensions = (len(shape.layers), num_pages, 2, shape.kv_heads, page_tokens, shape.head_dim)
        # Zeros: attention reads pages to their end, and must not meet a NaN there. The first pages, of all layers, are
        # real first: the server hands them out first.
        self._memory: ZeroedMemory | None = None
        if device.type == "cpu":
            self._memory = ZeroedMemory(math.prod(dimensions) * dtype.itemsize, parts=dimensions[0])
            self.pages = torch.frombuffer(self._memory.mapping, dtype=dtype).view(dimensions)
        else:
            self.pages = torch.zeros(dimensions, dtype=dtype, device=device)
        self.table: I32 = np.full((slots, -(-context_tokens // page_tokens)), -1, np.int32)

    @property
    def layer_elements(self) -> int:
        """Values that a page has in one layer."""
        return 2 * self.shape.kv_heads * self.page_tokens * self.shape.head_dim

    def layer(self, index: int) -> Tensor:
        """`[num_pages, 2, kv_heads, page_tokens, head_dim]` of the group's `index`-th layer."""
        return self.pages[index]

    @property
    def by_page(self) -> Tensor:
        """`[num_pages, layers, layer_elements]`"""
        return self.pages.view(len(self.shape.layers), self.num_pages, -1).transpose(0, 1)

    def touch(self, budget_ms: float) -> bool:
        """Make more of what the system has only promised real, for about so long; → whether all of it is."""
        return self._memory is None or self._memory.touch(budget_ms)

    def touch_first(self, pages: int) -> None:
        """The same for so many pages, all of them now; they must be free."""
        if self._memory is not None:
            self.clear(np.arange(pages, dtype=np.int32))

    def forget(self, slots: I32) -> None:
        """Take all pages out of the tables of these slots: a request begins in each of them."""
        self.table[slots] = -1

    def edit(self, slots: I32, indices: I32, pages: I32) -> None:
        """Apply page-table deltas in order; -1 takes a page out. Raises ValueError for one outside the table or pool.

        A wrong edit would let one request read another's tokens, so the bounds are checked here, once.
        """
        if not len(slots):
            return
        for name, values, least, most in (
            ("slot", slots, 0, self.table.shape[0]),
            ("index", indices, 0, self.table.shape[1]),
            ("page", pages, -1, self.num_pages),
        ):
            if values.min() < least or values.max() >= most:
                raise ValueError(f"a page-table edit has a {name} outside {least}..{most - 1}")
        self.table[slots, indices] = pages

    def first_pages(self, positions: I32) -> I32:
        """For tokens at these positions, the first page of the table that they may look at."""
        window = self.shape.window_tokens
        if not window:
            return np.zeros_like(positions)
        firsts: I32 = np.maximum(positions + 1 - window, 0) // self.page_tokens
        return firsts

    def begun_pages(self, slots: I32, before: I32, after: I32) -> I32:
        """Of rows that grow from `before` to `after` tokens, the pages that get their first tokens and will not be
        full: they must be cleared. Raises ValueError where the table lacks a page that any of the rows' tokens look
        at."""
        if not len(slots):
            return slots
        last = (after - 1) // self.page_tokens
        looked_at = np.minimum(np.arange(int(last.max()) + 1), last[:, None])
        if self.shape.window_tokens:
            looked_at = np.maximum(looked_at, self.first_pages(before)[:, None])
        used = self.table[slots[:, None], looked_at]
        if np.minimum.reduce(used, axis=None) < 0:
            raise ValueError("the page table has no page for a position that the batch uses")
        begun = np.flatnonzero((last * self.page_tokens >= before) & (after % self.page_tokens != 0))
        pages: I32 = self.table[slots[begun], last[begun]] if len(begun) else slots[:0]
        return pages

    def clear(self, pages: I32) -> None:
        """Zero pages that a request begins to fill.

        Attention reads a page to its end and gives the tail a weight of zero; zero times what a broken request left
        there may be NaN. 36 µs a page of the default model on one core of a Xeon (torch took 64), once in `page_tokens`
        steps of a request. Only on a CPU.
        """
        if not len(pages):
            return
        assert self._memory is not None
        values = np.frombuffer(self._memory.mapping, np.uint8).reshape(len(self.shape.layers), self.num_pages, -1)
        for page in pages.tolist():
            values[:, page] = 0

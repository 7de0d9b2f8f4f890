"""Memory of zeros, in huge pages where the kernel has them: a fifth less time to gather KV pages from, or to read
weights.

The kernel hands memory out when it is first touched, which takes 0.1 s per GiB, or 2 s in a virtual machine that gets
it from its host first. `touch` does that ahead of the steps, a little at a time, without delaying the start.

in     a size, and the number of equal parts that will be filled from their beginnings on
out    `mapping`, usable from the start
state  how much has been touched: the first piece of every part, then the second of every part, and so on
owner  whoever made it
ready  at once; what `touch` has not reached yet is only slower to use for the first time
end    with the last view of the mapping
"""

from __future__ import annotations

import errno
import mmap
import time
from typing import Final

import torch
from torch import Tensor

HUGE_PAGE_BYTES: Final = 2 << 20
_MAPPING_BYTES: Final = 64 << 20
"""What is not used of it takes no memory."""
_MADV_POPULATE_WRITE: Final = 23
"""Of Linux; Python has no name for it."""
_SHARED_PIECE_BYTES: Final = 256 << 10
"""0.1 ms, or 1 in a virtual machine that gets its memory from its host first."""
_ALIGNED_BYTES: Final = 4096
"""Tensors begin at a multiple of so many."""


class ZeroedMemory:
    """Equal parts, side by side."""

    def __init__(self, size_bytes: int, parts: int) -> None:
        """Raises OSError (ENOMEM) when the system promises no more memory. `parts` divides the size."""
        self.mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            self.mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as problem:
            # A kernel without huge pages.
            if problem.errno != errno.EINVAL:
                raise
        self._parts = torch.frombuffer(self.mapping, dtype=torch.uint8).view(parts, -1)
        self._touched_pieces = 0

    def touch(self, budget_ms: float) -> bool:
        """Make more of it real for about so long; → whether all of it is."""
        end_s = time.perf_counter() + budget_ms / 1e3
        parts, part_bytes = self._parts.shape
        while self._touched_pieces < parts * -(-part_bytes // HUGE_PAGE_BYTES):
            if time.perf_counter() >= end_s:
                return False
            piece, part = divmod(self._touched_pieces, parts)
            # A write that changes nothing.
            self._parts[part, piece * HUGE_PAGE_BYTES : (piece + 1) * HUGE_PAGE_BYTES : mmap.PAGESIZE].add_(0)
            self._touched_pieces += 1
        return True


class SharedMemory:
    """A mapping that other processes write to meanwhile, so that it can't be touched by writing to it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._touched_bytes = 0

    def touch(self, budget_ms: float) -> bool:
        """As `ZeroedMemory.touch`, from the beginning on."""
        end_s = time.perf_counter() + budget_ms / 1e3
        while self._touched_bytes < len(self._mapping):
            if time.perf_counter() >= end_s:
                return False
            count = min(_SHARED_PIECE_BYTES, len(self._mapping) - self._touched_bytes)
            try:
                self._mapping.madvise(_MADV_POPULATE_WRITE, self._touched_bytes, count)
            except OSError:
                # A kernel before 5.14, or memory is short: it comes when it is used.
                return True
            self._touched_bytes += count
        return True


class KeptTensors:
    """Tensors that stay, side by side in mappings of many huge pages: most are smaller than one page.

    Read by two threads, 269 MB of weights came at 46 GB/s instead of 38.
    """

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy. Raises OSError when memory lacks."""
        taken = -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if taken > len(self._room):
            mapping = ZeroedMemory(max(taken, _MAPPING_BYTES), parts=1).mapping
            self._room = torch.frombuffer(mapping, dtype=torch.uint8)
        here, self._room = self._room[: tensor.nbytes], self._room[taken:]
        return here.view(tensor.dtype).view(tensor.shape).copy_(tensor)

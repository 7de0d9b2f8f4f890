"""A model file's tensors, as the layers ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.ops.weights.dequantize import dequantize, dequantize_into
from headrace.ops.weights.gguf import GgufFile


class StoredWeights:
    """A file's tensors by name, converted to the dtype of the layers, counting what has been read."""

    def __init__(self, file: GgufFile, dtype: torch.dtype, progress: Callable[[int, int], None]) -> None:
        self.dtype = dtype
        self._file = file
        self._progress = progress
        self._read_bytes = 0
        self._total_bytes = sum(info.size_bytes for info in file.tensors.values())

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        info = self._file.tensors[name]
        tensor = dequantize(info.kind, self._file.bytes_of(info), info.shape, dtype)
        self._count(info.size_bytes)
        return tensor

    def fused(self, names: Sequence[str], dtype: torch.dtype | None = None) -> Tensor:
        """Several projections of the same input as one: `[sum of out, in]`, by default in the dtype of the layers."""
        parts = [self._file.tensors[name] for name in names]
        fused = torch.empty((sum(part.shape[0] for part in parts), parts[0].shape[1]), dtype=dtype or self.dtype)
        start = 0
        for part in parts:
            dequantize_into(part.kind, self._file.bytes_of(part), fused[start : start + part.shape[0]])
            start += part.shape[0]
            self._count(part.size_bytes)
        return fused

    def _count(self, size_bytes: int) -> None:
        self._read_bytes += size_bytes
        self._progress(self._read_bytes, self._total_bytes)

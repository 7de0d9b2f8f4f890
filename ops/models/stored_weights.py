"""A model file's tensors, as the layers ask for them: by GGUF's names, in the form that the layers compute with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from headrace.ops.models.architectures import tensors_of
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.keys import UnsupportedModel
from headrace.ops.weights.dequantize import dequantize, dequantize_into
from headrace.ops.weights.files import ModelFile
from headrace.ops.weights.groups import Groups, groups_of, stacked

TURNED: Final = ("attn_q", "attn_k")
"""Projections whose heads are turned; with `_norm`, the norms of those heads."""


class StoredWeights:
    """A file's tensors by name, converted to the dtype of the layers, counting what has been read.

    Heads that are turned come out in interleaved pairs, however they are stored, and norms with their offset.
    """

    def __init__(
        self, file: ModelFile, config: ModelConfig, dtype: torch.dtype, progress: Callable[[int, int], None]
    ) -> None:
        self.dtype = dtype
        self._file = file
        self._config = config
        self._tensors = tensors_of(file, config)
        self._progress = progress
        self._read_bytes = 0
        self._total_bytes = sum(info.size_bytes for info in self._tensors.values())

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        info = self._tensors[name]
        tensor = dequantize(info.kind, self._file.bytes_of(info), info.shape, dtype)
        self._check(info.name, tensor)
        self._count(info.size_bytes)
        return self._in_pairs(name, tensor)

    def norm(self, name: str) -> Tensor:
        """The weight of an RMSNorm, float32."""
        weight = self.read(f"{name}.weight", torch.float32)
        return weight + self._config.norm_offset if self._config.norm_offset else weight

    def fused(self, names: Sequence[str], dtype: torch.dtype | None = None) -> Tensor:
        """Several projections of the same input, or their biases, as one: `[sum of out, in]` or `[sum of out]`, by
        default in the dtype of the layers."""
        parts = [self._tensors[name] for name in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        fused = torch.empty(shape, dtype=dtype or self.dtype)
        start = 0
        for name, part in zip(names, parts):
            here = fused[start : start + part.shape[0]]
            dequantize_into(part.kind, self._file.bytes_of(part), here)
            self._check(part.name, here)
            ordered = self._in_pairs(name, here)
            if ordered is not here:
                here.copy_(ordered)
            start += part.shape[0]
            self._count(part.size_bytes)
        return fused

    def grouped(self, names: Sequence[str]) -> Groups:
        """Several projections of the same input as one, in groups of 32."""
        parts = []
        for name in names:
            info = self._tensors[name]
            groups = groups_of(info.kind, self._file.bytes_of(info), info.shape)
            self._check(info.name, groups.scales)
            self._check(info.name, groups.minimums)
            parts.append(Groups(groups.bits, *(self._in_pairs(name, rows) for rows in groups[1:])))
            self._count(info.size_bytes)
        return stacked(parts)

    def _check(self, name: str, numbers: Tensor) -> None:
        """Raises UnsupportedModel for a NaN or an infinity: every answer would be NaN, or nonsense."""
        # Both are NaN where any is. One pass, 1 ms for a million; looking at each takes 13.
        if not all(math.isfinite(bound) for bound in torch.aminmax(numbers)):
            raise UnsupportedModel(
                f"{self._file.path!r} can't be served: the tensor {name} holds values that are no finite numbers. "
                "The model is damaged: fetch or convert it again"
            )

    def _in_pairs(self, name: str, rows: Tensor) -> Tensor:
        """Rows (i, i + half) of each head → (2i, 2i + 1): query and key alike, so that their products stay."""
        module = name.split(".")[-2] if "." in name else name
        if self._config.rope_pairs == "interleaved" or module.removesuffix("_norm") not in TURNED:
            return rows
        assert self._config.rotary_dim == self._config.head_dim, "the rows that are not turned would have to stay"
        heads = rows.view(-1, 2, self._config.head_dim // 2, *rows.shape[1:])
        return heads.transpose(1, 2).reshape(rows.shape)

    def _count(self, size_bytes: int) -> None:
        self._read_bytes += size_bytes
        self._progress(self._read_bytes, self._total_bytes)

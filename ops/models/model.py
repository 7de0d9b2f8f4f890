"""What a step needs of a model, whatever its architecture."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.kv_copy import CopyPages
from headrace.ops.models.config import ModelConfig
from headrace.ops.step_kv import StepKv


class Model(Protocol):
    """What a step needs of a model."""

    config: ModelConfig

    @property
    def copy_pages(self) -> CopyPages:
        """Copies pages between the pools, by the threads that compute."""

    @property
    def back_up_pages(self) -> CopyPages:
        """The same by whoever calls it, also while those compute."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights in memory."""

    def forward(self, ids: NDArray[np.int64], kv: StepKv, keep: NDArray[np.int64]) -> Tensor:
        """Run the tokens of `kv.batch` through all layers, which write and read their KV.

        `ids`: [tokens], none of them left open as in the batch; `keep`: [kept], the tokens whose result is wanted →
        `[kept, width]`, what `logits` takes.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """→ float32 `[rows, vocab]`, the caller's until the next call."""

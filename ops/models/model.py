"""What a step needs of a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

from headrace.ops.models.config import ModelConfig

Attention: TypeAlias = Callable[[int, Tensor], Tensor]
"""`(layer, qkv [tokens, (heads + 2 · kv_heads) · head_dim])` → `[tokens, heads · head_dim]`."""


class Model(Protocol):
    """What a step needs of a model."""

    config: ModelConfig

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights in memory."""

    def forward(self, ids: Tensor, positions: Tensor, attention: Attention, keep: Tensor) -> Tensor:
        """int64 `[tokens]` twice, int64 `[kept]` → `[kept, hidden]`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """→ float32 `[rows, vocab]`."""

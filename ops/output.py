"""The output projection: from hidden states to logits."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from headrace.ops.linear import pack_linear
from headrace.ops.sampling import top

CANDIDATES: Final = 32
"""Ids per row whose logits are exact in bfloat16: more than the `MAX_LOGPROBS` that are ever reported."""


class OutputProjection:
    """`weight`: `[vocab, hidden]`, kept as it is where it is the embedding table too, or in bfloat16.

    A bfloat16 product is rounded when it is stored, between 16 and 32 to steps of 1/8: the best ids are often tied, and
    the lowest of them would win. So those of the best ids are computed again in float32, from the weight's rows: of 320
    greedy ids of the default model's float32 reference 318 come out instead of 315, for 60 µs a row.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = pack_linear(weight)
        self._rows = weight if weight.dtype == torch.bfloat16 else None
        self.size_bytes = self._packed.size_bytes

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` → float32 `[rows, vocab]`."""
        logits = self._packed(hidden).float()
        if self._rows is not None:
            _, ids = top(logits, min(CANDIDATES, logits.shape[1]))
            rows = self._rows.index_select(0, ids.flatten()).view(*ids.shape, -1).float()
            logits.scatter_(1, ids, torch.bmm(rows, hidden.float().unsqueeze(2)).squeeze(2))
        return logits

"""Rotary position embedding (arXiv:2104.09864) over interleaved pairs, torch reference.
On a GPU: `ops.triton.rotary`; compiled for a CPU: `ops.simd.rows`.

Dimensions (2i, 2i + 1) of a head are one complex number, turned by position · theta^(-2i / rotary_dim), divided by what
a scaling says (`models.rope`). That is the form in which Llama's weights lie in GGUF; weights whose pairs are
(i, i + rotary_dim / 2) have their rows reordered at load instead (`models.stored_weights`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.ops.models.config import Rope


class Rotary:
    """The turns of all positions, made once. complex64 [positions, rotary_dim / 2]; 256 bytes a position for 64."""

    def __init__(self, positions: int, rotary_dim: int, rope: Rope) -> None:
        # In float64: the angle of a late position loses 3 digits in float32.
        steps = rope.theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        if rope.divisors:
            steps /= torch.tensor(rope.divisors, dtype=torch.float64)
        angles = torch.outer(torch.arange(positions, dtype=torch.float64), steps)
        self.table = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        self._rotary_dim = rotary_dim

    def turns(self, positions: Tensor) -> Tensor:
        """int64 [tokens] → complex64 [tokens, 1, rotary_dim / 2]: the same for all layers and heads of a step."""
        return self.table.index_select(0, positions).unsqueeze(1)

    def rotate_(self, heads: Tensor, turns: Tensor) -> None:
        """Turn `heads` `[tokens, heads, head_dim]`, float32 or bfloat16, in place (computed in float32)."""
        pairs = heads[..., : self._rotary_dim].view(*heads.shape[:-1], -1, 2)
        if heads.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(turns)
        else:
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(turns)))

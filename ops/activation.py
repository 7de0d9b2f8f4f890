"""Gated activation of the MLP, torch reference."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) · up` (SwiGLU, arXiv:2002.05202): `[tokens, 2 · intermediate]` → `[tokens, intermediate]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)

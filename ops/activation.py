"""Gated activation of the MLP, torch reference.

On a GPU: `ops.triton.activation`; compiled for a CPU: `ops.simd.decoder`.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor


def gated(gate_up: Tensor, activation: Literal["silu", "gelu"]) -> Tensor:
    """`activation(gate) · up` (SwiGLU or GeGLU, arXiv:2002.05202; gelu in its tanh form): `[tokens, 2 · intermediate]`
    → `[tokens, intermediate]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active.mul_(up)

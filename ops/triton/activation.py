"""Gated activation of the MLP. On a CPU: `ops.activation`, and `ops.simd.decoder`.

Bound by bandwidth: with 8B shapes (14336, bfloat16) 56 KB in and 28 KB out a row, 5 operations a value.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.dispatch import ceil_div, launches

_BLOCK = 1024


def gated(gate_up: Tensor, out: Tensor, activation: Literal["silu", "gelu"]) -> None:
    """`out = activation(gate) · up` (SwiGLU or GeGLU, arXiv:2002.05202; gelu in its tanh form), computed in float32.

    `gate_up`: `[rows, 2 · n]`, the gates of a row first; `out`: `[rows, n]`. Rows apart by any stride.
    """
    if not launches(gate_up):
        reference(gate_up, out, activation)
        return
    rows, n = out.shape
    _gated[(rows, ceil_div(n, _BLOCK))](
        gate_up, out, gate_up.stride(0), out.stride(0), N=n, SILU=activation == "silu", BLOCK=_BLOCK, num_warps=4
    )


def reference(gate_up: Tensor, out: Tensor, activation: Literal["silu", "gelu"] = "silu") -> None:
    """The same in torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up)


@triton.jit
def _gated(gate_up, out, in_stride, out_stride, N: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    gate = tl.load(gate_up + row * in_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * in_stride + N + at, mask=inside, other=0.0).to(tl.float32)
    # gelu's tanh form is a silu too, (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), of u = sqrt(2 / pi) (x + 0.044715 x^3).
    slope = gate if SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * out_stride + at, gate / (1 + tl.exp(-slope)) * up, mask=inside)

"""RMSNorm (arXiv:1910.07467), with the residual's addition before it. On a CPU: `ops.norm`, and `ops.simd.rows`.

One program a row, which it holds in registers: the row is read once and written once. With 8B shapes (4096) and a
float32 residual that is 16 KB in, 8 KB of the branch in, 16 KB and 8 KB out a row; 3 operations a value, so the floor
is the bandwidth: 256 rows are 12 MB, 4 µs at 3 TB/s, less than a launch takes to show.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.dispatch import ceil_div, launches, power_of_two

_HEADS = 8
"""That a program norms: with 128 dimensions, eight values for each thread of four warps."""


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float, add: Tensor | None = None) -> None:
    """`out = y / sqrt(mean(y²) + eps) · weight`, where `y = x + add`; with `add`, `x` becomes `y`.

    `x`, `out`: `[rows, n]`; `add`: `[rows, n]` or None; `weight`: float32 `[n]`. Any float dtype each, rows apart by
    any stride, values of a row one after the other. Computed in float32; `y` is rounded to `x`'s dtype where it is
    stored.
    """
    if not launches(x):
        reference(x, weight, out, eps, add)
        return
    rows, n = x.shape
    block = power_of_two(n)
    _rms_norm[(rows,)](
        x,
        x if add is None else add,
        weight,
        out,
        eps,
        x.stride(0),
        0 if add is None else add.stride(0),
        out.stride(0),
        N=n,
        ADD=add is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )


def norm_heads_(heads: Tensor, weights: Tensor, eps: float) -> None:
    """RMSNorm of each head, in place.

    `heads`: `[tokens, heads, head_dim]`, a view with any stride of tokens, heads one after the other (queries and keys
    of a fused projection are one such view). `weights`: float32 `[heads, head_dim]`. Computed in float32.
    """
    if not launches(heads):
        norm_heads_reference_(heads, weights, eps)
        return
    tokens, count, head_dim = heads.shape
    _norm_heads[(tokens, ceil_div(count, _HEADS))](
        heads,
        weights,
        eps,
        heads.stride(0),
        HEADS=count,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=_HEADS,
        BLOCK_D=power_of_two(head_dim),
        num_warps=4,
    )


def norm_heads_reference_(heads: Tensor, weights: Tensor, eps: float) -> None:
    """The same in torch."""
    y = heads.float()
    heads.copy_(y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weights)


def reference(x: Tensor, weight: Tensor, out: Tensor, eps: float, add: Tensor | None = None) -> None:
    """The same in torch."""
    y = x.float()
    if add is not None:
        y = y + add.float()
        x.copy_(y)
    out.copy_(y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight)


@triton.jit
def _rms_norm(
    x,
    add,
    weight,
    out,
    eps,
    x_stride,
    add_stride,
    out_stride,
    N: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    y = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(add + row * add_stride + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * x_stride + at, y, mask=inside)
    scale = 1 / tl.sqrt(tl.sum(y * y, 0) / N + eps)
    y = y * scale * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * out_stride + at, y, mask=inside)


@triton.jit
def _norm_heads(
    heads,
    weights,
    eps,
    stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_D)
    inside = (head < HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    at = head[:, None] * HEAD_DIM + dim[None, :]
    y = tl.load(heads + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(y * y, 1) / HEAD_DIM + eps)
    y = y * scale[:, None] * tl.load(weights + at, mask=inside, other=0.0)
    tl.store(heads + token * stride + at, y, mask=inside)

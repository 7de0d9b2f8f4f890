"""RMSNorm (arXiv:1910.07467), with the residual's addition before it. On a CPU: `ops.norm`, and `ops.simd.rows`.

One program a row, which it holds in registers: the row is read once and written once. With 8B shapes (4096) and a
float32 residual that is 16 KB in, 8 KB of the branch in, 16 KB and 8 KB out a row; 3 operations a value, so the floor
is the bandwidth: 256 rows are 12 MB, 4 µs at 3 TB/s, less than a launch takes to show.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.dispatch import launches, power_of_two


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

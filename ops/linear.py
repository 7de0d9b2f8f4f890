"""Linear layers without bias, their weights packed once at load.

`pack_linear` picks the fastest implementation that this CPU has: oneDNN's reordered weights (at 1..32 rows twice as
fast as `F.linear` in bfloat16, 2 to 3 times in float32), or `F.linear`. With oneDNN a row's bits did not depend on the
number of rows on any CPU tried so far; that is tested where it is promised, not assumed here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """A projection: `[tokens, in]` → `[tokens, out]`, of one dtype, contiguous."""

    size_bytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """`F.linear` over the weight as it is."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.size_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight)


class OneDnnLinear:
    """oneDNN's inner product over a weight in the block layout that it likes best."""

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._multiply: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self.size_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._packed, None, "none", _NO_SCALARS, "")


_NO_SCALARS: Final[list[float]] = []


def pack_linear(weight: Tensor) -> Linear:
    """`weight`: `[out, in]`, float32 or bfloat16. oneDNN copies it; `PlainLinear` keeps it."""
    return OneDnnLinear(weight) if _onednn_multiplies(weight.dtype) else PlainLinear(weight)


@functools.cache
def _onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether this build and CPU have the packed kernels, and they multiply right: seen by trying, once a dtype."""
    operators = torch.ops.mkldnn
    if not (torch._C._has_mkldnn and hasattr(operators, "_reorder_linear_weight")):
        return False
    # Without the instructions oneDNN still multiplies bfloat16, but slower than torch itself.
    if dtype == torch.bfloat16 and not operators._is_mkldnn_bf16_supported():
        return False
    # Small integers: exact in both dtypes, whatever the order of the sums.
    weight = torch.arange(64 * 32).remainder(5).sub(2).view(64, 32).to(dtype)
    x = torch.arange(3 * 32).remainder(3).sub(1).view(3, 32).to(dtype)
    return torch.equal(OneDnnLinear(weight)(x), x @ weight.T)

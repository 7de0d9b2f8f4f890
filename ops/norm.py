"""RMSNorm (arXiv:1910.07467), torch reference.

On a GPU: `ops.triton.norm`; compiled for a CPU: `ops.simd.rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RmsNorm:
    """`x / sqrt(mean(x²) + eps) · weight`. `weight`: float32 [hidden]."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight
        self._eps = torch.tensor(eps)
        self._dtype = dtype
        self.size_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """float32 `[tokens, hidden]` → the same shape in the dtype of the layers."""
        # Four operations instead of the seven of F.rms_norm on a CPU: 7 µs against 12 at one row, 61 times a step.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(x * scale, self._weight, out=torch.empty(x.shape, dtype=self._dtype))

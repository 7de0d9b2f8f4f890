"""Stored blocks to float32 or bfloat16, on whole chunks of blocks.

Each kind equals the `gguf` package's numpy version bit for bit. The quantized ones are compiled loops (`simd.blocks`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from headrace.ops.weights.gguf import KINDS

_BY_NAME: Final = {kind.name: kind for kind in KINDS.values()}

PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Kinds that are no blocks."""
_CHUNK_ELEMENTS: Final = 1 << 16
"""Of float32 on their way to bfloat16: they stay in the L2 cache."""


def dequantize(kind: str, data: memoryview, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A new tensor of `shape` from a tensor's bytes (`GgufFile.bytes_of`); it shares no memory with the file.

    `dtype` is float32, or bfloat16 (the float32 value rounded to nearest even).
    """
    out = torch.empty(tuple(shape), dtype=dtype)
    dequantize_into(kind, data, out)
    return out


def dequantize_into(kind: str, data: memoryview, out: Tensor) -> None:
    """Fill `out` (contiguous, float32 or bfloat16): for weights that stand fused in one tensor, without a copy."""
    stored = _BY_NAME[kind]
    assert out.is_contiguous() and out.dtype in (torch.float32, torch.bfloat16)
    assert len(data) * stored.block_elements == out.numel() * stored.block_bytes, "shape and bytes disagree"
    if kind in PLAIN:
        out.view(-1).copy_(_tensor(data).view(PLAIN[kind]))
        return
    from headrace.ops.simd.blocks import decode  # numba, half a second

    blocks = np.frombuffer(data, np.uint8).reshape(-1, stored.block_bytes)
    rows = out.view(-1, stored.block_elements)
    if out.dtype == torch.float32:
        decode(kind, blocks, rows.numpy())
        return
    step = _CHUNK_ELEMENTS // stored.block_elements
    scratch = torch.empty((min(step, len(rows)), stored.block_elements))
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        exact = scratch[: len(chunk)]
        decode(kind, blocks[start : start + step], exact.numpy())
        chunk.copy_(exact)


def _tensor(data: memoryview) -> Tensor:
    """uint8 `[bytes]` over the mapping itself."""
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so; this one is only read, and does not leave this module.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)

"""Stored blocks to float32 or bfloat16: one small function per kind, on whole chunks of blocks.

Each equals the `gguf` package's numpy version bit for bit: products and sums are rounded one by one (no fused
multiply-add), in the same order. The default model's 135M weights take 0.15 s into bfloat16 and
0.3 s into float32 with two threads: page faults of new memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from headrace.ops.weights import k_quants
from headrace.ops.weights.gguf import KINDS, TensorKind

_BY_NAME: Final = {kind.name: kind for kind in KINDS.values()}

_CHUNK_ELEMENTS: Final = 1 << 21
"""Bounds the temporaries at about 16 MB; smaller chunks cost speed (1 << 17: 0.18 s instead of 0.12)."""


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
    decode = DECODERS[kind]
    blocks = _blocks(data, stored)
    rows = out.view(-1, stored.block_elements)
    step = max(1, _CHUNK_ELEMENTS // stored.block_elements)
    rounded = out.dtype != torch.float32
    scratch = torch.empty((min(step, len(rows)), stored.block_elements)) if rounded else rows
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        target = scratch[: len(chunk)] if rounded else chunk
        decode(blocks[start : start + step], target)
        if rounded:
            chunk.copy_(target)


def _blocks(data: memoryview, kind: TensorKind) -> Tensor:
    """uint8 [blocks, block_bytes] over the mapping itself."""
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so; this one is only read, and does not leave this module.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8).view(-1, kind.block_bytes)


def _f32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float32))


def _f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float16))


def _bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """f16 scale, 32 × int8."""
    scale = blocks[:, :2].view(torch.float16).float()
    torch.mul(blocks[:, 2:].view(torch.int8), scale, out=out)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """f16 scale, 16 bytes: elements 0..15 in the low halves, 16..31 in the high ones, each minus 8."""
    scale = blocks[:, :2].view(torch.float16).float()
    pairs = blocks[:, 2:]
    torch.mul((pairs & 15).view(torch.int8).sub_(8), scale, out=out[:, :16])
    torch.mul((pairs >> 4).view(torch.int8).sub_(8), scale, out=out[:, 16:])


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """f16 scale, f16 minimum, 16 bytes laid out as in Q4_0."""
    scale_and_minimum = blocks[:, :4].view(torch.float16).float()
    scale, minimum = scale_and_minimum[:, :1], scale_and_minimum[:, 1:]
    pairs = blocks[:, 4:]
    torch.mul(pairs & 15, scale, out=out[:, :16])
    torch.mul(pairs >> 4, scale, out=out[:, 16:])
    out.add_(minimum)


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    """f16 scale, 4 bytes whose bit i is the fifth bit of element i, 16 bytes laid out as in Q4_0, each minus 16."""
    scale = blocks[:, :2].view(torch.float16).float()
    low, high = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    torch.mul(low.view(torch.int8).sub_(16), scale, out=out[:, :16])
    torch.mul(high.view(torch.int8).sub_(16), scale, out=out[:, 16:])


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    """f16 scale, f16 minimum, then as in Q5_0."""
    scale_and_minimum = blocks[:, :4].view(torch.float16).float()
    scale, minimum = scale_and_minimum[:, :1], scale_and_minimum[:, 1:]
    low, high = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    torch.mul(low, scale, out=out[:, :16])
    torch.mul(high, scale, out=out[:, 16:])
    out.add_(minimum)


def _five_bits(fifths: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 `[blocks, 4]` and `[blocks, 16]` → the elements 0..15 and 16..31, from 0 to 31."""
    bits = ((fifths[:, :, None] >> _EIGHT & 1) << 4).flatten(1)
    return (pairs & 15).add_(bits[:, :16]), (pairs >> 4).add_(bits[:, 16:])


_EIGHT: Final = torch.arange(8, dtype=torch.uint8)

DECODERS: Final[dict[str, Callable[[Tensor, Tensor], None]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": k_quants.q2_k,
    "Q3_K": k_quants.q3_k,
    "Q4_K": k_quants.q4_k,
    "Q5_K": k_quants.q5_k,
    "Q6_K": k_quants.q6_k,
}
"""By kind: `(uint8 [blocks, block_bytes], float32 [blocks, block_elements])` fills the second from the first."""

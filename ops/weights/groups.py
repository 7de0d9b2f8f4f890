"""Weights in groups of 32 along the sum, each code · scale + minimum: what the compiled kernels multiply in q8.

A file's own 4 and 8 bits are kept as they are; other kinds are rounded to 8 bits, by a group's largest magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops.weights.dequantize import dequantize

GROUP: Final = 32
_LARGEST: Final = 127
_ZERO: Final = 128
"""The code of 0 in 8 bits."""
_PASS_ROWS: Final = 512
"""Rows of weights that are rounded at a time: their float32 stays in the cache."""


class Groups(NamedTuple):
    """`[out, in]` weights; `in` is filled up with zeros to whole groups."""

    bits: int
    """4 or 8: codes are below 2^bits."""
    codes: Tensor
    """uint8 [out, in]."""
    scales: Tensor
    """float32 [out, in / 32]."""
    minimums: Tensor
    """float32 [out, in / 32]: the weight of code 0."""

    def rows(self, at: Tensor) -> Groups:
        """The rows at int64 `at`, in this order; -1 is a row of zeros."""
        codes, scales, minimums = (part[at] * (at >= 0).unsqueeze(1).to(part.dtype) for part in self[1:])
        return Groups(self.bits, codes, scales, minimums)


def stacked(parts: Sequence[Groups]) -> Groups:
    """One below the other; in as many bits as the widest has."""
    codes, scales, minimums = (torch.cat(tensors) for tensors in list(zip(*parts))[1:])
    return Groups(max(part.bits for part in parts), codes, scales, minimums)


def groups_of(kind: str, data: memoryview, shape: Sequence[int]) -> Groups:
    """Of a tensor's bytes (`GgufFile.bytes_of`)."""
    if kind in ("Q4_0", "Q4_1"):
        return _four_bits(kind, data, shape)
    if kind == "Q8_0":
        blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape[0], -1, 2 + GROUP)
        scales = blocks[..., :2].contiguous().view(torch.float16).float().squeeze(-1)
        codes = blocks[..., 2:] ^ _ZERO
        return Groups(8, codes.reshape(shape[0], -1), scales, scales * -_ZERO)
    return rounded(dequantize(kind, data, shape))


def _four_bits(kind: str, data: memoryview, shape: Sequence[int]) -> Groups:
    """A float16 scale, in Q4_1 a float16 minimum, then 16 bytes: codes 0..15 in their low halves, 16..31 in the high
    ones."""
    header = 4 if kind == "Q4_1" else 2
    blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape[0], -1, header + GROUP // 2)
    numbers = blocks[..., :header].contiguous().view(torch.float16).float()
    pairs = blocks[..., header:]
    codes = torch.cat((pairs & 15, pairs >> 4), dim=-1).view(shape[0], -1)
    scales = numbers[..., 0].contiguous()
    return Groups(4, codes, scales, numbers[..., 1].contiguous() if kind == "Q4_1" else scales * -8)


def rounded(weight: Tensor) -> Groups:
    """float32 or bfloat16 `[out, in]` to 8 bits: each group by its largest magnitude, to -127 .. 127."""
    parts = [_rounded(F.pad(part.float(), (0, -part.shape[1] % GROUP))) for part in weight.split(_PASS_ROWS)]  # type: ignore[no-untyped-call]
    return stacked(parts)


def _rounded(weight: Tensor) -> Groups:
    groups = weight.view(len(weight), -1, GROUP)
    scales = groups.abs().amax(-1) / _LARGEST
    # A group of zeros has no scale to divide by.
    inverse = torch.where(scales > 0, 1 / scales, 0)
    codes = (groups * inverse.unsqueeze(-1)).round_().add_(_ZERO).to(torch.uint8)
    return Groups(8, codes.view(len(weight), -1), scales, scales * -_ZERO)

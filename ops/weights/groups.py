"""Weights in groups of 32 along the sum, each code · scale + minimum: what the compiled kernels multiply in q8.

A file's own 4, 5 and 8 bits are kept as they are, where its groups have 32 numbers; other kinds (Q6_K's groups have 16)
are rounded to 8 bits, by a group's largest magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops.weights.dequantize import dequantize
from headrace.ops.weights.gguf import KINDS

GROUP: Final = 32
_BLOCK_BYTES: Final = {kind.name: kind.block_bytes for kind in KINDS.values()}
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
        chosen = [part[at] for part in self[1:]]
        if bool((at < 0).any()):
            for part in chosen:
                part[at < 0] = 0
        return Groups(self.bits, *chosen)


def stacked(parts: Sequence[Groups]) -> Groups:
    """One below the other; in as many bits as the widest has."""
    codes, scales, minimums = (torch.cat(tensors) for tensors in list(zip(*parts))[1:])
    return Groups(max(part.bits for part in parts), codes, scales, minimums)


def groups_of(kind: str, data: memoryview, shape: Sequence[int]) -> Groups:
    """Of a tensor's bytes (`GgufFile.bytes_of`)."""
    read = _READ.get(kind)
    if read is None:
        return rounded(dequantize(kind, data, shape))
    rows, block_bytes = shape[0], _BLOCK_BYTES[kind]
    bits, codes, scales, minimums = read(
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(rows, -1, block_bytes)
    )
    return Groups(bits, codes.reshape(rows, -1), scales.reshape(rows, -1), minimums.reshape(rows, -1))


# ---------------------------------------------------------------------------------------------------------------
# Kinds whose groups of 32 have a scale, and codes in a row: blocks, uint8 [rows, blocks, bytes] → `Groups`, in whatever
# shape


def _q4_0(blocks: Tensor) -> Groups:
    scales = _float16s(blocks[..., :2])
    return Groups(4, _nibbles(blocks[..., 2:]), scales, scales * -8)


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(4, _nibbles(blocks[..., 4:]), _float16s(blocks[..., :2]), _float16s(blocks[..., 2:4]))


def _q5_0(blocks: Tensor) -> Groups:
    scales = _float16s(blocks[..., :2])
    return Groups(8, _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]), scales, scales * -16)


def _q5_1(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Groups(8, codes, _float16s(blocks[..., :2]), _float16s(blocks[..., 2:4]))


def _q8_0(blocks: Tensor) -> Groups:
    scales = _float16s(blocks[..., :2])
    return Groups(8, blocks[..., 2:] ^ _ZERO, scales, scales * -_ZERO)


def _q4_k(blocks: Tensor) -> Groups:
    return Groups(4, _nibbles_of_eight(blocks[..., 16:]), *_scales_of_eight(blocks))


def _q5_k(blocks: Tensor) -> Groups:
    # A byte for each place in a group, a bit for each group.
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1) << 4
    return Groups(8, _nibbles_of_eight(blocks[..., 48:]) | fifth, *_scales_of_eight(blocks))


def _float16s(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Codes 0 to 15 are in the low halves of 16 bytes, 16 to 31 in the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Of 32 codes in 4 bytes, as 16 or 0."""
    return ((packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1) << 4).flatten(-2)


def _nibbles_of_eight(packed: Tensor) -> Tensor:
    """Of eight groups: of 32 bytes the low halves are one's, the high ones the next one's."""
    pairs = packed.reshape(*packed.shape[:-1], 4, GROUP)
    return torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(-3, -2)


def _scales_of_eight(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of a block of 256: two float16, times 6 bits for each of its eight groups, in 12 bytes."""
    packed = blocks[..., 4:16]
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, rest & 15 | low >> 6 << 4), dim=-1)
    minimums = torch.cat((high & 63, rest >> 4 | high >> 6 << 4), dim=-1)
    return _float16s(blocks[..., :2]) * scales, -_float16s(blocks[..., 2:4]) * minimums


_READ: Final[dict[str, Callable[[Tensor], Groups]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}


# ---------------------------------------------------------------------------------------------------------------
# Other kinds


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

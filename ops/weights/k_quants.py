"""Blocks of K-quants to float32: 256 elements in 8 or 16 groups, whose scales are small integers times a scale of the
block, so that a group costs 4 to 8 bits of scale instead of 16.

Each takes uint8 `[blocks, block_bytes]` and fills float32 `[blocks, 256]`, and equals the `gguf` package's numpy
version bit for bit. Of a byte that holds parts of several numbers, the lowest bits are the earliest group's.

Layouts: ggml/src/ggml-common.h in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import torch
from torch import Tensor


def q2_k(blocks: Tensor, out: Tensor) -> None:
    """16 × (4-bit scale, 4-bit minimum), 64 bytes of 2-bit numbers, f16 scale, f16 minimum; groups of 16."""
    scales, minima = (blocks[:, :16] & 15) * _f16(blocks, 80), (blocks[:, :16] >> 4) * _f16(blocks, 82)
    quarters = blocks[:, 16:80].view(-1, 2, 2, 16)
    # [blocks, half, bits, 16 elements twice]
    groups, by_group = out.view(-1, 2, 4, 2, 16), (-1, 2, 4, 2, 1)
    scales, minima = scales.view(by_group), minima.view(by_group)
    for bits in range(4):
        torch.mul((quarters >> 2 * bits) & 3, scales[:, :, bits], out=groups[:, :, bits])
    groups.sub_(minima)


def q3_k(blocks: Tensor, out: Tensor) -> None:
    """32 bytes of high bits, 64 bytes of 2-bit low parts, 16 scales of 6 bits, f16 scale; groups of 16.

    A number is its low part, minus 4 where its high bit is *not* set.
    """
    packed = blocks[:, 96:108]
    low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), 1)
    high = torch.cat([(packed[:, 8:] >> 2 * bits) & 3 for bits in range(4)], 1)
    scales = (low | high << 4).view(torch.int8).sub(32) * _f16(blocks, 108)
    scales = scales.view(-1, 2, 4, 2, 1)
    masks, quarters = blocks[:, :32].view(-1, 2, 16), blocks[:, 32:96].view(-1, 2, 2, 16)
    groups = out.view(-1, 2, 4, 2, 16)
    for half in range(2):
        for bits in range(4):
            # 4 where the high bit is not set.
            offset = ((masks >> 4 * half + bits) & 1 ^ 1) << 2
            numbers = ((quarters[:, half] >> 2 * bits) & 3).sub_(offset).view(torch.int8)
            torch.mul(numbers, scales[:, half, bits], out=groups[:, half, bits])


def q4_k(blocks: Tensor, out: Tensor) -> None:
    """f16 scale, f16 minimum, 8 scales and 8 minima of 6 bits, 128 bytes of halves; groups of 32."""
    scales, minima = _scales_and_minima(blocks)
    pairs = blocks[:, 16:].view(-1, 4, 32)
    groups = out.view(-1, 4, 2, 32)
    torch.mul(pairs & 15, scales[:, :, 0], out=groups[:, :, 0])
    torch.mul(pairs >> 4, scales[:, :, 1], out=groups[:, :, 1])
    groups.sub_(minima)


def q5_k(blocks: Tensor, out: Tensor) -> None:
    """As Q4_K, with 32 bytes between the scales and the halves: bit g of byte i is the fifth bit of group g's i-th."""
    scales, minima = _scales_and_minima(blocks)
    fifths, pairs = blocks[:, 16:48], blocks[:, 48:].view(-1, 4, 32)
    groups = out.view(-1, 4, 2, 32)
    for pair in range(4):
        low = (pairs[:, pair] & 15).add_((fifths >> 2 * pair & 1) << 4)
        high = (pairs[:, pair] >> 4).add_((fifths >> 2 * pair + 1 & 1) << 4)
        torch.mul(low, scales[:, pair, 0], out=groups[:, pair, 0])
        torch.mul(high, scales[:, pair, 1], out=groups[:, pair, 1])
    groups.sub_(minima)


def q6_k(blocks: Tensor, out: Tensor) -> None:
    """128 bytes of low halves, 64 bytes of 2-bit high parts, 16 int8 scales, f16 scale; groups of 16, minus 32."""
    scales = (blocks[:, 192:208].view(torch.int8) * _f16(blocks, 208)).view(-1, 2, 4, 2, 1)
    halves, quarters = blocks[:, :128].view(-1, 2, 2, 2, 16), blocks[:, 128:192].view(-1, 2, 2, 16)
    groups = out.view(-1, 2, 4, 2, 16)
    for quarter in range(4):
        # A byte's low half is in the first or second quarter of 128 elements, its high half in the third or fourth.
        low = halves[:, :, quarter % 2]
        low = low >> 4 if quarter >= 2 else low & 15
        numbers = low.add_((quarters >> 2 * quarter & 3) << 4).view(torch.int8).sub_(32)
        torch.mul(numbers, scales[:, :, quarter], out=groups[:, :, quarter])


def _f16(blocks: Tensor, at: int) -> Tensor:
    """A float16 of each block → float32 `[blocks, 1]`."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: two float32 `[blocks, 4, 2, 1]`.

    Twelve bytes hold 6-bit scales 0 to 3 and minima 0 to 3; then the low halves of 4 to 7, whose two high bits are the
    top ones of the bytes before.
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, low & 15 | first >> 2 & 48), 1)
    minima = torch.cat((second & 63, low >> 4 | second >> 2 & 48), 1)
    shape = (-1, 4, 2, 1)
    return (scales * _f16(blocks, 0)).view(shape), (minima * _f16(blocks, 2)).view(shape)

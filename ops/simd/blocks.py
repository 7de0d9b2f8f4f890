"""Stored blocks to float32: a loop per kind, which LLVM makes vector code of. One thread turns out 0.8 to 2 billion
numbers a second, where chains of torch's operations gave 0.05 (Q3_K) to 0.3. Compiling takes 0.3 to 0.5 s a kind, once.

Each takes uint8 `[blocks, block_bytes]` and fills float32 `[blocks, block_elements]`, and equals the `gguf` package's
numpy version bit for bit: products and sums are rounded one by one, in the same order.

In a K-quant 256 elements are 8 or 16 groups, whose scales are small integers times a scale of the block, so that a
group costs 4 to 8 bits of scale instead of 16. Of a byte that holds parts of several numbers, the lowest bits are the
earliest group's.

Layouts: ggml/src/ggml-common.h in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

Blocks: TypeAlias = NDArray[np.uint8]
Numbers: TypeAlias = NDArray[np.float32]
Decoder: TypeAlias = Callable[[Blocks, Numbers, Numbers], None]

HALVES: Final[Numbers] = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""The float32 of each float16: numba has none."""

_SIGNATURE: Final = types.void(
    types.Array(types.uint8, 2, "C", readonly=True),
    types.Array(types.float32, 1, "C"),
    types.Array(types.float32, 2, "C"),
)
_inlined: Final = numba.njit(inline="always", error_model="numpy")

DECODERS: Final[dict[str, Any]] = {}
"""By kind: `(blocks, HALVES, out)`. They are compiled when they are first called."""


def decode(kind: str, blocks: Blocks, out: Numbers) -> None:
    """Fill float32 `[blocks, block_elements]` from uint8 `[blocks, block_bytes]`; both lie in one piece."""
    decoder = DECODERS[kind]
    if not decoder.signatures:
        decoder.compile(_SIGNATURE)
    blocks.flags.writeable = False
    decoder(blocks, HALVES, out)


def keep() -> None:
    """Keep what is compiled from now on where numba has been told to."""
    for decoder in DECODERS.values():
        decoder.enable_caching()


def _decoder(function: Decoder) -> Decoder:
    DECODERS[function.__name__.upper()] = numba.njit(function, error_model="numpy", nogil=True)
    return function


@_inlined  # type: ignore[untyped-decorator]
def _half(block: Blocks, at: int, halves: Numbers) -> np.float32:
    return halves[np.int32(block[at]) | np.int32(block[at + 1]) << 8]  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------------
# Blocks of 32


@_decoder
def q8_0(blocks: Blocks, halves: Numbers, out: Numbers) -> None:
    """f16 scale, 32 × int8."""
    for index in range(len(blocks)):
        block, numbers = blocks[index], out[index]
        scale = _half(block, 0, halves)
        for i in range(32):
            numbers[i] = np.float32(np.int8(block[2 + i])) * scale


@_decoder
def q4_0(blocks: Blocks, halves: Numbers, out: Numbers) -> None:
    """f16 scale, 16 bytes: elements 0..15 in the low halves, 16..31 in the high ones, each minus 8."""
    for index in range(len(blocks)):
        block, numbers = blocks[index], out[index]
        scale = _half(block, 0, halves)
        for i in range(16):
            pair = np.int32(block[2 + i])
            numbers[i] = np.float32((pair & 15) - 8) * scale
            numbers[16 + i] = np.float32((pair >> 4) - 8) * scale


@_decoder
def q4_1(blocks: Blocks, halves: Numbers, out: Numbers) -> None:
    """f16 scale, f16 minimum, 16 bytes laid out as in Q4_0."""
    for index in range(len(blocks)):
        block, numbers = blocks[index], out[index]
        scale, minimum = _half(block, 0, halves), _half(block, 2, halves)
        for i in range(16):
            pair = np.int32(block[4 + i])
            numbers[i] = np.float32(pair & 15) * scale + minimum
            numbers[16 + i] = np.float32(pair >> 4) * scale + minimum


@_decoder
def q5_0(blocks: Blocks, halves: Numbers, out: Numbers) -> None:
    """f16 scale, 4 bytes whose bit i is the fifth bit of element i, 16 bytes laid out as in Q4_0, each minus 16."""
    for index in range(len(blocks)):
        block, numbers = blocks[index], out[index]
        scale, fifths = _half(block, 0, halves), _four_bytes(block, 2)
        for i in range(16):
            pair = np.int32(block[6 + i])
            numbers[i] = np.float32((pair & 15 | (fifths >> i & 1) << 4) - 16) * scale
            numbers[16 + i] = np.float32((pair >> 4 | (fifths >> 16 + i & 1) << 4) - 16) * scale


@_decoder
def q5_1(blocks: Blocks, halves: Numbers, out: Numbers) -> None:
    """f16 scale, f16 minimum, then as in Q5_0, less nothing."""
    for index in range(len(blocks)):
        block, numbers = blocks[index], out[index]
        scale, minimum, fifths = _half(block, 0, halves), _half(block, 2, halves), _four_bytes(block, 4)
        for i in range(16):
            pair = np.int32(block[8 + i])
            numbers[i] = np.float32(pair & 15 | (fifths >> i & 1) << 4) * scale + minimum
            numbers[16 + i] = np.float32(pair >> 4 | (fifths >> 16 + i & 1) << 4) * scale + minimum


@_inlined  # type: ignore[untyped-decorator]
def _four_bytes(block: Blocks, at: int) -> np.int32:
    low = np.int32(block[at]) | np.int32(block[at + 1]) << 8
    return np.int32(low | np.int32(block[at + 2]) << 16 | np.int32(block[at + 3]) << 24)


# ---------------------------------------------------------------------------------------------------------------
# K-quants


@_decoder
def q2_k(blocks: Blocks, halves: Numbers, out: Numbers) -> None:
    """16 × (4-bit scale, 4-bit minimum), 64 bytes of 2-bit numbers, f16 scale, f16 minimum; groups of 16."""
    for index in range(len(blocks)):
        block, numbers = blocks[index], out[index]
        scale, minimum = _half(block, 80, halves), _half(block, 82, halves)
        for group in range(16):
            both = np.int32(block[group])
            own_scale, own_minimum = np.float32(both & 15) * scale, np.float32(both >> 4) * minimum
            first, shift = 16 + group // 8 * 32 + group % 2 * 16, group % 8 // 2 * 2
            for i in range(16):
                number = np.float32(np.int32(block[first + i]) >> shift & 3)
                numbers[group * 16 + i] = number * own_scale - own_minimum


@_decoder
def q3_k(blocks: Blocks, halves: Numbers, out: Numbers) -> None:
    """32 bytes of high bits, 64 bytes of 2-bit low parts, 16 scales of 6 bits, f16 scale; groups of 16.

    A number is its low part, minus 4 where its high bit is *not* set.
    """
    for index in range(len(blocks)):
        block, numbers = blocks[index], out[index]
        scale = _half(block, 108, halves)
        for group in range(16):
            low = np.int32(block[96 + group % 8]) >> group // 8 * 4 & 15
            high = np.int32(block[104 + group % 4]) >> group // 4 * 2 & 3
            own_scale = np.float32((low | high << 4) - 32) * scale
            half, quarter, part = group // 8, group % 8 // 2, group % 2 * 16
            for i in range(16):
                low_bits = np.int32(block[32 + half * 32 + part + i]) >> 2 * quarter & 3
                high_bit = np.int32(block[part + i]) >> 4 * half + quarter & 1
                numbers[group * 16 + i] = np.float32(low_bits + 4 * high_bit - 4) * own_scale


@_decoder
def q4_k(blocks: Blocks, halves: Numbers, out: Numbers) -> None:
    """f16 scale, f16 minimum, 8 scales and 8 minima of 6 bits, 128 bytes of halves; groups of 32."""
    for index in range(len(blocks)):
        block, numbers = blocks[index], out[index]
        scale, minimum = _half(block, 0, halves), _half(block, 2, halves)
        for group in range(8):
            own_scale, own_minimum = _six_bits(block, 4, group) * scale, _six_bits(block, 8, group) * minimum
            first, shift = 16 + group // 2 * 32, group % 2 * 4
            for i in range(32):
                number = np.float32(np.int32(block[first + i]) >> shift & 15)
                numbers[group * 32 + i] = number * own_scale - own_minimum


@_decoder
def q5_k(blocks: Blocks, halves: Numbers, out: Numbers) -> None:
    """As Q4_K, with 32 bytes between the scales and the halves: bit g of byte i is the fifth bit of group g's i-th."""
    for index in range(len(blocks)):
        block, numbers = blocks[index], out[index]
        scale, minimum = _half(block, 0, halves), _half(block, 2, halves)
        for group in range(8):
            own_scale, own_minimum = _six_bits(block, 4, group) * scale, _six_bits(block, 8, group) * minimum
            first, shift = 48 + group // 2 * 32, group % 2 * 4
            for i in range(32):
                fifth = np.int32(block[16 + i]) >> group & 1
                number = np.float32(np.int32(block[first + i]) >> shift & 15 | fifth << 4)
                numbers[group * 32 + i] = number * own_scale - own_minimum


@_decoder
def q6_k(blocks: Blocks, halves: Numbers, out: Numbers) -> None:
    """128 bytes of low halves, 64 bytes of 2-bit high parts, 16 int8 scales, f16 scale; groups of 16, minus 32.

    A byte's low half is in the first or second quarter of 128 elements, its high half in the third or fourth.
    """
    for index in range(len(blocks)):
        block, numbers = blocks[index], out[index]
        scale = _half(block, 208, halves)
        for group in range(16):
            own_scale = np.float32(np.int8(block[192 + group])) * scale
            half, quarter, part = group // 8, group % 8 // 2, group % 2 * 16
            low, high = half * 64 + quarter % 2 * 32 + part, 128 + half * 32 + part
            for i in range(16):
                low_bits = np.int32(block[low + i]) >> quarter // 2 * 4 & 15
                high_bits = np.int32(block[high + i]) >> 2 * quarter & 3
                numbers[group * 16 + i] = np.float32((low_bits | high_bits << 4) - 32) * own_scale


@_inlined  # type: ignore[untyped-decorator]
def _six_bits(block: Blocks, at: int, group: int) -> np.float32:
    """Of Q4_K and Q5_K: a scale (`at` 4) or a minimum (8).

    Four bytes hold 0 to 3; the low halves of 4 to 7 follow the minima, and their two high bits are the top ones of the
    bytes before.
    """
    if group < 4:
        return np.float32(np.int32(block[at + group]) & 63)
    low = np.int32(block[8 + group]) >> (at - 4) & 15
    return np.float32(low | np.int32(block[at + group - 4]) >> 2 & 48)

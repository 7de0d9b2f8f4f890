"""Rotary position embedding (arXiv:2104.09864), in place. On a CPU: `ops.rotary`, and `ops.simd.rows`.

A program turns a few heads of one token. Bound by bandwidth: with 8B shapes (32 + 8 heads of 128, bfloat16) 10 KB in
and out a token, and the turns, 512 B, which the heads share through the cache.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.dispatch import ceil_div, launches, power_of_two

_HEADS = 8
"""That a program turns: 64 pairs of each are 512, four for each thread of four warps."""


def rotate_(heads: Tensor, positions: Tensor, turns: Tensor, pairs: Literal["interleaved", "halves"]) -> None:
    """Turn pairs of dimensions of each head by its token's angles, in float32.

    `heads`: `[tokens, heads, head_dim]`, a view with any stride of tokens, heads one after the other (queries and keys
    of a fused projection are one such view). `positions`: int32 `[tokens]`, rows of `turns`, float32
    `[positions, rotary_dim / 2, 2]`: cosine and sine. `pairs`: (2i, 2i + 1) or (i, i + rotary_dim / 2), of the first
    `rotary_dim` dimensions; the others stay.
    """
    if not launches(heads):
        reference(heads, positions, turns, pairs)
        return
    tokens, count, head_dim = heads.shape
    half = turns.shape[1]
    _rotate[(tokens, ceil_div(count, _HEADS))](
        heads,
        positions,
        turns,
        heads.stride(0),
        HEADS=count,
        HEAD_DIM=head_dim,
        HALF=half,
        INTERLEAVED=pairs == "interleaved",
        BLOCK_HEADS=_HEADS,
        BLOCK_HALF=power_of_two(half),
        num_warps=4,
    )


def reference(heads: Tensor, positions: Tensor, turns: Tensor, pairs: Literal["interleaved", "halves"]) -> None:
    """The same in torch."""
    half = turns.shape[1]
    cos, sin = turns[positions.long()][:, None].unbind(-1)
    rotated = heads[..., : 2 * half]
    if pairs == "interleaved":
        a, b = rotated[..., 0::2].float(), rotated[..., 1::2].float()
        rotated.copy_(torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2))
    else:
        a, b = rotated[..., :half].float(), rotated[..., half:].float()
        rotated.copy_(torch.cat((a * cos - b * sin, a * sin + b * cos), -1))


@triton.jit
def _rotate(
    heads,
    positions,
    turns,
    stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    start = heads + token * stride + head[:, None] * HEAD_DIM
    turn = turns + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    pair = tl.arange(0, BLOCK_HALF)
    inside = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    cos = tl.load(turn + 2 * pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(turn + 2 * pair + 1, mask=pair < HALF, other=0.0)[None, :]
    if INTERLEAVED:
        # Read and written as runs, the two of a pair by the same thread.
        both = tl.arange(0, 2 * BLOCK_HALF)
        inside_both = (head < HEADS)[:, None] & (both < 2 * HALF)[None, :]
        x = tl.load(start + both[None, :], mask=inside_both, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (BLOCK_HEADS, BLOCK_HALF, 2)))
        x = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (BLOCK_HEADS, 2 * BLOCK_HALF))
        tl.store(start + both[None, :], x, mask=inside_both)
    else:
        a = tl.load(start + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(start + HALF + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(start + pair[None, :], a * cos - b * sin, mask=inside)
        tl.store(start + HALF + pair[None, :], a * sin + b * cos, mask=inside)

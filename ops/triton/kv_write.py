"""New keys and values go into the paged pool. On a CPU: `ops.attention.attend`, and `ops.simd.rows`.

A program writes all keys and values of one token, a run of `head_dim` values each, and finds the token's page itself,
so that no index is made on the host and a graph can be replayed with another page table. Bound by bandwidth: with 8B
shapes 4 KB in and out a token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.dispatch import launches, power_of_two


def write_kv(kv: Tensor, layer: Tensor, table: Tensor, token_slot: Tensor, positions: Tensor) -> None:
    """Put keys and values of tokens where the page table says.

    `kv`: `[tokens, 2 · kv_heads, head_dim]`, keys first, rotated; a view with any stride of tokens, heads one after the
    other. `layer`: `[num_pages, 2, kv_heads, page_tokens, head_dim]`, a layer of the pool (`ops.kv_pool`). `table`:
    int32 `[slots, pages]`. `token_slot`, `positions`: int32 `[tokens]`; a slot of -1 is a token that pads the batch and
    is not written. Every other token must have a page: nothing here checks the table.
    """
    if not launches(kv):
        reference(kv, layer, table, token_slot, positions)
        return
    tokens, planes, head_dim = kv.shape
    page_tokens = layer.shape[3]
    _write_kv[(tokens,)](
        kv,
        layer,
        table,
        token_slot,
        positions,
        kv.stride(0),
        table.stride(0),
        PLANES=planes,
        PAGE_TOKENS=page_tokens,
        HEAD_DIM=head_dim,
        BLOCK_PLANES=power_of_two(planes),
        BLOCK_DIM=power_of_two(head_dim),
        num_warps=4,
    )


def reference(kv: Tensor, layer: Tensor, table: Tensor, token_slot: Tensor, positions: Tensor) -> None:
    """The same in torch."""
    written = (token_slot >= 0).nonzero().squeeze(1)
    slots, at = token_slot[written].long(), positions[written].long()
    page_tokens = layer.shape[3]
    pages = table[slots, at // page_tokens].long()
    planes = layer.view(layer.shape[0], -1, page_tokens, layer.shape[4])
    planes[pages, :, at % page_tokens] = kv[written].to(layer.dtype)


@triton.jit
def _write_kv(
    kv,
    layer,
    table,
    token_slot,
    positions,
    kv_stride,
    table_stride,
    PLANES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_PLANES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slot + token).to(tl.int64)
    if slot >= 0:
        position = tl.load(positions + token)
        page = tl.load(table + slot * table_stride + position // PAGE_TOKENS).to(tl.int64)
        plane = tl.arange(0, BLOCK_PLANES)[:, None]
        dim = tl.arange(0, BLOCK_DIM)[None, :]
        inside = (plane < PLANES) & (dim < HEAD_DIM)
        values = tl.load(kv + token * kv_stride + plane * HEAD_DIM + dim, mask=inside, other=0.0)
        to = layer + (page * PLANES + plane) * (PAGE_TOKENS * HEAD_DIM) + position % PAGE_TOKENS * HEAD_DIM + dim
        tl.store(to, values, mask=inside)

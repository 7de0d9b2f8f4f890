"""Lookup of input embeddings, of ids that the host may not know yet. On a CPU: `ops.step`, `ops.models.llama`.

Bound by bandwidth: with 8B shapes (4096) 8 KB in and 16 KB of the float32 residual out a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.dispatch import ceil_div, launches

_BLOCK = 1024


def embed(ids: Tensor, future_tokens: Tensor, table: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """`out[t] = scale · table[id]`, where id is `ids[t]`, or `future_tokens[-ids[t] - 1]` where that is negative.

    `ids`: int32 `[tokens]`, as in `ForwardBatch.input_ids`; `future_tokens`: int64 `[slots]`; `table`:
    `[vocab, hidden]`, `out`: `[tokens, hidden]`, rows one after the other. Ids must be inside the table: nothing here
    checks them.
    """
    if not launches(table):
        reference(ids, future_tokens, table, out, scale)
        return
    tokens, hidden = out.shape
    _embed[(tokens, ceil_div(hidden, _BLOCK))](
        ids, future_tokens, table, out, scale, HIDDEN=hidden, BLOCK=_BLOCK, num_warps=4
    )


def reference(ids: Tensor, future_tokens: Tensor, table: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """The same in torch."""
    known = torch.where(ids < 0, future_tokens[(-ids.long() - 1).clamp(min=0)], ids.long())
    out.copy_(table.index_select(0, known).float() * scale)


@triton.jit
def _embed(ids, future_tokens, table, out, scale, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HIDDEN
    known = tl.load(ids + token).to(tl.int64)
    if known < 0:
        known = tl.load(future_tokens - known - 1)
    row = tl.load(table + known * HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + at, row * scale, mask=inside)

"""Log-probabilities: of one id of each row, and the best of each row. On a CPU: `ops.sampling`.

A row is one program: two passes for the sum, then one for each of the best asked for, largest first. A row of 128k
logits, 0.5 MB, stays in the L2 cache: about 5 µs a pass. Rows that ask for nothing cost a scalar load.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from headrace.ops import sampling
from headrace.ops.triton.dispatch import launches
from headrace.ops.triton.paged_attention import LOG2_E

_BLOCK: Final = 2048
_LN_2: Final = tl.constexpr(0.6931471805599453)


def report_logprobs(
    logits: Tensor, ids: Tensor, counts: Tensor, logprobs: Tensor, top_ids: Tensor, top_logprobs: Tensor
) -> None:
    """Log-softmax of raw logits, at the row's id and at its best ids, best first, the lowest of equals first.

    `logits`: float32 `[rows, vocab]`, rows apart by any stride. `ids`: int32 `[rows]`. `counts`: int32 `[rows]`: how
    many of the best, at most the columns of `top_ids` and the vocabulary; 0: the id's alone; -1: nothing of this row is
    written. `logprobs`: float32 `[rows]`; `top_ids`, `top_logprobs`: int32 and float32 `[rows, most]`.
    """
    if not launches(logits):
        reference(logits, ids, counts, logprobs, top_ids, top_logprobs)
        return
    rows, vocab = logits.shape
    _report[(rows,)](
        logits,
        ids,
        counts,
        logprobs,
        top_ids,
        top_logprobs,
        logits.stride(0),
        VOCAB=vocab,
        COLUMNS=top_ids.shape[1],
        BLOCK=_BLOCK,
        num_warps=8,
    )


def reference(
    logits: Tensor, ids: Tensor, counts: Tensor, logprobs: Tensor, top_ids: Tensor, top_logprobs: Tensor
) -> None:
    """Row by row in torch."""
    for row, count in enumerate(counts.tolist()):
        if count >= 0:
            one = logits[row : row + 1]
            logprobs[row] = sampling.log_probabilities(one, ids[row : row + 1].long())[0]
        if count > 0:
            best_ids, best = sampling.best_log_probabilities(one, count)
            top_ids[row, :count], top_logprobs[row, :count] = best_ids[0].int(), best[0]


@triton.jit
def _report(
    logits,
    ids,
    counts,
    logprobs,
    top_ids,
    top_logprobs,
    stride,
    VOCAB: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if count >= 0:
        x = logits + row * stride
        lane = tl.arange(0, BLOCK)
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            at = start + lane
            largest = tl.maximum(largest, tl.load(x + at, mask=at < VOCAB, other=float("-inf")))
        highest = tl.max(largest, 0)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            at = start + lane
            sums += tl.exp2((tl.load(x + at, mask=at < VOCAB, other=float("-inf")) - highest) * LOG2_E)
        log_sum = highest + tl.log2(tl.sum(sums, 0)) * _LN_2
        tl.store(logprobs + row, tl.load(x + tl.load(ids + row)) - log_sum)
        last = float("inf")
        last_id = -1
        for place in range(count):
            # The best of what comes behind the last one; in each lane the first of equals.
            value = tl.full((BLOCK,), float("-inf"), tl.float32)
            value_id = tl.full((BLOCK,), VOCAB, tl.int32)
            for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
                at = start + lane
                y = tl.load(x + at, mask=at < VOCAB, other=float("-inf"))
                behind = (y < last) | ((y == last) & (at > last_id))
                better = behind & (at < VOCAB) & ((y > value) | (value_id == VOCAB))
                value = tl.where(better, y, value)
                value_id = tl.where(better, at, value_id)
            last = tl.max(tl.where(value_id < VOCAB, value, float("-inf")), 0)
            last_id = tl.min(tl.where(value == last, value_id, VOCAB), 0)
            tl.store(top_ids + row * COLUMNS + place, last_id)
            tl.store(top_logprobs + row * COLUMNS + place, last - log_sum)

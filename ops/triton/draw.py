"""One id for each row: the best, or one drawn by chance. On a CPU: `ops.sampler`, `ops.sampling`.

The draw is that of `ops.sampling`: filters are thresholds on values, so that ids of equal logits stay or go together,
and the id is found in the order of ids from a number that is a pure function of seed, output position and draw number.
A row is one program: no sum depends on which rows are beside it.

A threshold is searched for on the bits of the distances from the best logit, which order as the distances do: two bits
a pass, sixteen passes over the row, without a sort and whatever top-k and top-p are. A row of 128k logits is 0.5 MB,
which stays in the L2 cache: 5 µs a pass at 64 B a clock and SM, so about 0.1 ms for top-k and as much for top-p, rows
beside each other; 15 µs without filters; next to nothing for greedy rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops import sampling
from headrace.ops.triton.dispatch import ceil_div, launches, power_of_two
from headrace.ops.triton.paged_attention import LOG2_E
from headrace.ops.triton.slot_tables import (
    FLOAT_COLUMNS,
    FREQUENCY,
    INT_COLUMNS,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SlotTables,
)

_BLOCK: Final = 2048
_ALMOST_ONE: Final = tl.constexpr(1 - 2**-40)
_FURTHEST: Final = tl.constexpr(-sampling.LEAST)


def draw(
    logits: Tensor,
    tables: SlotTables,
    best_values: Tensor,
    best_ids: Tensor,
    slots: Tensor,
    positions: Tensor,
    commits: Tensor,
    future_tokens: Tensor,
    ids: Tensor,
    status: Tensor,
    draw_number: int = 0,
) -> None:
    """Draw, and note what was drawn in `future_tokens` and the slots' counts.

    `logits`: float32 `[rows, vocab]`, contiguous, adjusted; `best_values`, `best_ids`: theirs, by `argmax.best`.
    `slots`, `positions` (in the output), `commits`: int32 `[rows]`: a slot of -1 pads the batch, its row is left alone;
    where `commits` is 0 nothing is noted. `future_tokens`: int64 `[slots]`. `ids`: int32 `[rows]`; `status`: int32
    `[rows]`: 1 where the best value is not finite, and the id is 0.
    """
    if not launches(logits):
        reference(
            logits, tables, best_values, best_ids, slots, positions, commits, future_tokens, ids, status, draw_number
        )
        return
    rows, vocab = logits.shape
    _draw[(rows,)](
        logits,
        tables.ints,
        tables.floats,
        tables.outputs,
        best_values,
        best_ids,
        slots,
        positions,
        commits,
        future_tokens,
        ids,
        status,
        DRAW=draw_number,
        VOCAB=vocab,
        BLOCK=_BLOCK,
        BLOCKS=power_of_two(ceil_div(vocab, _BLOCK)),
        num_warps=8,
    )


def reference(
    logits: Tensor,
    tables: SlotTables,
    best_values: Tensor,
    best_ids: Tensor,
    slots: Tensor,
    positions: Tensor,
    commits: Tensor,
    future_tokens: Tensor,
    ids: Tensor,
    status: Tensor,
    draw_number: int = 0,
) -> None:
    """Row by row in torch, on a CPU."""
    for row in (slots >= 0).nonzero().squeeze(1).tolist():
        slot = int(slots[row])
        usable = bool(torch.isfinite(best_values[row]))
        status[row], ids[row] = int(not usable), best_ids[row] if usable else 0
        floats = tables.floats[slot]
        if usable and floats[TEMPERATURE.value] > 0:
            low, high = (int(tables.ints[slot, column]) & 0xFFFFFFFF for column in (SEED_LOW.value, SEED_HIGH.value))
            seed = np.array([high << 32 | low], np.uint64)
            ids[row] = sampling.draw(
                logits[row : row + 1].clone(),
                sampling.uniform(seed, positions[row : row + 1].numpy(), draw_number),
                *(floats[None, TEMPERATURE.value], tables.ints[slot, TOP_K.value : TOP_K.value + 1]),
                *(floats[None, TOP_P.value], floats[None, MIN_P.value]),
            )[0].int()
        if commits[row]:
            future_tokens[slot] = ids[row]
            if floats[REPETITION.value :].tolist() != [1, 0, 0]:
                tables.outputs[slot, ids[row].long()] += 1


@triton.jit
def _draw(
    logits,
    ints,
    floats,
    outputs,
    best_values,
    best_ids,
    slots,
    positions,
    commits,
    future_tokens,
    ids,
    status,
    DRAW: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        highest = tl.load(best_values + row)
        usable = highest - highest == 0
        chosen = tl.where(usable, tl.load(best_ids + row), 0)
        parameters = floats + slot * FLOAT_COLUMNS
        temperature = tl.load(parameters + TEMPERATURE)
        if usable & (temperature > 0):
            x = logits + row * VOCAB
            numbers = ints + slot * INT_COLUMNS
            top_k = tl.load(numbers + TOP_K)
            top_p = tl.load(parameters + TOP_P)
            min_p = tl.load(parameters + MIN_P)
            # exp(distance / temperature) as a power of two.
            rate = -LOG2_E / temperature
            floor = (temperature * _FURTHEST).to(tl.uint32, bitcast=True)
            if (top_k > 0) & (top_k < VOCAB):
                floor = _floor(x, highest, 0.0, floor, top_k.to(tl.float32), VOCAB, BLOCK)
            if top_p < 1:
                # Nucleus sampling (arXiv:1904.09751) among what top-k left.
                wanted = top_p * _weight(x, highest, rate, floor, VOCAB, BLOCK)
                floor = tl.minimum(floor, _floor(x, highest, rate, floor, wanted, VOCAB, BLOCK))
            if min_p > 0:
                furthest = tl.log2(min_p) / rate
                floor = tl.minimum(floor, furthest.to(tl.uint32, bitcast=True))
            uniform = _uniform(
                tl.load(numbers + SEED_LOW), tl.load(numbers + SEED_HIGH), tl.load(positions + row), DRAW
            )
            chosen = _pick(x, highest, rate, floor, uniform, VOCAB, BLOCK, BLOCKS)
        tl.store(ids + row, chosen)
        tl.store(status + row, 1 - usable.to(tl.int32))
        if tl.load(commits + row) != 0:
            tl.store(future_tokens + slot, chosen.to(tl.int64))
            repetition = tl.load(parameters + REPETITION)
            frequency = tl.load(parameters + FREQUENCY)
            presence = tl.load(parameters + PRESENCE)
            if (repetition != 1) | (frequency != 0) | (presence != 0):
                count = outputs + slot * VOCAB + chosen
                tl.store(count, tl.load(count) + 1)


@triton.jit
def _weights(x, highest, rate, floor, start, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and weights of a block; the weight of what the floor keeps out is 0. A rate of 0 counts."""
    at = start + tl.arange(0, BLOCK)
    distance = highest - tl.load(x + at, mask=at < VOCAB, other=float("-inf"))
    key = distance.to(tl.uint32, bitcast=True)
    # What has no probability has none at a rate of 0 either.
    weight = tl.where(distance < float("inf"), tl.exp2(tl.where(distance < float("inf"), distance, 0.0) * rate), 0.0)
    return key, tl.where(key <= floor, weight, 0.0)


@triton.jit
def _weight(x, highest, rate, floor, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        _, weight = _weights(x, highest, rate, floor, start, VOCAB, BLOCK)
        sums += weight
    return tl.sum(sums, 0)


@triton.jit
def _floor(x, highest, rate, floor, wanted, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The least key such that it and all smaller ones weigh `wanted`; the greatest of all if rounding keeps their sum a
    hair below."""
    found = tl.full((), 0, tl.uint32)
    step = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        a = tl.zeros((BLOCK,), tl.float32)
        b = tl.zeros((BLOCK,), tl.float32)
        c = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            key, weight = _weights(x, highest, rate, floor, start, VOCAB, BLOCK)
            a += tl.where(key < found + step, weight, 0.0)
            b += tl.where(key < found + step * 2, weight, 0.0)
            c += tl.where(key < found + step * 3, weight, 0.0)
        below = (tl.sum(a, 0) < wanted).to(tl.uint32) + (tl.sum(b, 0) < wanted).to(tl.uint32)
        found += step * (below + (tl.sum(c, 0) < wanted).to(tl.uint32))
        step = step >> 2
    return found


@triton.jit
def _pick(x, highest, rate, floor, uniform, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The first id at which the sum of weights is above `uniform` of all of it: its block, then the id inside."""
    each = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.float64)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        _, weight = _weights(x, highest, rate, floor, start, VOCAB, BLOCK)
        sums = tl.where(each == start // BLOCK, tl.sum(weight, 0).to(tl.float64), sums)
    ends = tl.cumsum(sums, 0)
    total = tl.max(ends, 0)
    target = uniform * total
    # Never an id without weight: rounding may have brought the target up to the last sum.
    is_before = ends <= tl.minimum(target, total * _ALMOST_ONE)
    block = tl.sum(is_before.to(tl.int32), 0)
    before = tl.max(tl.where(is_before, ends, 0.0), 0)
    _, weight = _weights(x, highest, rate, floor, block * BLOCK, VOCAB, BLOCK)
    inside = tl.cumsum(weight.to(tl.float64), 0)
    limit = tl.minimum(target - before, tl.max(inside, 0) * _ALMOST_ONE)
    return block * BLOCK + tl.sum((inside <= limit).to(tl.int32), 0)


@triton.jit
def _uniform(low, high, position, DRAW: tl.constexpr):
    """`ops.sampling.uniform`."""
    seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    state = _mix(seed ^ 0x6A09E667F3BCC909)
    state = _mix(state + (position.to(tl.uint64) + 1) * 0xD1342543DE82EF95)
    state = _mix(state + ((DRAW + 1) * 0xAEF17502108EF2D9) % 18446744073709551616)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)

"""What changes logits before the draw: penalties, biases, masks, banned stops. On a CPU: `ops.sampler`, `ops.sampling`.

Blocks of a row beside each other. A row without any of these costs a few scalar loads where logits are changed in
place; one with penalties reads 9 B an id and writes 4.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops import sampling
from headrace.ops.triton.argmax import BLOCK, blocks
from headrace.ops.triton.dispatch import launches, power_of_two
from headrace.ops.triton.slot_tables import (
    BIAS_LEN,
    FLOAT_COLUMNS,
    FREQUENCY,
    INT_COLUMNS,
    MIN_TOKENS,
    PRESENCE,
    REPETITION,
    STOP_LEN,
    SlotTables,
)


def adjust(
    logits: Tensor,
    tables: SlotTables,
    slots: Tensor,
    positions: Tensor,
    mask_row: Tensor,
    mask_bits: Tensor,
    adjusted: Tensor,
    block_left: Tensor,
) -> None:
    """`logits` as the slots' requests want them → `adjusted`, which may be the same tensor.

    `logits`, `adjusted`: float32 `[rows, vocab]`, contiguous. `slots`, `positions` (in the output), `mask_row`: int32
    `[rows]`; a slot of -1 pads the batch, its row is left alone; a mask row of -1 allows all. `mask_bits`: int32
    `[masks, ceil(vocab / 32)]`: bit i of word w allows id 32 · w + i. Scratch: `block_left`: float32 `[rows,
    blocks(vocab)]`.

    Where a mask leaves nothing but banned stops (a grammar that is complete), they may be drawn after all.
    """
    if not launches(logits):
        reference(logits, tables, slots, positions, mask_row, mask_bits, adjusted)
        return
    rows, vocab = logits.shape
    count = blocks(vocab)
    _adjust[(rows, count)](
        logits,
        *tables,
        slots,
        positions,
        mask_row,
        mask_bits,
        adjusted,
        block_left,
        VOCAB=vocab,
        IN_PLACE=adjusted is logits,
        BLOCKS=count,
        BLOCK=BLOCK,
        num_warps=8,
    )
    _ban_stops[(rows, count)](
        tables.ints,
        tables.stops,
        slots,
        positions,
        adjusted,
        block_left,
        VOCAB=vocab,
        BLOCKS=count,
        BLOCK_LEFT=power_of_two(count),
        BLOCK=BLOCK,
        num_warps=8,
    )


def reference(
    logits: Tensor,
    tables: SlotTables,
    slots: Tensor,
    positions: Tensor,
    mask_row: Tensor,
    mask_bits: Tensor,
    adjusted: Tensor,
) -> None:
    """Row by row in torch."""
    vocab = logits.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    for row, (slot, position, mask) in enumerate(zip(slots.tolist(), positions.tolist(), mask_row.tolist())):
        if slot < 0:
            continue
        x = logits[row].clone()
        ints, floats = tables.ints[slot].tolist(), tables.floats[slot].tolist()
        penalties = floats[REPETITION.value], floats[FREQUENCY.value], floats[PRESENCE.value]
        if penalties != (1, 0, 0):
            sampling.penalize_(x, tables.prompt[slot] > 0, tables.outputs[slot], *penalties)
        if ints[BIAS_LEN.value]:
            x += tables.biases[slot]
        if mask >= 0:
            allowed = ((mask_bits[mask][:, None] >> bits) & 1).flatten()[:vocab]
            x.masked_fill_(allowed == 0, -math.inf)
        if position < ints[MIN_TOKENS.value] and ints[STOP_LEN.value]:
            without_stops = x.masked_fill(tables.stops[slot] > 0, -math.inf)
            if not bool(torch.isneginf(without_stops.max())):
                x = without_stops
        adjusted[row] = x


@triton.jit
def _adjust(
    logits,
    ints,
    floats,
    prompt,
    outputs,
    biases,
    stops,
    slots,
    positions,
    mask_row,
    mask_bits,
    adjusted,
    block_left,
    VOCAB: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        repetition = tl.load(floats + slot * FLOAT_COLUMNS + REPETITION)
        frequency = tl.load(floats + slot * FLOAT_COLUMNS + FREQUENCY)
        presence = tl.load(floats + slot * FLOAT_COLUMNS + PRESENCE)
        penalized = (repetition != 1) | (frequency != 0) | (presence != 0)
        biased = tl.load(ints + slot * INT_COLUMNS + BIAS_LEN) > 0
        mask = tl.load(mask_row + row).to(tl.int64)
        bans = _bans_stops(ints, slot, tl.load(positions + row))
        if penalized | biased | (mask >= 0) | bans | (not IN_PLACE):
            at = block * BLOCK + tl.arange(0, BLOCK)
            inside = at < VOCAB
            x = tl.load(logits + row * VOCAB + at, mask=inside, other=float("-inf"))
            if penalized:
                count = tl.load(outputs + slot * VOCAB + at, mask=inside, other=0)
                seen = (count > 0) | (tl.load(prompt + slot * VOCAB + at, mask=inside, other=0) > 0)
                x = tl.where(seen, tl.where(x > 0, x / repetition, x * repetition), x)
                x -= count.to(tl.float32) * frequency + (count > 0).to(tl.float32) * presence
            if biased:
                x += tl.load(biases + slot * VOCAB + at, mask=inside, other=0.0)
            if mask >= 0:
                word = tl.load(mask_bits + mask * ((VOCAB + 31) // 32) + at // 32, mask=inside, other=0)
                x = tl.where((word >> (at % 32)) & 1 != 0, x, float("-inf"))
            if bans:
                stop = tl.load(stops + slot * VOCAB + at, mask=inside, other=1) > 0
                tl.store(block_left + row * BLOCKS + block, tl.max(tl.where(stop, float("-inf"), x), 0))
            tl.store(adjusted + row * VOCAB + at, x, mask=inside)


@triton.jit
def _bans_stops(ints, slot, position):
    least = tl.load(ints + slot * INT_COLUMNS + MIN_TOKENS)
    return (position < least) & (tl.load(ints + slot * INT_COLUMNS + STOP_LEN) > 0)


@triton.jit
def _ban_stops(
    ints,
    stops,
    slots,
    positions,
    adjusted,
    block_left,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        bans = _bans_stops(ints, slot, tl.load(positions + row))
        if bans:
            each = tl.arange(0, BLOCK_LEFT)
            left = tl.load(block_left + row * BLOCKS + each, mask=each < BLOCKS, other=float("-inf"))
            if tl.max(left, 0) > float("-inf"):
                at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
                stop = tl.load(stops + slot * VOCAB + at, mask=at < VOCAB, other=0) > 0
                tl.store(adjusted + row * VOCAB + at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=stop)

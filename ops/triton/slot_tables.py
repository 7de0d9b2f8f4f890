"""What sampling knows of each request slot, on the device. On a CPU: `ops.sampler.Sampler`, whose state this is.

in     slot inits of a batch
out    parameters and tables, read by `adjust` and `draw`
state  the tensors of `SlotTables`; `draw` counts what it draws in `outputs`
owner  the compute stream; a slot's state belongs to the request whose init came last
ready  in stream order
end    a slot's state lasts until the next init of the slot, which sets all of it anew
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.ops.triton.dispatch import ceil_div, launches
from headrace.ops.wire import INIT_FLOATS, INIT_INTS

INT_COLUMNS: Final = tl.constexpr(len(INIT_INTS))
FLOAT_COLUMNS: Final = tl.constexpr(len(INIT_FLOATS))
TOP_K: Final = tl.constexpr(INIT_INTS.index("top_k"))
SEED_LOW: Final = tl.constexpr(INIT_INTS.index("seed_low"))
SEED_HIGH: Final = tl.constexpr(INIT_INTS.index("seed_high"))
MIN_TOKENS: Final = tl.constexpr(INIT_INTS.index("min_tokens"))
PROMPT_LEN: Final = tl.constexpr(INIT_INTS.index("prompt_len"))
OUTPUT_LEN: Final = tl.constexpr(INIT_INTS.index("output_len"))
BIAS_LEN: Final = tl.constexpr(INIT_INTS.index("bias_len"))
STOP_LEN: Final = tl.constexpr(INIT_INTS.index("stop_len"))
TEMPERATURE: Final = tl.constexpr(INIT_FLOATS.index("temperature"))
TOP_P: Final = tl.constexpr(INIT_FLOATS.index("top_p"))
MIN_P: Final = tl.constexpr(INIT_FLOATS.index("min_p"))
REPETITION: Final = tl.constexpr(INIT_FLOATS.index("repetition"))
FREQUENCY: Final = tl.constexpr(INIT_FLOATS.index("frequency"))
PRESENCE: Final = tl.constexpr(INIT_FLOATS.index("presence"))

_CLEAR: Final = 4096
_IDS: Final = 512


class SlotTables(NamedTuple):
    """Ten bytes an id and slot: 330 MB for 256 slots of 128k ids."""

    ints: Tensor
    """int32 `[slots, INIT_INTS]`, as they came."""
    floats: Tensor
    """float32 `[slots, INIT_FLOATS]`"""
    prompt: Tensor
    """uint8 `[slots, vocab]`: 1 for ids of the prompt."""
    outputs: Tensor
    """int32 `[slots, vocab]`: how often each id was drawn."""
    biases: Tensor
    """float32 `[slots, vocab]`"""
    stops: Tensor
    """uint8 `[slots, vocab]`: 1 for what may not be drawn below `min_tokens`."""


def make_tables(slots: int, vocab: int, device: torch.device) -> SlotTables:
    """Of slots that no request has begun."""

    def zeros(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((slots, columns), dtype=dtype, device=device)

    return SlotTables(
        zeros(len(INIT_INTS), torch.int32),
        zeros(len(INIT_FLOATS), torch.float32),
        zeros(vocab, torch.uint8),
        zeros(vocab, torch.int32),
        zeros(vocab, torch.float32),
        zeros(vocab, torch.uint8),
    )


def begin_slots(
    tables: SlotTables,
    init_slot: Tensor,
    init_ints: Tensor,
    init_floats: Tensor,
    init_ids: Tensor,
    init_biases: Tensor,
    starts: Tensor,
    most_ids: int,
) -> None:
    """Set slots anew; arguments as in `ForwardBatch`, on the device, checked on the host.

    `starts`: int32 `[inits, 2]`: where the slot's ids begin in `init_ids`, and its biases in `init_biases`. `most_ids`:
    as many as any init of the batch has. No slot twice.
    """
    if not len(init_slot):
        return
    if not launches(tables.ints):
        _begin_reference(tables, init_slot, init_ints, init_floats, init_ids, init_biases)
        return
    vocab = tables.prompt.shape[1]
    inits = len(init_slot)
    _clear[(inits, ceil_div(vocab, _CLEAR))](
        *tables, init_slot, init_ints, init_floats, VOCAB=vocab, BLOCK=_CLEAR, num_warps=4
    )
    if most_ids:
        _fill[(inits, ceil_div(most_ids, _IDS))](
            *tables[2:], init_slot, init_ints, init_ids, init_biases, starts, VOCAB=vocab, BLOCK=_IDS, num_warps=4
        )


def _begin_reference(
    tables: SlotTables, init_slot: Tensor, init_ints: Tensor, init_floats: Tensor, init_ids: Tensor, biases: Tensor
) -> None:
    slots = init_slot.long()
    tables.ints[slots], tables.floats[slots] = init_ints, init_floats
    for table in tables[2:]:
        table[slots] = 0
    lengths = init_ints[:, PROMPT_LEN.value :].tolist()
    ids = init_ids.long().split([length for each in lengths for length in each])
    values = biases.split([each[2] for each in lengths])
    for row, slot in enumerate(slots.tolist()):
        prompt, outputs, biased, stops = ids[4 * row : 4 * row + 4]
        tables.prompt[slot, prompt] = 1
        tables.outputs[slot].index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
        tables.biases[slot].index_add_(0, biased, values[row])
        tables.stops[slot, stops] = 1


@triton.jit
def _clear(
    ints,
    floats,
    prompt,
    outputs,
    biases,
    stops,
    init_slot,
    init_ints,
    init_floats,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    init = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(init_slot + init).to(tl.int64)
    if block == 0:
        column = tl.arange(0, 16)
        is_int, is_float = column < INT_COLUMNS, column < FLOAT_COLUMNS
        values = tl.load(init_ints + init * INT_COLUMNS + column, mask=is_int)
        tl.store(ints + slot * INT_COLUMNS + column, values, mask=is_int)
        numbers = tl.load(init_floats + init * FLOAT_COLUMNS + column, mask=is_float)
        tl.store(floats + slot * FLOAT_COLUMNS + column, numbers, mask=is_float)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCAB
    tl.store(prompt + slot * VOCAB + at, tl.zeros((BLOCK,), tl.uint8), mask=inside)
    tl.store(outputs + slot * VOCAB + at, tl.zeros((BLOCK,), tl.int32), mask=inside)
    tl.store(biases + slot * VOCAB + at, tl.zeros((BLOCK,), tl.float32), mask=inside)
    tl.store(stops + slot * VOCAB + at, tl.zeros((BLOCK,), tl.uint8), mask=inside)


@triton.jit
def _fill(
    prompt,
    outputs,
    biases,
    stops,
    init_slot,
    init_ints,
    init_ids,
    init_biases,
    starts,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    init = tl.program_id(0)
    slot = tl.load(init_slot + init).to(tl.int64)
    lengths = init_ints + init * INT_COLUMNS
    prompt_end = tl.load(lengths + PROMPT_LEN)
    outputs_end = prompt_end + tl.load(lengths + OUTPUT_LEN)
    biases_end = outputs_end + tl.load(lengths + BIAS_LEN)
    stops_end = biases_end + tl.load(lengths + STOP_LEN)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = slot * VOCAB + tl.load(init_ids + tl.load(starts + 2 * init) + at, mask=at < stops_end, other=0)
    is_bias = (at >= outputs_end) & (at < biases_end)
    values = tl.load(init_biases + tl.load(starts + 2 * init + 1) + at - outputs_end, mask=is_bias, other=0.0)
    one = tl.full((BLOCK,), 1, tl.uint8)
    tl.store(prompt + ids, one, mask=at < prompt_end)
    tl.atomic_add(outputs + ids, 1, mask=(at >= prompt_end) & (at < outputs_end))
    tl.atomic_add(biases + ids, values, mask=is_bias)
    tl.store(stops + ids, one, mask=(at >= biases_end) & (at < stops_end))

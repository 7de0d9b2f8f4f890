"""Sampling on the card: the host says which rows want what, the kernels draw, and nobody waits.

in     slot inits and masks of a batch; logits
out    drawn ids into `future_tokens`, and into the step's results behind its last event
state  each slot's parameters and tables on the card (`SlotTables`); a copy of the parameters on the host, which decides
       what is launched; scratch memory of the step that is running
owner  the compute stream; the copy: the worker's main thread
ready  in stream order
end    a slot's state lasts until the next init of the slot, which sets all of it anew
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.cuda.staging import Slot
from headrace.ops.sampler import check_inits
from headrace.ops.triton.argmax import best, blocks
from headrace.ops.triton.draw import draw
from headrace.ops.triton.logprobs import report_logprobs
from headrace.ops.triton.penalties import adjust
from headrace.ops.triton.slot_tables import begin_slots, make_tables
from headrace.ops.wire import I32, INIT_FLOATS, INIT_INTS, MAX_LOGPROBS, U32, ForwardBatch, StepResults

_INT: Final = {name: column for column, name in enumerate(INIT_INTS)}
_FLOAT: Final = {name: column for column, name in enumerate(INIT_FLOATS)}


class Draws(NamedTuple):
    """One step's sampling, as the host has planned it; tensors: int32 `[samples]`, staged."""

    slots: Tensor
    positions: Tensor
    commits: Tensor
    """0 where what is drawn leaves no trace."""
    mask_row: Tensor
    masks: Tensor
    """int32 `[masks, words]`, in the ring."""
    counts: Tensor
    """How many of the best are reported, -1 for nothing."""
    adjusts: bool
    reports: bool
    results: StepResults


class DeviceSampler:
    """Sampler state of all slots."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._tables = make_tables(slots, vocab, device)
        self.future_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        """The last id drawn for each slot."""
        self._ints: I32 = np.zeros((slots, len(INIT_INTS)), np.int32)
        self._floats = np.zeros((slots, len(INIT_FLOATS)), np.float32)
        self._vocab = vocab

        def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((slots, *shape), dtype=dtype, device=device)

        self._values, self._best = scratch(torch.float32), scratch(torch.int32)
        self._block_values = scratch(torch.float32, blocks(vocab))
        self._block_ids = scratch(torch.int32, blocks(vocab))
        self._ids, self._status = scratch(torch.int32), scratch(torch.int32)
        self._logprobs = scratch(torch.float32)
        self._top_ids = scratch(torch.int32, MAX_LOGPROBS)
        self._top_logprobs = scratch(torch.float32, MAX_LOGPROBS)

    def begin(self, batch: ForwardBatch, slot: Slot) -> Callable[[], None] | None:
        """Stage the batch's slot inits → what applies them, in the compute stream. Raises ValueError for ids or slots
        that do not exist, or a slot that begins twice."""
        check_inits(batch, len(self._ints), self._vocab)
        if not len(batch.init_slot):
            return None
        if len(np.unique(batch.init_slot)) < len(batch.init_slot):
            raise ValueError("a batch has two inits of one slot")
        self._ints[batch.init_slot], self._floats[batch.init_slot] = batch.init_ints, batch.init_floats
        lengths = batch.init_ints[:, _INT["prompt_len"] :]
        ids, biases = lengths.sum(1), lengths[:, 2]
        starts = np.stack((ids.cumsum() - ids, biases.cumsum() - biases), 1).astype(np.int32)
        return partial(
            begin_slots,
            self._tables,
            init_slot=slot.put(batch.init_slot),
            init_ints=slot.put(batch.init_ints),
            init_floats=slot.put(batch.init_floats),
            init_ids=slot.put(batch.init_ids),
            init_biases=slot.put(batch.init_biases),
            starts=slot.put(starts),
            most_ids=int(ids.max()),
        )

    def plan(
        self,
        slots: I32,
        positions: I32,
        masks: tuple[I32, U32],
        results: StepResults,
        skips: Sequence[int],
        slot: Slot,
    ) -> Draws:
        """Stage what a step's sampling needs. `slots`, `positions` (in the output): `[samples]`."""
        rows, bits = masks
        results.offsets[: len(slots) + 1] = np.arange(len(slots) + 1)
        commits: I32 = np.ones(len(slots), np.int32)
        commits[list(skips)] = 0
        mask_row: I32 = np.full(len(slots), -1, np.int32)
        mask_row[rows] = np.arange(len(rows))
        ints, floats = self._ints[slots], self._floats[slots]
        penalized = (floats[:, _FLOAT["repetition"] :] != (1, 0, 0)).any()
        biased = ints[:, _INT["bias_len"]].any()
        short = (positions < ints[:, _INT["min_tokens"]]).any()
        asked = ints[:, _INT["logprobs"]]
        counts = np.where(asked > 0, min(MAX_LOGPROBS, self._vocab), asked).astype(np.int32)
        return Draws(
            slots=slot.put(slots),
            positions=slot.put(positions),
            commits=slot.put(commits),
            mask_row=slot.put(mask_row),
            masks=torch.from_numpy(bits.view(np.int32)),
            counts=slot.put(counts),
            adjusts=bool(penalized or biased or short or len(rows)),
            reports=bool((asked >= 0).any()),
            results=results,
        )

    def draw(self, logits: Tensor, draws: Draws) -> None:
        """In the compute stream: draw an id for each row of `logits` (float32 `[samples, vocab]`, contiguous, may be
        overwritten), and send the results to the ring."""
        rows = len(logits)
        if not rows:
            return
        adjusted = torch.empty_like(logits) if draws.reports and draws.adjusts else logits
        if draws.adjusts:
            masks = draws.masks.to(logits.device, non_blocking=True, copy=True)
            left = self._block_values[:rows]
            adjust(logits, self._tables, draws.slots, draws.positions, draws.mask_row, masks, adjusted, left)
        values, best_ids = self._values[:rows], self._best[:rows]
        best(adjusted, values, best_ids, self._block_values[:rows], self._block_ids[:rows])
        ids, status = self._ids[:rows], self._status[:rows]
        places = (draws.slots, draws.positions, draws.commits)
        draw(adjusted, self._tables, values, best_ids, *places, self.future_tokens, ids, status)
        send(ids, draws.results.ids[:rows])
        send(status, draws.results.status[:rows])
        if draws.reports:
            self._report(logits, ids, draws)

    def _report(self, logits: Tensor, ids: Tensor, draws: Draws) -> None:
        rows = len(logits)
        logprobs, top_ids, top = self._logprobs[:rows], self._top_ids[:rows], self._top_logprobs[:rows]
        report_logprobs(logits, ids, draws.counts, logprobs, top_ids, top)
        send(logprobs, draws.results.logprobs[:rows])
        send(top_ids, draws.results.top_ids[:rows])
        send(top, draws.results.top_logprobs[:rows])


def send(source: Tensor, target: NDArray[np.generic]) -> None:
    """In the compute stream: copy to the host's memory, of the same shape and dtype; it is there when a later event is.
    From and to memory of one dtype and without gaps, or torch would wait."""
    to = torch.from_numpy(target)
    assert to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()
    to.copy_(source, non_blocking=True)

"""Sampling state of the request slots, and one step's sampling with it.

in     slot inits and masks of a batch, logits
out    drawn ids into the step's results and into `future_tokens`
state  each slot's parameters; for slots that use them: ids of the prompt, counts of the output, biases, banned ids
owner  the step that is running; a slot's state belongs to the request whose init came last
ready  in command order
end    a slot's state lasts until the next init of the slot, which sets all of it anew
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.sampling import (
    MIN_P,
    PARAMETERS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    Choose,
    best_log_probabilities,
    choose,
    log_probabilities,
    penalize_at_,
    uniform,
)
from headrace.ops.wire import I32, INIT_FLOATS, INIT_INTS, MAX_LOGPROBS, U32, ForwardBatch, StepResults

_INT: Final = {name: column for column, name in enumerate(INIT_INTS)}
_FLOAT: Final = {name: column for column, name in enumerate(INIT_FLOATS)}


class Sampler:
    """Sampler state of all slots.

    The tables over the vocabulary come from `np.zeros`, whose memory the kernel hands out when it is first written: a
    slot without penalties, biases or minimum length costs nothing (with all of them 10 bytes an id, and 8 for each that
    was there).
    """

    def __init__(self, slots: int, vocab: int, choose: Choose = choose) -> None:
        self._vocab = vocab
        self._choose = choose
        self.future_tokens: NDArray[np.int64] = np.zeros(slots, np.int64)
        """The last id drawn for each slot."""
        self._ints: I32 = np.zeros((slots, len(INIT_INTS)), np.int32)
        self._floats = np.zeros((slots, len(INIT_FLOATS)), np.float32)
        self._seeds: NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self._prompt: NDArray[np.bool_] = np.zeros((slots, vocab), np.bool_)
        self._outputs: I32 = np.zeros((slots, vocab), np.int32)
        self._seen: NDArray[np.int64] = np.zeros((slots, vocab), np.int64)
        """The ids of prompt and output, each once: there are hundreds of them, where a look at the whole vocabulary for
        those to penalize took 0.3 ms a row."""
        self._seen_count: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._biases = np.zeros((slots, vocab), np.float32)
        self._stops: NDArray[np.bool_] = np.zeros((slots, vocab), np.bool_)
        self._penalized: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._biased: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._min_tokens: I32 = np.zeros(slots, np.int32)
        self._parameters = np.zeros((slots, PARAMETERS))
        """Of the choice, but for what is drawn anew each time."""
        self._plain: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        """Slots that want nothing but ids, of logits as they are: then a step looks at no other table."""

    def begin(self, batch: ForwardBatch) -> None:
        """Apply the batch's slot inits. Raises ValueError for ids or slots that do not exist."""
        check_inits(batch, *self._prompt.shape)
        ids_at = biases_at = 0
        for slot, ints, floats in zip(batch.init_slot.tolist(), batch.init_ints, batch.init_floats):
            self._forget(slot)
            self._ints[slot], self._floats[slot] = ints, floats
            low, high = int(ints[_INT["seed_low"]]) & 0xFFFFFFFF, int(ints[_INT["seed_high"]]) & 0xFFFFFFFF
            self._seeds[slot] = high << 32 | low
            self._parameters[slot] = _parameters_of(ints, floats)
            parts = []
            for name in ("prompt_len", "output_len", "bias_len", "stop_len"):
                length = int(ints[_INT[name]])
                parts.append(batch.init_ids[ids_at : ids_at + length])
                ids_at += length
            prompt, outputs, biased, stops = parts
            repetition, frequency, presence = floats[_FLOAT["repetition"] :].tolist()
            if repetition != 1 or frequency != 0 or presence != 0:
                self._penalized[slot] = True
                self._prompt[slot, prompt] = True
                np.add.at(self._outputs[slot], outputs, 1)
                seen = np.unique(np.concatenate((prompt, outputs)))
                self._seen[slot, : len(seen)], self._seen_count[slot] = seen, len(seen)
            if len(biased):
                self._biased[slot] = True
                np.add.at(self._biases[slot], biased, batch.init_biases[biases_at : biases_at + len(biased)])
                biases_at += len(biased)
            if len(stops) and ints[_INT["min_tokens"]] > 0:
                self._min_tokens[slot] = ints[_INT["min_tokens"]]
                self._stops[slot, stops] = True
            changed = self._penalized[slot] or self._biased[slot] or self._min_tokens[slot]
            self._plain[slot] = not changed and ints[_INT["logprobs"]] < 0

    def sample(
        self,
        logits: Tensor,
        slots: I32,
        positions: I32,
        mask_rows: I32,
        mask_bits: U32,
        results: StepResults,
        skips: Sequence[int] = (),
    ) -> None:
        """Draw an id for each row of `logits` (float32 `[samples, vocab]`, may be overwritten) and fill `results`.

        `slots`, `positions` (in the output): `[samples]`; `mask_bits[i]` says what row `mask_rows[i]` may draw.
        What is drawn for the rows in `skips` leaves no trace in the slots' state.
        """
        count = len(slots)
        results.offsets[: count + 1] = np.arange(count + 1)
        if not count:
            return
        raw, reporting = None, np.zeros(0, np.intp)
        if len(mask_rows) or not self._plain[slots].all():
            reporting = np.flatnonzero(self._ints[slots, _INT["logprobs"]] >= 0)
            raw = logits[torch.from_numpy(reporting)] if len(reporting) else None
            self._adjust_(logits, slots, positions, mask_rows, mask_bits)
        usable, drawn = self._choose(logits, self._drawing(slots, positions))
        if skips:
            self._commit(np.delete(slots, list(skips)), np.delete(drawn, list(skips)))
        else:
            self._commit(slots, drawn)
        results.status[:count] = ~usable
        results.ids[:count] = drawn
        if raw is not None:
            self._report(raw, reporting, slots, torch.from_numpy(drawn), results)

    def _forget(self, slot: int) -> None:
        """What an overrun step of the slot's last request left must not reach the next one."""
        if self._penalized[slot]:
            self._prompt[slot] = False
            self._outputs[slot] = 0
            self._seen_count[slot] = 0
            self._penalized[slot] = False
        if self._biased[slot]:
            self._biases[slot] = 0
            self._biased[slot] = False
        if self._min_tokens[slot]:
            self._stops[slot] = False
            self._min_tokens[slot] = 0

    def _adjust_(self, logits: Tensor, slots: I32, positions: I32, mask_rows: I32, mask_bits: U32) -> None:
        """Penalties, biases, masks, banned stops, in place and only on the rows that have them: one by one, because a
        row and its tables stay in the cache, while gathered for all rows together they don't."""
        for row in np.flatnonzero(self._penalized[slots]).tolist():
            slot = slots[row]
            penalize_at_(
                logits[row],
                torch.from_numpy(self._seen[slot, : self._seen_count[slot]]),
                torch.from_numpy(self._outputs[slot]),
                *self._floats[slot, _FLOAT["repetition"] :].tolist(),
            )
        for row in np.flatnonzero(self._biased[slots]).tolist():
            logits[row] += torch.from_numpy(self._biases[slots[row]])
        for row, bits in zip(mask_rows.tolist(), mask_bits):
            allowed = np.unpackbits(bits.view(np.uint8), count=self._vocab, bitorder="little").view(np.bool_)
            logits[row].masked_fill_(torch.from_numpy(~allowed), -math.inf)
        for row in np.flatnonzero(positions < self._min_tokens[slots]).tolist():
            without_stops = logits[row].masked_fill(torch.from_numpy(self._stops[slots[row]]), -math.inf)
            # Where a mask leaves nothing but stop ids (a grammar that is complete), the minimum yields.
            if not bool(torch.isneginf(without_stops.max())):
                logits[row] = without_stops

    def _drawing(self, slots: I32, positions: I32) -> NDArray[np.float64]:
        """What the choice goes by."""
        parameters = self._parameters[slots]
        drawing = np.flatnonzero(parameters[:, TEMPERATURE])
        if len(drawing):
            parameters[drawing, UNIFORM] = uniform(self._seeds[slots[drawing]], positions[drawing])
        return parameters

    def _commit(self, slots: I32, drawn: NDArray[np.int64]) -> None:
        self.future_tokens[slots] = drawn
        counted = self._penalized[slots]
        if not counted.any():
            return
        for slot, token in zip(slots[counted].tolist(), drawn[counted].tolist()):
            if not self._prompt[slot, token] and not self._outputs[slot, token]:
                self._seen[slot, self._seen_count[slot]] = token
                self._seen_count[slot] += 1
            self._outputs[slot, token] += 1

    def _report(self, raw: Tensor, reporting: NDArray[np.intp], slots: I32, ids: Tensor, results: StepResults) -> None:
        results.logprobs[reporting] = log_probabilities(raw, ids[torch.from_numpy(reporting)]).numpy()
        if (self._ints[slots[reporting], _INT["logprobs"]] > 0).any():
            top_ids, top_logprobs = best_log_probabilities(raw, min(MAX_LOGPROBS, self._vocab))
            results.top_ids[reporting, : top_ids.shape[1]] = top_ids.numpy()
            results.top_logprobs[reporting, : top_ids.shape[1]] = top_logprobs.numpy()


def _parameters_of(ints: I32, floats: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of a slot's init."""
    parameters = np.zeros(PARAMETERS)
    parameters[TEMPERATURE] = max(floats[_FLOAT["temperature"]], 0)
    parameters[TOP_K], parameters[TOP_P] = ints[_INT["top_k"]], floats[_FLOAT["top_p"]]
    parameters[MIN_P] = floats[_FLOAT["min_p"]]
    return parameters


def check_inits(batch: ForwardBatch, slots: int, vocab: int) -> None:
    """Raises ValueError for slot inits whose ids, slots or lengths can't be."""
    counts = batch.counts
    for name, values, end in (
        ("slot", batch.init_slot, slots),
        ("token id", batch.init_ids, vocab),
    ):
        if len(values) and (values.min() < 0 or values.max() >= end):
            raise ValueError(f"a slot init has a {name} outside 0..{end - 1}")
    lengths = batch.init_ints[:, _INT["prompt_len"] :]
    ids, biases = int(lengths.sum()), int(lengths[:, 2].sum())
    if (lengths < 0).any() or ids != counts.init_ids or biases != counts.init_biases:
        raise ValueError("the lengths of the slot inits do not add up to their ids and biases")

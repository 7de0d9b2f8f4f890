"""A step: the batch's edits, loads and model pass (`forward`), then the drawing of its ids (`sample`).

in     a `ForwardBatch`, then the masks of its samples
out    KV in the device pools; ids and logprobs in the step's results; ids in `future_tokens`
state  the model, pools and page tables, sampler state: the compute stream's; between the two commands of a step its
       logits
owner  the worker's main thread gives commands to the streams, one after the other
ready  ids when `Sampled.done` is; KV of a layer for the next command in the compute stream, loaded KV when the layer's
       event is
end    a page's bytes are overwritten when the server gives it to another request
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops import accesses
from headrace.ops.batch_check import BadBatch, check_batch
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.model import Model
from headrace.ops.runner import BackedUp, CopyTime, Sampled
from headrace.ops.sampler import Sampler
from headrace.ops.sampling import best_log_probabilities, log_probabilities
from headrace.ops.step_copies import Copier, StepCopies, layer_places
from headrace.ops.step_kv import StepKv
from headrace.ops.streams import Event, Streams
from headrace.ops.wire import I32, MAX_LOGPROBS, U32, Backup, ForwardBatch, StepResults

WANTS_PER_PASS: Final = 64
"""Prompt positions whose logits exist at a time: 12 MB with a vocabulary of 49k."""


class _Forwarded(msgspec.Struct):
    """What `sample` needs of the step whose `forward` came last."""

    step: int
    slots: I32
    positions: I32
    began: Event
    load: CopyTime
    ended: Event | None = None
    logits: Tensor | None = None
    """There when the compute stream gets to `sample`."""


class StepRunner:
    """A CPU's `Runner`."""

    def __init__(
        self, model: Model, pools: list[KvPool], sampler: Sampler, host: Sequence[Copier], streams: Streams
    ) -> None:
        self._model = model
        self._pools = pools
        self._sampler = sampler
        self._streams = streams
        self._places = layer_places(pools)
        self._copies = StepCopies(pools, self._places, host, streams)
        self._forwarded: _Forwarded | None = None

    def forward(self, batch: ForwardBatch, results: StepResults) -> None:
        compute = self._streams.compute
        began = compute.record()
        check_batch(batch, self._pools, self._model.config.vocab_size)
        load = CopyTime()
        arrivals = self._copies.load(batch, load)
        forwarded = _Forwarded(batch.step, batch.row_slot[batch.sample_row], batch.sample_position, began, load)
        with self._streams.held() if arrivals else nullcontext():
            compute.run(partial(self._forward, batch, arrivals, results, forwarded))
        forwarded.ended = compute.record()
        self._forwarded = forwarded

    def sample(
        self, step: int, mask_rows: I32, mask_bits: U32, results: StepResults, skips: Sequence[int] = ()
    ) -> Sampled:
        forwarded, self._forwarded = self._forwarded, None
        if forwarded is None or forwarded.step != step or forwarded.ended is None:
            raise BadBatch(f"step {step} is to be sampled, but its forward did not come last")
        compute = self._streams.compute
        began = compute.record()
        compute.run(partial(self._sample, forwarded, mask_rows, mask_bits, results, skips))
        done = compute.record()
        return Sampled(step, done, ((forwarded.began, forwarded.ended), (began, done)), forwarded.load)

    def back_up(self, command: Backup) -> BackedUp:
        return self._copies.back_up(command)

    # -----------------------------------------------------------------------------------------------------------
    # In the compute stream

    def _forward(
        self, batch: ForwardBatch, arrivals: dict[int, Event], results: StepResults, forwarded: _Forwarded
    ) -> None:
        if batch.counts.slot_inits:
            self._sampler.begin(batch)
        if batch.counts.slot_inits or batch.counts.table_edits:
            for group, pool in enumerate(self._pools):
                pool.forget(batch.init_slot)
                here = batch.edit_group == group
                pool.edit(batch.edit_slot[here], batch.edit_index[here], batch.edit_page[here])
        if batch.counts.tokens:
            forwarded.logits = self._run(batch, arrivals, results)
        else:
            for arrival in arrivals.values():
                self._streams.compute.wait(arrival)
            forwarded.logits = self._no_logits()

    def _sample(
        self, forwarded: _Forwarded, mask_rows: I32, mask_bits: U32, results: StepResults, skips: Sequence[int]
    ) -> None:
        assert forwarded.logits is not None
        self._streams.compute.uses(partial(accesses.draws, forwarded.step, forwarded.slots))
        self._sampler.sample(
            forwarded.logits, forwarded.slots, forwarded.positions, mask_rows, mask_bits, results, skips
        )

    def _run(self, batch: ForwardBatch, arrivals: dict[int, Event], results: StepResults) -> Tensor:
        """The model pass; → logits of the samples."""
        last_tokens = batch.row_start[1:][batch.sample_row] - 1
        keep = np.concatenate((last_tokens, batch.want_token), dtype=np.int64)
        kv = StepKv(batch, self._pools, self._places, arrivals, self._streams.compute)
        hidden = self._model.forward(self._input_ids(batch), kv, keep)
        samples = batch.counts.samples
        if batch.counts.wants:
            self._report_wants(hidden[samples:], batch.want_target, results)
        if not samples:
            return self._no_logits()
        return self._model.logits(hidden[:samples])

    def _input_ids(self, batch: ForwardBatch) -> NDArray[np.int64]:
        self._streams.compute.uses(partial(accesses.inputs, batch))
        ids = batch.input_ids.astype(np.int64)
        drawn = np.flatnonzero(ids < 0)
        ids[drawn] = self._sampler.future_tokens[-ids[drawn] - 1]
        return ids

    def _no_logits(self) -> Tensor:
        return torch.empty((0, self._model.config.vocab_size))

    def _report_wants(self, hidden: Tensor, targets: I32, results: StepResults) -> None:
        for start in range(0, len(targets), WANTS_PER_PASS):
            end = min(start + WANTS_PER_PASS, len(targets))
            logits = self._model.logits(hidden[start:end])
            ids = torch.from_numpy(targets[start:end].astype(np.int64))
            results.want_logprobs[start:end] = log_probabilities(logits, ids).numpy()
            top_ids, top_logprobs = best_log_probabilities(logits, min(MAX_LOGPROBS, logits.shape[1]))
            results.want_top_ids[start:end, : top_ids.shape[1]] = top_ids.numpy()
            results.want_top_logprobs[start:end, : top_ids.shape[1]] = top_logprobs.numpy()

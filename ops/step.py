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

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.ops import accesses
from headrace.ops.kv_copy import HostPages, PageLoad, back_up
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.model import Model
from headrace.ops.sampler import Sampler
from headrace.ops.sampling import best_log_probabilities, log_probabilities
from headrace.ops.step_kv import StepKv
from headrace.ops.streams import Event, Streams
from headrace.ops.wire import I32, MAX_LOGPROBS, U32, Backup, ForwardBatch, StepResults

WANTS_PER_PASS: Final = 64
"""Prompt positions whose logits exist at a time: 12 MB with a vocabulary of 49k."""


class BadBatch(ValueError):
    """The server sent a batch that contradicts itself or this worker's sizes."""


class CopyTime(msgspec.Struct):
    """What copies have taken of this thread's time: next to nothing where they are only given to a stream."""

    spent_ms: float = 0.0

    def of(self, work: Callable[[], None]) -> None:
        """Do it, and count."""
        began = time.perf_counter()
        work()
        self.spent_ms += (time.perf_counter() - began) * 1e3


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


class Sampled(NamedTuple):
    """A step that was given to the streams."""

    step: int
    done: Event
    """Its results are in the ring slot, its KV in the pages; nothing of it reads or writes any more."""
    spans: tuple[tuple[Event, Event], ...]
    load: CopyTime

    @property
    def step_ms(self) -> float:
        """What its commands took, when it is done."""
        return sum(began.ms_until(ended) for began, ended in self.spans)


class BackedUp(NamedTuple):
    """A backup that was given to its stream."""

    transfer: int
    done: Event
    copy: CopyTime


class StepRunner:
    """Gives the commands of steps to the streams, in the order of the calls."""

    def __init__(
        self, model: Model, pools: list[KvPool], sampler: Sampler, host: HostPages | None, streams: Streams
    ) -> None:
        self._model = model
        self._pools = pools
        self._sampler = sampler
        self._host = host
        self._streams = streams
        # Layer of the model → its pool's index in the list, its index in the pool.
        self._places = {
            layer: (group, index) for group, pool in enumerate(pools) for index, layer in enumerate(pool.shape.layers)
        }
        self._forwarded: _Forwarded | None = None

    def forward(self, batch: ForwardBatch, results: StepResults) -> None:
        """Everything up to the logits, prompt logprobs included. Raises BadBatch, IndexError or ValueError for what the
        server got wrong, RuntimeError for what torch can't do."""
        compute = self._streams.compute
        began = compute.record()
        self._check(batch)
        load = CopyTime()
        arrivals = self._load(batch, load)
        forwarded = _Forwarded(batch.step, batch.row_slot[batch.sample_row], batch.sample_position, began, load)
        compute.run(partial(self._forward, batch, arrivals, results, forwarded))
        forwarded.ended = compute.record()
        self._forwarded = forwarded

    def sample(
        self, step: int, mask_rows: I32, mask_bits: U32, results: StepResults, skips: Sequence[int] = ()
    ) -> Sampled:
        """Draw the step's ids, not those in `skips`. Raises BadBatch if `forward` of another step came last."""
        forwarded, self._forwarded = self._forwarded, None
        if forwarded is None or forwarded.step != step or forwarded.ended is None:
            raise BadBatch(f"step {step} is to be sampled, but its forward did not come last")
        compute = self._streams.compute
        began = compute.record()
        compute.run(partial(self._sample, forwarded, mask_rows, mask_bits, results, skips))
        done = compute.record()
        return Sampled(step, done, ((forwarded.began, forwarded.ended), (began, done)), forwarded.load)

    def back_up(self, command: Backup) -> BackedUp:
        """Copy device pages to host pages, behind all that was computed before. Raises ValueError without a host pool;
        the stream raises IndexError for pages that do not exist."""
        if self._host is None:
            raise ValueError("a backup was asked for, but this worker has no host pool")
        backup = self._streams.backup
        backup.wait(self._streams.compute.record())
        pool, pages = self._pools[command.group], (command.device_pages, command.host_pages)
        backup.uses(partial(accesses.backup, command.transfer, command.group, pool, *pages))
        copy = CopyTime()
        backup.run(partial(copy.of, partial(back_up, pool, self._host, *pages)))
        return BackedUp(command.transfer, backup.record(), copy)

    # -----------------------------------------------------------------------------------------------------------
    # In the load stream

    def _load(self, batch: ForwardBatch, spent: CopyTime) -> dict[int, Event]:
        """Bring the batch's host pages → for each layer of the model, the event behind its part."""
        loads = {}
        for group in np.unique(batch.load_group).tolist():
            if self._host is None:
                raise BadBatch("the batch loads host pages, but this worker has no host pool")
            here = batch.load_group == group
            loads[group] = PageLoad(self._pools[group], self._host, batch.load_host[here], batch.load_device[here])
        arrivals = {}
        stream = self._streams.load
        for layer, (group, index) in sorted(self._places.items()) if loads else ():
            if group in loads:
                stream.uses(partial(accesses.load, batch.step, group, index, *loads[group].pages))
                stream.run(partial(spent.of, partial(loads[group].bring, index)))
                arrivals[layer] = stream.record()
        return arrivals

    # -----------------------------------------------------------------------------------------------------------
    # In the compute stream

    def _forward(
        self, batch: ForwardBatch, arrivals: dict[int, Event], results: StepResults, forwarded: _Forwarded
    ) -> None:
        self._sampler.begin(batch)
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
        keep = np.concatenate((last_tokens, batch.want_token)).astype(np.int64)
        hidden = self._model.forward(
            self._input_ids(batch),
            torch.from_numpy(batch.positions.astype(np.int64)),
            StepKv(batch, self._pools, self._places, arrivals, self._streams.compute),
            torch.from_numpy(keep),
        )
        samples = batch.counts.samples
        self._report_wants(hidden[samples:], batch.want_target, results)
        if not samples:
            return self._no_logits()
        return self._model.logits(hidden[:samples])

    def _input_ids(self, batch: ForwardBatch) -> Tensor:
        self._streams.compute.uses(partial(accesses.inputs, batch))
        ids = batch.input_ids.astype(np.int64)
        drawn = np.flatnonzero(ids < 0)
        ids[drawn] = self._sampler.future_tokens[-ids[drawn] - 1]
        return torch.from_numpy(ids)

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

    def _check(self, batch: ForwardBatch) -> None:
        """A wrong index would read or write another request's KV without a sound: bounds are checked before anything
        changes (20 µs a step)."""
        counts = batch.counts
        slots, pages = self._pools[0].table.shape
        context_tokens = pages * self._pools[0].page_tokens
        lengths = np.diff(batch.row_start)
        problems = (
            ("rows", counts.rows and (batch.row_start[0] != 0 or lengths.min() < 1)),
            ("tokens", (batch.row_start[-1] if counts.rows else 0) != counts.tokens),
            ("single-token rows", (lengths[: counts.decode_rows] != 1).any()),
            ("row slots", _outside(batch.row_slot, 0, slots) or len(set(batch.row_slot.tolist())) != counts.rows),
            (
                "context lengths",
                _outside(batch.row_kv_len, 1, context_tokens + 1) or (batch.row_kv_len < lengths).any(),
            ),
            ("positions", counts.tokens and not self._positions_agree(batch, lengths)),
            ("input ids", _outside(batch.input_ids, -slots, self._model.config.vocab_size)),
            ("sampled rows", _outside(batch.sample_row, 0, counts.rows)),
            ("wanted tokens", _outside(batch.want_token, 0, counts.tokens)),
            ("wanted ids", _outside(batch.want_target, 0, self._model.config.vocab_size)),
            ("edited groups", _outside(batch.edit_group, 0, len(self._pools))),
            ("loaded groups", _outside(batch.load_group, 0, len(self._pools))),
        )
        wrong = [name for name, is_wrong in problems if is_wrong]
        if wrong:
            raise BadBatch(f"the batch of step {batch.step} has impossible {', '.join(wrong)}")

    @staticmethod
    def _positions_agree(batch: ForwardBatch, lengths: I32) -> bool:
        first = np.repeat(batch.row_kv_len - batch.row_start[1:], lengths)
        return bool(np.array_equal(batch.positions, first + np.arange(len(first))))


def _outside(values: I32, least: int, end: int) -> bool:
    return bool(len(values)) and (int(values.min()) < least or int(values.max()) >= end)

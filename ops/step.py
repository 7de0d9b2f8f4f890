"""A step: the batch's edits, loads and model pass (`forward`), then the drawing of its ids (`sample`).

in     a `ForwardBatch`, then the masks of its samples
out    KV in the device pools; ids and logprobs in the step's results; ids in `future_tokens`
state  the model, pools and page tables, sampler state; between the two commands of a step its logits
owner  the worker's main thread, one command after the other
ready  ids when `sample` returns; KV for the next command when `forward` returns
end    a page's bytes are overwritten when the server gives it to another request
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.ops.attention import attend, plan_attention
from headrace.ops.kv_copy import HostPages, PageLoad, back_up
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.model import Attention, Model
from headrace.ops.sampler import Sampler
from headrace.ops.sampling import best_log_probabilities, log_probabilities
from headrace.ops.wire import I32, MAX_LOGPROBS, U32, Backup, ForwardBatch, StepResults

WANTS_PER_PASS: Final = 64
"""Prompt positions whose logits exist at a time: 12 MB with a vocabulary of 49k."""


class BadBatch(ValueError):
    """The server sent a batch that contradicts itself or this worker's sizes."""


class _Forwarded(NamedTuple):
    """What `sample` needs of the step whose `forward` came last."""

    step: int
    slots: I32
    positions: I32
    logits: Tensor
    forward_ms: float
    load_ms: float


class StepMs(NamedTuple):
    """What a step took, in ms; the load is a part of the whole."""

    step_ms: float
    load_ms: float


class StepRunner:
    """Runs the commands of steps, in the order of the calls."""

    def __init__(self, model: Model, pools: list[KvPool], sampler: Sampler, host: HostPages | None) -> None:
        self._model = model
        self._pools = pools
        self._sampler = sampler
        self._host = host
        # Layer of the model → its pool's index in the list, its index in the pool.
        self._places = {
            layer: (group, index) for group, pool in enumerate(pools) for index, layer in enumerate(pool.shape.layers)
        }
        self._forwarded: _Forwarded | None = None

    def forward(self, batch: ForwardBatch, results: StepResults) -> None:
        """Everything up to the logits, prompt logprobs included. Raises BadBatch, IndexError or ValueError for what the
        server got wrong, RuntimeError for what torch can't do."""
        began = time.perf_counter()
        self._check(batch)
        self._sampler.begin(batch)
        for group, pool in enumerate(self._pools):
            pool.forget(batch.init_slot)
            here = batch.edit_group == group
            pool.edit(batch.edit_slot[here], batch.edit_index[here], batch.edit_page[here])
        loads = self._loads(batch)
        slots = batch.row_slot[batch.sample_row]
        logits = self._run(batch, loads, results) if batch.counts.tokens else self._only_load(loads)
        forward_ms = (time.perf_counter() - began) * 1e3
        load_ms = sum(load.spent_ms for load in loads.values())
        self._forwarded = _Forwarded(batch.step, slots, batch.sample_position, logits, forward_ms, load_ms)

    def sample(self, step: int, mask_rows: I32, mask_bits: U32, results: StepResults) -> StepMs:
        """Draw the step's ids; → what both commands took. Raises BadBatch if `forward` of another step came last."""
        began = time.perf_counter()
        forwarded, self._forwarded = self._forwarded, None
        if forwarded is None or forwarded.step != step:
            raise BadBatch(f"step {step} is to be sampled, but its forward did not come last")
        self._sampler.sample(forwarded.logits, forwarded.slots, forwarded.positions, mask_rows, mask_bits, results)
        return StepMs(forwarded.forward_ms + (time.perf_counter() - began) * 1e3, forwarded.load_ms)

    def back_up(self, command: Backup) -> float:
        """Copy device pages to host pages; → ms that it took. Raises IndexError for pages that do not exist, ValueError
        without a host pool."""
        if self._host is None:
            raise ValueError("a backup was asked for, but this worker has no host pool")
        began = time.perf_counter()
        back_up(self._pools[command.group], self._host, command.device_pages, command.host_pages)
        return (time.perf_counter() - began) * 1e3

    def _run(self, batch: ForwardBatch, loads: dict[int, PageLoad], results: StepResults) -> Tensor:
        """The model pass; → logits of the samples."""
        last_tokens = batch.row_start[1:][batch.sample_row] - 1
        keep = np.concatenate((last_tokens, batch.want_token)).astype(np.int64)
        hidden = self._model.forward(
            self._input_ids(batch),
            torch.from_numpy(batch.positions.astype(np.int64)),
            self._attention(batch, loads),
            torch.from_numpy(keep),
        )
        samples = batch.counts.samples
        self._report_wants(hidden[samples:], batch.want_target, results)
        if not samples:
            return torch.empty((0, self._model.config.vocab_size))
        return self._model.logits(hidden[:samples])

    def _attention(self, batch: ForwardBatch, loads: dict[int, PageLoad]) -> Attention:
        plans = []
        for pool in self._pools:
            plan = plan_attention(batch, pool)
            pool.clear(plan.begun_pages)
            plans.append(plan)

        def attention(layer: int, qkv: Tensor) -> Tensor:
            group, index = self._places[layer]
            if group in loads:
                loads[group].bring(index)
            return attend(self._pools[group], index, qkv, plans[group])

        return attention

    def _input_ids(self, batch: ForwardBatch) -> Tensor:
        ids = batch.input_ids.astype(np.int64)
        drawn = np.flatnonzero(ids < 0)
        ids[drawn] = self._sampler.future_tokens[-ids[drawn] - 1]
        return torch.from_numpy(ids)

    def _loads(self, batch: ForwardBatch) -> dict[int, PageLoad]:
        loads = {}
        for group in np.unique(batch.load_group).tolist():
            if self._host is None:
                raise BadBatch("the batch loads host pages, but this worker has no host pool")
            here = batch.load_group == group
            loads[group] = PageLoad(self._pools[group], self._host, batch.load_host[here], batch.load_device[here])
        return loads

    def _only_load(self, loads: dict[int, PageLoad]) -> Tensor:
        for group, load in loads.items():
            for index in range(len(self._pools[group].shape.layers)):
                load.bring(index)
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

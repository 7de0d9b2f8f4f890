"""A step on the card: the host checks, edits its tables and stages; the streams get copies, kernels, or a graph.

Nothing here waits for the card, and nothing that the card does later reads what the host may have changed by then: only
staging slots, the ring, and host pages, each of which has its rule. Decode steps run as graphs, captured for a list of
batch sizes and padded to the next one; whatever has a prompt's tokens, loads or wanted logprobs is launched kernel by
kernel.

in     a `ForwardBatch`, then the masks of its samples
out    KV in the device pools; ids and logprobs in the step's results; ids in `future_tokens`
state  the host's tables and parameters, ahead of the card's by the steps under way; the card's: the compute stream's;
       between the two commands of a step its logits
owner  the worker's main thread gives commands to the streams, one after the other
ready  ids when `Sampled.done` is; KV of a layer for the next command in the compute stream, loaded KV when the layer's
       event is
end    a page's bytes are overwritten when the server gives it to another request
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops import accesses
from headrace.ops.batch_check import BadBatch, check_batch
from headrace.ops.cuda.accesses import decode
from headrace.ops.cuda.decoder import DeviceDecoder
from headrace.ops.cuda.kv import PADDING, DeviceKv, DevicePools, StepRows, padded_rows, stage_rows
from headrace.ops.cuda.sampler import DeviceSampler, Draws, send
from headrace.ops.cuda.staging import Slot, Staging
from headrace.ops.runner import BackedUp, CopyTime, Sampled
from headrace.ops.sampling import best_log_probabilities, log_probabilities
from headrace.ops.step_copies import Copier, StepCopies, layer_places
from headrace.ops.streams import Event, Operation, Streams
from headrace.ops.wire import I32, MAX_LOGPROBS, U32, Backup, ForwardBatch, RingGeometry, StepResults

GRAPH_ROWS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Batch sizes that decode steps are captured for. A decode step costs the reading of the weights, whatever its rows:
50 % of padding at 2 rows and 16 % at 256 are a few percent of its time."""
WANTS_PER_PASS: Final = 64
"""Prompt positions whose logits exist at a time: 33 MB with a vocabulary of 128k."""


class _Forwarded(msgspec.Struct):
    """What `sample` needs of the step whose `forward` came last."""

    step: int
    slots: I32
    positions: I32
    staged: Slot
    load: CopyTime
    began: Event
    ended: Event | None = None
    logits: Tensor | None = None
    """There when the compute stream gets to `sample`."""


class _Pass(msgspec.Struct):
    """One step's way through the model, staged."""

    batch: ForwardBatch
    staged: Slot
    rows: StepRows
    graph: Callable[[], None] | None
    samples: Tensor | None
    """int64: tokens that sample; None for all, in order."""
    keep: Tensor | None
    """int64: tokens whose result is wanted, those that sample first; None for all, in order."""
    wanted_ids: Tensor
    begins: list[Callable[[], None]]
    arrivals: dict[int, Event]


class DeviceStepRunner:
    """A card's `Runner`; on a CPU's tensors it does the same with the kernels' references."""

    def __init__(
        self,
        model: DeviceDecoder,
        pools: DevicePools,
        sampler: DeviceSampler,
        copiers: Sequence[Copier],
        streams: Streams,
        geometry: RingGeometry,
        tell: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """`copiers`: of each pool; none without a host pool. `geometry`: what bounds a batch. `tell` is called after
        each of the graphs, with how many there are."""
        self._model = model
        self._pools = pools
        self._sampler = sampler
        self._streams = streams
        self._places = layer_places(pools.pools)
        self._copies = StepCopies(pools.pools, self._places, copiers, streams)
        self._forwarded: _Forwarded | None = None
        slots = len(pools.pools[0].table)
        # All that is staged of a batch is its fields, one or two of them in eight bytes, and the plan of its attention.
        self._staging = Staging(4 * geometry.max_batch_bytes + (64 << 10), 64 * slots + 4096, model.device, streams)
        self._hidden = torch.empty((slots, model.config.hidden), dtype=pools.pools[0].pages.dtype, device=model.device)
        """What the last graph has left."""
        self.graphs = self._capture([rows for rows in GRAPH_ROWS if rows < slots] + [slots], tell)

    def forward(self, batch: ForwardBatch, results: StepResults) -> None:
        check_batch(batch, self._pools.pools, self._model.config.vocab_size)
        staged, for_sample = self._staging.open(batch.step)
        load = CopyTime()
        step = self._stage(batch, staged)
        step.arrivals = self._copies.load(batch, load)
        compute = self._streams.compute
        began = compute.record()
        slots = batch.row_slot[batch.sample_row]
        forwarded = _Forwarded(batch.step, slots, batch.sample_position.copy(), for_sample, load, began)
        compute.run(partial(self._forward, step, results, forwarded))
        forwarded.ended = compute.record()
        self._forwarded = forwarded

    def sample(
        self, step: int, mask_rows: I32, mask_bits: U32, results: StepResults, skips: Sequence[int] = ()
    ) -> Sampled:
        forwarded, self._forwarded = self._forwarded, None
        if forwarded is None or forwarded.step != step or forwarded.ended is None:
            raise BadBatch(f"step {step} is to be sampled, but its forward did not come last")
        slots, staged, masks = forwarded.slots, forwarded.staged, (mask_rows, mask_bits)
        draws = self._sampler.plan(slots, forwarded.positions, masks, results, skips, staged)
        compute = self._streams.compute
        began = compute.record()
        compute.run(partial(self._sample, forwarded, draws))
        done = compute.record()
        self._staging.close(staged.number, done)
        return Sampled(step, done, ((forwarded.began, forwarded.ended), (began, done)), forwarded.load)

    def back_up(self, command: Backup) -> BackedUp:
        return self._copies.back_up(command)

    # -----------------------------------------------------------------------------------------------------------
    # On the host, ahead of the card

    def _stage(self, batch: ForwardBatch, staged: Slot) -> _Pass:
        counts = batch.counts
        only_decodes = 0 < counts.tokens == counts.decode_rows and not counts.wants and not counts.loads
        fitting = [rows for rows in self.graphs if rows >= counts.rows] if only_decodes else []
        last_tokens = batch.row_start[1:][batch.sample_row].astype(np.int64) - 1
        everyone = np.array_equal(last_tokens, np.arange(counts.tokens))
        if fitting:
            # First: a graph's rows lie where they lay when it was captured.
            rows = padded_rows(staged, min(fitting), batch)
            samples = keep = None if everyone else staged.put(last_tokens)
        else:
            rows = stage_rows(batch, self._pools, staged)
            keep = staged.put(np.concatenate((last_tokens, batch.want_token.astype(np.int64))))
            samples = None
        begins = (self._pools.edit(batch, staged), self._sampler.begin(batch, staged))
        for pool in self._pools.pools:
            # Raises where a token has no page. Nothing needs clearing: the kernels don't read behind a context's end.
            pool.begun_pages(batch.row_slot, batch.row_kv_len - np.diff(batch.row_start), batch.row_kv_len)
        return _Pass(
            batch=batch,
            staged=staged,
            rows=rows,
            graph=self.graphs[min(fitting)] if fitting else None,
            samples=samples,
            keep=keep,
            wanted_ids=staged.put(batch.want_target.astype(np.int64)),
            begins=[begin for begin in begins if begin is not None],
            arrivals={},
        )

    # -----------------------------------------------------------------------------------------------------------
    # In the compute stream

    def _forward(self, step: _Pass, results: StepResults, forwarded: _Forwarded) -> None:
        step.staged.send()
        for begin in step.begins:
            begin()
        if not step.batch.counts.tokens:
            for arrival in step.arrivals.values():
                self._streams.compute.wait(arrival)
            forwarded.logits = self._no_logits()
            return
        self._streams.compute.uses(partial(accesses.inputs, step.batch))
        if step.graph is not None:
            self._streams.compute.uses(partial(self._decode_accesses, step))
            step.graph()
            rows = step.batch.counts.rows
            hidden = self._hidden[:rows] if step.samples is None else self._hidden.index_select(0, step.samples)
        else:
            kv = DeviceKv(step.rows, self._pools, self._places, partial(self._arrive, step))
            hidden = self._model.forward(self._sampler.future_tokens, kv, step.keep)
        samples = step.batch.counts.samples
        self._report_wants(hidden[samples:], step.wanted_ids, results)
        forwarded.logits = self._model.logits(hidden[:samples]) if samples else self._no_logits()

    def _no_logits(self) -> Tensor:
        return torch.empty((0, self._model.config.vocab_size), device=self._model.device)

    def _sample(self, forwarded: _Forwarded, draws: Draws) -> None:
        assert forwarded.logits is not None
        forwarded.staged.send()
        self._streams.compute.uses(partial(accesses.draws, forwarded.step, forwarded.slots))
        self._sampler.draw(forwarded.logits, draws)

    def _arrive(self, step: _Pass, layer: int) -> None:
        """What comes next touches the layer's pages."""
        if layer in step.arrivals:
            self._streams.compute.wait(step.arrivals[layer])
        group, index = self._places[layer]
        pool, table = self._pools.pools[group], self._pools.tables[group]
        self._streams.compute.uses(lambda: accesses.attention(step.batch, group, pool, table.numpy(), index))

    def _decode_accesses(self, step: _Pass) -> Operation:
        return decode(step.batch, self._pools.pools, [table.numpy() for table in self._pools.tables])

    def _report_wants(self, hidden: Tensor, ids: Tensor, results: StepResults) -> None:
        best = min(MAX_LOGPROBS, self._model.config.vocab_size)
        for start in range(0, len(ids), WANTS_PER_PASS):
            end = min(start + WANTS_PER_PASS, len(ids))
            logits = self._model.logits(hidden[start:end])
            send(log_probabilities(logits, ids[start:end]), results.want_logprobs[start:end])
            top_ids, top = best_log_probabilities(logits, best)
            # The ring has room for all columns of a row, one row behind the other.
            missing = (0, MAX_LOGPROBS - best)
            send(F.pad(top_ids.int(), missing), results.want_top_ids[start:end])
            send(F.pad(top, missing), results.want_top_logprobs[start:end])

    # -----------------------------------------------------------------------------------------------------------
    # Graphs

    def _capture(self, sizes: list[int], tell: Callable[[int, int], None]) -> dict[int, Callable[[], None]]:
        """Rows → what runs a decode step of so many. The largest first: the others fit into its memory."""
        graphs = {}
        for done, rows in enumerate(sorted(sizes, reverse=True)):
            staged, _ = self._staging.open(0)
            padded = padded_rows(staged, rows)
            # No copy: the streams are not running yet.
            for tensor, padding in zip(padded[:-1], PADDING):
                tensor.fill_(padding)
            kv = DeviceKv(padded, self._pools, self._places, lambda layer: None)
            graphs[rows] = self._streams.capture(partial(self._decode, kv))
            tell(done + 1, len(sizes))
        return graphs

    def _decode(self, kv: DeviceKv) -> None:
        hidden = self._model.forward(self._sampler.future_tokens, kv, None)
        self._hidden[: len(hidden)].copy_(hidden)

"""A step's choice, and how it becomes flat arrays for the device.

`ScheduleBatch` says who computes what; `encode` writes it into a ring slot as a `ForwardBatch` (256 decoding requests:
a dozen numpy operations). Nothing here keeps state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.ops.wire import I32, Counts, ForwardBatch, batch_bytes
from headrace.sched.messages import MAX_LOGIT_BIASES, SamplingParams
from headrace.sched.request import Request, SlotTable


@dataclass(slots=True)
class Chunk:
    """Positions [start, end) of a request's known tokens; `samples` when they are the last."""

    request: Request
    start: int
    end: int
    samples: bool
    wants_from: int
    """Prompt positions [wants_from, wants_to) get their logprobs from this chunk: those after each computed one."""
    wants_to: int

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def wants(self) -> int:
        return max(0, self.wants_to - self.wants_from)


@dataclass(slots=True)
class ScheduleBatch:
    """One step: decoding slots, prefill chunks, and the page-table deltas that both need."""

    decode: NDArray[np.int64]
    """Slots that compute one token each."""
    grown: NDArray[np.int64]
    """Decoding slots that got one more page ..."""
    grown_pages: I32
    """... namely [groups, grown]."""
    chunks: list[Chunk] = field(default_factory=list)
    entered: list[Request] = field(default_factory=list)
    """Requests that got a slot in this step; each also has a chunk."""

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def prefill_pairs(self) -> int:
        """Sum of tokens x context, what attention costs."""
        return sum(chunk.tokens * chunk.end for chunk in self.chunks)

    def counts(self) -> Counts:
        """Sizes of the arrays."""
        groups = self.grown_pages.shape[0]
        decode, tokens = len(self.decode), self.prefill_tokens
        inits = [_init_ids(request) for request in self.entered]
        pages = sum(request.holding.count for request in self.entered if request.holding is not None)
        return Counts(
            tokens=decode + tokens,
            rows=decode + len(self.chunks),
            decode_rows=decode,
            samples=decode + sum(chunk.samples for chunk in self.chunks),
            table_edits=groups * (len(self.grown) + pages),
            slot_inits=len(self.entered),
            init_ids=sum(len(ids) for parts in inits for ids in parts),
            init_biases=sum(len(request.submit.sampling.logit_bias) for request in self.entered),
            wants=sum(chunk.wants for chunk in self.chunks),
            loads=0,
        )

    def fits(self, max_batch_bytes: int, max_wants: int) -> bool:
        """Whether a ring slot has room for it."""
        counts = self.counts()
        return batch_bytes(counts) <= max_batch_bytes and counts.wants <= max_wants


def max_batch_bytes(
    max_slots: int, max_context_tokens: int, max_chunk_tokens: int, page_tokens: int, groups: int
) -> int:
    """Room in a ring slot so that a full decode batch beside one request's largest chunk and sampler state fits."""
    table_pages = -(-max_context_tokens // page_tokens) + 1
    largest = Counts(
        tokens=max_slots + max_chunk_tokens,
        rows=max_slots,
        decode_rows=max_slots,
        samples=max_slots,
        table_edits=groups * (max_slots + table_pages),
        slot_inits=max_slots,
        init_ids=2 * max_context_tokens + 2 * MAX_LOGIT_BIASES,
        init_biases=MAX_LOGIT_BIASES,
        wants=max_chunk_tokens,
        loads=groups * table_pages,
    )
    return batch_bytes(largest)


def encode(out: ForwardBatch, batch: ScheduleBatch, table: SlotTable, page_tokens: int) -> None:
    """Fill the views of a ring slot with a batch, as the table stands before its launch."""
    decode = batch.decode
    rows = len(decode)
    # The last drawn id of a decoding slot is always in future_tokens, known or not: one path for both.
    out.input_ids[:rows] = -(decode + 1)
    out.positions[:rows] = table.computed[decode]
    out.row_slot[:rows] = decode
    out.row_start[: rows + 1] = np.arange(rows + 1)
    out.row_kv_len[:rows] = table.computed[decode] + 1
    out.sample_row[:rows] = np.arange(rows)
    out.sample_position[:rows] = table.extent[decode] - table.prompt[decode]
    samples, token, want = rows, rows, 0
    for row, chunk in enumerate(batch.chunks, rows):
        slot = chunk.request.slot
        out.input_ids[token : token + chunk.tokens] = table.tokens[slot, chunk.start : chunk.end]
        out.positions[token : token + chunk.tokens] = np.arange(chunk.start, chunk.end)
        out.row_slot[row] = slot
        out.row_start[row + 1] = token + chunk.tokens
        out.row_kv_len[row] = chunk.end
        if chunk.samples:
            out.sample_row[samples] = row
            out.sample_position[samples] = table.extent[slot] - table.prompt[slot]
            samples += 1
        if chunk.wants:
            span = slice(want, want + chunk.wants)
            out.want_token[span] = token + np.arange(chunk.wants_from, chunk.wants_to) - 1 - chunk.start
            out.want_target[span] = table.tokens[slot, chunk.wants_from : chunk.wants_to]
            want += chunk.wants
        token += chunk.tokens
    _encode_edits(out, batch, table, page_tokens)
    _encode_inits(out, batch)


def _encode_edits(out: ForwardBatch, batch: ScheduleBatch, table: SlotTable, page_tokens: int) -> None:
    at = 0
    for group in range(batch.grown_pages.shape[0]):
        end = at + len(batch.grown)
        out.edit_group[at:end] = group
        out.edit_slot[at:end] = batch.grown
        out.edit_index[at:end] = table.computed[batch.grown] // page_tokens
        out.edit_page[at:end] = batch.grown_pages[group]
        at = end
        for request in batch.entered:
            assert request.holding is not None
            count = request.holding.count
            end = at + count
            out.edit_group[at:end] = group
            out.edit_slot[at:end] = request.slot
            out.edit_index[at:end] = np.arange(count)
            out.edit_page[at:end] = request.holding.pages[group, :count]
            at = end


def _encode_inits(out: ForwardBatch, batch: ScheduleBatch) -> None:
    at = bias_at = 0
    for i, request in enumerate(batch.entered):
        sampling = request.submit.sampling
        parts = _init_ids(request)
        seed = sampling.seed & 0xFFFFFFFFFFFFFFFF
        out.init_slot[i] = request.slot
        out.init_ints[i] = (
            *(sampling.top_k, _signed(seed), _signed(seed >> 32), sampling.min_tokens, sampling.logprobs),
            *(len(part) for part in parts),
        )
        out.init_floats[i] = (
            *(sampling.temperature, sampling.top_p, sampling.min_p),
            *(sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty),
        )
        for part in parts:
            out.init_ids[at : at + len(part)] = part
            at += len(part)
        biases = [bias for _, bias in sampling.logit_bias]
        out.init_biases[bias_at : bias_at + len(biases)] = biases
        bias_at += len(biases)


def _init_ids(request: Request) -> tuple[I32, I32, I32, I32]:
    """Prompt, output, bias and stop ids that the slot's sampler needs: only those that its settings make it read."""
    sampling, known = request.submit.sampling, request.key.tokens[: request.key.length]
    outputs = _penalises(sampling) or sampling.repetition_penalty != 1.0
    return (
        request.submit.prompt_ids if sampling.repetition_penalty != 1.0 else _NONE,
        known[request.prompt_tokens :] if outputs else _NONE,
        np.array([token for token, _ in sampling.logit_bias], np.int32),
        np.array(sampling.stop_ids, np.int32) if sampling.min_tokens else _NONE,
    )


def _penalises(sampling: SamplingParams) -> bool:
    return sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def _signed(bits: int) -> int:
    low = bits & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


_NONE: I32 = np.zeros(0, np.int32)

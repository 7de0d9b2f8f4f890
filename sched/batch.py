"""A step's choice, and how it becomes flat arrays for the device.

`ScheduleBatch` says who computes what; `encode` writes it into a ring slot as a `ForwardBatch` (256 decoding requests:
a dozen numpy operations). Nothing here keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.holding import Holding, Repointed
from headrace.ops.wire import I32, Counts, ForwardBatch, batch_bytes, more_bytes
from headrace.sched.messages import MAX_LOGIT_BIASES, SamplingParams
from headrace.sched.request import Request, SlotTable

SamplerIds: TypeAlias = tuple[I32, I32, I32, I32]


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


class WindowEdit(NamedTuple):
    """Pages of a window group that a request which computes a chunk reads and writes from now on."""

    request: Request
    group: int
    first: int
    """In the request's page table."""
    pages: I32


class Moved(NamedTuple):
    """Duplicates of a request that it gave back: its slot's table shows other pages instead."""

    slot: int
    holding: Holding
    places: Repointed


class ScheduleBatch:
    """One step: decoding slots, prefill chunks, and the page-table deltas that both need.

    Sizes are kept as it grows, so that asking whether one more request fits costs the same for the hundredth.
    """

    __slots__ = (
        *("_bytes", "_sizes", "chunks", "decode", "entered", "grown", "grown_pages", "inits", "loading", "moved"),
        *("prefill_pairs", "read_tokens", "window_edits"),
    )

    def __init__(
        self, decode: NDArray[np.int64], grown: NDArray[np.int64], grown_pages: I32, moved: Sequence[Moved] = ()
    ) -> None:
        self.decode = decode
        """Slots that compute one token each."""
        self.grown = grown
        """Decoding slots that got one more page ..."""
        self.grown_pages = grown_pages
        """... of every group, namely [groups, grown]."""
        self.moved = moved
        """Pages that slots read elsewhere from now on."""
        self.chunks: list[Chunk] = []
        self.window_edits: list[WindowEdit] = []
        self.entered: list[Request] = []
        """Requests that got a slot in this step; each also has a chunk."""
        self.inits: list[SamplerIds] = []
        """Per entered request."""
        self.loading: list[Request] = []
        """Those of them that load pages from the host."""
        self.prefill_pairs = 0
        """Sum of tokens x context over the chunks, what attention costs."""
        self.read_tokens = 0
        """Whose KV is read for the decoding slots."""
        rows = len(decode)
        edits = grown_pages.size + sum(some.places.pages.size for some in moved)
        counts = Counts(rows, rows, rows, rows, edits, 0, 0, 0, 0, 0)
        self._sizes, self._bytes = msgspec.structs.astuple(counts), batch_bytes(counts)

    @property
    def counts(self) -> Counts:
        """Sizes of the arrays."""
        return Counts(*self._sizes)

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    def add(self, chunk: Chunk, max_bytes: int, enters: Holding | None = None, edits: int = 0, loads: int = 0) -> bool:
        """Add a chunk; False if there is no room. `enters`: the holding of a request that gets its slot in this step,
        which loads so many pages; `edits`: of its page tables."""
        request, tokens = chunk.request, chunk.tokens
        init = sampler_ids(request) if enters is not None else None
        ids = sum(map(len, init)) if init else 0
        biases = len(request.submit.sampling.logit_bias) if init else 0
        # In the order of `Counts`, which is made once a batch.
        more = tokens, 1, 0, chunk.samples, edits, init is not None, ids, biases, chunk.wants, loads
        size = self._bytes + more_bytes(more)
        if size > max_bytes:
            return False
        self._bytes, self._sizes = size, tuple(map(add, self._sizes, more))
        self.chunks.append(chunk)
        self.prefill_pairs += tokens * chunk.end - tokens * tokens // 2
        if init is not None:
            self.entered.append(request)
            self.inits.append(init)
            if loads:
                self.loading.append(request)
        return True


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
        # One request's whole table, a page more for each slot, and its duplicates: what a step's chunks have published
        # at its launch, and the two in flight when they were collected.
        table_edits=groups * (table_pages + max_slots + max_chunk_tokens // page_tokens + 3 * max_slots),
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
    if batch.chunks:
        _encode_chunks(out, batch.chunks, rows, table)
    _encode_edits(out, batch, table, page_tokens)
    if batch.entered:
        _encode_inits(out, batch)
    _encode_loads(out, batch)


def _encode_chunks(out: ForwardBatch, chunks: Sequence[Chunk], rows: int, table: SlotTable) -> None:
    """Behind the `rows` of one token each. A chunk at a time would be eight assignments of 0.3 µs."""
    tokens, slots = [chunk.tokens for chunk in chunks], [chunk.request.slot for chunk in chunks]
    starts = list(accumulate(tokens, initial=rows))
    ids = [table.tokens[slot, chunk.start : chunk.end] for slot, chunk in zip(slots, chunks)]
    np.concatenate(ids, out=out.input_ids[rows:])
    first_positions = np.array([chunk.start - start for chunk, start in zip(chunks, starts)], np.int32)
    out.positions[rows:] = np.repeat(first_positions, tokens)
    out.positions[rows:] += np.arange(rows, starts[-1], dtype=np.int32)
    out.row_slot[rows:] = slots
    out.row_start[rows + 1 :] = starts[1:]
    out.row_kv_len[rows:] = [chunk.end for chunk in chunks]
    sampling = [at for at, chunk in enumerate(chunks) if chunk.samples]
    out.sample_row[rows:] = [rows + at for at in sampling]
    sampled = [slots[at] for at in sampling]
    out.sample_position[rows:] = table.extent[sampled] - table.prompt[sampled]
    want = 0
    for slot, chunk, start in zip(slots, chunks, starts):
        if chunk.wants:
            span = slice(want, want + chunk.wants)
            out.want_token[span] = start + np.arange(chunk.wants_from, chunk.wants_to) - 1 - chunk.start
            out.want_target[span] = table.tokens[slot, chunk.wants_from : chunk.wants_to]
            want += chunk.wants


def _encode_loads(out: ForwardBatch, batch: ScheduleBatch) -> None:
    at = 0
    for request in batch.loading:
        holding = request.holding
        assert holding is not None
        for group, host in enumerate(holding.host):
            end = at + len(host)
            out.load_group[at:end] = group
            out.load_host[at:end] = host
            out.load_device[at:end] = holding.pages[group, holding.device_pages : holding.matched_pages]
            at = end
        for group, window in enumerate(holding.windows, len(holding.host)):
            end = at + len(window.host)
            out.load_group[at:end] = group
            out.load_host[at:end] = window.host
            out.load_device[at:end] = window.pages[window.lacking]
            at = end


def _encode_edits(out: ForwardBatch, batch: ScheduleBatch, table: SlotTable, page_tokens: int) -> None:
    at = 0
    for group in range(batch.grown_pages.shape[0]):
        for moved in (moved for moved in batch.moved if group < len(moved.places.pages)):
            end = at + len(moved.places.indices)
            out.edit_group[at:end] = group
            out.edit_slot[at:end] = moved.slot
            out.edit_index[at:end] = moved.places.indices
            out.edit_page[at:end] = moved.places.pages[group]
            at = end
        end = at + len(batch.grown)
        out.edit_group[at:end] = group
        out.edit_slot[at:end] = batch.grown
        out.edit_index[at:end] = table.computed[batch.grown] // page_tokens
        out.edit_page[at:end] = batch.grown_pages[group]
        at = end
        if len(shown := _tables_of(batch.entered, group)):
            end = at + shown.shape[1]
            out.edit_group[at:end] = group
            out.edit_slot[at:end], out.edit_index[at:end], out.edit_page[at:end] = shown
            at = end
    for request, group, first, pages in batch.window_edits:
        end = at + len(pages)
        out.edit_group[at:end] = group
        out.edit_slot[at:end] = request.slot
        out.edit_index[at:end] = np.arange(first, first + len(pages))
        out.edit_page[at:end] = pages
        at = end


def _tables_of(entered: Sequence[Request], group: int) -> I32:
    """What the page tables of a full group show of requests that enter: int32 [(slot, index, page), n]."""
    holdings = [request.holding for request in entered if request.holding is not None]
    if not holdings or group >= len(holdings[0].pages):
        return _NONE
    counts = [holding.count for holding in holdings]
    firsts = list(accumulate(counts, initial=0))
    shown = np.empty((3, firsts[-1]), np.int32)
    shown[0] = np.repeat([request.slot for request in entered], counts)
    shown[1] = np.arange(firsts[-1]) - np.repeat(firsts[:-1], counts)
    np.concatenate([holding.pages[group, : holding.count] for holding in holdings], out=shown[2])
    return shown


def _encode_inits(out: ForwardBatch, batch: ScheduleBatch) -> None:
    samplings = [request.submit.sampling for request in batch.entered]
    out.init_slot[:] = [request.slot for request in batch.entered]
    out.init_ints[:] = [
        (
            *(sampling.top_k, _signed(sampling.seed), _signed(sampling.seed >> 32), sampling.min_tokens),
            *(sampling.logprobs, *map(len, parts)),
        )
        for sampling, parts in zip(samplings, batch.inits)
    ]
    out.init_floats[:] = [
        (
            *(sampling.temperature, sampling.top_p, sampling.min_p),
            *(sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty),
        )
        for sampling in samplings
    ]
    out.init_biases[:] = [bias for sampling in samplings for _, bias in sampling.logit_bias]
    if len(out.init_ids):
        np.concatenate([part for parts in batch.inits for part in parts], out=out.init_ids)


def sampler_ids(request: Request) -> SamplerIds:
    """Prompt, output, bias and stop ids that the slot's sampler needs: only those that its settings make it read."""
    sampling, known = request.submit.sampling, request.key.tokens[: request.key.length]
    repetition = sampling.repetition_penalty != 1.0
    return (
        request.submit.prompt_ids if repetition else _NONE,
        known[request.prompt_tokens :] if repetition or _penalises(sampling) else _NONE,
        np.array([token for token, _ in sampling.logit_bias], np.int32) if sampling.logit_bias else _NONE,
        np.array(sampling.stop_ids, np.int32) if sampling.min_tokens else _NONE,
    )


def _penalises(sampling: SamplingParams) -> bool:
    return sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def _signed(bits: int) -> int:
    low = bits & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


_NONE: I32 = np.zeros(0, np.int32)

"""What the server and a device worker say to each other: commands, replies, and the batch in shared memory.

The command pipe *is* the compute stream: steps are computed in the order they are sent, and each `Sample` is answered
with one `StepDone`. Copies have streams of their own (`ops/streams.py`). A load may run ahead of the steps before it:
what was sent before and is not yet answered may neither touch the pages that it writes nor write those that it reads. A
backup runs behind all that was sent before it, and its pages stay as they are until it is answered.

Commands and replies are small msgpack structs; arrays travel through a ring of slots in a shared mapping (a memfd),
which the server fills and the worker reads in place. Nothing is pickled.

A step is two commands. `Forward` runs the model over the batch in a ring slot and keeps the logits on the device;
`Sample` draws from them, writes `future_tokens`, and puts the ids into the slot's result region. Between the two the
server may still be computing masks (grammars); other commands may be sent in between, except another `Sample`.

One ring slot, in 4-byte words::

    | header [16] | input fields, sized by the header's counts | results | masks |

This module holds no torch, so that both sides can import it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from operator import mul
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

I32: TypeAlias = NDArray[np.int32]
F32: TypeAlias = NDArray[np.float32]
U32: TypeAlias = NDArray[np.uint32]

MAX_LOGPROBS: Final = 20
"""Alternatives per position that a result has room for (OpenAI's limit)."""

_HEADER: Final = 16
_WORD: Final = 4
_MAGIC: Final = 0x48525631  # "HRV1"


# ---------------------------------------------------------------------------------------------------------------
# Commands: server → worker


class GroupShape(msgspec.Struct, frozen=True):
    """One group of layers that share a page table. Bytes are laid out by the worker, counted by `KvLayout`."""

    kind: str
    """"full" or "window"."""
    window_tokens: int
    """0 for a full group."""
    layers: list[int]
    kv_heads: int
    head_dim: int


class HostArea(msgspec.Struct, frozen=True):
    """Where the pages of one group are in the host pool."""

    offset: int
    """Bytes from its start."""
    slot_bytes: int
    """From page to page."""
    pages: int


class RingGeometry(msgspec.Struct, frozen=True):
    """Sizes of the ring; both sides derive every offset from them."""

    slots: int
    max_batch_bytes: int
    """Room for the header and the input fields of one batch."""
    max_samples: int
    """Rows that may sample in one step; also the number of request slots."""
    max_wants: int
    """Prompt positions whose logprobs one step may return."""
    vocab: int

    @property
    def mask_words(self) -> int:
        """Words of one mask: bit i of word w allows token 32·w + i."""
        return (self.vocab + 31) // 32

    @property
    def result_start(self) -> int:
        """Word at which a slot's results begin."""
        return self.max_batch_bytes // _WORD

    @property
    def mask_start(self) -> int:
        """Word at which a slot's masks begin."""
        return self.result_start + _result_words(self.max_samples, self.max_wants)

    @property
    def slot_bytes(self) -> int:
        """A whole number of 64-byte cache lines."""
        words = self.mask_start + self.max_samples * (1 + self.mask_words)
        return (words * _WORD + 63) // 64 * 64

    @property
    def size_bytes(self) -> int:
        return self.slots * self.slot_bytes


class Start(msgspec.Struct, tag="start", frozen=True):
    """First command. The worker loads the weights, reports `Progress`, then `Loaded` or `Refused`."""

    model_path: str
    dtype: str
    """"float32" or "bfloat16": of weights, activations and KV."""
    quantization: str
    """"none", or "q8": weights in 8 bits, or in the file's own 4, in groups of 32; only with compiled kernels."""
    threads: int
    max_slots: int
    """Request slots: rows of the page tables, of `future_tokens` and of the sampler state."""
    max_context_tokens: int
    page_tokens: int
    ring: RingGeometry
    groups: list[GroupShape]
    host_slot_bytes: int = 0
    """Stride of a full group's page in the host pool, which begins with them; 0 without one (its memfd is passed at
    spawn)."""
    window_areas: list[HostArea] = []
    """Where the window groups have theirs, in their order."""
    kernels: str = "torch"
    """"compiled" (`ops.simd`), "torch" or "triton" (`ops.cuda`): who computes the layers. Pages of one are no other's:
    the first lays bytes out in its own way, and each rounds differently."""
    device: str = "cpu"
    """"cuda", only with "triton"; or "cpu"."""
    kernel_cache: str = ""
    """Folder of compiled code; empty: none is kept."""
    pinned: bool = False
    """Compiled kernels' threads may stay on one core each: the process is the worker's alone."""
    dot: str = ""
    """How this CPU multiplies bfloat16 by what the pages say (`ops.dot`): the worker refuses to do it otherwise. Empty:
    however it does."""


class MakePools(msgspec.Struct, tag="pools", frozen=True):
    """Allocate `num_pages[g]` device pages for every group g, then warm up; answered by `Ready`."""

    num_pages: list[int]
    warm_up_tokens: int
    """The largest prefill chunk to measure; 0 skips the warm-up."""


class Forward(msgspec.Struct, tag="forward", frozen=True):
    """Apply the slot inits, page-table edits and loads of the batch in `ring_slot`, then run the model over it."""

    step: int
    ring_slot: int


class Sample(msgspec.Struct, tag="sample", frozen=True):
    """Draw for every sample of the step whose `Forward` came last; `masks` rows of the mask region apply."""

    step: int
    ring_slot: int
    masks: int = 0
    skips: tuple[int, ...] = ()
    """Samples that are not drawn: `future_tokens` and the counts of their slots stay as they are."""


class Backup(msgspec.Struct, tag="backup", frozen=True):
    """Copy device pages to host pages, ordered behind all commands before it; answered by `BackupDone`."""

    transfer: int
    group: int
    device_pages: list[int]
    host_pages: list[int]


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Finish what was sent before, then exit 0."""


Command: TypeAlias = Start | MakePools | Forward | Sample | Backup | Stop


# ---------------------------------------------------------------------------------------------------------------
# Replies: worker → server


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """Where loading stands; `done` of `total` bytes or steps of `phase`."""

    phase: str
    done: int
    total: int


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """The weights are in place; `free_bytes` of device memory are left for pages (0: ask the host)."""

    weights_bytes: int
    free_bytes: int


class StepCost(msgspec.Struct, frozen=True):
    """One measured step: `decode_rows` of one token each beside one prefill chunk, at a context length; in ms."""

    decode_rows: int
    prefill_tokens: int
    context_tokens: int
    step_ms: float


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Pools are allocated and warm; `costs` were measured in the warm-up."""

    costs: list[StepCost]
    device_name: str
    numerics: str
    """What holds for reuse: "row-exact" where a row's bits depend on nothing but its own tokens, else the dtype whose
    rounding may differ between batches."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The worker can't serve; `message` says what to change. It exits after this."""

    message: str


class StepDone(msgspec.Struct, tag="done", frozen=True):
    """All of a step's commands have completed; its results are in the ring slot."""

    step: int
    step_ms: float
    load_ms: float = 0.0
    """Of `step_ms`, copying host pages to the device."""


class StepFailed(msgspec.Struct, tag="failed", frozen=True):
    """The step raised; no KV written by it or by steps launched after it may be used. Later steps are skipped and
    answered by `StepFailed` too, until the server has restarted the worker."""

    step: int
    message: str


class BackupDone(msgspec.Struct, tag="backed_up", frozen=True):
    """The host pages of the transfer hold the bytes."""

    transfer: int


Reply: TypeAlias = Progress | Loaded | Ready | Refused | StepDone | StepFailed | BackupDone

command_decoder: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
reply_decoder: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)
encoder: Final = msgspec.msgpack.Encoder()

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Bound of one command or reply; a longer backup is cut by its sender."""


# ---------------------------------------------------------------------------------------------------------------
# The batch in a ring slot


class Counts(msgspec.Struct, frozen=True):
    """How many of each thing a batch holds. The field order is the header's."""

    tokens: int
    rows: int
    decode_rows: int
    """The first `decode_rows` rows have exactly one token each."""
    samples: int
    table_edits: int
    slot_inits: int
    init_ids: int
    init_biases: int
    wants: int
    loads: int


_COUNT_NAMES: Final = Counts.__struct_fields__

INIT_INTS: Final = (
    *("top_k", "seed_low", "seed_high", "min_tokens", "logprobs"),
    *("prompt_len", "output_len", "bias_len", "stop_len"),
)
"""Columns of `init_ints`. `top_k` 0 is off; `logprobs` -1 is off, 0 the chosen id's alone. The `_len` columns cut the
slot's part of `init_ids` into prompt ids, output ids, bias ids and stop ids (banned below `min_tokens`); bias values
stand in `init_biases`."""
INIT_FLOATS: Final = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")
"""Columns of `init_floats`. Temperature 0 is greedy; top_p 1, min_p 0, repetition 1, frequency 0 and presence 0 are
off."""

# name, float, the count it is sized by, columns (0: one-dimensional), extra elements
_FIELDS: Final = tuple(
    (name, is_float, _COUNT_NAMES.index(count), columns, extra)
    for name, is_float, count, columns, extra in (
        ("input_ids", False, "tokens", 0, 0),
        ("positions", False, "tokens", 0, 0),
        ("row_slot", False, "rows", 0, 0),
        ("row_start", False, "rows", 0, 1),
        ("row_kv_len", False, "rows", 0, 0),
        ("sample_row", False, "samples", 0, 0),
        ("sample_position", False, "samples", 0, 0),
        ("edit_group", False, "table_edits", 0, 0),
        ("edit_slot", False, "table_edits", 0, 0),
        ("edit_index", False, "table_edits", 0, 0),
        ("edit_page", False, "table_edits", 0, 0),
        ("init_slot", False, "slot_inits", 0, 0),
        ("init_ints", False, "slot_inits", len(INIT_INTS), 0),
        ("init_floats", True, "slot_inits", len(INIT_FLOATS), 0),
        ("init_ids", False, "init_ids", 0, 0),
        ("init_biases", True, "init_biases", 0, 0),
        ("want_token", False, "wants", 0, 0),
        ("want_target", False, "wants", 0, 0),
        ("load_group", False, "loads", 0, 0),
        ("load_host", False, "loads", 0, 0),
        ("load_device", False, "loads", 0, 0),
    )
)
_CONSTANT_WORDS: Final = _HEADER + sum(extra * max(columns, 1) for _, _, _, columns, extra in _FIELDS)
_COUNT_WORDS: Final = [
    sum(max(columns, 1) for _, _, sized_by, columns, _ in _FIELDS if sized_by == count)
    for count in range(len(_COUNT_NAMES))
]
"""Words that one more of each count takes: a batch is measured anew with each request that joins it."""
_EMPTY: Final = {
    (is_float, columns): np.zeros((0, columns) if columns else 0, np.float32 if is_float else np.int32)
    for _, is_float, _, columns, _ in _FIELDS
}


class ForwardBatch:
    """One step's input: flat views over a ring slot, written by the server, read by the worker.

    Tokens of row r are `[row_start[r], row_start[r + 1])`; after the step the row's context is `row_kv_len[r]` tokens
    long, so its first token stands at position `row_kv_len[r] - (row_start[r + 1] - row_start[r])`. The KV of position
    p of a request in slot s goes to page `table[group][s, p // page_tokens]`, offset `p % page_tokens`.
    """

    __slots__ = ("counts", "step", *(field[0] for field in _FIELDS))

    step: int
    counts: Counts
    input_ids: I32
    """[tokens] a token id, or -(slot + 1): what the last `Sample` put into `future_tokens[slot]`."""
    positions: I32
    """[tokens] position in the request's context, from 0."""
    row_slot: I32
    """[rows] request slot; no slot twice in a batch."""
    row_start: I32
    """[rows + 1] offsets into the tokens."""
    row_kv_len: I32
    """[rows] context length after this step."""
    sample_row: I32
    """[samples] rows whose last token's logits are sampled."""
    sample_position: I32
    """[samples] position of the drawn id among the request's outputs, from 0: the random draw is a function of it."""
    edit_group: I32
    """[table_edits] page-table deltas, applied in order before the model runs."""
    edit_slot: I32
    edit_index: I32
    edit_page: I32
    init_slot: I32
    """[slot_inits] slots that begin a request: sampler state is set anew. Applied before the model runs."""
    init_ints: I32
    """[slot_inits, INIT_INTS]"""
    init_floats: F32
    """[slot_inits, INIT_FLOATS]"""
    init_ids: I32
    init_biases: F32
    want_token: I32
    """[wants] token indices whose logits give the logprob of a prompt id ..."""
    want_target: I32
    """[wants] ... namely this one (the id at the next position)."""
    load_group: I32
    """[loads] host pages to bring to device pages; layer k waits for layer k's part of them and no other layer's."""
    load_host: I32
    load_device: I32


def batch_bytes(counts: Counts) -> int:
    """Bytes that a batch of these counts takes in its ring slot."""
    return _CONSTANT_WORDS * _WORD + more_bytes(msgspec.structs.astuple(counts))


def more_bytes(counts: Iterable[int]) -> int:
    """Bytes that so many more of each thing take, in the order of `Counts`."""
    words: int = sum(map(mul, counts, _COUNT_WORDS))
    return words * _WORD


class StepResults:
    """One step's output: views over the result region of a ring slot, written by the worker, read by the server.

    Ids of sample s are `ids[offsets[s]:offsets[s + 1]]` (one each until there is speculation); logprob arrays run
    along the ids. Only samples whose slot asked for logprobs have theirs filled.
    """

    __slots__ = (
        *("offsets", "status", "ids", "logprobs", "top_ids", "top_logprobs"),
        *("want_logprobs", "want_top_ids", "want_top_logprobs"),
    )

    offsets: I32
    """[max_samples + 1]"""
    status: I32
    """[max_samples] 0, or 1 where the logits were not finite: that request fails, the others don't."""
    ids: I32
    """[max_samples]"""
    logprobs: F32
    """[max_samples] log-softmax of the raw logits (before temperature, bias and penalties) at the id."""
    top_ids: I32
    """[max_samples, MAX_LOGPROBS]"""
    top_logprobs: F32
    """[max_samples, MAX_LOGPROBS]"""
    want_logprobs: F32
    """[max_wants]"""
    want_top_ids: I32
    """[max_wants, MAX_LOGPROBS]"""
    want_top_logprobs: F32
    """[max_wants, MAX_LOGPROBS]"""


# name, float, per sample (or per want), columns, extra elements
_RESULT_FIELDS: Final = (
    ("offsets", False, True, 0, 1),
    ("status", False, True, 0, 0),
    ("ids", False, True, 0, 0),
    ("logprobs", True, True, 0, 0),
    ("top_ids", False, True, MAX_LOGPROBS, 0),
    ("top_logprobs", True, True, MAX_LOGPROBS, 0),
    ("want_logprobs", True, False, 0, 0),
    ("want_top_ids", False, False, MAX_LOGPROBS, 0),
    ("want_top_logprobs", True, False, MAX_LOGPROBS, 0),
)


def _result_words(samples: int, wants: int) -> int:
    return sum(
        ((samples if per_sample else wants) + extra) * max(columns, 1)
        for _, _, per_sample, columns, extra in _RESULT_FIELDS
    )


class RingSlotFull(Exception):
    """A batch does not fit its ring slot: the builder takes fewer requests."""


class BatchRing:
    """The ring of batch slots over one shared mapping. Which slot is free is its owner's (the server's) business."""

    def __init__(self, buffer: mmap.mmap | bytearray, geometry: RingGeometry) -> None:
        """Raises ValueError if the buffer is smaller than the geometry."""
        if len(buffer) < geometry.size_bytes:
            raise ValueError(f"the ring needs {geometry.size_bytes} bytes, the mapping has {len(buffer)}")
        self.geometry = geometry
        words = geometry.slot_bytes // _WORD
        # Slicing a ready view costs 0.2 µs, np.frombuffer 1 µs: a batch of 21 fields takes 6 µs instead of 30.
        self._ints: I32 = np.frombuffer(buffer, np.int32, geometry.slots * words).reshape(geometry.slots, words)
        self._floats: F32 = self._ints.view(np.float32)
        self._results: list[StepResults | None] = [None] * geometry.slots

    def write(self, ring_slot: int, step: int, counts: Counts) -> ForwardBatch:
        """Lay out a batch of these counts; the caller fills the views. Raises RingSlotFull."""
        if batch_bytes(counts) > self.geometry.max_batch_bytes:
            raise RingSlotFull(f"{counts} take {batch_bytes(counts)} bytes of {self.geometry.max_batch_bytes}")
        header = (_MAGIC, step & 0x7FFFFFFF, step >> 31, *msgspec.structs.astuple(counts))
        self._ints[ring_slot, : len(header)] = header
        return self._batch(ring_slot, step, counts)

    def read(self, ring_slot: int) -> ForwardBatch:
        """The batch that was written into this slot. Raises ValueError if there is none."""
        return self._batch(ring_slot, *self.counts(ring_slot))

    def counts(self, ring_slot: int) -> tuple[int, Counts]:
        """The step and the counts of the same."""
        magic, low, high, *sizes = self._ints[ring_slot, : 3 + len(_COUNT_NAMES)].tolist()
        if magic != _MAGIC:
            raise ValueError(f"ring slot {ring_slot} holds no batch")
        counts = Counts(*sizes)
        if min(sizes) < 0 or batch_bytes(counts) > self.geometry.max_batch_bytes:
            raise ValueError(f"ring slot {ring_slot} holds impossible counts: {counts}")
        return high << 31 | low, counts

    def results(self, ring_slot: int) -> StepResults:
        """The result region of a slot: always the same views, made once (they cost 9 µs)."""
        if (made := self._results[ring_slot]) is not None:
            return made
        geometry = self.geometry
        results = self._results[ring_slot] = StepResults()
        at = geometry.result_start
        for name, is_float, per_sample, columns, extra in _RESULT_FIELDS:
            length = (geometry.max_samples if per_sample else geometry.max_wants) + extra
            at = self._set(results, name, is_float, ring_slot, at, length, columns)
        return results

    def masks(self, ring_slot: int) -> tuple[I32, U32]:
        """`(rows, bits)`: bits[i] (uint32 `[mask_words]`) says which ids the sample rows[i] may draw."""
        samples, start = self.geometry.max_samples, self.geometry.mask_start
        bits = self._ints[ring_slot, start + samples : start + samples * (1 + self.geometry.mask_words)]
        return self._ints[ring_slot, start : start + samples], bits.view(np.uint32).reshape(samples, -1)

    def _batch(self, ring_slot: int, step: int, counts: Counts) -> ForwardBatch:
        batch = ForwardBatch()
        batch.step = step
        batch.counts = counts
        sizes = msgspec.structs.astuple(counts)
        ints, floats = self._ints[ring_slot], self._floats[ring_slot]
        at = _HEADER
        for name, is_float, count, columns, extra in _FIELDS:
            length = sizes[count] + extra
            if not length:
                # Half of the fields, in a step that only decodes.
                setattr(batch, name, _EMPTY[is_float, columns])
                continue
            end = at + length * (columns or 1)
            view = floats[at:end] if is_float else ints[at:end]
            setattr(batch, name, view.reshape(length, columns) if columns else view)
            at = end
        return batch

    def _set(
        self, target: object, name: str, is_float: bool, ring_slot: int, at: int, length: int, columns: int
    ) -> int:
        end = at + length * (columns or 1)
        view = (self._floats if is_float else self._ints)[ring_slot, at:end]
        setattr(target, name, view.reshape(length, columns) if columns else view)
        return end

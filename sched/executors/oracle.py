"""The oracle: a device without a neural network whose output depends on every byte of KV it should have read.

The KV "content" of position i is 16 bytes, the chain hash of tokens 0..i, written into real pools through the page
table. A row reads its predecessor's content from the pool, so a wrong page poisons what is built on it; sampling
gathers all pages of the context again and hashes them whole into the next id. Any stale, swapped, half-loaded or
early-freed page changes the ids at once. `expected` is what a request gets with no cache, no batch and no pages.

In a window group the content of position i is the hash of its content in the full group and of the group's own contents
in the window before it: each token reads the whole window, and none may read beyond it.

in     commands of `ops.wire`, in order
out    replies; ids in the ring's results
state  pools, page tables, `future_tokens`, sampler state: what a real worker holds
owner  whoever delivers the commands
ready  a step's results are in the ring when its `StepDone` is replied
end    with the connection
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.ops.wire import (
    I32,
    INIT_INTS,
    U32,
    Backup,
    BackupDone,
    BatchRing,
    Command,
    Forward,
    ForwardBatch,
    Loaded,
    MakePools,
    Ready,
    Reply,
    Sample,
    Start,
    StepCost,
    StepDone,
    Stop,
)
from headrace.sched.grammar import Matcher

CONTENT_BYTES = 16
_EMPTY = bytes(CONTENT_BYTES)


def content(previous: bytes, token: int) -> bytes:
    """The KV of a token, given its predecessor's (zeros before the first)."""
    return xxhash.xxh3_128_digest(previous + token.to_bytes(4, "little"))


def draw(
    contents: bytes | bytearray,
    seed: int,
    position: int,
    vocab: int,
    banned: Sequence[int] = (),
    mask: U32 | None = None,
) -> int:
    """The next id after these contents: `position` counts outputs; ids that are `banned`, or that the mask does not
    allow, are stepped over. Where the mask allows nothing but banned ids, they are drawn."""
    token = xxhash.xxh3_64_intdigest(contents, seed=(seed ^ position * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF) % vocab
    if mask is None:
        while token in banned:
            token = (token + 1) % vocab
        return token
    allowed = np.unpackbits(mask.view(np.uint8), count=vocab, bitorder="little")
    without_banned = allowed.copy()
    without_banned[list(banned)] = 0
    usable = np.flatnonzero(without_banned if without_banned.any() else allowed)
    return int(usable[np.searchsorted(usable, token) % len(usable)])


def prompt_logprob(contents: bytes, target: int) -> float:
    """The "logprob" of an id after these contents, in (-1, 0]."""
    return -(xxhash.xxh3_64_intdigest(contents, seed=target) % 1024) / 1024


def window_content(full: bytes, window: bytes | bytearray) -> bytes:
    """The KV of a token in a window group: `full` in the full group, `window` of the tokens that it sees before it."""
    return xxhash.xxh3_128_digest(full + window)


class Context:
    """The KV that a request alone in the world would have."""

    def __init__(self, windows: Sequence[int] = ()) -> None:
        """`windows`: how many tokens a token sees, itself included, in each window group."""
        self._full = bytearray()
        self._last = _EMPTY
        self._windows = [(tokens, bytearray()) for tokens in windows]

    def extend(self, tokens: Iterable[int]) -> None:
        """The next tokens."""
        for token in tokens:
            self._last = content(self._last, token)
            for window, contents in self._windows:
                contents += window_content(self._last, contents[max(0, len(contents) - (window - 1) * CONTENT_BYTES) :])
            self._full += self._last

    def __len__(self) -> int:
        return len(self._full) // CONTENT_BYTES

    def seen(self, tokens: int) -> bytes:
        """What the last of the first `tokens` tokens sees, itself included."""
        end = tokens * CONTENT_BYTES
        parts = [contents[max(0, end - window * CONTENT_BYTES) : end] for window, contents in self._windows]
        return bytes(self._full[:end]) + b"".join(parts)


def prompt_logprob_at(prompt: Sequence[int], position: int, windows: Sequence[int] = ()) -> float:
    """What `prompt_logprob` gives for the prompt id at `position`, with no cache."""
    context = Context(windows)
    context.extend(prompt[:position])
    return prompt_logprob(context.seen(position), prompt[position])


def expected(
    prompt: Sequence[int],
    outputs: int,
    vocab: int,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
    matcher: Matcher | None = None,
    windows: Sequence[int] = (),
) -> list[int]:
    """The ids of a request that is alone in the world; ends behind the first stop id, or where its grammar (a fresh
    `matcher`) is complete."""
    context = Context(windows)
    context.extend(prompt)
    ids: list[int] = []
    mask: U32 | None = None if matcher is None else np.zeros((vocab + 31) // 32, np.uint32)
    while len(ids) < outputs:
        if matcher is not None and mask is not None and matcher.fill(mask, frozenset(stop_ids)):
            break
        seen, banned = context.seen(len(context)), stop_ids if len(ids) < min_tokens else ()
        token = draw(seen, seed, len(ids), vocab, banned, mask)
        if matcher is not None and token not in stop_ids:
            assert matcher.accept(token), "the matcher does not take what its mask allows"
        ids.append(token)
        if token in stop_ids:
            break
        context.extend((token,))
    return ids


class _Row(NamedTuple):
    """What a row has read back."""

    full: bytes
    """Of all positions, in all full groups one after the other."""
    windows: list[tuple[int, int, bytes]]
    """Of each window group: its window, the first position, and the contents from there on."""
    groups: int
    """Full ones."""

    def seen(self, tokens: int) -> bytes:
        """As `Context.seen`; with several full groups, of each."""
        size, end = len(self.full) // self.groups, tokens * CONTENT_BYTES
        parts = [self.full[group * size : group * size + end] for group in range(self.groups)]
        for window, first, contents in self.windows:
            at = (max(0, tokens - window) - first) * CONTENT_BYTES
            assert at >= 0
            parts.append(contents[at : end - first * CONTENT_BYTES])
        return b"".join(parts)


@dataclass(slots=True)
class _Sampler:
    seed: int = 0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()


class OracleDevice:
    """The device's side of the protocol; hand its `handle` the commands in order."""

    def __init__(
        self,
        ring: BatchRing,
        reply: Callable[[Reply], None],
        vocab: int,
        costs: Sequence[StepCost] = (),
        host_pool: bytearray | None = None,
    ) -> None:
        self._ring = ring
        self._reply = reply
        self._vocab = vocab
        self._costs = list(costs)
        self._host_buffer = host_pool
        self._host: list[NDArray[np.uint8]] = []
        """Of each group, uint8 [pages, slot_bytes]."""
        self._start: Start | None = None
        self._pools: list[NDArray[np.uint8]] = []
        self._tables: list[I32] = []
        self._future: I32 = np.zeros(0, np.int32)
        self._samplers: list[_Sampler] = []
        self._batch: ForwardBatch | None = None
        self._rows: list[_Row] = []

    def handle(self, command: Command) -> None:
        """Execute one command."""
        match command:
            case Start():
                self._start = command
                self._reply(Loaded(weights_bytes=0, free_bytes=0))
            case MakePools():
                self._make_pools(command.num_pages)
                self._reply(Ready(costs=self._costs, device_name="oracle", numerics="row-exact"))
            case Forward():
                self._forward(command)
            case Sample():
                self._sample(command)
                self._reply(StepDone(step=command.step, step_ms=0.0))
            case Backup():
                blobs = self._pools[command.group][command.device_pages]
                self._host[command.group][command.host_pages, : blobs[0].size] = blobs.reshape(len(blobs), -1)
                self._reply(BackupDone(command.transfer))
            case Stop():
                return

    def _make_pools(self, num_pages: list[int]) -> None:
        start = self._start
        assert start is not None
        rng = np.random.default_rng(0)
        shape = (start.page_tokens, CONTENT_BYTES)
        # Noise, so that reading what was never written is no plausible content.
        self._pools = [rng.integers(0, 256, (count, *shape), np.uint8) for count in num_pages]
        if self._host_buffer is not None and start.host_slot_bytes:
            flat, windows = np.frombuffer(self._host_buffer, np.uint8), start.window_areas
            end = min((area.offset for area in windows), default=len(flat))
            self._host = [flat[:end].reshape(-1, start.host_slot_bytes)] * (len(num_pages) - len(windows))
            for area in windows:
                part = flat[area.offset : area.offset + area.pages * area.slot_bytes]
                self._host.append(part.reshape(area.pages, area.slot_bytes))
        pages = -(-start.max_context_tokens // start.page_tokens) + 1
        self._tables = [np.full((start.max_slots, pages), -1, np.int32) for _ in num_pages]
        self._future = np.full(start.max_slots, -1, np.int32)
        self._samplers = [_Sampler() for _ in range(start.max_slots)]

    def _forward(self, command: Forward) -> None:
        batch = self._ring.read(command.ring_slot)
        assert batch.step == command.step, "the ring slot holds another step's batch"
        self._batch = batch
        self._init_slots(batch)
        for group, table in enumerate(self._tables):
            mine = batch.edit_group == group
            table[batch.edit_slot[mine], batch.edit_index[mine]] = batch.edit_page[mine]
        for group, host, page in zip(batch.load_group.tolist(), batch.load_host.tolist(), batch.load_device.tolist()):
            blob = self._pools[group][page]
            self._pools[group][page] = self._host[group][host, : blob.size].reshape(blob.shape)
        self._rows = []
        starts = batch.row_start.tolist()
        for row, (slot, kv_len) in enumerate(zip(batch.row_slot.tolist(), batch.row_kv_len.tolist())):
            ids = batch.input_ids[starts[row] : starts[row + 1]].tolist()
            ids = [token if token >= 0 else int(self._future[-token - 1]) for token in ids]
            assert batch.positions[starts[row]] == kv_len - len(ids), "positions do not follow the context length"
            self._rows.append(self._run_row(slot, ids, kv_len))
        results = self._ring.results(command.ring_slot)
        for want, (token, target) in enumerate(zip(batch.want_token.tolist(), batch.want_target.tolist())):
            row = int(np.searchsorted(batch.row_start, token, "right")) - 1
            context = self._rows[row].seen(int(batch.positions[token]) + 1)
            results.want_logprobs[want] = prompt_logprob(context, target)

    def _init_slots(self, batch: ForwardBatch) -> None:
        at = 0
        for table in self._tables:
            table[batch.init_slot] = -1
        for slot, row in zip(batch.init_slot.tolist(), batch.init_ints.tolist()):
            ints = dict(zip(INIT_INTS, row))
            seed = ints["seed_low"] & 0xFFFFFFFF | (ints["seed_high"] & 0xFFFFFFFF) << 32
            at += ints["prompt_len"] + ints["output_len"] + ints["bias_len"]
            stops = batch.init_ids[at : at + ints["stop_len"]].tolist()
            at += ints["stop_len"]
            self._samplers[slot] = _Sampler(seed, ints["min_tokens"], tuple(stops))

    def _run_row(self, slot: int, ids: list[int], kv_len: int) -> _Row:
        """Write the contents of a row's tokens into every group's pages; then read the whole context back."""
        assert self._start is not None
        first, full, windows, groups = kv_len - len(ids), b"", [], 0
        fresh: list[bytes] = []
        for shape, pool, table in zip(self._start.groups, self._pools, self._tables):
            if shape.kind == "window":
                window = shape.window_tokens
                begin, contents = self._run_window(window, pool, table[slot], fresh, kv_len)
                windows.append((window, begin, contents))
                continue
            pages = self._pages(table[slot], 0, kv_len)
            groups += 1
            last, fresh = self._read(pool, pages, first - 1) if first else _EMPTY, []
            for position, token in enumerate(ids, first):
                last = content(last, token)
                fresh.append(last)
                self._write(pool, pages, position, last)
            full += pool[pages].tobytes()[: kv_len * CONTENT_BYTES]
        return _Row(full, windows, groups)

    def _run_window(
        self, window: int, pool: NDArray[np.uint8], table: I32, fresh: list[bytes], kv_len: int
    ) -> tuple[int, bytes]:
        """The same for a window group, as far as the row's tokens see; → the first position, and contents from there
        on. `fresh`: their contents in the full group."""
        assert self._start is not None
        first, page_tokens = kv_len - len(fresh), self._start.page_tokens
        begin = max(0, first + 1 - window)
        start = begin // page_tokens * page_tokens
        pages = self._pages(table, start, kv_len)
        seen = bytearray(pool[pages].tobytes()[(begin - start) * CONTENT_BYTES : (first - start) * CONTENT_BYTES])
        for position, full in enumerate(fresh, first):
            low = (max(0, position + 1 - window) - begin) * CONTENT_BYTES
            seen += window_content(full, seen[low:])
            self._write(pool, pages, position - start, bytes(seen[-CONTENT_BYTES:]))
        return begin, pool[pages].tobytes()[(begin - start) * CONTENT_BYTES : (kv_len - start) * CONTENT_BYTES]

    def _pages(self, table: I32, start: int, end: int) -> I32:
        """Of positions [start, end) of a row."""
        assert self._start is not None
        page_tokens = self._start.page_tokens
        pages = table[start // page_tokens : -(-end // page_tokens)]
        assert (pages >= 0).all(), "a row reads through a page-table entry that was never set"
        return pages

    def _read(self, pool: NDArray[np.uint8], pages: I32, position: int) -> bytes:
        assert self._start is not None
        return bytes(pool[pages[position // self._start.page_tokens], position % self._start.page_tokens])

    def _write(self, pool: NDArray[np.uint8], pages: I32, position: int, value: bytes) -> None:
        assert self._start is not None
        page_tokens = self._start.page_tokens
        pool[pages[position // page_tokens], position % page_tokens] = np.frombuffer(value, np.uint8)

    def _sample(self, command: Sample) -> None:
        batch = self._batch
        assert batch is not None and batch.step == command.step, "Sample does not follow its Forward"
        results = self._ring.results(command.ring_slot)
        mask_rows, mask_bits = self._ring.masks(command.ring_slot)
        masks = {int(row): mask_bits[i] for i, row in enumerate(mask_rows[: command.masks])}
        count = batch.counts.samples
        results.offsets[: count + 1] = np.arange(count + 1)
        results.status[:count] = 0
        results.logprobs[:count] = 0.0
        for sample, (row, position) in enumerate(zip(batch.sample_row.tolist(), batch.sample_position.tolist())):
            slot = int(batch.row_slot[row])
            sampler = self._samplers[slot]
            if sample in command.skips:
                continue
            banned = sampler.stop_ids if position < sampler.min_tokens else ()
            seen = self._rows[row].seen(int(batch.row_kv_len[row]))
            token = draw(seen, sampler.seed, position, self._vocab, banned, masks.get(sample))
            results.ids[sample] = token
            self._future[slot] = token

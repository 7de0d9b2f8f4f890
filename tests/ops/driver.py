"""A device worker in the test's own process, and the least of a server that can drive it."""

from __future__ import annotations

import copy
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from ops.slot_inits import SlotInit, init_counts, write_inits

from headrace.ops.device_worker import DeviceWorker, served_groups
from headrace.ops.kv_pool import KvPool
from headrace.ops.models import architectures
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.model import Model
from headrace.ops.step import StepRunner
from headrace.ops.streams import Streams, in_order_streams
from headrace.ops.weights.files import open_model_file
from headrace.ops.wire import (
    Backup,
    BatchRing,
    Counts,
    Forward,
    GroupShape,
    Loaded,
    MakePools,
    Ready,
    Reply,
    RingGeometry,
    Sample,
    Start,
    StepDone,
    StepResults,
)
from headrace.server.models import cache_folder

RING_SLOTS = 3


class Feed(NamedTuple):
    """Tokens that a slot computes in a step: ids, or `future(slot)` for what it drew last."""

    slot: int
    ids: Sequence[int]
    sample: bool = True
    want: Mapping[int, int] = {}
    """Offset among these tokens → the id whose logprob there is wanted."""


class _Slot(msgspec.Struct):
    """Where the request in a slot stands."""

    length: int = 0
    drawn: int = 0
    tables: list[dict[int, int]] = []
    """Of each group: its pages by their index; a window group's last ones only."""

    @property
    def pages(self) -> list[int]:
        """Of the full group, which comes first."""
        return list(self.tables[0].values())


def future(slot: int) -> int:
    """The input id that stands for what was drawn last in a slot."""
    return -(slot + 1)


def read_config(model: Path) -> ModelConfig:
    with open_model_file(model) as file:
        return architectures.read_config(file)


def start_command(config: ModelConfig, model: Path, ring: RingGeometry, **changes: object) -> Start:
    """A `Start` that fits the model, but for the changes."""
    start = Start(
        model_path=str(model),
        dtype="float32",
        quantization="none",
        threads=1,
        max_slots=ring.max_samples,
        max_context_tokens=min(config.context_tokens, 1024),
        page_tokens=16,
        ring=ring,
        kernel_cache=str(cache_folder(os.environ) / "kernels"),
        groups=[GroupShape("full", 0, list(range(config.layers)), config.kv_heads, config.head_dim)],
    )
    return msgspec.structs.replace(start, **changes)


def ring_geometry(vocab: int, slots: int = 8) -> RingGeometry:
    return RingGeometry(slots=RING_SLOTS, max_batch_bytes=1 << 16, max_samples=slots, max_wants=64, vocab=vocab)


def window_groups(config: ModelConfig) -> list[GroupShape]:
    """A full group, and one of the layers with a window."""
    served = served_groups(config)[-1]
    assert [group.kind for group in served] == ["full", "window"]
    return served


class Driver:
    """Loads a model and runs the steps that a test asks for, in order on one thread, or on other `streams`. Pages are
    handed out in a shuffled order. A window group's are taken when a row gets to them, and given back when its next
    token doesn't look at them any more."""

    def __init__(
        self,
        model: Path,
        *,
        num_pages: int | list[int] = 64,
        slots: int = 8,
        host_pool: mmap.mmap | bytearray | None = None,
        warm_up_tokens: int = 0,
        streams: Streams | None = None,
        **start: object,
    ) -> None:
        self.config = read_config(model)
        geometry = ring_geometry(self.config.vocab_size, slots)
        buffer = bytearray(geometry.size_bytes)
        self.ring = BatchRing(buffer, geometry)
        self.replies: list[Reply] = []
        self.worker = DeviceWorker(self.replies.append, buffer, host_pool, streams or in_order_streams())
        command = start_command(self.config, model, geometry, **start)
        self.page_tokens = command.page_tokens
        self.worker.handle(command)
        assert isinstance(self.replies[-1], Loaded), self.replies[-1]
        self.groups = command.groups
        counts = [num_pages] * len(self.groups) if isinstance(num_pages, int) else num_pages
        self.worker.handle(MakePools(counts, warm_up_tokens))
        assert isinstance(self.replies[-1], Ready), self.replies[-1]
        self.steps = 0
        self.free: list[list[int]] = [np.random.default_rng(5).permutation(count).tolist() for count in counts]
        """Of each group; the last is taken first."""
        self.slots: dict[int, _Slot] = {}
        self._inits: list[SlotInit] = []
        self._edits: list[tuple[int, int, int, int]] = []
        self._sampled: dict[int, list[int]] = {}

    @property
    def model(self) -> Model:
        """Of a CPU's worker."""
        runner = self.worker._runner
        assert isinstance(runner, StepRunner)
        return runner._model

    @property
    def pool(self) -> KvPool:
        return self.worker._pools[0]

    def fill(self, page: int, value: float) -> None:
        """Write one value all over a page."""
        with torch.inference_mode():
            self.pool.pages[:, page] = value

    def begin(self, init: SlotInit) -> None:
        """A request begins in a slot, with the next step; pages of the one before are free again."""
        old = self.slots.get(init.slot)
        if old is not None:
            for group, table in enumerate(old.tables):
                self._give_back(group, init.slot, list(table.values()))
        self.slots[init.slot] = _Slot(drawn=len(init.outputs), tables=[{} for _ in self.groups])
        self._inits.append(init)

    def share(self, giver: int, taker: int, tokens: int) -> None:
        """The request in `taker` goes on from the first `tokens` tokens (whole pages) of the one in `giver`."""
        assert tokens % self.page_tokens == 0 and tokens <= self.slots[giver].length
        for group, table in enumerate(self.slots[giver].tables):
            for index in range(self.first_page(group, tokens), tokens // self.page_tokens):
                self._give(group, taker, index, table[index])
        self.slots[taker].length = tokens

    def lacking(self, group: int, slot: int, tokens: int) -> list[int]:
        """Indices of pages that a request has to get before it has so many tokens."""
        state = self.slots[slot]
        wanted = range(self.first_page(group, state.length), -(-tokens // self.page_tokens))
        return [index for index in wanted if index not in state.tables[group]]

    def give_pages(self, slot: int, tokens: int) -> list[int]:
        """Pages for so many tokens in all; → all pages of the slot in the full group."""
        for group in range(len(self.groups)):
            for index in self.lacking(group, slot, tokens):
                self._give(group, slot, index, self.free[group].pop())
        return self.slots[slot].pages

    def first_page(self, group: int, position: int) -> int:
        """The first one that a token there looks at."""
        window = self.groups[group].window_tokens
        return max(position + 1 - window, 0) // self.page_tokens if window else 0

    def launch(
        self,
        feeds: Sequence[Feed],
        *,
        masks: Mapping[int, Sequence[int]] | None = None,
        loads: Sequence[tuple[int, ...]] = (),
    ) -> int:
        """Send a step: `masks` says for slots which ids they may draw, `loads` are (host page, device page), and the
        group where it isn't the first."""
        feeds = sorted(feeds, key=lambda feed: len(feed.ids) != 1)
        self._write(feeds, loads)
        ring_slot = self.steps % RING_SLOTS
        self.worker.handle(Forward(self.steps, ring_slot))
        count = self._write_masks(ring_slot, self._sampled[self.steps], masks or {})
        self.worker.handle(Sample(self.steps, ring_slot, count))
        return self.steps

    def results(self, step: int) -> StepResults:
        """A copy of what a step gave."""
        done = [reply for reply in self.replies if isinstance(reply, StepDone) and reply.step == step]
        assert len(done) == 1, self.replies[-1]
        assert step > self.steps - RING_SLOTS, "another step has its ring slot"
        return copy.deepcopy(self.ring.results(step % RING_SLOTS))

    def drawn(self, step: int) -> dict[int, int]:
        """Slot → id that the step drew."""
        results = self.results(step)
        assert not results.status[: len(self._sampled[step])].any(), "a sample failed"
        return dict(zip(self._sampled[step], results.ids.tolist()))

    def run(self, *feeds: Feed, **more: object) -> dict[int, int]:
        """Launch a step and read what it drew."""
        return self.drawn(self.launch(feeds, **more))  # type: ignore[arg-type]

    def back_up(self, device_pages: list[int], host_pages: list[int]) -> None:
        self.worker.handle(Backup(self.steps, 0, device_pages, host_pages))

    def _write(self, feeds: Sequence[Feed], loads: Sequence[tuple[int, ...]]) -> None:
        for feed in feeds:
            self.give_pages(feed.slot, self.slots[feed.slot].length + len(feed.ids))
        lengths = np.array([len(feed.ids) for feed in feeds], np.int32)
        starts = np.array([self.slots[feed.slot].length for feed in feeds], np.int32)
        sampled = [row for row, feed in enumerate(feeds) if feed.sample]
        wants = [(row, offset, target) for row, feed in enumerate(feeds) for offset, target in feed.want.items()]
        counts = Counts(
            tokens=int(lengths.sum()),
            rows=len(feeds),
            decode_rows=int((lengths == 1).sum()),
            samples=len(sampled),
            table_edits=len(self._edits),
            wants=len(wants),
            loads=len(loads),
            **init_counts(self._inits),
        )
        self.steps += 1
        batch = self.ring.write(self.steps % RING_SLOTS, self.steps, counts)
        batch.input_ids[:] = [token for feed in feeds for token in feed.ids]
        batch.row_slot[:] = [feed.slot for feed in feeds]
        batch.row_start[:] = [0, *np.cumsum(lengths)]
        batch.positions[:] = np.arange(counts.tokens) + np.repeat(starts - batch.row_start[:-1], lengths)
        batch.row_kv_len[:] = starts + lengths
        batch.sample_row[:] = sampled
        batch.sample_position[:] = [self.slots[feeds[row].slot].drawn for row in sampled]
        edits: NDArray[np.int32] = np.array(self._edits, np.int32).reshape(-1, 4)
        batch.edit_group[:], batch.edit_slot[:], batch.edit_index[:], batch.edit_page[:] = edits.T
        write_inits(batch, self._inits)
        batch.want_token[:] = [batch.row_start[row] + offset for row, offset, _ in wants]
        batch.want_target[:] = [target for _, _, target in wants]
        batch.load_group[:] = [group[0] if group else 0 for _, _, *group in loads]
        batch.load_host[:] = [load[0] for load in loads]
        batch.load_device[:] = [load[1] for load in loads]
        self._inits, self._edits = [], []
        self._sampled[self.steps] = [feeds[row].slot for row in sampled]
        for feed in feeds:
            self.slots[feed.slot].length += len(feed.ids)
            self.slots[feed.slot].drawn += feed.sample
            self._leave_behind(feed.slot)

    def _write_masks(self, ring_slot: int, sampled: list[int], masks: Mapping[int, Sequence[int]]) -> int:
        rows, bits = self.ring.masks(ring_slot)
        for at, (slot, allowed) in enumerate(masks.items()):
            rows[at] = sampled.index(slot)
            bits[at] = 0
            for token in allowed:
                bits[at, token // 32] |= np.uint32(1 << token % 32)
        return len(masks)

    def _give(self, group: int, slot: int, index: int, page: int) -> None:
        self._edits.append((group, slot, index, page))
        self.slots[slot].tables[group][index] = page

    def _leave_behind(self, slot: int) -> None:
        """What the request's next token doesn't look at."""
        state = self.slots[slot]
        for group, table in enumerate(state.tables):
            first = self.first_page(group, state.length)
            self._give_back(group, slot, [table.pop(index) for index in list(table) if index < first])

    def _give_back(self, group: int, slot: int, pages: list[int]) -> None:
        """Free, where no other request has it; to be taken last."""
        others = [state for name, state in self.slots.items() if name != slot]
        kept = {page for state in others for page in state.tables[group].values()}
        self.free[group][:0] = [page for page in pages if page not in kept]

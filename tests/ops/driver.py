"""A device worker in the test's own process, and the least of a server that can drive it."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from ops.slot_inits import SlotInit, init_counts, write_inits

from headrace.ops.device_worker import DeviceWorker
from headrace.ops.kv_pool import KvPool
from headrace.ops.models import architectures
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.model import Model
from headrace.ops.step import StepRunner
from headrace.ops.streams import Streams
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
    pages: list[int] = []


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


class Driver:
    """Loads a model and runs the steps that a test asks for. Pages are handed out in a shuffled order."""

    def __init__(
        self,
        model: Path,
        *,
        num_pages: int = 64,
        slots: int = 8,
        host_pool: bytearray | None = None,
        warm_up_tokens: int = 0,
        streams: Streams | None = None,
        **start: object,
    ) -> None:
        self.config = read_config(model)
        geometry = ring_geometry(self.config.vocab_size, slots)
        buffer = bytearray(geometry.size_bytes)
        self.ring = BatchRing(buffer, geometry)
        self.replies: list[Reply] = []
        self.worker = DeviceWorker(self.replies.append, buffer, host_pool, streams)
        command = start_command(self.config, model, geometry, **start)
        self.page_tokens = command.page_tokens
        self.worker.handle(command)
        assert isinstance(self.replies[-1], Loaded), self.replies[-1]
        self.worker.handle(MakePools([num_pages], warm_up_tokens))
        assert isinstance(self.replies[-1], Ready), self.replies[-1]
        self.steps = 0
        self.free_pages: list[int] = np.random.default_rng(5).permutation(num_pages).tolist()
        self.slots: dict[int, _Slot] = {}
        self._inits: list[SlotInit] = []
        self._edits: list[tuple[int, int, int]] = []
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
            given_back = [page for page in old.pages if not self._used_elsewhere(page, init.slot)]
            self.free_pages = given_back + self.free_pages
        self.slots[init.slot] = _Slot(drawn=len(init.outputs), pages=[])
        self._inits.append(init)

    def share(self, giver: int, taker: int, tokens: int) -> None:
        """The request in `taker` goes on from the first `tokens` tokens (whole pages) of the one in `giver`."""
        assert tokens % self.page_tokens == 0 and tokens <= self.slots[giver].length
        for page in self.slots[giver].pages[: tokens // self.page_tokens]:
            self._give(taker, page)
        self.slots[taker].length = tokens

    def give_pages(self, slot: int, tokens: int) -> list[int]:
        """Pages for so many tokens in all; → all pages of the slot."""
        while len(self.slots[slot].pages) * self.page_tokens < tokens:
            self._give(slot, self.free_pages.pop())
        return self.slots[slot].pages

    def launch(
        self,
        feeds: Sequence[Feed],
        *,
        masks: Mapping[int, Sequence[int]] | None = None,
        loads: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Send a step: `masks` says for slots which ids they may draw, `loads` are (host page, device page)."""
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

    def _write(self, feeds: Sequence[Feed], loads: Sequence[tuple[int, int]]) -> None:
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
        edits: NDArray[np.int32] = np.array(self._edits, np.int32).reshape(-1, 3)
        batch.edit_group[:] = 0
        batch.edit_slot[:], batch.edit_index[:], batch.edit_page[:] = edits.T
        write_inits(batch, self._inits)
        batch.want_token[:] = [batch.row_start[row] + offset for row, offset, _ in wants]
        batch.want_target[:] = [target for _, _, target in wants]
        batch.load_group[:] = 0
        batch.load_host[:] = [host for host, _ in loads]
        batch.load_device[:] = [device for _, device in loads]
        self._inits, self._edits = [], []
        self._sampled[self.steps] = [feeds[row].slot for row in sampled]
        for feed in feeds:
            self.slots[feed.slot].length += len(feed.ids)
            self.slots[feed.slot].drawn += feed.sample

    def _write_masks(self, ring_slot: int, sampled: list[int], masks: Mapping[int, Sequence[int]]) -> int:
        rows, bits = self.ring.masks(ring_slot)
        for at, (slot, allowed) in enumerate(masks.items()):
            rows[at] = sampled.index(slot)
            bits[at] = 0
            for token in allowed:
                bits[at, token // 32] |= np.uint32(1 << token % 32)
        return len(masks)

    def _give(self, slot: int, page: int) -> None:
        self._edits.append((slot, len(self.slots[slot].pages), page))
        self.slots[slot].pages.append(page)

    def _used_elsewhere(self, page: int, slot: int) -> bool:
        return any(page in other.pages for name, other in self.slots.items() if name != slot)

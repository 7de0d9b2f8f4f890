"""The least of a server: requests in slots, their pages, and steps for any runner."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from gpu.random_model import RING_SLOTS

from headrace.ops.runner import Runner, Sampled
from headrace.ops.wire import INIT_FLOATS, BatchRing, Counts, StepResults

GREEDY: Final = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "frequency": 0.0, "presence": 0.0}


class Feed(NamedTuple):
    """What a slot computes in a step; `None` for ids: what it drew last."""

    slot: int
    ids: Sequence[int] | None = None
    sample: bool = True
    wants: Mapping[int, int] = {}
    """Offset among the ids → the id whose log-probability there is wanted."""


class _Slot:
    def __init__(self) -> None:
        self.length = 0
        self.drawn = 0
        self.pages: list[int] = []


class Requests:
    """Gives steps to a runner, two at a time at most, and gathers what they draw."""

    def __init__(self, runner: Runner, ring: BatchRing, pages: int, page_tokens: int = 16, groups: int = 1) -> None:
        """`groups`: each has so many pages, and a request the same ones in all of them."""
        self.runner = runner
        self.ring = ring
        self.step = 0
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.wanted: list[float] = []
        self._page_tokens = page_tokens
        self._groups = groups
        self._free = np.random.default_rng(3).permutation(pages).tolist()
        self._slots: dict[int, _Slot] = {}
        self._begun: list[int] = []
        self._edits: list[tuple[int, int, int]] = []
        self._launched: list[tuple[Sampled, list[int], int]] = []
        """Steps that are not collected, the slots that sample, how many log-probabilities are wanted."""
        self._floats = [GREEDY[name] for name in INIT_FLOATS]

    def begin(self, slot: int, context: int = 0) -> list[int]:
        """A request begins behind `context` tokens that are taken to be there; → their pages."""
        if slot in self._slots:
            self._free += self._slots[slot].pages
        self._slots[slot] = state = _Slot()
        self.outputs[slot], self.logprobs[slot] = [], []
        self._begun.append(slot)
        self._grow(slot, context)
        state.length = context
        return list(state.pages)

    def pages_of(self, slot: int) -> list[int]:
        """Its pages, in the order of their tokens."""
        return list(self._slots[slot].pages)

    def launch(self, feeds: Sequence[Feed], loads: Sequence[tuple[int, int]] = ()) -> Sampled:
        """Give a step; `loads` are (host page, device page). The step two before it is collected first."""
        while len(self._launched) > RING_SLOTS - 2:
            self.collect()
        feeds = sorted(feeds, key=lambda feed: feed.ids is not None and len(feed.ids) != 1)
        self.step += 1
        ring_slot = self.step % RING_SLOTS
        with torch.inference_mode():
            sampling = self._write(ring_slot, feeds, loads)
            results = self.ring.results(ring_slot)
            self.runner.forward(self.ring.read(ring_slot), results)
            rows, bits = self.ring.masks(ring_slot)
            sampled = self.runner.sample(self.step, rows[:0], bits[:0], results)
        self._launched.append((sampled, sampling, sum(len(feed.wants) for feed in feeds)))
        return sampled

    def collect(self) -> StepResults:
        """Wait for the step that was launched first → its results. Raises RuntimeError for logits that are broken."""
        sampled, slots, wants = self._launched.pop(0)
        while not sampled.done.query():
            pass
        results = copy.deepcopy(self.ring.results(sampled.step % RING_SLOTS))
        if results.status[: len(slots)].any():
            raise RuntimeError(f"step {sampled.step} has logits that are not finite")
        for slot, drawn, logprob in zip(slots, results.ids.tolist(), results.logprobs.tolist()):
            self.outputs[slot].append(drawn)
            self.logprobs[slot].append(logprob)
        self.wanted += results.want_logprobs[:wants].tolist()
        return results

    def finish(self) -> None:
        """Collect all."""
        while self._launched:
            self.collect()

    def serve(self, prompts: Mapping[int, Sequence[int]], chunk: int, outputs: int) -> dict[int, list[int]]:
        """Requests that come one after the other, chunks beside decodes, until each has so many ids."""
        left = {slot: list(ids) for slot, ids in prompts.items()}
        sampled = dict.fromkeys(prompts, 0)
        for slot in prompts:
            self.begin(slot)
        while unfinished := [slot for slot in prompts if left[slot] or sampled[slot] < outputs]:
            feeds = []
            chunked = False
            for slot in unfinished:
                if not left[slot]:
                    feeds.append(Feed(slot))
                elif not chunked:
                    feeds.append(Feed(slot, left[slot][:chunk], sample=len(left[slot]) <= chunk))
                    left[slot] = left[slot][chunk:]
                    chunked = True
            for feed in feeds:
                sampled[feed.slot] += feed.sample
            self.launch(feeds)
        self.finish()
        return {slot: self.outputs[slot] for slot in prompts}

    def _grow(self, slot: int, tokens: int) -> None:
        state = self._slots[slot]
        while len(state.pages) * self._page_tokens < tokens:
            page = self._free.pop()
            self._edits.append((slot, len(state.pages), page))
            state.pages.append(page)

    def _write(self, ring_slot: int, feeds: Sequence[Feed], loads: Sequence[tuple[int, int]]) -> list[int]:
        lengths = np.array([1 if feed.ids is None else len(feed.ids) for feed in feeds], np.int32)
        before = np.array([self._slots[feed.slot].length for feed in feeds], np.int32)
        for feed, length in zip(feeds, lengths.tolist()):
            self._grow(feed.slot, self._slots[feed.slot].length + length)
        sampled = [row for row, feed in enumerate(feeds) if feed.sample]
        wants = [(row, offset, target) for row, feed in enumerate(feeds) for offset, target in feed.wants.items()]
        counts = Counts(
            tokens=int(lengths.sum()),
            rows=len(feeds),
            decode_rows=int((lengths == 1).sum()),
            samples=len(sampled),
            table_edits=self._groups * len(self._edits),
            slot_inits=len(self._begun),
            init_ids=0,
            init_biases=0,
            wants=len(wants),
            loads=len(loads),
        )
        batch = self.ring.write(ring_slot, self.step, counts)
        ids = [[-feed.slot - 1] if feed.ids is None else list(feed.ids) for feed in feeds]
        batch.input_ids[:] = [token for each in ids for token in each]
        batch.row_slot[:] = [feed.slot for feed in feeds]
        batch.row_start[:] = [0, *np.cumsum(lengths)]
        batch.positions[:] = np.arange(counts.tokens) + np.repeat(before - batch.row_start[:-1], lengths)
        batch.row_kv_len[:] = before + lengths
        batch.sample_row[:] = sampled
        batch.sample_position[:] = [self._slots[feeds[row].slot].drawn for row in sampled]
        edits = np.array(self._edits * self._groups, np.int32).reshape(-1, 3)
        batch.edit_group[:] = np.repeat(np.arange(self._groups), len(self._edits))
        batch.edit_slot[:], batch.edit_index[:], batch.edit_page[:] = edits.T
        batch.init_slot[:] = self._begun
        # With `logprobs` 0 the log-probability of what is drawn is reported, and no other.
        batch.init_ints[:] = 0
        batch.init_floats[:] = self._floats
        batch.want_token[:] = [batch.row_start[row] + offset for row, offset, _ in wants]
        batch.want_target[:] = [target for _, _, target in wants]
        batch.load_group[:] = 0
        batch.load_host[:] = [host for host, _ in loads]
        batch.load_device[:] = [device for _, device in loads]
        self._begun, self._edits = [], []
        for feed, length in zip(feeds, lengths.tolist()):
            self._slots[feed.slot].length += length
            self._slots[feed.slot].drawn += feed.sample
        return [feeds[row].slot for row in sampled]

"""With the compiled kernels a row's bits depend on its own tokens alone, whatever is computed beside it and before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from ops.driver import Driver, Feed
from ops.slot_inits import SlotInit
from ops.small_llama import HEADS, KV_HEADS, VOCAB
from torch import Tensor

from headrace.ops.simd.attention import block_tokens
from headrace.ops.simd.tables import StepField
from headrace.ops.simd.target import AMX

SLOTS = 34
SHORT = 21
LONG = 150
SHARED = 144
"""Tokens of whole pages, whatever their size; 128 of them are read once."""
HOST_PAGE_BYTES = 16384
SEQUENCE = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, LONG)]


class Mode(NamedTuple):
    dtype: str
    quantization: str
    page_tokens: int = 16


MODES = [
    Mode("float32", "none"),
    Mode("bfloat16", "none"),
    Mode("bfloat16", "q8"),
    # Pages that do not hold whole groups of 16 tokens.
    Mode("bfloat16", "none", 4),
]


class Watched:
    """A driver, and the logits that its model gave last."""

    def __init__(self, model: Path, mode: Mode, threads: int = 1, host_pages: int = 0) -> None:
        self.driver = Driver(
            model,
            slots=SLOTS,
            num_pages=2048,
            host_pool=bytearray(host_pages * HOST_PAGE_BYTES) if host_pages else None,
            host_slot_bytes=HOST_PAGE_BYTES if host_pages else 0,
            kernels="compiled",
            threads=threads,
            **mode._asdict(),
        )
        inner = self.driver.model.logits
        self._last = torch.empty(0)

        def logits(hidden: Tensor) -> Tensor:
            given = inner(hidden)
            self._last = given.clone()
            return given

        self.driver.model.logits = logits  # type: ignore[method-assign]

    def after(self, *feeds: Feed) -> Tensor:
        """Logits of the step's last sample."""
        return self.all_after(*feeds)[-1]

    def all_after(self, *feeds: Feed, loads: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Of all its samples."""
        self.driver.launch(feeds, loads=loads)
        assert len(self._last), self.driver.replies[-1]
        return self._last

    @property
    def bundles(self) -> int:
        """Of the last step."""
        step = self.driver.model._program.step  # type: ignore[attr-defined]
        return int(step[StepField.BUNDLES])

    def fresh(self, slot: int) -> None:
        self.driver.begin(SlotInit(slot))

    def close(self) -> None:
        close = self.driver.worker._model.close  # type: ignore[attr-defined]
        close()


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: "-".join(map(str, mode)))
def mode(request: pytest.FixtureRequest) -> Mode:
    assert isinstance(request.param, Mode)
    return request.param


@pytest.fixture(scope="module")
def watched(small_model: Path, mode: Mode) -> Iterator[Watched]:
    watched = Watched(small_model, mode)
    yield watched
    watched.close()


@pytest.fixture(scope="module")
def alone(watched: Watched) -> Tensor:
    """Logits after the sequence, computed in one piece and by itself."""
    watched.fresh(0)
    logits = watched.after(Feed(0, SEQUENCE))
    assert bool(torch.isfinite(logits).all())
    return logits


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 63, 64, 100])
def test_chunks_of_any_size_end_in_the_same_bits(watched: Watched, alone: Tensor, chunk_tokens: int) -> None:
    watched.fresh(1)
    for start in range(0, LONG, chunk_tokens):
        logits = watched.after(Feed(1, SEQUENCE[start : start + chunk_tokens]))
    assert torch.equal(logits, alone)


@pytest.mark.parametrize("others", [1, 2, 4, 5, 6, 7, 12, 32])
def test_batch_mates_leave_a_decoded_row_as_it_is(watched: Watched, alone: Tensor, others: int) -> None:
    for slot in range(others + 1):
        watched.fresh(slot)
        watched.after(Feed(slot, SEQUENCE[:-1] if slot == others else SEQUENCE[: SHORT + slot]))
    feeds = [Feed(slot, SEQUENCE[-1:]) for slot in range(others + 1)]
    assert torch.equal(watched.after(*feeds), alone)


def test_a_chunk_beside_decoding_rows_and_other_chunks_has_the_same_bits(watched: Watched, alone: Tensor) -> None:
    for slot in range(3):
        watched.fresh(slot)
        watched.after(Feed(slot, SEQUENCE[:SHORT]))
    watched.fresh(3)
    watched.fresh(4)
    watched.after(Feed(4, SEQUENCE[:40]))
    feeds = [*(Feed(slot, [5]) for slot in range(3)), Feed(3, SEQUENCE[:33]), Feed(4, SEQUENCE[40:])]
    assert torch.equal(watched.after(*feeds), alone)


def test_a_prefix_that_another_request_computed_has_the_same_bits(watched: Watched, alone: Tensor) -> None:
    watched.fresh(5)
    watched.after(Feed(5, [*SEQUENCE[:80], 1, 2, 3]))
    watched.fresh(6)
    watched.driver.share(5, 6, 80)
    assert torch.equal(watched.after(Feed(6, SEQUENCE[80:])), alone)


@pytest.mark.parametrize("sharers", [2, 3, 16, 17, 33])
def test_rows_that_read_the_same_pages_once_have_the_bits_that_they_have_alone(
    watched: Watched, mode: Mode, alone: Tensor, sharers: int
) -> None:
    def begin(slot: int) -> None:
        """Right behind what is shared, in the next page, or in the one after that."""
        if slot % 3:
            watched.after(Feed(slot, [slot] * (slot % 3 * 9)))

    expected = []
    for slot in range(1, sharers):
        watched.fresh(slot)
        watched.after(Feed(slot, SEQUENCE[:SHARED]))
        begin(slot)
        expected.append(watched.after(Feed(slot, [7])))
        assert not watched.bundles
    watched.fresh(0)
    watched.after(Feed(0, SEQUENCE[:-1]))
    for slot in range(1, sharers):
        watched.fresh(slot)
        watched.driver.share(0, slot, SHARED)
        begin(slot)
    found = watched.all_after(*(Feed(slot, [7]) for slot in range(1, sharers)), Feed(0, SEQUENCE[-1:]))
    most = block_tokens(HEADS // KV_HEADS, AMX and mode.dtype == "bfloat16")
    assert watched.bundles == -(-sharers // most)
    assert torch.equal(found, torch.stack([*expected, alone]))


def test_a_chunk_and_a_stranger_beside_a_bundle_change_no_bits(watched: Watched, alone: Tensor) -> None:
    watched.fresh(0)
    watched.after(Feed(0, SEQUENCE[:-1]))
    for slot in (1, 2):
        watched.fresh(slot)
        watched.driver.share(0, slot, SHARED)
    watched.fresh(3)
    watched.after(Feed(3, SEQUENCE[:-1]))
    watched.fresh(4)
    feeds = [Feed(1, [5]), Feed(3, SEQUENCE[-1:]), Feed(2, [6]), Feed(0, SEQUENCE[-1:]), Feed(4, SEQUENCE[:100])]
    logits = watched.all_after(*feeds)
    assert watched.bundles == 1
    assert torch.equal(logits[1], alone) and torch.equal(logits[3], alone)
    assert torch.equal(watched.after(Feed(4, SEQUENCE[100:])), alone)


@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_gives_the_same_bits(small_model: Path, mode: Mode, alone: Tensor, threads: int) -> None:
    watched = Watched(small_model, mode, threads)
    try:
        watched.fresh(0)
        watched.after(Feed(0, SEQUENCE[:100]))
        assert torch.equal(watched.after(Feed(0, SEQUENCE[100:])), alone)
    finally:
        watched.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_prefix_that_the_host_brings_back_has_the_same_bits(
    small_model: Path, mode: Mode, alone: Tensor, threads: int
) -> None:
    watched = Watched(small_model, mode, threads, SHARED // mode.page_tokens)
    try:
        watched.fresh(0)
        watched.after(Feed(0, SEQUENCE[:SHARED]))
        given = list(watched.driver.slots[0].pages)
        watched.driver.back_up(given, list(range(len(given))))
        for slot in range(1, 9):
            watched.fresh(slot)
            loads = list(enumerate(watched.driver.give_pages(slot, SHARED)))
            watched.driver.slots[slot].length = SHARED
            assert torch.equal(watched.all_after(Feed(slot, SEQUENCE[SHARED:]), loads=loads)[-1], alone)
    finally:
        watched.close()


@pytest.fixture(scope="module")
def plain_and_q8(model_file: Path) -> Iterator[list[Watched]]:
    """The real model, whose projections are blocks of 4 bits and whose embeddings are of 8."""
    both = [Watched(model_file, Mode("bfloat16", quantization)) for quantization in ("none", "q8")]
    yield both
    for watched in both:
        watched.close()


@pytest.mark.skipif(not AMX, reason="without tiles q8 scales the sums of groups")
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_blocks_of_a_file_in_q8_have_the_bits_of_bfloat16_in_tiles(plain_and_q8: list[Watched], rows: int) -> None:
    found = []
    for watched in plain_and_q8:
        for slot in range(rows):
            watched.fresh(slot)
        prompts = watched.all_after(*(Feed(slot, SEQUENCE[slot : slot + 20]) for slot in range(rows)))
        found.append(torch.cat((prompts, watched.all_after(*(Feed(slot, [7 + slot]) for slot in range(rows))))))
    plain, q8 = found
    assert plain.shape[0] == 2 * rows and bool(torch.isfinite(plain).all())
    assert torch.equal(plain, q8)

"""Each architecture computes what `transformers` does with the same folder, in torch's layers, in compiled ones, and in
a card's, whose kernels are their references here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ops.checkpoints import CHECKPOINTS, VOCAB, Checkpoint, Reference
from ops.driver import Driver, Feed, future
from ops.slot_inits import SlotInit
from torch import Tensor

from headrace.ops.triton import dispatch

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 90)]
"""Longer than the windows, and no multiple of a page."""
SHARED = 64
OUTPUTS = 64
KERNELS = ("torch", "compiled", "triton")


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=lambda checkpoint: checkpoint.name)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    assert isinstance(request.param, Checkpoint)
    return Reference(request.param, tmp_path_factory.mktemp("checkpoint") / request.param.name)


class Watched:
    """A driver, and the logits that its model gave last."""

    def __init__(self, reference: Reference, **start: Any) -> None:
        self.driver = Driver(reference.folder, num_pages=64, slots=4, **start)
        model: Any = self.driver.worker._model
        inner = model.logits
        self.last = torch.empty(0)

        def logits(hidden: Tensor) -> Tensor:
            given: Tensor = inner(hidden)
            self.last = given.clone()
            return given

        model.logits = logits

    def prefill(self, slot: int, ids: list[int], chunk_tokens: int) -> Tensor:
        """→ logits after the last of the ids."""
        for start in range(0, len(ids), chunk_tokens):
            self.driver.launch([Feed(slot, ids[start : start + chunk_tokens])])
        return self.last[-1]

    def close(self) -> None:
        close = getattr(self.driver.worker._model, "close", None)
        if close is not None:
            close()


@pytest.fixture(params=KERNELS)
def watched(reference: Reference, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    # The interpreter takes hundreds of times as long; `test_decoder` has it.
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    watched = Watched(reference, kernels=request.param)
    yield watched
    watched.close()


def test_float32_logits_and_64_greedy_ids_are_those_of_transformers(watched: Watched, reference: Reference) -> None:
    watched.driver.begin(SlotInit(0, PROMPT))

    logits = watched.prefill(0, PROMPT, 50)

    torch.testing.assert_close(logits, reference.logits(PROMPT)[-1], atol=2e-4, rtol=2e-4)
    watched.driver.begin(SlotInit(1, PROMPT))
    ids = [watched.driver.run(Feed(1, PROMPT))[1]]
    while len(ids) < OUTPUTS:
        ids.append(watched.driver.run(Feed(1, [future(1)]))[1])
    expected = reference.greedy(PROMPT, OUTPUTS)
    assert ids == expected
    assert len(set(expected)) > 8, "a model that repeats itself proves little"


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "q8")])
def test_a_cached_prefix_gives_the_bits_of_a_cold_run_near_the_float32_logits(
    reference: Reference, dtype: str, quantization: str
) -> None:
    watched = Watched(reference, kernels="compiled", dtype=dtype, quantization=quantization)
    try:
        watched.driver.begin(SlotInit(0, PROMPT))
        cold = watched.prefill(0, PROMPT, len(PROMPT))
        watched.driver.begin(SlotInit(1, PROMPT))
        watched.driver.share(0, 1, SHARED)

        cached = watched.prefill(1, PROMPT[SHARED:], 7)

        assert torch.equal(cached, cold)
        error = (cold - reference.logits(PROMPT)[-1]).norm() / reference.logits(PROMPT)[-1].norm()
        assert error < 1e-4 if dtype == "float32" else 0.15
    finally:
        watched.close()

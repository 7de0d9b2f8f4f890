"""The default model's bits after a long prompt do not depend on where its chunks end, nor on the number of threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ops.driver import Driver, Feed
from ops.slot_inits import SlotInit
from torch import Tensor

TOKENS = 2064
PAGES = -(-TOKENS // 16)
PROMPT = [int(token) for token in np.random.default_rng(9).integers(100, 49_000, TOKENS)]


def logits_after(model: Path, quantization: str, threads: int, chunk_sizes: list[int]) -> list[Tensor]:
    """Behind the prompt, computed once for each size of its chunks."""
    driver = Driver(
        model,
        slots=len(chunk_sizes),
        num_pages=PAGES * len(chunk_sizes),
        kernels="compiled",
        dtype="bfloat16",
        quantization=quantization,
        threads=threads,
        max_context_tokens=TOKENS,
    )
    last: list[Tensor] = []
    inner = driver.model.logits

    def logits(hidden: Tensor) -> Tensor:
        given = inner(hidden)
        last[:] = [given.clone()]
        return given

    driver.model.logits = logits  # type: ignore[method-assign]
    after: list[Tensor] = []
    try:
        for slot, chunk_tokens in enumerate(chunk_sizes):
            driver.begin(SlotInit(slot))
            for start in range(0, TOKENS, chunk_tokens):
                driver.launch([Feed(slot, PROMPT[start : start + chunk_tokens])])
            after.append(last[0][-1])
    finally:
        driver.worker._model.close()  # type: ignore[attr-defined]
    return after


@pytest.mark.parametrize("quantization", ["none", "q8"])
def test_chunks_of_16_to_2064_tokens_on_one_thread_or_two_end_in_the_same_bits(
    model_file: Path, quantization: str
) -> None:
    sizes = [TOKENS, 16, 100, 512, 2048]
    whole, *others = logits_after(model_file, quantization, 1, sizes)
    assert bool(torch.isfinite(whole).all())
    others += logits_after(model_file, quantization, 2, [TOKENS, 300])
    assert [torch.equal(other, whole) for other in others] == [True] * 6

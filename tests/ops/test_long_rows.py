"""The default model's bits after a long prompt do not depend on where its chunks end."""

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


@pytest.mark.parametrize("quantization", ["none", "q8"])
def test_chunks_of_16_to_2048_tokens_end_in_the_same_bits(model_file: Path, quantization: str) -> None:
    sizes = [16, 100, 512, 2048]
    driver = Driver(
        model_file,
        slots=1 + len(sizes),
        num_pages=PAGES * (1 + len(sizes)),
        kernels="compiled",
        dtype="bfloat16",
        quantization=quantization,
        max_context_tokens=TOKENS,
    )
    last: list[Tensor] = []
    inner = driver.model.logits

    def logits(hidden: Tensor) -> Tensor:
        given = inner(hidden)
        last[:] = [given.clone()]
        return given

    driver.model.logits = logits  # type: ignore[method-assign]
    prompt = np.random.default_rng(9).integers(100, driver.config.vocab_size, TOKENS).tolist()

    def after(slot: int, chunk_tokens: int) -> Tensor:
        driver.begin(SlotInit(slot))
        for start in range(0, TOKENS, chunk_tokens):
            driver.launch([Feed(slot, prompt[start : start + chunk_tokens])])
        return last[0][-1]

    try:
        whole = after(0, TOKENS)
        assert bool(torch.isfinite(whole).all())
        for slot, chunk_tokens in enumerate(sizes, 1):
            assert torch.equal(after(slot, chunk_tokens), whole), f"chunks of {chunk_tokens}"
    finally:
        driver.worker._model.close()  # type: ignore[attr-defined]

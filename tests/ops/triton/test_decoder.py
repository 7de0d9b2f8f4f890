"""The card's decoder with its kernels interpreted: every architecture gives the logits of torch's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ops.checkpoints import CHECKPOINTS, VOCAB, Checkpoint, Reference
from ops.driver import Feed, future
from ops.slot_inits import SlotInit
from ops.test_architectures import Watched

from headrace.ops.triton import dispatch

PROMPT = [(7 * at + 3) % VOCAB for at in range(43)]
"""Longer than most windows."""


def run(reference: Reference, kernels: str) -> tuple[torch.Tensor, list[int]]:
    """A chunk, a chunk behind it, decodes by graph → the logits of each, and the ids."""
    watched = Watched(reference, kernels=kernels)
    driver = watched.driver
    driver.begin(SlotInit(0, PROMPT))
    logits = [watched.prefill(0, PROMPT[:37], 37)]
    ids = [driver.run(Feed(0, PROMPT[37:]))[0]]
    logits.append(watched.last[-1])
    for _ in range(2):
        ids.append(driver.run(Feed(0, [future(0)]))[0])
        logits.append(watched.last[-1])
    return torch.stack(logits), ids


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda checkpoint: checkpoint.name)
def test_interpreted_kernels_give_the_logits_of_torchs_layers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert dispatch.INTERPRETED
    reference = Reference(checkpoint, tmp_path / checkpoint.name)
    expected, ids = run(reference, "torch")
    logits, found = run(reference, "triton")
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    assert found == ids

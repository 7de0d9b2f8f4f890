"""The card's decoder with its kernels interpreted: every architecture gives the logits of torch's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ops.checkpoints import CHECKPOINTS, VOCAB, Checkpoint, Reference
from ops.driver import Feed, future, read_config, window_groups
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


TEXT = [(11 * at + 5) % VOCAB for at in range(135)]
"""Longer than a window of 23 tokens, the block of keys that it begins in, and a page."""
CHUNKS = (50, 60, 25)


def run_windowed(reference: Reference, kernels: str, **start: Any) -> tuple[torch.Tensor, list[int]]:
    """Chunks, then decodes; what is free in a window group is NaN each time → the logits of each step, and the ids."""
    watched = Watched(reference, kernels=kernels, **start)
    driver = watched.driver
    driver.begin(SlotInit(0, TEXT))
    ids, logits, at = list[int](), [], 0
    for tokens in (*CHUNKS, *([1] * 4)):
        with torch.inference_mode():
            for group in range(1, len(driver.groups)):
                driver.worker._pools[group].pages[:, driver.free[group]] = torch.nan
        chunk = TEXT[at : at + tokens] if at < len(TEXT) else [future(0)]
        at += tokens
        ids.append(driver.run(Feed(0, chunk))[0])
        logits.append(watched.last[-1])
    left_behind = [min(driver.slots[0].tables[group]) for group in range(1, len(driver.groups))]
    assert all(left_behind), "the first pages have been given back"
    watched.close()
    return torch.stack(logits), ids


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen2-window"])
def test_layers_with_a_window_need_no_page_before_it(name: str, tmp_path: Path) -> None:
    (checkpoint,) = (each for each in CHECKPOINTS if each.name == name)
    reference = Reference(checkpoint, tmp_path / name)
    expected, ids = run_windowed(reference, "torch")
    groups = window_groups(read_config(reference.folder))
    logits, found = run_windowed(reference, "triton", groups=groups)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    assert found == ids

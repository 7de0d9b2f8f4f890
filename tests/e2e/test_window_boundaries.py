"""Prompts that end around a window's borders, and a page's, draw the ids of `transformers` from every tier.

The models are small and random, of both kinds of window; a span is a window and the block of keys that it begins in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.tiered import TieredEngine, tiered_engine, until
from ops.checkpoints import CHECKPOINTS, VOCAB, Reference

from headrace.ops.models.config import KEY_BLOCK_TOKENS

WINDOW = 23
SPAN = WINDOW + KEY_BLOCK_TOKENS - 1
OUTPUTS = 6
TEXT = [int(token) for token in np.random.default_rng(11).integers(0, VOCAB, 200)]
SETTINGS: dict[str, Any] = {"max_total_tokens": 256, "context_length": 224, "chunked_prefill_size": 33}


def lengths(page_tokens: int) -> list[int]:
    """From the longest on: each is a prefix of the ones before, so that windows in the middle of a path are needed."""
    borders = (WINDOW, SPAN, 2 * SPAN, 3 * page_tokens)
    return sorted({border + beside for border in borders for beside in (-1, 0, 1)}, reverse=True)


@pytest.mark.parametrize(("name", "page_tokens"), [("gemma3", 16), ("qwen2-window", 4)])
async def test_prompts_around_borders_draw_the_references_ids_from_every_tier(
    name: str, page_tokens: int, tmp_path: Path
) -> None:
    (checkpoint,) = (each for each in CHECKPOINTS if each.name == name)
    assert checkpoint.changes["sliding_window"] == WINDOW
    reference = Reference(checkpoint, tmp_path / name)
    prompts = [TEXT[:length] for length in lengths(page_tokens)]
    expected = [reference.greedy(prompt, OUTPUTS) for prompt in prompts]
    settings = {**SETTINGS, "page_size": page_tokens}

    async def tiers(tiered: TieredEngine, order: Sequence[int]) -> tuple[int, int, int]:
        """Ask in this order → tokens from the device, the host and storage."""
        found = np.zeros(3, np.int64)
        for number in order:
            ids, started = await tiered.ask(prompts[number], OUTPUTS)
            assert ids == expected[number], (len(prompts[number]), started)
            found += (started.cached_device_tokens, started.cached_host_tokens, started.cached_storage_tokens)
            await until(lambda: not tiered.engine.writing)
        device, host, storage = found.tolist()
        return device, host, storage

    numbers = range(len(prompts))
    async with tiered_engine(reference.folder, tmp_path / "kv", **settings) as tiered:
        assert tiered.engine.status().window_groups
        assert await tiers(tiered, numbers[:1]) == (0, 0, 0)
        device, _, _ = await tiers(tiered, numbers)
        assert device > 0
        tiered.engine.flush_cache(device=True, host=False)
        _, host, _ = await tiers(tiered, numbers)
        assert host > 0
        tiered.flush()
        _, _, storage = await tiers(tiered, numbers[::-1])
        assert storage > 0
    async with tiered_engine(reference.folder, tmp_path / "kv", **settings) as tiered:
        _, _, storage = await tiers(tiered, numbers)
        assert storage > 0

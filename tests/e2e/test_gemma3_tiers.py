"""Gemma 3, whose window layers keep their windows only, over real tiers: ids are the cold ones from whichever tier a
prefix comes, and the pages of its window layers are those of one window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.tiered import tiered_engine, until

from headrace.sched.messages import Started
from headrace.server.text import TextService

TEXT = "The quick brown fox jumps over the lazy dog, and nobody in the village remembers why. "
OUTPUTS = 12
POOL_TOKENS = 2048
SETTINGS: dict[str, Any] = {
    "page_size": 16,
    "max_total_tokens": POOL_TOKENS,
    "context_length": POOL_TOKENS,
    "chunked_prefill_size": 256,
    "max_running_requests": 2,
    "hicache_size": 0.4,
}
WINDOW_PAGES = 37
"""Of 16 tokens: the window of 512, and the block of keys that it begins in; and the page before."""


@pytest.fixture(scope="module")
def prompts(gemma_file: Path) -> list[list[int]]:
    """Three that begin alike, with 720, 880 and 880 tokens: the second goes on where the first ends."""
    tokenizer = TextService.open(gemma_file, None).tokenizer
    ids: list[int] = tokenizer.encode(TEXT * 50).tolist()
    other: list[int] = tokenizer.encode("Why does the village not remember? " * 40).tolist()
    assert len(ids) >= 880 and len(other) >= 160
    return [ids[:720], ids[:880], [*ids[:720], *other[:160]]]


def by_tier(started: Started) -> tuple[int, int, int]:
    """Tokens from the device, the host, storage."""
    return started.cached_device_tokens, started.cached_host_tokens, started.cached_storage_tokens


async def test_ids_are_the_cold_ones_from_the_device_the_host_and_the_disk(
    gemma_file: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    cold: list[list[int]] = []
    async with tiered_engine(gemma_file, tmp_path / "cold", **SETTINGS) as tiered:
        for salt, prompt in enumerate(prompts):
            ids, started = await tiered.ask(prompt, OUTPUTS, salt=str(salt))
            assert by_tier(started) == (0, 0, 0)
            cold.append(ids)
    async with tiered_engine(gemma_file, tmp_path / "kv", **SETTINGS) as tiered:
        ids, started = await tiered.ask(prompts[0], OUTPUTS)
        assert (ids, by_tier(started)) == (cold[0], (0, 0, 0))
        await tiered.settled()
        (group,) = tiered.engine.status().window_groups
        assert group.pages_total < tiered.engine.status().pages_total and group.saved_bytes > 0
        assert WINDOW_PAGES <= group.copied_pages <= WINDOW_PAGES + 1 < tiered.engine.status().copied_pages
        # Both go on behind the first's prompt.
        for prompt, expected in zip(prompts[1:], cold[1:]):
            ids, started = await tiered.ask(prompt, OUTPUTS)
            assert (ids, by_tier(started)) == (expected, (720, 0, 0))
        await tiered.settled()
        tiered.engine.flush_cache(device=True, host=False)
        # What another has brought to the device a moment ago is there.
        for prompt, expected, device in ((prompts[2], cold[2], 0), (prompts[1], cold[1], 720)):
            ids, started = await tiered.ask(prompt, OUTPUTS)
            assert (ids, by_tier(started)) == (expected, (device, 864 - device, 0))
        assert tiered.engine.status().window_groups[0].short_matches == 0
        await until(lambda: not tiered.engine.writing)
    async with tiered_engine(gemma_file, tmp_path / "kv", **SETTINGS) as tiered:
        for prompt, expected in zip(prompts[::-1], cold[::-1]):
            # Copies that are being made hold their pages.
            await until(lambda: not tiered.engine.writing)
            tiered.flush()
            ids, started = await tiered.ask(prompt, OUTPUTS)
            assert (ids, by_tier(started)) == (expected, (0, 0, (len(prompt) - 1) // 16 * 16))

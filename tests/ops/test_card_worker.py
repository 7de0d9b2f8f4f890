"""The worker of a card in a process of its own, under the real engine: its kernels interpreted on the CPU, and, where
there is a card, on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from e2e.test_tiers_real import OUTPUTS, golden
from e2e.tiered import tiered_engine
from gpu import check
from ops.checkpoints import CHECKPOINTS, Reference
from ops.small_llama import VOCAB, SmallLlama

from headrace.ops.triton import dispatch
from headrace.ops.wire import Start

PROMPT = [(11 * at + 5) % VOCAB for at in range(75)]
CACHED = 64
"""Whole pages of 16."""
needs_a_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no card here"),
]


def interpreted(start: Start) -> Start:
    """The worker of a card, on a CPU's tensors."""
    return msgspec.structs.replace(start, kernels="triton", device="cpu")


async def test_what_each_tier_has_comes_to_the_ids_of_a_cold_run(
    small_llama: SmallLlama, small_model: Path, tmp_path: Path
) -> None:
    assert dispatch.INTERPRETED and os.environ["TRITON_INTERPRET"] == "1", "the worker's process has it too"
    sizes = {"page_size": 16, "max_total_tokens": 256, "context_length": 96, "max_running_requests": 2}
    async with tiered_engine(small_model, tmp_path, interpreted, **sizes) as tiered:
        cold, started = await tiered.ask(PROMPT, 4)
        assert cold == small_llama.greedy(PROMPT, 4) and started.cached_tokens == 0
        await tiered.settled()
        ids, started = await tiered.ask(PROMPT, 4)
        assert (ids, started.cached_device_tokens) == (cold, CACHED)
        tiered.engine.flush_cache(device=True, host=False)
        ids, started = await tiered.ask(PROMPT, 4)
        assert (ids, started.cached_host_tokens) == (cold, CACHED)
        tiered.flush()
        ids, started = await tiered.ask(PROMPT, 4)
        assert (ids, started.cached_storage_tokens) == (cold, CACHED)


async def test_layers_with_a_window_keep_no_more_and_each_tier_has_all_of_it(
    tmp_path: Path,
) -> None:
    (checkpoint,) = (each for each in CHECKPOINTS if each.name == "gemma3")
    reference = Reference(checkpoint, tmp_path / checkpoint.name)
    text = [(7 * at + 2) % VOCAB for at in range(131)]
    expected = reference.greedy(text, 4)
    sizes = {"page_size": 16, "max_total_tokens": 512, "context_length": 160, "max_running_requests": 2}
    async with tiered_engine(reference.folder, tmp_path / "kv", interpreted, **sizes) as tiered:
        ids, started = await tiered.ask(text, 4)
        assert ids == expected and started.cached_tokens == 0
        await tiered.settled()
        (group,) = tiered.engine.status().window_groups
        assert 0 < group.copied_pages < tiered.engine.status().copied_pages, "pages before the window stay behind"
        for tier in ("device", "host", "storage"):
            if tier == "host":
                tiered.engine.flush_cache(device=True, host=False)
            elif tier == "storage":
                tiered.flush()
            ids, started = await tiered.ask(text, 4)
            assert (ids, getattr(started, f"cached_{tier}_tokens")) == (expected, 128)


def test_a_worker_sleeps_no_longer_than_it_says() -> None:
    """In a process of its own: it is the whole thread's."""
    script = "from headrace.ops.cuda import card; card.wake_in_time(); print(open('/proc/self/timerslack_ns').read())"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 1 and int(Path("/proc/self/timerslack_ns").read_text()) > 1


class TestOnACard:
    pytestmark = needs_a_card

    @pytest.mark.parametrize("part", [part.name for part in check.PARTS if not part.timed])
    def test_what_needs_no_clock_holds(self, part: str, tmp_path: Path) -> None:
        """Kernels against references; steps without a wait, as graphs and not. In a process where nothing is
        interpreted."""
        command = [sys.executable, str(check.ENTRY), "--part", part, "--json", str(tmp_path / "results.json")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    async def test_the_default_model_draws_the_golden_ids_cold_and_cached(
        self, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TRITON_INTERPRET")
        async with tiered_engine(model_file, tmp_path, device="cuda", dtype="float32") as tiered:
            for case in golden():
                assert (await tiered.ask(case.prompt, OUTPUTS))[0] == case.ids
            await tiered.settled()
            tiered.engine.flush_cache(device=True, host=False)
            for case in golden():
                ids, started = await tiered.ask(case.prompt, OUTPUTS)
                assert ids == case.ids and started.cached_host_tokens == case.cached()

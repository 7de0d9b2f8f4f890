"""The memory plan of a card: what runs there, what fits, and sentences that say what to change. The card is a fake."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from server.test_pool_sizes import WINDOWED
from server.test_sizing import GIB, LARGE, SMALL, advised, machine

from headrace.ops.cuda.kv import DevicePools
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.config import ModelConfig
from headrace.ops.triton.slot_tables import make_tables
from headrace.ops.wire import GroupShape
from headrace.server.card import Card, NoCard
from headrace.server.card_sizing import CARD_PROGRAM_BYTES, card_workspace_bytes
from headrace.server.config import BadSetting, Settings
from headrace.server.hardware import Hardware
from headrace.server.launch import NO_TIERS, api_settings, engine_options, with_card
from headrace.server.sampling_defaults import SamplingDefaults
from headrace.server.sizing import SPARE_FRACTION, DoesNotFit, MemoryPlan, memory_table, plan_memory, size_text


def with_a_card(free_gib: float = 80, host_gib: float = 64) -> Hardware:
    card = Card("A Card", 80 * GIB, int(free_gib * GIB), 132)
    return msgspec.structs.replace(machine(host_gib), card=card)


def plan(free_gib: float = 80, model: ModelConfig = LARGE, **flags: Any) -> MemoryPlan:
    return plan_memory(model, Settings(**flags), with_a_card(free_gib))


def refusal(free_gib: float, model: ModelConfig = LARGE, **flags: Any) -> str:
    with pytest.raises(BadSetting) as caught:
        plan(free_gib, model, **flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "device", "kernels"),
    [
        ({}, "cuda", "triton"),
        ({"device": "cuda"}, "cuda", "triton"),
        ({"device": "cpu"}, "cpu", "compiled"),
        ({"cpu_kernels": "torch"}, "cpu", "torch"),
        ({"quantization": "q8"}, "cpu", "compiled"),
    ],
)
def test_auto_takes_the_card_unless_a_flag_is_given_that_only_a_cpu_has(
    flags: dict[str, Any], device: str, kernels: str
) -> None:
    made = plan(model=SMALL, **flags)
    assert (made.device, made.kernels) == (device, kernels)


def test_without_a_card_auto_is_the_cpu_and_cuda_says_why_not() -> None:
    assert plan_memory(SMALL, Settings(), machine(16)).device == "cpu"
    lacking = msgspec.structs.replace(machine(16), no_card="there is no NVIDIA driver here (libcuda.so.1). Install one")
    with pytest.raises(BadSetting) as caught:
        plan_memory(SMALL, Settings(device="cuda"), lacking)
    assert str(caught.value) == (
        "--device cuda: there is no NVIDIA driver here (libcuda.so.1). Install one, or give --device cpu."
    )


@pytest.mark.parametrize("flags", [{"quantization": "q8"}, {"cpu_kernels": "compiled"}])
def test_flags_of_a_cpu_contradict_cuda(flags: dict[str, Any]) -> None:
    assert re_flag(flags) in refusal(80, device="cuda", **flags)


def re_flag(flags: dict[str, Any]) -> str:
    ((field, value),) = flags.items()
    return f"--{field.replace('_', '-')} {value} is for CPUs only: leave it out, or give --device cpu."


def test_the_pool_takes_what_weights_and_workspace_leave_of_the_card() -> None:
    made = plan(80)
    assert made.dtype == "bfloat16"
    assert made.weights_bytes == 2 * LARGE.parameters
    assert 0 <= made.card_left_bytes - SPARE_FRACTION * 80 * GIB < made.layout.page_bytes(0)
    assert made.pool_bytes > 50 * GIB
    assert made.left_bytes > 60 * GIB, "the host's memory is there for its tier"


def test_layers_with_a_window_have_a_pool_of_their_own_on_a_card_too() -> None:
    made = plan(4, WINDOWED, max_running_requests=64)
    assert [group.kind for group in made.layout.groups] == ["full", "window"]
    full, window = made.num_pages
    # All requests' windows and the longest chunk, at least.
    assert made.layout.groups[1].running_pages(16) * 64 + 8192 // 16 <= window < full
    assert made.pool_bytes == full * made.layout.page_bytes(0) + window * made.layout.page_bytes(1)
    every_page = plan(4, SMALL, max_running_requests=64)
    assert made.pool_tokens > every_page.pool_tokens, "as in a model of this shape without windows"


def test_a_pool_is_no_larger_than_all_requests_could_use() -> None:
    made = plan(80, SMALL, max_running_requests=2)
    assert made.pool_tokens == 2 * SMALL.context_tokens


def test_a_fraction_is_of_what_is_free_on_the_card() -> None:
    made = plan(40, mem_fraction_static=0.7)
    assert 0 <= 0.7 * 40 * GIB - made.weights_bytes - made.pool_bytes < made.layout.page_bytes(0)


def test_the_longest_prefill_chunk_is_longer_than_a_cpus() -> None:
    assert plan(80).max_chunk_tokens == 8192
    assert plan(80, chunked_prefill_size=512).max_chunk_tokens == 512


@pytest.mark.parametrize("free_gib", [18, 17.3, 17])
def test_what_a_refusal_advises_does_fit(free_gib: float) -> None:
    says = refusal(free_gib, dtype="bfloat16", max_running_requests=1024)
    assert f"{size_text(int(free_gib * GIB))} of memory free, of 80.0 GiB, on a A Card" in says
    plan(free_gib, **{"max_running_requests": 1024, **advised(says)})


def test_a_model_larger_than_the_card_is_sent_to_the_cpu_if_it_fits_there() -> None:
    assert "It fits with --device cpu." in refusal(12)
    assert plan_memory(LARGE, Settings(device="cpu"), with_a_card(12)).device == "cpu"


@given(
    free_gib=st.floats(0.05, 141),
    context_length=st.none() | st.integers(2, 131072),
    max_total_tokens=st.none() | st.integers(1, 1 << 22),
    fraction=st.none() | st.floats(0.01, 0.99),
    running=st.integers(1, 1024),
    model=st.sampled_from([SMALL, LARGE]),
)
def test_a_plan_never_takes_more_than_the_card_has(
    free_gib: float,
    context_length: int | None,
    max_total_tokens: int | None,
    fraction: float | None,
    running: int,
    model: ModelConfig,
) -> None:
    flags = {"context_length": context_length, "max_total_tokens": max_total_tokens, "mem_fraction_static": fraction}
    try:
        made = plan(free_gib, model, device="cuda", max_running_requests=running, **flags)
    except DoesNotFit as error:
        assert "--" in str(error) or "take a smaller model" in str(error)
        return
    except BadSetting as error:
        assert context_length is not None and str(context_length) in str(error)
        return
    assert made.card_left_bytes >= int(SPARE_FRACTION * free_gib * GIB) - 1


def test_the_workspace_has_room_for_what_a_worker_allocates_for_its_slots() -> None:
    slots, context = 32, 131072
    pool = KvPool(GroupShape("full", 0, [0], 8, 128), 1, 16, slots, context, torch.bfloat16)
    pools = DevicePools([pool], 32, torch.device("meta"), 132, [(0,)])
    tables = make_tables(slots, LARGE.vocab_size, torch.device("meta"))
    allocated = sum(each.nbytes for each in (*tables, *pools.tables, pools.span_parts, pools.span_sums))
    assert 0.15 < allocated / card_workspace_bytes(LARGE, slots, 64, context, 16, 2) < 1


def test_the_mixtures_of_long_contexts_take_no_gigabyte() -> None:
    """They took 1 GiB for 256 slots of 128k tokens when every context was cut into spans of 512."""
    long, short = (card_workspace_bytes(LARGE, 256, 64, context, 16, 2) for context in (131072, 32768))
    assert long - short < 128 << 20


def test_the_table_accounts_for_the_card_and_for_the_host() -> None:
    made = plan(80)
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(memory_table(LARGE, made, with_a_card(80), host_tier_bytes=GIB))
    shown = console.export_text()
    assert "80.0 GiB of memory free, of 80.0 GiB, on a A Card" in shown
    for part in (made.weights_bytes, made.pool_bytes, made.workspace_bytes, CARD_PROGRAM_BYTES, made.card_left_bytes):
        assert size_text(part) in shown
    assert f"{size_text(made.left_bytes - GIB)} stay free" in shown
    console.print(memory_table(SMALL, plan(80, SMALL), with_a_card(80)))
    assert "million in bfloat16" in console.export_text(clear=False) and "twice" not in console.export_text()


def test_the_worker_is_told_of_the_card(tmp_path: Path) -> None:
    start = engine_options(Settings(cache=tmp_path), tmp_path / "x.gguf", LARGE, plan(80), b"").start
    assert (start.device, start.kernels, start.dtype) == ("cuda", "triton", "bfloat16")


def test_server_info_has_the_device_and_what_of_it_is_planned(tmp_path: Path) -> None:
    settings = Settings(cache=tmp_path)
    public = api_settings(settings, plan(80), NO_TIERS, SamplingDefaults()).public
    assert (public["device"], public["dtype"], public["card_bytes"]) == ("cuda", "bfloat16", 80 * GIB)
    assert api_settings(settings, plan(80, SMALL, device="cpu"), NO_TIERS, SamplingDefaults()).public["device"] == "cpu"


def absent() -> Card:
    raise NoCard("there is a card (A Card), but no triton. Install headrace[cuda]")


def test_a_card_is_looked_for_unless_the_cpu_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    card = Card("A Card", GIB, GIB, 1)
    assert with_card(machine(16), Settings(), lambda: card).card == card
    assert with_card(machine(16), Settings(device="cpu"), absent) == machine(16)
    with caplog.at_level(logging.WARNING):
        assert with_card(machine(16), Settings(), absent).no_card.endswith("Install headrace[cuda]")
    assert "the model runs on the CPU: there is a card (A Card), but no triton" in caplog.text

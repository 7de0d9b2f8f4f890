"""The memory plan: what fits, what is refused before loading, and that the value named in a refusal does fit (B27)."""

import io
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.ops.models.config import ModelConfig, Rope
from headrace.server.config import BadSetting, Settings
from headrace.server.hardware import Hardware
from headrace.server.sizing import SPARE_FRACTION, DoesNotFit, MemoryPlan, memory_table, plan_memory, size_text

GIB = 1 << 30

SMALL = ModelConfig(
    architecture="llama",
    name="Small",
    vocab_size=49152,
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    rope=Rope(100000.0),
    rotary_dim=64,
    rope_pairs="interleaved",
    norm_eps=1e-5,
    context_tokens=8192,
    tied_embeddings=True,
    parameters=134_515_008,
)
LARGE = msgspec.structs.replace(
    SMALL,
    name="Large",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab_size=128256,
    context_tokens=131072,
    tied_embeddings=False,
    parameters=8_030_261_248,
)


def machine(free_gib: float, cores: int = 8, bfloat16: bool = True) -> Hardware:
    return Hardware(
        cpu_name="a CPU",
        architecture="x86_64",
        cores=cores,
        ram_bytes=max(int(free_gib * GIB), 64 * GIB),
        available_bytes=int(free_gib * GIB),
        limit_bytes=int(free_gib * GIB),
        bfloat16=bfloat16,
    )


def plan(free_gib: float = 16, model: ModelConfig = SMALL, **flags: Any) -> MemoryPlan:
    return plan_memory(model, Settings(**flags), machine(free_gib))


def refusal(free_gib: float = 16, model: ModelConfig = SMALL, **flags: Any) -> str:
    with pytest.raises(BadSetting) as caught:
        plan(free_gib, model, **flags)
    return str(caught.value)


def advised(message: str) -> dict[str, Any]:
    """The flags that a refusal advises, as settings."""
    advice = message[message.rindex("give --" if "give --" in message else "fits with --") :]
    found = re.findall(r"--([a-z-]+) (\w+)", advice)
    return {name.replace("-", "_"): int(value) if value.isdigit() else value for name, value in found}


def test_a_page_of_the_default_model_takes_what_was_measured() -> None:
    made = plan()
    assert made.pool_bytes == made.num_pages[0] * 368_640
    assert made.pool_tokens == made.num_pages[0] * 16


def test_dtype_auto_is_bfloat16_only_where_the_cpu_has_it() -> None:
    assert plan_memory(SMALL, Settings(), machine(16, bfloat16=True)).dtype == "bfloat16"
    assert plan_memory(SMALL, Settings(), machine(16, bfloat16=False)).dtype == "float32"
    assert plan_memory(SMALL, Settings(dtype="bfloat16"), machine(16, bfloat16=False)).dtype == "bfloat16"


def test_float32_takes_twice_the_bytes_of_bfloat16() -> None:
    wide, narrow = plan(dtype="float32"), plan(dtype="bfloat16")
    assert wide.weights_bytes == 2 * narrow.weights_bytes
    assert wide.layout.page_bytes(0) == 2 * narrow.layout.page_bytes(0)


def test_q8_weights_take_three_quarters_of_bfloat16_at_most() -> None:
    half, fewer = (plan_memory(LARGE, Settings(quantization=kept), machine(64)) for kept in ("none", "q8"))
    # The embedding table stays in bfloat16: its rows are looked up, not multiplied.
    assert 0.75 < fewer.weights_bytes / half.weights_bytes < 0.8


def test_heads_that_fill_no_vector_are_computed_by_torch_unless_that_contradicts_the_settings() -> None:
    narrow = msgspec.structs.replace(SMALL, head_dim=72, rotary_dim=72)
    assert plan_memory(SMALL, Settings(), machine(16)).kernels == "compiled"
    assert plan_memory(narrow, Settings(), machine(16)).kernels == "torch"
    for settings in (Settings(cpu_kernels="compiled"), Settings(quantization="q8")):
        with pytest.raises(BadSetting, match="have 72 dimensions, which is no multiple of 16"):
            plan_memory(narrow, settings, machine(16))


def test_another_architecture_gets_torch() -> None:
    other = msgspec.structs.replace(machine(16), architecture="riscv64")
    assert plan_memory(SMALL, Settings(), other).kernels == "torch"


def test_q8_and_torch_contradict_each_other() -> None:
    with pytest.raises(BadSetting, match="--quantization q8 needs the compiled kernels"):
        plan_memory(SMALL, Settings(quantization="q8", cpu_kernels="torch"), machine(16))


def test_the_default_pool_is_a_gib_or_a_quarter_of_what_is_free() -> None:
    assert GIB - 368_640 < plan(16).pool_bytes <= GIB
    assert plan(3).pool_bytes < 0.75 * GIB


def test_the_default_pool_is_no_larger_than_all_requests_together_could_use() -> None:
    made = plan(64, max_running_requests=2)
    assert made.pool_tokens == 2 * SMALL.context_tokens
    assert made.pool_tokens < plan(64).pool_tokens


def test_the_default_pool_holds_one_whole_context_where_that_fits() -> None:
    # A quarter of what is left would be 6,000 tokens.
    made = plan(1.5)
    assert made.pool_tokens == made.max_context_tokens == 8192


def test_a_model_with_a_longer_context_than_memory_holds_runs_with_a_shorter_one() -> None:
    made = plan(24, LARGE)
    assert made.max_context_tokens == made.pool_tokens < LARGE.context_tokens
    shown = table_text(made, LARGE, 24)
    assert f"contexts up to {made.max_context_tokens} tokens of the model's 131072" in shown


def test_tokens_asked_for_become_whole_pages() -> None:
    made = plan(max_total_tokens=1001, page_size=16)
    assert (made.num_pages, made.pool_tokens) == ((63,), 1008)


def test_a_pool_of_few_pages_can_be_asked_for() -> None:
    made = plan(max_total_tokens=40)
    assert (made.num_pages, made.max_context_tokens, made.max_chunk_tokens) == ((3,), 48, 48)


def test_a_context_that_is_asked_for_gets_its_pool_beyond_the_default_share() -> None:
    assert plan(1.25).pool_tokens < 8192
    assert plan(1.5, context_length=8192).max_context_tokens == 8192


def test_no_more_than_the_models_context_can_be_asked_for() -> None:
    assert advised(refusal(context_length=9000)) == {"context_length": 8192}


def test_b27_a_context_that_cannot_be_held_names_one_that_can() -> None:
    message = refusal(1.2, context_length=8192)
    change = advised(message)
    assert plan(1.2, **change).max_context_tokens == change["context_length"]


def test_b27_a_pool_too_large_names_one_that_fits() -> None:
    message = refusal(4, max_total_tokens=10_000_000)
    change = advised(message)
    assert plan(4, **change).pool_tokens == change["max_total_tokens"]
    assert plan(4, **change).left_bytes >= 0.9 * SPARE_FRACTION * 4 * GIB


def test_b27_a_fraction_too_small_or_too_large_names_the_range() -> None:
    for fraction in (0.01, 0.99):
        message = refusal(16, mem_fraction_static=fraction)
        found = re.search(r"give (0\.\d+) to (0\.\d+)", message)
        assert found is not None
        least, largest = (float(value) for value in found.groups())
        assert plan(16, mem_fraction_static=least).pool_tokens < plan(16, mem_fraction_static=largest).pool_tokens


def test_a_fraction_covers_weights_and_pool_together() -> None:
    made = plan(16, mem_fraction_static=0.5)
    assert 8 * GIB - 368_640 < made.weights_bytes + made.pool_bytes <= 8 * GIB


def test_b27_a_fraction_and_a_pool_that_contradict_each_other_are_both_named() -> None:
    message = refusal(16, mem_fraction_static=0.1, max_total_tokens=500_000)
    assert "--mem-fraction-static 0.1 leaves" in message
    change = advised(message)
    assert plan(16, mem_fraction_static=0.1, **change).pool_tokens == change["max_total_tokens"]


@pytest.mark.parametrize(
    ("free_gib", "model", "flags"),
    [
        (1.0, SMALL, {"dtype": "float32"}),
        (1.0, SMALL, {"max_running_requests": 1024}),
        (1.0, SMALL, {"chunked_prefill_size": -1, "max_running_requests": 128}),
        (24.0, LARGE, {"dtype": "float32"}),
    ],
)
def test_b27_weights_that_do_not_fit_name_flags_that_make_them(
    free_gib: float, model: ModelConfig, flags: dict[str, Any]
) -> None:
    message = refusal(free_gib, model, **flags)
    assert "It fits with --" in message
    plan(free_gib, model, **{**flags, **advised(message)})


def test_b27_a_model_that_cannot_fit_at_all_is_refused_with_the_machines_limit() -> None:
    message = refusal(8, LARGE)
    assert "8.0 GiB that this control group may use" in message
    assert "take a smaller model" in message


def test_threads_leave_one_core_to_the_server() -> None:
    assert plan_memory(SMALL, Settings(), machine(16, cores=8)).cpu_threads == 7
    assert plan_memory(SMALL, Settings(), machine(16, cores=1)).cpu_threads == 1
    assert plan_memory(SMALL, Settings(cpu_threads=8), machine(16, cores=8)).cpu_threads == 8


def test_more_threads_than_cores_are_refused() -> None:
    assert "may use 8 cores; give 8 or fewer" in refusal(cpu_threads=9)


def test_the_queue_has_room_for_the_longest_prompt() -> None:
    assert plan().max_queued_tokens == 262_144
    long = msgspec.structs.replace(SMALL, context_tokens=1 << 20)
    assert plan(64, long).max_queued_tokens == 1 << 20


def test_prefill_without_chunks_takes_a_whole_context() -> None:
    assert plan(chunked_prefill_size=-1).max_chunk_tokens == 8192
    assert plan(chunked_prefill_size=512).max_chunk_tokens == 512
    assert plan(chunked_prefill_size=512, context_length=100).max_chunk_tokens == 100


def test_the_prefill_of_a_step_is_measured_unless_it_is_given() -> None:
    assert plan().prefill_tokens == 0
    assert plan(chunked_prefill_size=512).prefill_tokens == 512
    assert plan(chunked_prefill_size=-1).prefill_tokens == 8192


def table_text(made: MemoryPlan, model: ModelConfig, free_gib: float) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(memory_table(model, made, machine(free_gib)))
    return console.export_text()


def test_the_table_accounts_for_all_memory() -> None:
    made = plan(16)
    shown = table_text(made, SMALL, 16)
    for part in (made.weights_bytes, made.pool_bytes, made.workspace_bytes, made.runtime_bytes, made.left_bytes):
        assert size_text(part) in shown
    assert f"{made.pool_tokens} tokens in {made.num_pages[0]} pages of 16" in shown


@given(
    free_gib=st.floats(0.05, 64),
    context_length=st.none() | st.integers(2, 8192),
    max_total_tokens=st.none() | st.integers(1, 1 << 22),
    fraction=st.none() | st.floats(0.01, 0.99),
    page_size=st.sampled_from([1, 16, 256]),
    running=st.integers(1, 1024),
)
def test_a_plan_never_takes_more_than_there_is_and_a_refusal_always_speaks(
    free_gib: float,
    context_length: int | None,
    max_total_tokens: int | None,
    fraction: float | None,
    page_size: int,
    running: int,
) -> None:
    flags: dict[str, Any] = {
        "context_length": context_length,
        "max_total_tokens": max_total_tokens,
        "mem_fraction_static": fraction,
        "page_size": page_size,
        "max_running_requests": running,
    }
    try:
        made = plan(free_gib, **flags)
    except DoesNotFit as error:
        assert "--" in str(error) or "take a smaller model" in str(error)
        return
    except BadSetting as error:
        assert context_length is not None
        assert str(context_length) in str(error)
        return
    assert made.left_bytes >= int(SPARE_FRACTION * free_gib * GIB) - 1
    assert made.pool_tokens >= (max_total_tokens or 1)
    assert 1 <= made.max_context_tokens <= made.pool_tokens
    assert context_length is None or made.max_context_tokens == context_length

"""A step computes what the model computes, whatever shares the batch and however a sequence is cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.driver import Driver, Feed, future
from ops.slot_inits import SlotInit
from ops.small_llama import F64, VOCAB, SmallLlama

from headrace.ops.wire import MAX_LOGPROBS, Progress, Ready, StepFailed


@pytest.fixture(scope="module", params=["torch", "compiled"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def driver(small_model: Path, kernels: str) -> Driver:
    return Driver(small_model, num_pages=64, kernels=kernels)


def ids(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]


def shares(small_llama: SmallLlama, sequence: Sequence[int]) -> F64:
    """Log-probabilities after the last token."""
    return np.asarray(small_llama.logprobs(sequence)[-1])


@settings(max_examples=25, deadline=None)
@given(
    plan=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, 1, 1, 2, 5, 16, 17, 40])), min_size=1, max_size=14),
)
def test_any_ragged_mix_of_rows_gives_each_row_its_own_logprobs(
    driver: Driver, small_llama: SmallLlama, plan: list[tuple[int, int]]
) -> None:
    for slot in range(5):
        driver.begin(SlotInit(slot, logprobs=5))
    sequences: dict[int, list[int]] = {slot: [] for slot in range(5)}
    for at in range(0, len(plan), 5):
        rows = dict(plan[at : at + 5])
        feeds = [Feed(slot, ids(len(sequences[slot]) + slot, length)) for slot, length in rows.items()]
        results = driver.results(step := driver.launch(feeds))
        drawn = driver.drawn(step)
        for feed in feeds:
            sequences[feed.slot] += feed.ids
        for row, slot in enumerate(drawn):
            expected = shares(small_llama, sequences[slot])
            assert drawn[slot] == expected.argmax()
            assert results.logprobs[row] == pytest.approx(expected.max(), abs=1e-4)
            assert results.top_logprobs[row] == pytest.approx(np.sort(expected)[::-1][:MAX_LOGPROBS], abs=1e-4)


def test_many_rows_of_very_different_length_are_each_right(driver: Driver, small_llama: SmallLlama) -> None:
    lengths = {0: 300, 1: 3, 2: 290, 3: 17, 4: 90, 5: 1}
    sequences = {slot: ids(slot, length) for slot, length in lengths.items()}
    for slot, sequence in sequences.items():
        driver.begin(SlotInit(slot, logprobs=0))
        if len(sequence) > 1:
            driver.run(Feed(slot, sequence[:-1], sample=False))
    drawn = driver.run(*(Feed(slot, sequence[-1:]) for slot, sequence in sequences.items()))
    assert drawn == {slot: shares(small_llama, sequence).argmax() for slot, sequence in sequences.items()}


def test_ids_that_only_the_device_knows_are_inputs_of_the_next_step(driver: Driver, small_llama: SmallLlama) -> None:
    prompt = ids(7, 20)
    driver.begin(SlotInit(2, prompt))
    steps = [driver.launch([Feed(2, prompt)]), *(driver.launch([Feed(2, [future(2)])]) for _ in range(2))]
    assert [driver.drawn(step)[2] for step in steps] == small_llama.greedy(prompt, 3)


def test_a_prompt_of_known_ids_and_one_drawn_id_is_one_chunk(driver: Driver, small_llama: SmallLlama) -> None:
    prompt = ids(8, 5)
    driver.begin(SlotInit(2, prompt))
    first = driver.run(Feed(2, prompt))[2]
    drawn = driver.run(Feed(2, [future(2), 9, 10]))[2]
    assert drawn == shares(small_llama, [*prompt, first, 9, 10]).argmax()


def test_a_chunk_without_samples_is_done_all_the_same(driver: Driver) -> None:
    driver.begin(SlotInit(0))
    results = driver.results(driver.launch([Feed(0, ids(1, 9), sample=False)]))
    assert results.offsets[0] == 0


def test_prompt_logprobs_are_those_of_the_ids_that_follow(driver: Driver, small_llama: SmallLlama) -> None:
    prompt = ids(9, 30)
    expected = small_llama.logprobs(prompt)
    driver.begin(SlotInit(1, prompt))
    want: Mapping[int, int] = {offset: prompt[offset + 1] for offset in range(29)}
    results = driver.results(driver.launch([Feed(1, prompt, want=want)]))
    assert results.want_logprobs[:29] == pytest.approx(expected[np.arange(29), prompt[1:]], abs=1e-4)
    assert results.want_top_ids[:29, 0].tolist() == expected[:29].argmax(-1).tolist()
    assert results.want_top_logprobs[:29, 0] == pytest.approx(expected[:29].max(-1), abs=1e-4)


def test_untied_output_weights_are_used(tmp_path: Path, kernels: str) -> None:
    untied = SmallLlama(seed=1, tied=False)
    driver = Driver(untied.write(tmp_path / "untied.gguf"), kernels=kernels)
    driver.begin(SlotInit(0, logprobs=0))
    results = driver.results(driver.launch([Feed(0, [1, 2, 3])]))
    expected = shares(untied, [1, 2, 3])
    assert results.ids[0] == expected.argmax()
    assert results.logprobs[0] == pytest.approx(expected.max(), abs=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("quantization", "kernels"), [("none", "torch"), ("none", "compiled"), ("q8", "compiled")])
def test_bfloat16_and_q8_stay_near_float32(tmp_path: Path, tied: bool, quantization: str, kernels: str) -> None:
    llama = SmallLlama(seed=2, tied=tied)
    model = llama.write(tmp_path / "model.gguf")
    driver = Driver(model, dtype="bfloat16", kernels=kernels, quantization=quantization)
    prompts = {slot: ids(20 + slot, 10 * slot + 1) for slot in range(5)}
    for slot in prompts:
        driver.begin(SlotInit(slot, logprobs=1))
    results = driver.results(driver.launch([Feed(slot, prompt) for slot, prompt in prompts.items()]))
    for row, prompt in enumerate(prompts.values()):
        expected = shares(llama, prompt)
        assert results.logprobs[row] == pytest.approx(
            expected[results.ids[row]], abs=0.15 if quantization == "none" else 0.4
        )


def test_a_page_that_held_nan_does_not_harm_its_next_owner(
    small_model: Path, small_llama: SmallLlama, kernels: str
) -> None:
    driver = Driver(small_model, num_pages=2, kernels=kernels)
    for page in (0, 1):
        driver.fill(page, math.nan)
    driver.begin(SlotInit(0))
    driver.begin(SlotInit(1))
    # A lone row, a row padded beside a longer one, and a chunk.
    chunk = driver.run(Feed(0, [5, 6, 7]), Feed(1, [8]))
    single = driver.run(Feed(0, [9]), Feed(1, [10]))
    assert chunk == {0: shares(small_llama, [5, 6, 7]).argmax(), 1: shares(small_llama, [8]).argmax()}
    assert single == {0: shares(small_llama, [5, 6, 7, 9]).argmax(), 1: shares(small_llama, [8, 10]).argmax()}


def test_a_row_whose_kv_is_broken_fails_alone(driver: Driver, small_llama: SmallLlama) -> None:
    for slot in (0, 1):
        driver.begin(SlotInit(slot))
        driver.run(Feed(slot, ids(slot, 20), sample=False))
    driver.fill(driver.slots[0].pages[0], math.nan)
    results = driver.results(driver.launch([Feed(0, [1]), Feed(1, [1])]))
    driver.fill(driver.slots[0].pages[0], 0)
    assert results.status[:2].tolist() == [1, 0]
    assert results.ids[1] == shares(small_llama, [*ids(1, 20), 1]).argmax()


def test_a_batch_that_names_a_page_it_was_not_given_fails_the_step(small_model: Path, kernels: str) -> None:
    driver = Driver(small_model, kernels=kernels)
    driver.begin(SlotInit(0))
    driver.give_pages(0, 40)
    driver._edits.clear()
    driver.launch([Feed(0, ids(0, 40))])
    answer = driver.replies[-1]
    assert isinstance(answer, StepFailed)
    assert "page table has no page" in answer.message


def test_pages_of_the_last_request_are_out_of_reach_of_the_next_one_in_its_slot(small_model: Path) -> None:
    driver = Driver(small_model)
    driver.begin(SlotInit(0))
    driver.run(Feed(0, ids(0, 40)))
    kept = driver.slots[0]
    driver.begin(SlotInit(0))
    # A server that believes the new request to be the old one.
    driver.slots[0] = kept
    driver.launch([Feed(0, [1])])
    answer = driver.replies[-1]
    assert isinstance(answer, StepFailed)
    assert "page table has no page" in answer.message


def test_the_warm_up_measures_decode_and_prefill_and_leaves_no_trace(
    small_model: Path, small_llama: SmallLlama
) -> None:
    driver = Driver(small_model, num_pages=20, warm_up_tokens=300)
    ready = next(reply for reply in driver.replies if isinstance(reply, Ready))
    shapes = {(cost.decode_rows, cost.prefill_tokens, cost.context_tokens) for cost in ready.costs}
    assert {(1, 0, 192), (8, 0, 192), (0, 64, 0), (0, 32, 992), (0, 256, 0), (0, 300, 0)} <= shapes
    assert all(cost.step_ms > 0 for cost in ready.costs)
    assert (driver.pool.table == -1).all()
    driver.begin(SlotInit(0))
    assert driver.run(Feed(0, [4, 5]))[0] == shares(small_llama, [4, 5]).argmax()


def test_loading_reports_progress_up_to_the_whole_file(driver: Driver) -> None:
    progress = [reply for reply in driver.replies if isinstance(reply, Progress)]
    assert 2 < len(progress) < 60
    assert [step.done for step in progress] == sorted(step.done for step in progress)
    assert progress[-1].done == progress[-1].total > 0

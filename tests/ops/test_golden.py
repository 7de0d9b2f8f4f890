"""The default model in float32 draws the ids of a float32 reference, however its tokens come to the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from ops.driver import Driver, Feed, future
from ops.slot_inits import SlotInit

DATA = Path(__file__).parent.parent / "data" / "smollm2-135m-instruct-q4_1.json"


class Case(msgspec.Struct):
    prompt_ids: list[int]
    greedy_ids: list[int]
    top5_ids: list[int]
    top5_logprobs: list[float]


class Golden(msgspec.Struct):
    cases: list[Case]


CASES = msgspec.json.decode(DATA.read_bytes(), type=Golden).cases


@pytest.fixture(scope="module", params=["torch", "compiled"])
def driver(model_file: Path, request: pytest.FixtureRequest) -> Driver:
    return Driver(model_file, num_pages=80, kernels=request.param)


def prefill(driver: Driver, prompts: dict[int, Sequence[int]], chunk_tokens: int) -> dict[int, int]:
    """Compute the prompts side by side, chunk by chunk → the first id of each slot."""
    first: dict[int, int] = {}
    left = {slot: list(ids) for slot, ids in prompts.items()}
    while left:
        feeds = [Feed(slot, ids[:chunk_tokens], sample=len(ids) <= chunk_tokens) for slot, ids in left.items()]
        first |= driver.run(*feeds)
        left = {slot: ids[chunk_tokens:] for slot, ids in left.items() if len(ids) > chunk_tokens}
    return first


def decode(driver: Driver, first: dict[int, int], count: int) -> dict[int, list[int]]:
    """`count` ids in all; each step is launched before the ids of the one before have been read."""
    outputs = {slot: [token] for slot, token in first.items()}
    before: int | None = None
    for _ in range(count - 1):
        step = driver.launch([Feed(slot, [future(slot)]) for slot in outputs])
        if before is not None:
            collect(outputs, driver.drawn(before))
        before = step
    assert before is not None
    collect(outputs, driver.drawn(before))
    return outputs


def collect(outputs: dict[int, list[int]], drawn: dict[int, int]) -> None:
    for slot, token in drawn.items():
        outputs[slot].append(token)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_each_prompt_alone_gives_the_reference_ids(driver: Driver, case: Case) -> None:
    driver.begin(SlotInit(3, case.prompt_ids))
    first = prefill(driver, {3: case.prompt_ids}, 64)
    assert decode(driver, first, 64)[3] == case.greedy_ids


@pytest.mark.parametrize("chunk_tokens", [7, 16, 64])
def test_all_prompts_batched_give_the_reference_ids_for_any_chunk_size(driver: Driver, chunk_tokens: int) -> None:
    for slot, case in enumerate(CASES):
        driver.begin(SlotInit(slot, case.prompt_ids))
    before = driver.steps
    first = prefill(driver, {slot: case.prompt_ids for slot, case in enumerate(CASES)}, chunk_tokens)
    longest = max(len(case.prompt_ids) for case in CASES)
    assert driver.steps - before == -(-longest // chunk_tokens)
    outputs = decode(driver, first, 64)
    assert outputs == {slot: case.greedy_ids for slot, case in enumerate(CASES)}


@pytest.mark.parametrize("chunk_tokens", [7, 16])
def test_a_prompt_alone_in_chunks_starts_like_the_reference(driver: Driver, chunk_tokens: int) -> None:
    case = max(CASES, key=lambda case: len(case.prompt_ids))
    assert len(case.prompt_ids) > 2 * chunk_tokens
    driver.begin(SlotInit(0, case.prompt_ids))
    first = prefill(driver, {0: case.prompt_ids}, chunk_tokens)
    assert decode(driver, first, 16)[0] == case.greedy_ids[:16]


def test_prompts_that_arrive_while_others_decode_give_the_reference_ids(driver: Driver) -> None:
    outputs: dict[int, list[int]] = {}
    waiting = [(slot, case) for slot, case in enumerate(CASES)]
    left: list[int] = []
    arriving = -1
    mixed_steps = 0
    while waiting or left or len(outputs[arriving]) < 24:
        if not left and waiting:
            arriving, case = waiting.pop(0)
            driver.begin(SlotInit(arriving, case.prompt_ids))
            left = list(case.prompt_ids)
        chunk, left = left[:7], left[7:]
        feeds = [Feed(slot, [future(slot)]) for slot in outputs]
        mixed_steps += bool(feeds) and len(chunk) > 1
        drawn = driver.run(*feeds, *([Feed(arriving, chunk, sample=not left)] if chunk else []))
        for slot, token in drawn.items():
            outputs.setdefault(slot, []).append(token)
    assert mixed_steps > 5
    for slot, ids in outputs.items():
        assert ids[:64] == CASES[slot].greedy_ids[: len(ids)]


def test_going_on_from_a_prefix_that_another_slot_computed_gives_the_reference_ids(driver: Driver) -> None:
    case = max(CASES, key=lambda case: len(case.prompt_ids))
    driver.begin(SlotInit(0, case.prompt_ids))
    driver.run(Feed(0, case.prompt_ids))
    driver.begin(SlotInit(1, case.prompt_ids))
    driver.share(0, 1, 32)
    first = driver.run(Feed(1, case.prompt_ids[32:]))
    assert decode(driver, first, 64)[1] == case.greedy_ids


def test_logprobs_are_close_to_the_reference(driver: Driver) -> None:
    for slot, case in enumerate(CASES):
        driver.begin(SlotInit(slot, case.prompt_ids, logprobs=5))
    results = driver.results(driver.launch([Feed(slot, case.prompt_ids) for slot, case in enumerate(CASES)]))
    for row, case in enumerate(CASES):
        assert results.top_ids[row, :5].tolist() == case.top5_ids
        assert results.top_logprobs[row, :5].tolist() == pytest.approx(case.top5_logprobs, abs=2e-4)
        assert results.logprobs[row] == results.top_logprobs[row, 0]


@pytest.mark.parametrize("quantization", ["none", "q8"])
def test_b24_in_bfloat16_and_q8_ids_are_the_same_alone_and_batched_in_chunks(
    model_file: Path, quantization: str
) -> None:
    driver = Driver(model_file, num_pages=80, dtype="bfloat16", kernels="compiled", quantization=quantization)
    alone: dict[int, list[int]] = {}
    for slot, case in enumerate(CASES):
        driver.begin(SlotInit(slot, case.prompt_ids))
        alone |= decode(driver, prefill(driver, {slot: case.prompt_ids}, 64), 64)
    for slot, case in enumerate(CASES):
        driver.begin(SlotInit(slot, case.prompt_ids))
    prompts: dict[int, Sequence[int]] = {slot: case.prompt_ids for slot, case in enumerate(CASES)}
    assert decode(driver, prefill(driver, prompts, 7), 64) == alone


@pytest.mark.parametrize(
    ("kernels", "quantization", "least"),
    [("torch", "none", 0.975), ("compiled", "none", 0.98), ("compiled", "q8", 0.98)],
)
def test_bfloat16_and_q8_agree_with_the_reference_on_nearly_every_id(
    model_file: Path, kernels: str, quantization: str, least: float
) -> None:
    driver = Driver(model_file, num_pages=80, dtype="bfloat16", kernels=kernels, quantization=quantization)
    agreed = total = 0
    for slot, case in enumerate(CASES):
        driver.begin(SlotInit(slot, case.prompt_ids))
    drawn = driver.run(*(Feed(slot, case.prompt_ids) for slot, case in enumerate(CASES)))
    for at in range(64):
        agreed += sum(drawn[slot] == case.greedy_ids[at] for slot, case in enumerate(CASES))
        total += len(CASES)
        if at < 63:
            drawn = driver.run(*(Feed(slot, [case.greedy_ids[at]]) for slot, case in enumerate(CASES)))
    # The reference's own ids are fed, so that one different id does not count for all after it.
    assert agreed / total >= least

"""What may be drawn, how often, and that a draw depends on nothing but its own row, seed and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.ops.sampling import (
    _first_above,
    best,
    best_log_probabilities,
    draw,
    log_probabilities,
    penalize_,
    top,
    uniform,
)

SEED = 1234


def uniforms(count: int, seed: int = SEED) -> Tensor:
    """Those of one request's outputs."""
    return uniform(np.full(count, seed, np.uint64), np.arange(count))


def drawn(
    logits: Tensor, count: int, *, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> Tensor:
    """`count` draws from one row of logits."""

    def each(value: float) -> Tensor:
        return torch.full((count,), float(value))

    return draw(
        logits.repeat(count, 1),
        uniforms(count),
        each(temperature),
        torch.full((count,), top_k),
        each(top_p),
        each(min_p),
    )


def assert_shares(ids: Tensor, expected: Tensor) -> None:
    """How often each id was drawn is within five standard deviations of its probability, and never where that is 0."""
    counts = torch.bincount(ids, minlength=len(expected)).double()
    spread = (len(ids) * expected * (1 - expected)).sqrt()
    assert (counts[expected == 0] == 0).all()
    assert ((counts - len(ids) * expected).abs() <= 5 * spread + 1e-9).all()


LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0, 2.5, -4.0])


def filtered(logits: Tensor, keep: list[int]) -> Tensor:
    kept = torch.full_like(logits, -math.inf)
    kept[keep] = logits[keep]
    return kept.double().softmax(0)


def test_ids_are_drawn_as_often_as_their_probability_says() -> None:
    assert_shares(drawn(LOGITS, 40_000), LOGITS.double().softmax(0))


@pytest.mark.parametrize("temperature", [0.3, 2.0, 1e-6])
def test_temperature_sharpens_and_flattens(temperature: float) -> None:
    assert_shares(drawn(LOGITS, 20_000, temperature=temperature), (LOGITS.double() / temperature).softmax(0))


def test_top_k_keeps_the_k_best() -> None:
    assert_shares(drawn(LOGITS, 20_000, top_k=3), filtered(LOGITS, [0, 3, 5]))


def test_top_k_keeps_all_that_are_equal_to_the_last_one() -> None:
    logits = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0])
    assert_shares(drawn(logits, 20_000, top_k=2), filtered(logits, [0, 2, 3, 4]))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert LOGITS.softmax(0)[[3, 5]].sum() < 0.8 < LOGITS.softmax(0)[[3, 5, 0]].sum()
    assert_shares(drawn(LOGITS, 20_000, top_p=0.8), filtered(LOGITS, [0, 3, 5]))


def test_top_p_of_nothing_keeps_the_best() -> None:
    assert set(drawn(LOGITS, 100, top_p=0.0).tolist()) == {3}


def test_top_p_counts_shares_of_what_top_k_left() -> None:
    # Of the best two, the first has 0.62: enough for 0.6, though it is only 0.47 of all.
    assert set(drawn(LOGITS, 1000, top_k=2, top_p=0.6).tolist()) == {3}


def test_top_p_is_measured_after_the_temperature() -> None:
    assert set(drawn(LOGITS, 1000, temperature=0.25, top_p=0.8).tolist()) == {3}


def test_min_p_drops_what_is_far_less_likely_than_the_best() -> None:
    assert_shares(drawn(LOGITS, 20_000, min_p=0.2), filtered(LOGITS, [0, 3, 5]))


@pytest.mark.parametrize("top_p", [0.5, 0.999, 0.9999999])
def test_top_p_cuts_a_flat_distribution_of_many_ids_where_it_should(top_p: float) -> None:
    logits = torch.linspace(0, 1, 1280)
    shares = logits.double().softmax(0)
    keep = int((shares.sort(descending=True).values.cumsum(0) < top_p).sum()) + 1
    ids = drawn(logits, 5000, top_p=top_p)
    # Sums are rounded: an id at the edge may fall to either side.
    assert abs(len(logits) - keep - int(ids.min())) < 10
    assert int(ids.min()) >= len(logits) - keep - 1


def test_rows_with_different_parameters_do_not_disturb_each_other() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((6, 777), generator=generator) * 4
    parameters = (
        uniforms(6),
        torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 0.7]),
        torch.tensor([0, 5, 0, 40, 0, 776]),
        torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 0.3]),
        torch.tensor([0.0, 0.0, 0.0, 0.1, 0.4, 0.0]),
    )
    together = draw(logits.clone(), *parameters)
    for row in range(6):
        alone = draw(logits[row : row + 1].clone(), *(part[row : row + 1] for part in parameters))
        assert alone[0] == together[row]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.floats(0, 1), st.integers(0, 5), st.floats(0, 1))
def test_no_draw_is_ever_of_an_id_without_probability(
    vocab: int, seed: int, top_p: float, top_k: int, uniform_value: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal((3, vocab)).astype(np.float32) * 30)
    logits[torch.from_numpy(rng.random((3, vocab)) < 0.5)] = -math.inf
    logits[:, int(rng.integers(vocab))] = 5.0
    each = torch.ones(3)
    # The largest float64 below 1 included.
    points = torch.tensor([0.0, min(uniform_value, 1 - 2**-53), 1 - 2**-53], dtype=torch.float64)
    ids = draw(logits.clone(), points, each, torch.full((3,), top_k), each * top_p, each * 0)
    assert torch.isfinite(logits.gather(1, ids[:, None])).all()


def test_a_target_that_was_rounded_up_to_the_sum_picks_the_last_id_with_weight() -> None:
    sums = torch.tensor([[0.0, 1.0, 3.0, 3.0], [0.0, 0.0, 2.0, 4.0]], dtype=torch.float64)
    assert _first_above(sums, torch.tensor([3.0, 5.0], dtype=torch.float64)).tolist() == [2, 3]


def test_uniform_numbers_are_a_pure_function_of_seed_position_and_draw() -> None:
    seeds = np.array([1, 2, 1 << 63, (1 << 64) - 1], np.uint64)
    first = uniform(seeds, np.array([0, 5, 7, 100_000]))
    assert first.tolist() == uniform(seeds, np.array([0, 5, 7, 100_000])).tolist()
    assert first[1] == uniform(seeds[1:2], np.array([5]))[0]
    assert len({*first.tolist(), *uniform(seeds, np.array([1, 6, 8, 0])).tolist()}) == 8
    assert not (first == uniform(seeds, np.array([0, 5, 7, 100_000]), draw=1)).any()


@pytest.mark.parametrize("over", ["positions", "seeds", "draws"])
def test_uniform_numbers_are_evenly_spread_and_do_not_follow_each_other(over: str) -> None:
    count = 50_000
    steps = np.arange(count)
    match over:
        case "positions":
            values = uniforms(count)
        case "seeds":
            values = uniform(steps.astype(np.uint64), np.zeros(count, np.int64))
        case _:
            values = torch.cat([uniform(np.array([SEED], np.uint64), np.array([3]), draw) for draw in range(2000)])
    assert values.min() >= 0 and values.max() < 1
    counts = torch.histc(values.float(), 20, 0, 1)
    assert ((counts - len(values) / 20).abs() < 5 * math.sqrt(len(values) / 20)).all()
    following = torch.corrcoef(torch.stack((values[:-1], values[1:])))[0, 1]
    assert abs(following) < 5 / math.sqrt(len(values))


def test_the_lowest_of_equally_good_ids_is_the_best() -> None:
    logits = torch.zeros((2, 300))
    logits[0, [70, 200]] = 4.0
    logits[1, [130, 140]] = 4.0
    values, ids = best(logits)
    assert ids.tolist() == [70, 130]
    assert values.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_logit_shows_in_the_best_value_of_its_row_alone(bad: float) -> None:
    logits = torch.zeros((3, 200))
    logits[1, 150] = bad
    values, _ = best(logits)
    assert torch.isfinite(values).tolist() == [True, False, True]


def test_a_row_with_nothing_left_has_no_finite_best() -> None:
    values, _ = best(torch.full((1, 70), -math.inf))
    assert not torch.isfinite(values[0])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 1000))
def test_top_finds_what_topk_finds(vocab: int, count: int, seed: int) -> None:
    count = min(count, vocab)
    values = torch.from_numpy(np.random.default_rng(seed).permutation(3 * vocab).astype(np.float32)).view(3, vocab)
    expected = values.topk(count, dim=-1)
    found, ids = top(values, count)
    assert found.equal(expected.values)
    assert ids.equal(expected.indices)


def test_log_probabilities_are_those_of_softmax() -> None:
    logits = torch.randn((4, 500), generator=torch.Generator().manual_seed(0)) * 5
    expected = logits.double().log_softmax(-1)
    ids = torch.tensor([0, 499, 7, 7])
    torch.testing.assert_close(
        log_probabilities(logits, ids).double(), expected.gather(1, ids[:, None])[:, 0], atol=1e-5, rtol=0
    )
    top_ids, top_values = best_log_probabilities(logits, 20)
    torch.testing.assert_close(top_values.double(), expected.topk(20).values, atol=1e-5, rtol=0)
    assert top_ids.equal(logits.topk(20).indices)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    logits = torch.tensor([4.0, -4.0, 4.0, -4.0, 1.0])
    prompt = torch.tensor([True, False, False, False, False])
    outputs = torch.tensor([0, 2, 1, 0, 0], dtype=torch.int32)
    penalize_(logits, prompt, outputs, 2.0, 0.0, 0.0)
    assert logits.tolist() == [2.0, -8.0, 2.0, -4.0, 1.0]


def test_frequency_and_presence_penalties_count_outputs_only() -> None:
    logits = torch.ones(4)
    prompt = torch.tensor([True, False, True, False])
    outputs = torch.tensor([0, 3, 1, 0], dtype=torch.int32)
    penalize_(logits, prompt, outputs, 1.0, 0.5, 0.25)
    assert logits.tolist() == [1.0, 1 - 3 * 0.5 - 0.25, 1 - 0.5 - 0.25, 1.0]

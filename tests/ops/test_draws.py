"""The compiled choice of ids is the reference's, id for id."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.sampling import MIN_P, PARAMETERS, TEMPERATURE, TOP_K, TOP_P, UNIFORM, choose
from headrace.ops.simd.draws import Chooser

ROWS = 24


def parameters(temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> NDArray[np.float64]:
    """The same for all rows, but for what each draws."""
    made = np.zeros((ROWS, PARAMETERS))
    made[:, UNIFORM] = np.random.default_rng(top_k).random(ROWS)
    made[:, UNIFORM][:2] = 0, 1 - 2**-53
    made[:, TOP_K] = top_k
    for column, value in ((TEMPERATURE, temperature), (TOP_P, top_p), (MIN_P, min_p)):
        made[:, column] = np.float32(value)
    return made


def rows(vocab: int, spread: float, seed: int = 0) -> Tensor:
    return torch.randn((ROWS, vocab), generator=torch.Generator().manual_seed(seed)) * spread


def assert_the_same(logits: Tensor, of: NDArray[np.float64]) -> None:
    usable, ids = Chooser(logits.shape[1])(logits.clone(), of)
    expected_usable, expected = choose(logits.clone(), of)
    assert usable.tolist() == expected_usable.tolist()
    assert ids.tolist() == expected.tolist()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 15, 64, 100, 3000]),
    st.sampled_from([0.01, 1.0, 5.0, 60.0]),
    st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 40, 99, 5000]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-6, 1 - 1e-7]),
    st.sampled_from([0.0, 0.05, 1.0]),
)
@example(49_152, 3.0, 0.8, 50, 0.95, 0.0)
@example(49_152, 0.1, 1.0, 0, 0.95, 0.0)
@example(100, 60.0, 1.0, 0, 1.0, 0.0)
@example(15, 60.0, 1.0, 0, 1.0, 0.0)  # a share of 0 of weights that are subnormal
def test_any_parameters_choose_as_the_reference_does(
    vocab: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    of = parameters(temperature, top_k, top_p, min_p)
    if spread > 5:
        # Weights of 1e-10 and 1e-13 of the whole stand at its end: which of them the last share of all meets is decided
        # by the last bit of the largest, in which two exponentials may differ.
        of[1, UNIFORM] = 1 - 2**-20
    assert_the_same(rows(vocab, spread), of)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 37, 99])
def test_a_row_with_a_nan_or_an_infinity_is_told_from_one_with_a_ban(
    temperature: float, value: float, place: int
) -> None:
    logits = rows(100, 2.0)
    logits[3, place] = value
    assert_the_same(logits, parameters(temperature))


def test_a_row_in_which_everything_is_banned_is_not_usable() -> None:
    logits = rows(100, 2.0)
    logits[5] = -math.inf
    usable, _ = Chooser(100)(logits, parameters(1.0))
    assert usable.tolist() == [row != 5 for row in range(ROWS)]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-6])
def test_what_is_banned_is_never_chosen(temperature: float) -> None:
    logits = rows(200, 0.0)
    logits[:, :150] = -math.inf
    _, ids = Chooser(200)(logits.clone(), parameters(temperature))
    assert ids.min() >= 150
    assert_the_same(logits, parameters(temperature))


@pytest.mark.parametrize("top_k", [1, 3, 5, 6])
def test_ids_of_equal_logits_stay_or_go_together(top_k: int) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0]).repeat(ROWS, 1)
    assert_the_same(logits, parameters(5.0, top_k))


def test_the_first_of_the_best_is_chosen() -> None:
    logits = torch.zeros((ROWS, 300))
    logits[:, [77, 130, 299]] = 4.0
    assert Chooser(300)(logits, parameters(0.0))[1].tolist() == [77] * ROWS


def test_rows_may_lie_apart_and_do_not_see_each_other() -> None:
    of = parameters(1.0, 40, 0.9)
    apart = torch.full((ROWS, 400), math.nan)
    apart[:, :130] = rows(130, 3.0)
    together = Chooser(130)(apart[:, :130], of)[1]
    chooser = Chooser(130)
    alone = [chooser(apart[row : row + 1, :130], of[row : row + 1])[1][0] for row in range(ROWS)]
    assert together.tolist() == alone
    assert_the_same(apart[:, :130], of)

"""Weights in groups are the file's own numbers where it has 4 or 8 bits, and close to them elsewhere."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.ops.weights.groups import GROUP, Groups, groups_of, rounded, stacked

SHAPE = (5, 96)
BITS = {"Q4_0": 4, "Q4_1": 4}
EXACT = ("Q4_0", "Q4_1", "Q8_0")


def values(groups: Groups) -> Tensor:
    _, codes, scales, minimums = groups
    whole = codes.view(len(codes), -1, GROUP).double() * scales.unsqueeze(-1) + minimums.unsqueeze(-1)
    return whole.view(len(codes), -1)


def stored(kind: str) -> tuple[Groups, Tensor]:
    """Random weights of a kind, in groups, and as the `gguf` package reads them."""
    of = gguf.GGMLQuantizationType[kind]
    data = gguf.quantize(np.random.default_rng(3).standard_normal(SHAPE, dtype=np.float32), of)
    return groups_of(kind, memoryview(data.tobytes()), SHAPE), torch.from_numpy(gguf.dequantize(data, of)).double()


@pytest.mark.parametrize("kind", [*EXACT, "F32", "F16", "BF16"])
def test_each_kind_keeps_its_numbers(kind: str) -> None:
    groups, expected = stored(kind)
    assert groups.bits == BITS.get(kind, 8) and int(groups.codes.max()) < 1 << groups.bits
    # Half a step of 8 bits; the file's own numbers to the last digits of a float32.
    step = expected.view(len(expected), -1, GROUP).abs().amax() / 127
    torch.testing.assert_close(values(groups), expected, rtol=0, atol=1e-6 if kind in EXACT else float(step) * 0.501)


def test_a_group_of_zeros_stays_zero() -> None:
    assert not values(rounded(torch.zeros(2, 64))).any()


def test_parts_of_4_and_8_bits_stand_in_one_matrix_of_8() -> None:
    (few, of_few), (many, of_many) = stored("Q4_1"), stored("Q8_0")
    both = stacked([few, many])
    assert both.bits == 8
    torch.testing.assert_close(values(both), torch.cat((of_few, of_many)), rtol=0, atol=1e-6)


def test_rows_are_taken_in_any_order_and_minus_one_is_a_row_of_zeros() -> None:
    groups, expected = stored("Q4_1")
    taken = values(groups.rows(torch.tensor([2, -1, 0])))
    torch.testing.assert_close(
        taken, torch.stack((expected[2], torch.zeros(96).double(), expected[0])), rtol=0, atol=1e-6
    )

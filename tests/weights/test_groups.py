"""Weights in groups are the file's own numbers where it has them in groups of 32, and close to them elsewhere."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.ops.weights.groups import GROUP, Groups, groups_of, rounded, stacked

SHAPE = (5, 96)
BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4}
EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
BLOCKS_OF_256 = ("Q4_K", "Q5_K")


def values(groups: Groups) -> Tensor:
    _, codes, scales, minimums = groups
    whole = codes.view(len(codes), -1, GROUP).double() * scales.unsqueeze(-1) + minimums.unsqueeze(-1)
    return whole.view(len(codes), -1)


def stored(kind: str) -> tuple[Groups, Tensor]:
    """Random weights of a kind, in groups, and as the `gguf` package reads them."""
    of = gguf.GGMLQuantizationType[kind]
    data = gguf.quantize(np.random.default_rng(3).standard_normal(SHAPE, dtype=np.float32), of)
    return groups_of(kind, memoryview(data.tobytes()), SHAPE), torch.from_numpy(gguf.dequantize(data, of)).double()


def drawn(kind: str) -> tuple[Groups, Tensor]:
    """Random blocks, all codes and scales among them: the package writes no blocks of these kinds."""
    of, shape = gguf.GGMLQuantizationType[kind], (6, 768)
    random, (_, block_bytes) = np.random.default_rng(5), gguf.GGML_QUANT_SIZES[of]
    blocks = random.integers(0, 256, (*shape[:1], shape[1] // 256, block_bytes), np.uint8)
    blocks[..., :4] = random.uniform(1e-4, 1e-2, (*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
    data = blocks.reshape(shape[0], -1)
    return groups_of(kind, memoryview(data.tobytes()), shape), torch.from_numpy(gguf.dequantize(data, of)).double()


@pytest.mark.parametrize("kind", BLOCKS_OF_256)
def test_blocks_of_eight_groups_keep_their_numbers(kind: str) -> None:
    groups, expected = drawn(kind)
    assert groups.bits == BITS.get(kind, 8)
    assert sorted(set(groups.codes.flatten().tolist())) == list(range(16 if kind == "Q4_K" else 32))
    torch.testing.assert_close(values(groups), expected, rtol=1e-6, atol=1e-6)


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

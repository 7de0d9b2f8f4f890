"""Packed weights multiply like plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops.linear import Linear, PlainLinear, pack_linear
from headrace.ops.output import OutputProjection


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pack", [pack_linear, PlainLinear])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_every_packing_multiplies_like_the_weight(
    dtype: torch.dtype, pack: Callable[[Tensor], Linear], rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn((70, 33), generator=generator).to(dtype)
    x = torch.randn((rows, 33), generator=generator).to(dtype)
    expected = F.linear(x.double(), weight.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(pack(weight)(x).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("vocab", [50, 3000])
def test_the_best_logits_of_a_bfloat16_model_are_not_rounded(vocab: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((vocab, 64), generator=generator).bfloat16()
    hidden = (3 * torch.randn((5, 64), generator=generator)).bfloat16()
    exact = hidden.double() @ weight.double().T
    logits = OutputProjection(weight)(hidden)
    assert logits.dtype == torch.float32
    best = exact.topk(20).indices
    torch.testing.assert_close(logits.gather(1, best).double(), exact.gather(1, best), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits.double(), exact, atol=0.3, rtol=0)

"""Which of an operation's two texts runs: the Triton kernel, or the torch reference beside it.

Tensors of a GPU go to the kernel. Tensors of a CPU go to the reference, unless the process was started with
`TRITON_INTERPRET=1`: then triton runs the kernel in numpy, slow and without a GPU, which is how tests read it.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: Final[bool] = triton.knobs.runtime.interpret
"""Read when the kernels are made, as triton does."""

WIDEN: Final = tl.constexpr(INTERPRETED)
"""Whether operands of a product are made float32 first: the interpreter multiplies the bits of bfloat16 as integers."""


def launches(tensor: Tensor) -> bool:
    """Whether the kernel runs on this tensor, not the reference. (Tensors without memory, "meta", compile it.)"""
    return tensor.device.type != "cpu" or INTERPRETED


def ceil_div(size: int, part: int) -> int:
    """How many parts hold it."""
    return -(-size // part)


def power_of_two(size: int) -> int:
    """The least one that is not smaller: a tile's sizes must be."""
    return 1 << (size - 1).bit_length()

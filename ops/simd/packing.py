"""Weights in the form that tiles read: panels of 16 columns, lanes of four bytes along the sum.

    F32, BF16  [out / 16, in / lane, 16, lane]           lane: 1 float32 or 2 bfloat16
    Q8         [out / 16, in / 32, 8 · 16 · 4 + 16 · 4]  bytes: 8 lanes of 16 columns, then 16 float32 scales

Both sides are filled up with zeros: `out` to a whole tile of 64, `in` to a whole group of 32.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops.simd.inputs import GROUP
from headrace.ops.simd.instructions import LANES
from headrace.ops.simd.tiles import Q8_WEIGHT_BYTES, TILE_COLUMNS
from headrace.ops.simd.vector import LANE_BYTES

_Q8_ZERO: Final = 128
_Q8_PASS_BYTES: Final = 1 << 20
"""Of float32 weights that are quantized at a time: they stay in the cache through all passes."""


def round_up(count: int, to: int) -> int:
    return -(-count // to) * to


def pack(weight: Tensor) -> Tensor:
    """float32 or bfloat16 `[out, in]` → packed, in the same dtype."""
    weight = _filled(weight)
    lane = LANE_BYTES // weight.element_size()
    return weight.view(len(weight) // LANES, LANES, -1, lane).permute(0, 2, 1, 3).contiguous()


def quantize(weight: Tensor) -> Tensor:
    """float32 or bfloat16 `[out, in]` → Q8: each group of 32 of a row by its largest magnitude, to -127 .. 127."""
    rows = max(TILE_COLUMNS, _Q8_PASS_BYTES // (weight.shape[1] * 4) // TILE_COLUMNS * TILE_COLUMNS)
    return torch.cat([_quantized(_filled(part.float())) for part in torch.split(weight, rows)])


def paired(gate: Tensor, up: Tensor) -> Tensor:
    """Two `[out, in]` → one, whose tiles of 64 rows hold 32 rows of gate and the same of up."""
    short = -len(gate) % GROUP
    halves = [F.pad(weight, (0, 0, 0, short)).view(-1, GROUP, weight.shape[1]) for weight in (gate, up)]
    return torch.cat(halves, dim=1).view(-1, gate.shape[1])


def _filled(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    return F.pad(weight, (0, -columns % GROUP, 0, -rows % TILE_COLUMNS))


def _quantized(weight: Tensor) -> Tensor:
    groups = weight.view(len(weight), -1, GROUP)
    # As the kernel does it with a row (`inputs.store_group`).
    scales = groups.abs().amax(-1) * (1 / 127)
    # A group of zeros has no scale to divide by.
    inverse = torch.where(scales > 0, 1 / scales, 0)
    codes = (groups * inverse.unsqueeze(-1)).round_().add_(_Q8_ZERO).to(torch.uint8)
    panels, groups_per_row = len(weight) // LANES, groups.shape[1]
    packed = torch.empty((panels, groups_per_row, Q8_WEIGHT_BYTES), dtype=torch.uint8)
    lanes = codes.view(panels, LANES, groups_per_row, GROUP // LANE_BYTES, LANE_BYTES).permute(0, 2, 3, 1, 4)
    packed[..., : GROUP * LANES] = lanes.reshape(panels, groups_per_row, -1)
    by_panel = scales.view(panels, LANES, groups_per_row).permute(0, 2, 1).contiguous()
    packed[..., GROUP * LANES :] = by_panel.view(torch.uint8)
    return packed

"""Weights in the form that tiles read: panels of 16 columns, lanes of four bytes along the sum.

    F32, BF16  [out / 16, in / lane, 16, lane]                        lane: 1 float32 or 2 bfloat16
    Q8         [out / 16, in / 32 · planes, 4 · 16 · 4 + 2 · 16 · 4]  bytes: 4 lanes of 16 columns, then their float32
                                                                      scales and their offsets

A lane of Q8 has 8 codes of 4 bits: those of an even place along the sum in its low half, of an odd one in its high.
Codes of 8 bits are two planes of a group, the high halves first. `q8` reads a code as 16 + code, so an offset is the
group's minimum - 16 · scale. For AMX codes lie as `amx_q8` has them. Both sides are filled up with zeros: `out` to a
whole tile of 64, `in` to a whole group of 32.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops.simd.amx_q8 import EIGHT_BITS_BYTES, FOUR_BITS_BYTES
from headrace.ops.simd.inputs import GROUP
from headrace.ops.simd.instructions import LANES
from headrace.ops.simd.q8 import Q8_WEIGHT_BYTES
from headrace.ops.simd.target import AMX
from headrace.ops.simd.tiles import TILE_COLUMNS
from headrace.ops.simd.vector import LANE_BYTES
from headrace.ops.weights.groups import Groups

_Q8_PASS_ROWS: Final = 16 * TILE_COLUMNS
"""Rows that are packed at a time: they stay in the cache through all passes."""


def round_up(count: int, to: int) -> int:
    return -(-count // to) * to


def pack(weight: Tensor) -> Tensor:
    """float32 or bfloat16 `[out, in]` → packed, in the same dtype."""
    weight = _filled(weight)
    lane = LANE_BYTES // weight.element_size()
    return weight.view(len(weight) // LANES, LANES, -1, lane).permute(0, 2, 1, 3).contiguous()


def group_bytes(bits: int) -> int:
    """Of 32 places of a panel, in codes of so many bits."""
    if AMX:
        return FOUR_BITS_BYTES if bits == 4 else EIGHT_BITS_BYTES
    return bits // 4 * Q8_WEIGHT_BYTES


def pack_groups(weight: Groups) -> Tensor:
    """Groups `[out, in]` → Q8, uint8 `[out / 16, groups, bytes]`."""
    rows = torch.arange(round_up(len(weight.codes), TILE_COLUMNS))
    rows = torch.where(rows < len(weight.codes), rows, -1)
    groups, pack_rows = weight.codes.shape[1] // GROUP, _pack_for_tiles if AMX else _pack_planes
    packed = torch.empty((len(rows) // LANES, groups, group_bytes(weight.bits)), dtype=torch.uint8)
    for start in range(0, len(rows), _Q8_PASS_ROWS):
        end = start + _Q8_PASS_ROWS
        whole = end <= len(weight.codes)
        part = Groups(weight.bits, *(of[start:end] for of in weight[1:])) if whole else weight.rows(rows[start:end])
        pack_rows(part, packed[start // LANES :])
    return packed


def _pack_for_tiles(weight: Groups, into: Tensor) -> None:
    panels, groups = len(weight.codes) // LANES, weight.scales.shape[1]
    here = into[:panels]
    if weight.bits == 4:
        # [panels, half of the columns, column, group, half of the rows, quarter, row, place]
        parts = weight.codes.view(panels, 2, 8, groups, 2, 2, 4, 2)
        pairs = parts[:, :, :, :, 0] | parts[:, :, :, :, 1] << 4
        codes = pairs.permute(0, 3, 4, 1, 2, 6, 5)
    else:
        codes = weight.codes.view(panels, LANES, groups, GROUP // 2, 2).permute(0, 2, 3, 1, 4)
    codes = codes.reshape(panels, groups, -1)
    here[..., : codes.shape[-1]] = codes
    numbers = torch.stack((weight.scales, weight.minimums)).view(2, panels, LANES, groups).permute(1, 3, 0, 2)
    here[..., codes.shape[-1] :] = numbers.reshape(panels, groups, -1).contiguous().view(torch.uint8)


def _pack_planes(weight: Groups, into: Tensor) -> None:
    codes, scales, minimums = weight.codes, weight.scales, weight.minimums
    planes = [(codes, scales, minimums)]
    if weight.bits == 8:
        planes = [(codes >> 4, scales * 16, minimums), (codes & 15, scales, torch.zeros_like(minimums))]
    panels, groups = len(codes) // LANES, scales.shape[1]
    of_planes = into[:panels].view(panels, groups * len(planes), Q8_WEIGHT_BYTES)
    for number, (plane, scale, minimum) in enumerate(planes):
        here = of_planes[:, number :: len(planes)]
        # [panels, column, group, lane, byte of a half, half of a byte, half of the lane]: an even and an odd place lie
        # in the halves of a lane.
        parts = plane.view(panels, LANES, groups, 4, 2, 2, 2)
        pairs = parts[..., 0, :] | parts[..., 1, :] << 4
        here[..., : GROUP // 2 * LANES] = pairs.permute(0, 2, 3, 1, 5, 4).reshape(panels, groups, -1)
        numbers = torch.stack((scale, minimum - 16 * scale)).view(2, panels, LANES, groups).permute(1, 3, 0, 2)
        here[..., GROUP // 2 * LANES :] = numbers.reshape(panels, groups, -1).contiguous().view(torch.uint8)


def paired_rows(width: int) -> Tensor:
    """Which rows of gate `[width, in]` with up below it stand where, so that tiles of 64 rows hold 32 of gate and the
    same of up; -1: none."""
    gate = torch.arange(round_up(width, GROUP))
    gate = torch.where(gate < width, gate, -1)
    up = torch.where(gate < 0, -1, gate + width)
    return torch.stack((gate.view(-1, GROUP), up.view(-1, GROUP)), dim=1).flatten()


def paired(gate: Tensor, up: Tensor) -> Tensor:
    """Two `[out, in]` → one, whose tiles of 64 rows hold 32 rows of gate and the same of up."""
    short = -len(gate) % GROUP
    halves = [F.pad(weight, (0, 0, 0, short)).view(-1, GROUP, weight.shape[1]) for weight in (gate, up)]
    return torch.cat(halves, dim=1).view(-1, gate.shape[1])


def _filled(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    return F.pad(weight, (0, -columns % GROUP, 0, -rows % TILE_COLUMNS))

"""Every kernel against its reference: the launcher on the card's tensors, and the same launcher on a CPU's.

On tensors of a CPU a launcher runs its reference; in a dry run, where both are there, the reference is asked for.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from gpu.cases import Case, copy_cases, layer_cases, sampling_cases
from gpu.report import Report
from gpu.timing import Device
from torch import Tensor

from headrace.ops.triton import dispatch

TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Absolute and relative. float32 products are three of TF32, sums are made in another order."""


def run(report: Report, options: argparse.Namespace) -> None:
    """All but attention's."""
    compare_all(report, Device(options.dry), layer_cases, copy_cases, sampling_cases)


def compare_all(report: Report, device: Device, *groups: Callable[[Device], Iterator[Case]]) -> None:
    """A case that raises fails, and the next one runs; after an error of the card itself none of them can."""
    torch.manual_seed(1)
    for cases in groups:
        for case in cases(device):
            try:
                report.check(case.name, *compared(case, device))
            except Exception as problem:
                traceback.print_exc()
                report.check(case.name, False, f"{type(problem).__name__}: {problem}"[:200])


def compared(case: Case, device: Device) -> tuple[bool, str]:
    """Whether all that the kernel wrote is what the reference writes, and the greatest difference."""
    placed = {name: placed_on(device, tensor, name in case.pinned) for name, tensor in case.tensors.items()}
    case.call(placed)
    device.wait()
    expected = {name: tensor.clone() for name, tensor in case.tensors.items()}
    with references():
        case.call(expected)
    worst, holds = 0.0, True
    for name in case.outputs:
        ours, theirs = placed[name].cpu(), expected[name]
        if not ours.is_floating_point():
            holds &= bool(torch.equal(ours, theirs))
            continue
        tolerance = TOLERANCE[ours.dtype]
        same = torch.isclose(ours.float(), theirs.float(), atol=tolerance, rtol=tolerance, equal_nan=True)
        holds &= bool(same.all())
        apart = (ours.float() - theirs.float()).abs().nan_to_num(0.0, posinf=0.0)
        worst = max(worst, float(apart.max()) if apart.numel() else 0.0)
    return holds, f"apart by {worst:.1e} at most"


def placed_on(device: Device, tensor: Tensor, pinned: bool) -> Tensor:
    """A copy where the kernel will look for it, with the same strides."""
    if pinned and not device.dry:
        return tensor.clone().pin_memory()
    if tensor.is_contiguous():
        return tensor.to(device.torch, copy=True)
    # A view of something wider keeps its strides, or kernels would only see what is dense.
    wide = torch.zeros(tensor.shape[0], tensor.stride(0), dtype=tensor.dtype, device=device.torch)
    view = wide.as_strided(tensor.shape, tensor.stride())
    view.copy_(tensor)
    return view


@contextmanager
def references() -> Iterator[None]:
    """Launchers run their references on tensors of a CPU."""
    interpreted, dispatch.INTERPRETED = dispatch.INTERPRETED, False  # type: ignore[misc]
    try:
        yield
    finally:
        dispatch.INTERPRETED = interpreted  # type: ignore[misc]

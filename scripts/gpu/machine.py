"""The card, and the ceilings that figures of other parts are read against."""

from __future__ import annotations

import argparse
import platform

from gpu.report import Report
from gpu.timing import Ceilings, Device


def run(report: Report, options: argparse.Namespace) -> None:
    """Facts first, so that they are there whatever else fails."""
    import torch
    import triton

    device = Device(options.dry)
    report.fact("card", device.name)
    if not device.dry:
        properties = torch.cuda.get_device_properties(0)
        report.fact("compute capability", f"{properties.major}.{properties.minor}")
        report.fact("memory", f"{properties.total_memory / 2**30:.0f} GiB")
        report.fact("multiprocessors", str(properties.multi_processor_count))
        from headrace.ops.cuda.card import card_problem

        problem = card_problem()
        report.check("the card can be used", not problem, problem)
    report.fact("torch", torch.__version__)
    report.fact("triton", triton.__version__)
    report.fact("python", platform.python_version())
    ceilings = Ceilings.measured(device)
    report.figure("copy on the card, bytes read and written", ceilings.bytes_s / 1e9, "GB/s")
    report.figure("product of matrices, bfloat16", ceilings.flops / 1e12, "TFLOP/s")

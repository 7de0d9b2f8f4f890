"""The kernels of attention against their reference."""

from __future__ import annotations

import argparse

from gpu.cases import attention_cases
from gpu.kernels import compare_all
from gpu.report import Report
from gpu.timing import Device


def run(report: Report, options: argparse.Namespace) -> None:
    """All shapes, decode and extend."""
    compare_all(report, Device(options.dry), attention_cases)

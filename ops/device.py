"""The CPU as a device: its name, its threads, and how it hands out memory for activations."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

import torch

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""The largest that glibc accepts."""
_TRIM_THRESHOLD_BYTES: Final = 512 << 20


def prepare_cpu(threads: int) -> None:
    """Set the number of compute threads and keep freed activations in the process.

    glibc maps every block over 128 KiB afresh and gives it back when freed; each of its pages then faults once per
    operation: 4 ms for 12 MB, which is one activation of a prefill chunk. Other C libraries are left as they are.
    """
    torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def device_name(threads: int) -> str:
    """What a person would call this CPU, and how many threads compute on it."""
    return f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    # Arm kernels name no model there.
    return f"{platform.machine()} CPU"

"""How a CPU multiplies bfloat16. Each way has an order of sums and roundings of its own: KV pages that were computed in
one of them are no other's, also where a disk tier has moved to another machine.

    amx      AMX tiles: even and odd places of 32 apart (`simd.amx`)
    avx512   `vdpbf16ps`: pairs
    fma      multiplications of float32, one after the other: all other CPUs, of whatever make

In float32 all CPUs do the same.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Set
from typing import Final, Literal, TypeAlias

Dot: TypeAlias = Literal["amx", "avx512", "fma"]

_SYSCALL_ARCH_PRCTL: Final = 158
_GET_SUPPORTED: Final = 0x1021
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18
"""The part of a thread's state that tiles are."""


def dot_of(features: Set[str], tiles: bool) -> Dot:
    """By what the CPU has, in the words of /proc/cpuinfo or of LLVM, and whether the kernel gives tiles to anybody."""
    words = {feature.replace("_", "").replace("-", "") for feature in features}
    if tiles and words >= {"amxtile", "amxbf16", "avx512bf16"}:
        return "amx"
    return "avx512" if "avx512bf16" in words else "fma"


def kernel_has_tiles() -> bool:
    """Whether Linux (5.16 or later) can keep the tiles of threads, and so gives them to those who ask."""
    if platform.machine() != "x86_64":
        return False
    supported = ctypes.c_uint64()
    return _arch_prctl(_GET_SUPPORTED, ctypes.addressof(supported)) == 0 and bool(supported.value >> _TILE_DATA & 1)


def ask_for_tiles() -> str:
    """Ask the kernel for tiles, for all threads of this process → why not, or nothing. Only on x86-64."""
    error = _arch_prctl(_REQUEST_PERMISSION, _TILE_DATA)
    return os.strerror(error) if error else ""


def _arch_prctl(operation: int, argument: int) -> int:
    """→ the error's number, or 0."""
    library = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_long(value) for value in (_SYSCALL_ARCH_PRCTL, operation, argument)]
    return 0 if library.syscall(*arguments) == 0 else ctypes.get_errno()

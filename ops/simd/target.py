"""Which CPU the kernels are compiled for: this one, unless numba was told otherwise, less what its kernel refuses.

Tiles (AMX) are 8 kB of registers that Linux gives a process only when asked. It is asked here, once, when this module
is imported: that is before anything is compiled and before the first thread of a team begins, and threads inherit the
permission.
"""

from __future__ import annotations

import functools
import logging
import platform
from typing import Final

import numba
from numba.core import codegen

from headrace.ops.dot import Dot, ask_for_tiles, dot_of

_log: Final = logging.getLogger("headrace.worker")
_TILE_FEATURES: Final = frozenset({"amx-tile", "amx-bf16"})


@functools.cache
def host_features() -> frozenset[str]:
    """LLVM's names of the features that code is compiled for. Tiles are among them only where they may be used."""
    flags = codegen.get_host_cpu_features() if numba.config.CPU_FEATURES is None else numba.config.CPU_FEATURES
    features = frozenset(flag[1:] for flag in flags.split(",") if flag.startswith("+"))
    if platform.machine() != "x86_64" or dot_of(features, True) != "amx":
        return features - _TILE_FEATURES
    refused = ask_for_tiles()
    if refused:
        _log.warning("this CPU has AMX, but the kernel does not let us use it (%s): AVX-512 is used instead", refused)
        return features - _TILE_FEATURES
    return features


DOT: Final[Dot] = dot_of(host_features(), True)
"""How bfloat16 is multiplied."""
AMX: Final = DOT == "amx"
"""In tiles."""
WIDE: Final = "avx512f" in host_features()
"""32 registers of a whole vector; elsewhere a vector takes 2 of 16 registers (AVX2), or 4 of 32 (NEON)."""

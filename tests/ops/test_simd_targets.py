"""The kernels are right as code for other CPUs, too: whatever this one understands is tried.

numba compiles for another CPU if its environment says so; each target is a process of its own, in which the tests of
`test_simd.py` and of exact rows run once more.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

AVX512 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
TARGETS = {
    # No SIMD that LLVM would not have to make up: what any 64-bit CPU runs.
    "generic": ("generic", ""),
    "avx2": ("x86-64-v3", "+avx,+avx2,+fma,+f16c,+bmi,+bmi2"),
    "avx512": ("x86-64-v4", f"{AVX512},+avx512bf16"),
    # The host's own target, on an Intel CPU that has it.
    "amx": ("sapphirerapids", f"{AVX512},+avx512bf16,+amx-tile,+amx-bf16"),
}
WANTED_FLAGS = {"generic": "", "avx2": "avx2", "avx512": "avx512_bf16", "amx": "amx_bf16"}
IN_X86 = platform.machine() == "x86_64"


@pytest.mark.parametrize("target", [name for name in TARGETS if IN_X86 or name == "generic"])
def test_the_kernels_are_right_as_code_for(target: str, tmp_path: Path) -> None:
    if WANTED_FLAGS[target] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU does not run code for {target}")
    name, features = TARGETS[target]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "test_simd.py")],
        env={**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]

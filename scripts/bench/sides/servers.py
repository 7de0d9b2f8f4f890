"""The servers that `scripts/bench/peers.py` compares: how each is started, found ready, held still and ended."""

from __future__ import annotations

import ctypes.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final, NamedTuple

from bench.sides.environments import Environment, Unavailable, llama_cpp, run, say

CONTEXT_TOKENS: Final = 4096
CACHE_TOKENS: Final = 32_768
"""Room for 16 conversations that share nothing."""
STREAMS: Final = 32
READY_S: Final = 300.0
SCRIPTS: Final = Path(__file__).resolve().parents[2]


class Launch(NamedTuple):
    """How to start a server; `{port}` stands in the command for the port."""

    name: str
    version: str
    command: Sequence[str]
    environment: Mapping[str, str]
    in_process: Sequence[str]
    """The command that measures the same engine without HTTP."""


class Models(NamedTuple):
    """The default model, as each side reads it."""

    gguf: Path
    folder: Path
    """Of Hugging Face's form, in bfloat16."""
    q8_0: Path


def models(gguf: Path, cache: Path) -> Models:
    """Make the peers' forms of a model file with transformers and gguf, or leave them alone. Raises Unavailable."""
    target = cache / "peers" / "models" / gguf.stem
    made = Models(gguf, target / "bfloat16", target / "q8_0.gguf")
    if not (target / "complete").exists():
        python = Environment("transformers", cache).prepare()
        say(f"Making the peers' forms of {gguf.name} in {target}")
        target.mkdir(parents=True, exist_ok=True)
        run([str(python), "-P", str(SCRIPTS / "bench" / "sides" / "model_files.py"), *map(str, made)])
        (target / "complete").touch()
    return made


def headrace(gguf: Path, quantization: str, threads: int) -> Launch:
    name = "headrace q8" if quantization == "q8" else "headrace bf16"
    flags = [
        *(
            "--model-path",
            str(gguf),
            "--dtype",
            "bfloat16",
            "--quantization",
            quantization,
            "--cpu-kernels",
            "compiled",
        ),
        *("--device", "cpu", "--cpu-threads", str(threads), "--context-length", str(CONTEXT_TOKENS)),
        *("--max-total-tokens", str(CACHE_TOKENS), "--log-level", "warning", "--port", "{port}"),
    ]
    mode = "compiled-q8" if quantization == "q8" else "compiled-bfloat16"
    bench = [sys.executable, "-P", str(SCRIPTS / "bench" / "worker.py"), "--model", str(gguf), "--mode", mode]
    return Launch(
        name,
        "this checkout",
        [sys.executable, "-P", "-m", "headrace.server", "serve", *flags],
        {},
        [*bench, "--threads", str(threads)],
    )


def vllm(models: Models, threads: int, cache: Path) -> Launch:
    """vLLM's CPU build in bfloat16, with the allocator and the OpenMP that its documentation asks for, where they are.
    Raises Unavailable."""
    environment = Environment("vllm", cache)
    python = environment.prepare()
    preloaded = [str(path) for path in sorted(environment.folder.glob("lib/**/libiomp5.so"))[:1]]
    allocator = ctypes.util.find_library("tcmalloc_minimal")
    if allocator is None:
        say("  libtcmalloc_minimal is missing, which vLLM recommends: apt install libtcmalloc-minimal4")
    else:
        preloaded.append(allocator)
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "LD_PRELOAD": " ".join(preloaded),
    }
    sizes = ["--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(2 * STREAMS), "--dtype", "bfloat16"]
    serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(models.folder), *sizes]
    return Launch(
        "vLLM bf16",
        f"vllm-cpu 0.32.0{'' if allocator else ', without tcmalloc'}",
        [str(python), *serve, "--served-model-name", "default", "--host", "127.0.0.1", "--port", "{port}"],
        settings,
        [str(python), str(SCRIPTS / "bench" / "sides" / "vllm_engine.py"), str(models.folder), str(threads)],
    )


def llama_q8_0(models: Models, threads: int, cache: Path) -> Launch:
    """llama.cpp's server with Q8_0 weights. Raises Unavailable."""
    made = llama_cpp(cache)
    shared = ["-m", str(models.q8_0), "-t", str(threads), "-tb", str(threads)]
    sizes = ["-c", str(CACHE_TOKENS), "-np", str(STREAMS), "--kv-unified", "-b", "2048", "-ub", "512"]
    lengths = ["-npp", "128", "-ntg", "128", "-npl", "1,8,32", "--output-format", "jsonl"]
    return Launch(
        "llama.cpp Q8_0",
        _llama_version(made.programs / "llama-server"),
        [str(made.programs / "llama-server"), *shared, *sizes, "--host", "127.0.0.1", "--port", "{port}"],
        {"LD_LIBRARY_PATH": str(made.programs)},
        [str(made.programs / "llama-batched-bench"), *shared, "-c", str(CACHE_TOKENS), *lengths],
    )


def _llama_version(program: Path) -> str:
    where = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
    asked = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60, env=where)
    found = re.search(r"version: (.*)", asked.stdout + asked.stderr)
    if found is None:
        raise Unavailable(f"{program} does not run here: {(asked.stdout + asked.stderr)[-500:]}")
    return f"llama.cpp {found[1]}"


class Server:
    """A server at work, in a process group of its own; held still while another is measured."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.port = _free_port()
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the server)
        command = [part.replace("{port}", str(self.port)) for part in launch.command]
        began_s = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **launch.environment},
            start_new_session=True,
        )
        try:
            self._await_ready()
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - began_s

    def hold(self) -> None:
        """All its processes stand still: an idle server must cost the others nothing."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the group; its children die with it."""
        for name in (signal.SIGCONT, signal.SIGTERM):
            _signal_group(self._process.pid, name)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def said(self) -> str:
        """The end of its log."""
        self._log.seek(0)
        return "".join(self._log.readlines()[-15:])

    def _await_ready(self) -> None:
        """Raises Unavailable."""
        end_s = time.perf_counter() + READY_S
        while time.perf_counter() < end_s:
            if self._process.poll() is not None:
                raise Unavailable(f"{self.launch.name} ended at its start:\n{self.said()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=5):
                    pass
                # llama.cpp lists its model before it is loaded; all three have this one.
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise Unavailable(f"{self.launch.name} was not ready after {READY_S:.0f} s:\n{self.said()}")


def _signal_group(group: int, name: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def at_work(server: Server) -> Iterator[Server]:
    """Let it go on, then hold it again."""
    server.go_on()
    try:
        yield server
    finally:
        server.hold()

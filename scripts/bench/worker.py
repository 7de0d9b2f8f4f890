"""Speed of the device worker's steps, in this process: decode at 1, 8 and 32 streams, prefill of 512 and 2048 tokens.

Nothing of a server takes part, so this is the bound of what a server on this machine can reach. The modes take turns,
step by step, so that what else the machine does falls on all of them; the last column compares each with the first.

    python scripts/bench/worker.py --threads 2 --json worker.json
    python scripts/bench/worker.py --mode torch-bfloat16 --mode compiled-bfloat16 --mode compiled-q8
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import torch

from headrace.ops.backend import DTYPES
from headrace.ops.device import device_name, prepare_cpu
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.compiled_decoder import CompiledDecoder
from headrace.ops.models.model import Model
from headrace.ops.models.registry import load_compiled, load_model
from headrace.ops.sampler import Sampler
from headrace.ops.sampling import choose
from headrace.ops.simd.compiler import Elements, prepare
from headrace.ops.simd.draws import Chooser
from headrace.ops.step import StepRunner
from headrace.ops.streams import in_order_streams
from headrace.ops.warm_up import StepProbe, StepShape
from headrace.ops.wire import GroupShape
from headrace.server.models import DEFAULT_MODEL, ModelProblem, cache_folder, resolve

CONTEXT_TOKENS: Final = 192
STREAMS: Final = (1, 8, 32)
PROMPTS: Final = (512, 2048)
PAGE_TOKENS: Final = 16
SHAPES: Final = [
    *(StepShape(rows, 0, CONTEXT_TOKENS) for rows in STREAMS),
    *(StepShape(0, tokens, 0) for tokens in PROMPTS),
]
MODES: Final = ("torch-float32", "compiled-float32", "torch-bfloat16", "compiled-bfloat16", "compiled-q8")
DEFAULT_MODES: Final = ("torch-bfloat16", "compiled-bfloat16", "compiled-q8")
FEWEST_STEPS: Final = 3


class Speed(msgspec.Struct):
    """One shape in one mode; the spread is from the fastest to the slowest repeat."""

    mode: str
    decode_rows: int
    prefill_tokens: int
    context_tokens: int
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    tokens_per_s: float
    """Of the median step."""
    ratio: float
    """Of the first mode's fastest step to this one's: the steps that were disturbed least."""


class Report(msgspec.Struct):
    device: str
    torch: str
    model: str
    load_s: dict[str, float]
    speeds: list[Speed]


def load(path: str, mode: str, threads: int, code: str) -> Model:
    kernels, _, kind = mode.partition("-")
    kv: Elements = "float32" if kind == "float32" else "bfloat16"
    dtype = DTYPES[kv]
    if kernels == "torch":
        return load_model(path, dtype, max(PROMPTS), lambda done, total: None)
    prepare("q8" if kind == "q8" else kv, kv, code, _tell_compiling)
    return load_compiled(path, dtype, kind == "q8", max(PROMPTS), threads, lambda done, total: None)


def measure(path: str, modes: list[str], threads: int, seconds: float, code: str, report: Report) -> None:
    """Fill the report."""
    probes, cores = {}, sorted(os.sched_getaffinity(0))
    compiled: list[CompiledDecoder] = []
    for mode in modes:
        began = time.perf_counter()
        model = load(path, mode, threads, code)
        report.load_s[mode] = time.perf_counter() - began
        if isinstance(model, CompiledDecoder):
            compiled.append(model)
        config = model.config
        group = GroupShape("full", 0, list(range(config.layers)), config.kv_heads, config.head_dim)
        pages = max(max(STREAMS) * (CONTEXT_TOKENS // PAGE_TOKENS + 1), max(PROMPTS) // PAGE_TOKENS)
        dtype = DTYPES["float32" if mode.endswith("float32") else "bfloat16"]
        pool = KvPool(group, pages, PAGE_TOKENS, max(STREAMS), max(PROMPTS), dtype)
        chooser = choose if mode.startswith("torch") else Chooser(config.vocab_size)
        sampler = Sampler(max(STREAMS), config.vocab_size, chooser)
        runner = StepRunner(model, [pool], sampler, [], in_order_streams())
        probes[mode] = StepProbe(runner, [pool], config.vocab_size, SHAPES, pages)
    # As a server does; a thread that is made later would be where this one stays.
    for decoder in compiled:
        decoder.pin(cores)
    for shape in SHAPES:
        report.speeds += _speeds(probes, shape, seconds)


def _speeds(probes: dict[str, StepProbe], shape: StepShape, seconds: float) -> list[Speed]:
    times_ms: dict[str, list[float]] = {mode: [] for mode in probes}
    for probe in probes.values():
        probe.run(shape)
    end = time.perf_counter() + seconds * len(probes)
    while len(times_ms[next(iter(probes))]) < FEWEST_STEPS or time.perf_counter() < end:
        for mode, probe in probes.items():
            times_ms[mode].append(probe.run(shape))
    first = min(times_ms[next(iter(probes))])
    speeds = []
    for mode, taken_ms in times_ms.items():
        median_ms, fastest_ms = statistics.median(taken_ms), min(taken_ms)
        rate = shape.tokens / median_ms * 1e3
        speeds.append(Speed(mode, *shape, median_ms, fastest_ms, max(taken_ms), rate, first / fastest_ms))
    return speeds


def _tell_compiling(done: int, total: int) -> None:
    if done in (1, total):
        print(f"compiling kernels for this CPU: {done} of {total}", file=sys.stderr)


def _print(report: Report) -> None:
    print(f"{report.device}, torch {report.torch}, {report.model}")
    print(f"{'':18}{'step':>14}{'tok/s':>9}{'median ms':>12}{'fastest':>10}{'slowest':>10}{'ratio':>8}")
    for speed in report.speeds:
        what = f"prefill {speed.prefill_tokens}" if speed.prefill_tokens else f"{speed.decode_rows} streams"
        times = f"{speed.median_ms:>12.1f}{speed.fastest_ms:>10.1f}{speed.slowest_ms:>10.1f}{speed.ratio:>8.2f}"
        print(f"{speed.mode:18}{what:>14}{speed.tokens_per_s:>9.0f}{times}")
    for mode, load_s in report.load_s.items():
        print(f"loading {mode}: {load_s:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file or a model's name")
    parser.add_argument("--threads", type=int, default=1, help="of the model (default 1)")
    parser.add_argument("--mode", choices=MODES, action="append", help=f"by default {', '.join(DEFAULT_MODES)}")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each shape and mode, at least three steps")
    parser.add_argument("--json", type=Path, help="write the report to this file too")
    arguments = parser.parse_args()
    cache = cache_folder(os.environ)
    try:
        model = str(resolve(arguments.model, cache))
    except ModelProblem as problem:
        sys.exit(str(problem))
    modes = arguments.mode or list(DEFAULT_MODES)
    kinds = {mode.partition("-")[0] for mode in modes}
    if arguments.threads > 1 and len(kinds) > 1:
        sys.exit(
            "with several threads torch's layers and compiled kernels are measured in runs of their own, since torch's "
            "threads wait by spinning, 4 ms of each step on the cores of the others: give --mode of one kind"
        )
    # As a server does.
    prepare_cpu(arguments.threads if "torch" in kinds else 1)
    report = Report(device_name(arguments.threads), str(torch.__version__), Path(model).name, {}, [])
    with torch.inference_mode():
        measure(model, modes, arguments.threads, arguments.seconds, str(cache / "kernels"), report)
    _print(report)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


if __name__ == "__main__":
    main()

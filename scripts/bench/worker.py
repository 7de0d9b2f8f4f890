"""Speed of the device worker's steps, in this process: decode at 1, 8 and 32 streams, prefill of 512 and 2048 tokens;
and how long one copy of pages to the host holds the stream between decode steps of 8 streams.

Nothing of a server takes part, so this is the bound of what a server on this machine can reach:

    python scripts/bench/worker.py --threads 2 --json worker.json
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from headrace.ops.device import device_name, prepare_cpu
from headrace.ops.device_worker import DTYPES
from headrace.ops.kv_copy import HostPages
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.registry import load_model
from headrace.ops.sampler import Sampler
from headrace.ops.step import StepRunner
from headrace.ops.streams import cpu_streams
from headrace.ops.warm_up import StepProbe, StepShape
from headrace.ops.wire import Backup, GroupShape
from headrace.sched.budget import CopyPace
from headrace.server.models import DEFAULT_MODEL, ModelProblem, cache_folder, resolve

CONTEXT_TOKENS: Final = 192
STREAMS: Final = (1, 8, 32)
COPIES: Final = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
PROMPTS: Final = (512, 2048)
PAGE_TOKENS: Final = 16
SHAPES: Final = [
    *(StepShape(rows, 0, CONTEXT_TOKENS) for rows in STREAMS),
    *(StepShape(0, tokens, 0) for tokens in PROMPTS),
]


class Speed(msgspec.Struct):
    """One shape in one dtype; the spread is from the fastest to the slowest repeat."""

    dtype: str
    decode_rows: int
    prefill_tokens: int
    context_tokens: int
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    tokens_per_s: float


class CopySpeed(msgspec.Struct):
    """Copies of one size; `size` is "paced" for what the engine would choose from copy to copy. On a machine that is
    shared, the clock counts the turns of others too; the process's own time is in `cpu_p99_ms`."""

    dtype: str
    size: str
    pages: float
    megabytes: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_p99_ms: float


class Report(msgspec.Struct):
    device: str
    torch: str
    model: str
    load_s: dict[str, float]
    speeds: list[Speed]
    copies: list[CopySpeed]


def measure(model: str, dtype: str, seconds: float) -> tuple[float, list[Speed], list[CopySpeed]]:
    """→ seconds that loading took, the speed of each shape, and that of copies to the host."""
    began = time.perf_counter()
    loaded = load_model(model, DTYPES[dtype], max(PROMPTS), lambda done, total: None)
    load_s = time.perf_counter() - began
    config = loaded.config
    group = GroupShape("full", 0, list(range(config.layers)), config.kv_heads, config.head_dim)
    pages = max(max(STREAMS) * (CONTEXT_TOKENS // PAGE_TOKENS + 1), max(PROMPTS) // PAGE_TOKENS)
    pool = KvPool(group, pages, PAGE_TOKENS, max(STREAMS), max(PROMPTS), DTYPES[dtype])
    page_bytes = len(group.layers) * pool.layer_elements * pool.pages.element_size()
    buffer = mmap.mmap(-1, pages * page_bytes)
    buffer.write(bytes(len(buffer)))
    host = HostPages(buffer, page_bytes, DTYPES[dtype])
    runner = StepRunner(loaded, [pool], Sampler(max(STREAMS), config.vocab_size), host, cpu_streams())
    probe = StepProbe(runner, [pool], config.vocab_size, SHAPES, pages)
    speeds = [_speed(probe, dtype, shape, seconds) for shape in SHAPES]
    copies = [_copies(runner, probe, dtype, f"{size >> 20} MiB", page_bytes, pages, seconds) for size in COPIES]
    return load_s, speeds, [*copies, _copies(runner, probe, dtype, "paced", page_bytes, pages, 2 * seconds)]


def _copies(
    runner: StepRunner, probe: StepProbe, dtype: str, size: str, page_bytes: int, num_pages: int, seconds: float
) -> CopySpeed:
    """One copy behind each decode step of 8 streams, as the engine sends them; the first ten are not counted."""
    pace, rng, shape = CopyPace(page_bytes), random.Random(0), StepShape(8, 0, CONTEXT_TOKENS)
    fixed = 0 if size == "paced" else max(1, (int(size.split()[0]) << 20) // page_bytes)
    times_ms: list[float] = []
    cpu_ms: list[float] = []
    sizes: list[int] = []
    end = time.perf_counter() + seconds
    while len(times_ms) < 30 or time.perf_counter() < end:
        count = fixed or pace.pages
        probe.run(shape)
        device, to = rng.sample(range(num_pages), count), rng.sample(range(num_pages), count)
        began = time.process_time()
        backup = runner.back_up(Backup(1, 0, device, to))
        backup.done.query()
        times_ms.append(backup.copy.spent_ms)
        cpu_ms.append((time.process_time() - began) * 1e3)
        sizes.append(count)
        pace.observe(count, times_ms[-1])
    pages = statistics.fmean(sizes[10:])
    p50_ms, p99_ms, max_ms = np.percentile(times_ms[10:], (50, 99, 100)).tolist()
    cpu_p99_ms = float(np.percentile(cpu_ms[10:], 99))
    return CopySpeed(dtype, size, pages, pages * page_bytes / 1e6, p50_ms, p99_ms, max_ms, cpu_p99_ms)


def _speed(probe: StepProbe, dtype: str, shape: StepShape, seconds: float) -> Speed:
    probe.run(shape)
    times_ms: list[float] = []
    end = time.perf_counter() + seconds
    while len(times_ms) < 3 or time.perf_counter() < end:
        times_ms.append(probe.run(shape))
    median_ms = statistics.median(times_ms)
    return Speed(dtype, *shape, median_ms, min(times_ms), max(times_ms), shape.tokens / median_ms * 1e3)


def _print(report: Report) -> None:
    print(f"{report.device}, torch {report.torch}, {report.model}")
    print(f"{'':12}{'step':>16}{'tok/s':>9}{'median ms':>12}{'fastest':>10}{'slowest':>10}")
    for speed in report.speeds:
        what = f"prefill {speed.prefill_tokens}" if speed.prefill_tokens else f"{speed.decode_rows} streams"
        times = f"{speed.median_ms:>12.1f}{speed.fastest_ms:>10.1f}{speed.slowest_ms:>10.1f}"
        print(f"{speed.dtype:12}{what:>16}{speed.tokens_per_s:>9.0f}{times}")
    print(f"\n{'':12}{'copy to host':>16}{'pages':>9}{'MB':>7}{'median ms':>12}{'p99':>10}{'max':>10}{'CPU p99':>10}")
    for copy in report.copies:
        times = f"{copy.p50_ms:>12.2f}{copy.p99_ms:>10.2f}{copy.max_ms:>10.2f}{copy.cpu_p99_ms:>10.2f}"
        print(f"{copy.dtype:12}{copy.size:>16}{copy.pages:>9.1f}{copy.megabytes:>7.1f}{times}")
    for dtype, load_s in report.load_s.items():
        print(f"loading in {dtype}: {load_s:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file or a model's name")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="all cores by default")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append", help="both by default")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each shape, at least three steps")
    parser.add_argument("--json", type=Path, help="write the report to this file too")
    arguments = parser.parse_args()
    try:
        model = str(resolve(arguments.model, cache_folder(os.environ)))
    except ModelProblem as problem:
        sys.exit(str(problem))
    prepare_cpu(arguments.threads)
    report = Report(device_name(), str(torch.__version__), Path(model).name, {}, [], [])
    with torch.inference_mode():
        for dtype in arguments.dtype or DTYPES:
            report.load_s[dtype], speeds, copies = measure(model, dtype, arguments.seconds)
            report.speeds += speeds
            report.copies += copies
    _print(report)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


if __name__ == "__main__":
    main()

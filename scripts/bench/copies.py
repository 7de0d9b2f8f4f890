#!/usr/bin/env python3
"""How long one copy of pages to the host holds a CPU's stream, between decode steps of 8 streams: for fixed sizes, and
for the size that the engine chooses from copy to copy.

    scripts/bench/copies.py --threads 2 --json copies.json
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

from headrace.ops.backend import DTYPES
from headrace.ops.device import device_name, prepare_cpu
from headrace.ops.kv_copy import HostPages
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.registry import load_compiled
from headrace.ops.sampler import Sampler
from headrace.ops.simd.compiler import Elements, prepare
from headrace.ops.simd.draws import Chooser
from headrace.ops.step import StepRunner
from headrace.ops.streams import cpu_streams
from headrace.ops.warm_up import StepProbe, StepShape
from headrace.ops.wire import Backup, GroupShape
from headrace.sched.budget import CopyPace
from headrace.server.host_pool import HostPool
from headrace.server.models import DEFAULT_MODEL, ModelProblem, cache_folder, resolve

KINDS: Final[tuple[Elements, ...]] = ("float32", "bfloat16")
CONTEXT_TOKENS: Final = 192
STREAMS: Final = 8
COPIES: Final = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
PAGE_TOKENS: Final = 16
NUM_PAGES: Final = 512
SHAPE: Final = StepShape(STREAMS, 0, CONTEXT_TOKENS)


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
    copies: list[CopySpeed]


def measure(model: str, dtype: Elements, threads: int, code: str, seconds: float) -> list[CopySpeed]:
    """Of every size, by the kernels and in the memory that a server has. `code`: where compiled kernels lie."""
    prepare(dtype, dtype, code, lambda done, total: None)
    loaded = load_compiled(model, DTYPES[dtype], False, CONTEXT_TOKENS, threads, lambda done, total: None)
    config = loaded.config
    group = GroupShape("full", 0, list(range(config.layers)), config.kv_heads, config.head_dim)
    pages = NUM_PAGES
    pool = KvPool(group, pages, PAGE_TOKENS, STREAMS, CONTEXT_TOKENS + PAGE_TOKENS, DTYPES[dtype])
    page_bytes = len(group.layers) * pool.layer_elements * pool.pages.element_size()
    memory = HostPool(pages * page_bytes)
    buffer = mmap.mmap(memory.descriptor, memory.size_bytes)
    memory.close()
    buffer.write(bytes(len(buffer)))
    host = HostPages(buffer, page_bytes, DTYPES[dtype], loaded.copy_pages)
    sampler = Sampler(STREAMS, config.vocab_size, Chooser(config.vocab_size))
    runner = StepRunner(loaded, [pool], sampler, [host], cpu_streams())
    probe = StepProbe(runner, [pool], config.vocab_size, [SHAPE], pages)
    copies = [_copies(runner, probe, dtype, f"{size >> 20} MiB", page_bytes, pages, seconds) for size in COPIES]
    return [*copies, _copies(runner, probe, dtype, "paced", page_bytes, pages, 2 * seconds)]


def _copies(
    runner: StepRunner, probe: StepProbe, dtype: str, size: str, page_bytes: int, num_pages: int, seconds: float
) -> CopySpeed:
    """One copy behind each decode step of 8 streams, as the engine sends them; the first ten are not counted."""
    pace, rng = CopyPace(page_bytes), random.Random(0)
    fixed = 0 if size == "paced" else max(1, (int(size.split()[0]) << 20) // page_bytes)
    times_ms: list[float] = []
    cpu_ms: list[float] = []
    sizes: list[int] = []
    end = time.perf_counter() + seconds
    while len(times_ms) < 30 or time.perf_counter() < end:
        count = fixed or min(pace.most, pace.pages(0.0))
        probe.run(SHAPE)
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


def _print(report: Report) -> None:
    print(f"{report.device}, torch {report.torch}, {report.model}")
    print(f"{'':12}{'copy to host':>16}{'pages':>9}{'MB':>7}{'median ms':>12}{'p99':>10}{'max':>10}{'CPU p99':>10}")
    for copy in report.copies:
        times = f"{copy.p50_ms:>12.2f}{copy.p99_ms:>10.2f}{copy.max_ms:>10.2f}{copy.cpu_p99_ms:>10.2f}"
        print(f"{copy.dtype:12}{copy.size:>16}{copy.pages:>9.1f}{copy.megabytes:>7.1f}{times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file or a model's name")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="all cores by default")
    parser.add_argument("--dtype", choices=KINDS, action="append", help="both by default")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size")
    parser.add_argument("--json", type=Path, help="write the report to this file too")
    arguments = parser.parse_args()
    cache = cache_folder(os.environ)
    try:
        model = str(resolve(arguments.model, cache))
    except ModelProblem as problem:
        sys.exit(str(problem))
    prepare_cpu(1)
    report = Report(device_name(arguments.threads), str(torch.__version__), Path(model).name, [])
    with torch.inference_mode():
        for dtype in arguments.dtype or KINDS:
            code = str(cache / "kernels")
            report.copies += measure(model, dtype, arguments.threads, code, arguments.seconds)
    _print(report)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What copies to the host cost the steps beside them on a CPU: times of steps without copies, with as many as keep up
with what each step computes, and with copies always under way; and how fast those are.

    scripts/bench/copies.py --threads 1 --threads 2 --json copies.json
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from headrace.ops.backend import DTYPES
from headrace.ops.copy_thread import LOOK_S, cpu_streams
from headrace.ops.device import device_name, prepare_cpu
from headrace.ops.kv_copy import HostPages
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.registry import load_compiled
from headrace.ops.runner import BackedUp
from headrace.ops.sampler import Sampler
from headrace.ops.simd.compiler import Elements, prepare
from headrace.ops.simd.draws import Chooser
from headrace.ops.step import StepRunner
from headrace.ops.streams import Streams
from headrace.ops.warm_up import StepProbe, StepShape
from headrace.ops.wire import Backup, GroupShape
from headrace.sched.copying import COPIES_AHEAD, MAX_COPY_BYTES
from headrace.server.host_pool import HostPool
from headrace.server.models import DEFAULT_MODEL, ModelProblem, cache_folder, resolve

KINDS: Final[tuple[Elements, ...]] = ("float32", "bfloat16")
CONTEXT_TOKENS: Final = 192
STREAMS: Final = 8
PAGE_TOKENS: Final = 16
DECODE: Final = StepShape(STREAMS, 0, CONTEXT_TOKENS)
CHUNKS: Final = (256, 1024)
"""Of prompts, in tokens."""
NUM_PAGES: Final = 1024
ENDLESS: Final = float(1 << 40)
"""Pages."""
IDLE_BYTES: Final = 1 << 30
ROUNDS: Final = 4
"""In which the kinds of copies take turns: a machine has slow minutes."""


class StepTimes(msgspec.Struct):
    """Steps of one shape beside one kind of copies: "none", "own" (of as many pages as the step fills), "always"."""

    dtype: str
    threads: int
    step: str
    copies: str
    steps: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    copied_gb_s: float
    """While copies were under way."""


class Report(msgspec.Struct):
    device: str
    torch: str
    model: str
    idle_gb_s: dict[str, float]
    """Copies while no step runs, by dtype."""
    times: list[StepTimes]


class Copies:
    """Copies under way, as the engine has them. What is not copied yet waits."""

    def __init__(self, runner: StepRunner, page_bytes: int) -> None:
        self.copied_bytes = 0
        self.busy_s = 0.0
        """In which at least one was under way."""
        self._runner = runner
        self._page_bytes = page_bytes
        self._most_pages = max(1, MAX_COPY_BYTES // page_bytes)
        self._rng = random.Random(0)
        self._under_way: deque[tuple[BackedUp, int]] = deque()
        self._waiting = 0.0
        self._began_s = 0.0

    @property
    def gb_s(self) -> float:
        return self.copied_bytes / self.busy_s / 1e9 if self.busy_s else 0.0

    def order(self, pages: float) -> None:
        """Look what has been made, and give out more; pages come in whole ones."""
        now_s = time.perf_counter()
        while self._under_way and self._under_way[0][0].done.query():
            self.copied_bytes += self._under_way.popleft()[1] * self._page_bytes
            self.busy_s += now_s - self._began_s
            self._began_s = now_s
        self._waiting += pages
        while len(self._under_way) < COPIES_AHEAD and self._waiting >= 1:
            count = min(self._most_pages, int(self._waiting))
            device, to = (self._rng.sample(range(NUM_PAGES), count) for _ in range(2))
            if not self._under_way:
                self._began_s = now_s
            self._under_way.append((self._runner.back_up(Backup(1, 0, device, to)), count))
            self._waiting -= count

    def stop(self) -> None:
        """What is under way is made, what waits is forgotten."""
        self._waiting = 0.0
        while self._under_way:
            time.sleep(1e-4)
            self.order(0.0)


class Steps:
    """A worker's steps, with the kernels and in the memory that a server has."""

    def __init__(self, model: str, dtype: Elements, threads: int, code: str) -> None:
        """`code`: where compiled kernels lie."""
        prepare(dtype, dtype, code, lambda done, total: None)
        self.dtype, self.threads = dtype, threads
        self.streams: Streams = cpu_streams()
        context = max(CONTEXT_TOKENS + PAGE_TOKENS, *CHUNKS)
        self._model = load_compiled(model, DTYPES[dtype], False, context, threads, lambda done, total: None)
        self._model.pin(sorted(os.sched_getaffinity(0)))
        config = self._model.config
        group = GroupShape("full", 0, list(range(config.layers)), config.kv_heads, config.head_dim)
        pool = KvPool(group, NUM_PAGES, PAGE_TOKENS, STREAMS, context, DTYPES[dtype])
        self.page_bytes = len(group.layers) * pool.layer_elements * pool.pages.element_size()
        memory = HostPool(NUM_PAGES * self.page_bytes)
        buffer = mmap.mmap(memory.descriptor, memory.size_bytes)
        memory.close()
        buffer.write(bytes(len(buffer)))
        host = HostPages(buffer, self.page_bytes, DTYPES[dtype], self._model.copy_pages, self._model.back_up_pages)
        sampler = Sampler(STREAMS, config.vocab_size, Chooser(config.vocab_size))
        self.runner = StepRunner(self._model, [pool], sampler, [host], self.streams)
        self.shapes = [DECODE, *(StepShape(0, chunk, 0) for chunk in CHUNKS)]
        self.probe = StepProbe(self.runner, [pool], config.vocab_size, self.shapes, NUM_PAGES)

    def measure(self, shape: StepShape, seconds: float) -> list[StepTimes]:
        """Of one shape, beside each kind of copies."""
        filled = shape.tokens / PAGE_TOKENS
        kinds = {"none": 0.0, "own": filled, "always": ENDLESS}
        times_ms: dict[str, list[float]] = {kind: [] for kind in kinds}
        made = {kind: Copies(self.runner, self.page_bytes) for kind in kinds}
        for _ in range(ROUNDS):
            for kind, pages in kinds.items():
                times_ms[kind] += self._round(shape, made[kind], pages, seconds / ROUNDS)
        return [self._times(shape, kind, times_ms[kind], made[kind]) for kind in kinds]

    def idle_gb_s(self) -> float:
        """Copies while no step runs."""
        copies = Copies(self.runner, self.page_bytes)
        while copies.copied_bytes < IDLE_BYTES:
            copies.order(ENDLESS)
            time.sleep(LOOK_S)
        copies.stop()
        return copies.gb_s

    def _round(self, shape: StepShape, copies: Copies, pages: float, seconds: float) -> list[float]:
        """ms from one step's end to the next one's; the first two are not counted."""
        times_ms: list[float] = []
        ended_s = began_s = time.perf_counter()
        while len(times_ms) < 5 or ended_s - began_s < seconds:
            copies.order(pages)
            self.probe.run(shape)
            now_s = time.perf_counter()
            times_ms.append((now_s - ended_s) * 1e3)
            ended_s = now_s
        copies.stop()
        return times_ms[2:]

    def _times(self, shape: StepShape, kind: str, times_ms: list[float], copies: Copies) -> StepTimes:
        step = f"{shape.decode_rows} streams" if shape.decode_rows else f"chunk of {shape.tokens}"
        p50_ms, p99_ms, max_ms = np.percentile(times_ms, (50, 99, 100)).tolist()
        return StepTimes(self.dtype, self.threads, step, kind, len(times_ms), p50_ms, p99_ms, max_ms, copies.gb_s)

    def close(self) -> None:
        self.streams.close()
        self._model.close()


def _print(report: Report) -> None:
    print(f"{report.device}, torch {report.torch}, {report.model}")
    for dtype, gb_s in report.idle_gb_s.items():
        print(f"{dtype:9}copies while no step runs: {gb_s:.1f} GB/s")
    titles = f"{'':9}threads  {'step':15}{'copies':>7}{'steps':>7}{'median ms':>11}{'p99':>9}{'max':>9}{'GB/s':>7}"
    print(f"{titles}{'more, median':>15}{'p99':>7}")
    alone = report.times[0]
    for times in report.times:
        start = f"{times.dtype:9}{times.threads:>7}  {times.step:15}{times.copies:>7}{times.steps:>7}"
        figures = f"{times.p50_ms:>11.2f}{times.p99_ms:>9.2f}{times.max_ms:>9.2f}{times.copied_gb_s:>7.2f}"
        if times.copies == "none":
            alone = times
            print(start + figures)
        else:
            print(f"{start}{figures}{times.p50_ms - alone.p50_ms:>+15.2f}{times.p99_ms - alone.p99_ms:>+7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file or a model's name")
    parser.add_argument("--threads", type=int, action="append", help="all cores but one, and all, by default")
    parser.add_argument("--dtype", choices=KINDS, action="append", help="both by default")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each step and kind of copies")
    parser.add_argument("--json", type=Path, help="write the report to this file too")
    arguments = parser.parse_args()
    cache = cache_folder(os.environ)
    try:
        model = str(resolve(arguments.model, cache))
    except ModelProblem as problem:
        sys.exit(str(problem))
    prepare_cpu(1)
    report = Report(device_name(cores), str(torch.__version__), Path(model).name, {}, [])
    with torch.inference_mode():
        for dtype in arguments.dtype or KINDS:
            for threads in arguments.threads or sorted({max(1, cores - 1), cores}):
                _measure(report, model, dtype, threads, str(cache / "kernels"), arguments.seconds)
    _print(report)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def _measure(report: Report, model: str, dtype: Elements, threads: int, code: str, seconds: float) -> None:
    affinity = os.sched_getaffinity(0)
    steps = Steps(model, dtype, threads, code)
    report.idle_gb_s[dtype] = steps.idle_gb_s()
    for shape in steps.shapes:
        report.times += steps.measure(shape, seconds)
    steps.close()
    os.sched_setaffinity(0, affinity)


if __name__ == "__main__":
    main()

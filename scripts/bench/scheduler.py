#!/usr/bin/env python3
"""CPU time of the scheduler against a device that does nothing: no model, no process, no loop.

    scripts/bench/scheduler.py [--requests 256] [--steps 400] [--json FILE]

Three figures a step, in µs of CPU: prepare (choose, take pages, encode the ring slot), collect (commit ids, publish
pages, build the deltas), and both; for plain decode, and with a tenth of the requests ending and joining each step.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from headrace.kvcache.cache import KvCache
from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.ops.wire import BatchRing, RingGeometry
from headrace.sched.batch import encode, max_batch_bytes
from headrace.sched.budget import StepBudget
from headrace.sched.collect import LaunchedStep, collect, remember
from headrace.sched.messages import SamplingParams, Submit
from headrace.sched.request import Request
from headrace.sched.scheduler import Scheduler

PAGE_TOKENS, VOCAB, PROMPT_TOKENS, CONTEXT_TOKENS = 16, 49_152, 192, 2048


class NullDevice:
    """The engine's inner loop without an engine: every step completes at once, with id 7 for everyone."""

    def __init__(self, requests: int) -> None:
        layout = KvLayout(PAGE_TOKENS, (LayerGroup("full", 0, (0,), 1, 64, 2),))
        pages = requests * layout.pages(CONTEXT_TOKENS)
        room = max_batch_bytes(requests, CONTEXT_TOKENS, requests * PROMPT_TOKENS, PAGE_TOKENS, 1)
        geometry = RingGeometry(3, room, requests, 1, VOCAB)
        self.ring = BatchRing(bytearray(geometry.size_bytes), geometry)
        for slot in range(3):
            self.ring.results(slot).ids[:] = 7
        self.scheduler = Scheduler(KvCache(layout, [pages]), geometry, CONTEXT_TOKENS, 1.0)
        self.stop_ids = np.zeros(VOCAB, np.bool_)
        self.in_flight: list[LaunchedStep] = []
        self.step = self.handles = 0
        self.rng = np.random.default_rng(0)

    def submit(self, max_tokens: int) -> None:
        """A request with a prompt of its own."""
        self.handles += 1
        prompt = self.rng.integers(0, VOCAB, PROMPT_TOKENS).astype(np.int32)
        submit = Submit(self.handles, prompt, SamplingParams(max_tokens=max_tokens))
        key = PrefixKey(namespace(b"", "", ""), PAGE_TOKENS, prompt, PROMPT_TOKENS)
        self.scheduler.enqueue(Request(submit, key, self.handles, 0.0), 0.0)

    def prepare(self) -> None:
        """Choose, encode and launch a step."""
        batch, _ = self.scheduler.prepare(self.step, 0.0, lambda rows: StepBudget(1 << 20))
        assert batch is not None
        views = self.ring.write(self.step % 3, self.step, batch.counts)
        encode(views, batch, self.scheduler.table, PAGE_TOKENS)
        self.in_flight.append(remember(batch, self.scheduler.table, self.step, self.step % 3, 0.0))
        self.scheduler.launched(batch, self.step)
        self.step += 1

    def collect(self) -> int:
        """Collect the oldest step; how many requests ended in it."""
        launched = self.in_flight.pop(0)
        self.scheduler.cache.complete_step(launched.step)
        collected = collect(self.scheduler, launched, self.ring.results(launched.ring_slot), self.stop_ids, 0.0)
        return len(collected.ended)


def measure(requests: int, steps: int, turnover: bool) -> dict[str, float]:
    """Median µs of CPU per step."""
    device = NullDevice(requests)
    outputs = 10 if turnover else CONTEXT_TOKENS - PROMPT_TOKENS
    for i in range(requests):
        device.submit(1 + i % outputs if turnover else outputs)
    device.prepare()
    device.prepare()
    prepares: list[int] = []
    collects: list[int] = []
    gc.collect()
    gc.disable()
    for _ in range(min(steps, CONTEXT_TOKENS - PROMPT_TOKENS - 4)):
        began = time.process_time_ns()
        ended = device.collect()
        middle = time.process_time_ns()
        for _ in range(ended):
            device.submit(outputs)
        joined = time.process_time_ns()
        device.prepare()
        prepares.append(time.process_time_ns() - joined)
        collects.append(middle - began)
    gc.enable()
    prepare, collected = float(np.median(prepares)) / 1e3, float(np.median(collects)) / 1e3
    both = float(np.median(np.add(prepares, collects))) / 1e3
    return {"prepare_us": prepare, "collect_us": collected, "both_us": both}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="running requests (default 256)")
    parser.add_argument("--steps", type=int, default=400, help="steps measured (default 400)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args()
    results = {
        "plain decode": measure(options.requests, options.steps, turnover=False),
        "a tenth ends and joins": measure(options.requests, options.steps, turnover=True),
    }
    table = Table("step", "prepare µs", "collect µs", "both µs", title=f"{options.requests} running requests")
    for name, figures in results.items():
        table.add_row(name, *(f"{value:.0f}" for value in figures.values()))
    Console().print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"requests": options.requests, "steps": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

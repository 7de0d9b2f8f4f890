#!/usr/bin/env python3
"""CPU time of the scheduler against a device that does nothing: no model, no process, no loop.

    scripts/bench/scheduler.py [--requests 256] [--steps 400] [--waiting 1024] [--json FILE]

Three figures a step, in µs of CPU: prepare (choose, take pages, encode the ring slot), collect (commit ids, publish
pages, build the deltas), and both; for plain decode, and with a tenth of the requests ending and joining each step.

Then what a long queue adds to a step, under each policy: prepare with so many waiting less prepare with one, while the
index changes in every step (the worst case: nothing that was looked up stays true) and every second step one request
begins in the place of another. The waiting share sixteen prefixes, as conversations do.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from typing import Final, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from headrace.kvcache.cache import KvCache
from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.ops.wire import I32, BatchRing, RingGeometry
from headrace.sched.batch import encode, max_batch_bytes
from headrace.sched.budget import StepBudget
from headrace.sched.collect import LaunchedStep, collect, remember
from headrace.sched.messages import SamplingParams, Submit
from headrace.sched.policies import SchedulePolicy
from headrace.sched.request import Request
from headrace.sched.scheduler import Scheduler

BARS_US = {"plain decode": 1000.0, "a tenth ends and joins": 3000.0}
"""For both, with 256 requests."""
PAGE_TOKENS, VOCAB, PROMPT_TOKENS, CONTEXT_TOKENS = 16, 49_152, 192, 2048
STEP_S: Final = 0.02
SLOTS_OF_THE_QUEUE: Final = 64
NO_PREFIX: Final = np.zeros(0, np.int32)


class NullDevice:
    """The engine's inner loop without an engine: every step completes at once, with id 7 for everyone."""

    def __init__(self, requests: int, policy: SchedulePolicy = "fcfs") -> None:
        layout = KvLayout(PAGE_TOKENS, (LayerGroup("full", 0, (0,), 1, 64, 2),))
        pages = requests * layout.pages(CONTEXT_TOKENS)
        room = max_batch_bytes(requests, CONTEXT_TOKENS, requests * PROMPT_TOKENS, PAGE_TOKENS, 1)
        geometry = RingGeometry(3, room, requests, 1, VOCAB)
        self.ring = BatchRing(bytearray(geometry.size_bytes), geometry)
        for slot in range(3):
            self.ring.results(slot).ids[:] = 7
        self.scheduler = Scheduler(KvCache(layout, [pages]), geometry, CONTEXT_TOKENS, 1.0, policy=policy)
        self.stop_ids = np.zeros(VOCAB, np.bool_)
        self.in_flight: list[LaunchedStep] = []
        self.step = self.handles = 0
        self.rng = np.random.default_rng(0)

    def submit(self, max_tokens: int, prefix: I32 = NO_PREFIX) -> None:
        """A request with a prompt of its own behind a prefix."""
        self.handles += 1
        prompt = np.concatenate((prefix, self.rng.integers(0, VOCAB, PROMPT_TOKENS).astype(np.int32)))
        submit = Submit(self.handles, prompt, SamplingParams(max_tokens=max_tokens))
        key = PrefixKey(namespace(b"", "", ""), PAGE_TOKENS, prompt, len(prompt))
        now_s = self.step * STEP_S
        self.scheduler.enqueue(Request(submit, key, self.handles, now_s), now_s)

    def prepare(self) -> None:
        """Choose, encode and launch a step."""
        batch, _ = self.scheduler.prepare(self.step, self.step * STEP_S, lambda rows: StepBudget(1 << 20))
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


def measure_waiting(policy: SchedulePolicy, waiting: int, steps: int) -> float:
    """Mean µs of CPU of a prepare, with so many waiting; one request begins in every second."""
    device = NullDevice(SLOTS_OF_THE_QUEUE, policy)
    prefixes = [device.rng.integers(0, VOCAB, 1024).astype(np.int32) for _ in range(16)]
    for _ in range(SLOTS_OF_THE_QUEUE - 1):
        device.submit(CONTEXT_TOKENS - PROMPT_TOKENS)
    for prefix in prefixes:
        device.submit(1, prefix)
    device.prepare()
    while device.scheduler.waiting:
        device.prepare()
        device.collect()
    for i in range(waiting):
        device.submit(1, prefixes[i % 16])
    spent_ns = 0
    gc.collect()
    gc.disable()
    for i in range(steps):
        device.collect()
        if len(device.scheduler.waiting) < waiting:
            device.submit(1, prefixes[i % 16])
        device.scheduler.cache.version += 1
        began = time.process_time_ns()
        device.prepare()
        spent_ns += time.process_time_ns() - began
    gc.enable()
    return spent_ns / steps / 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="running requests (default 256)")
    parser.add_argument("--steps", type=int, default=400, help="steps measured (default 400)")
    parser.add_argument("--waiting", type=int, default=1024, help="waiting requests, of the queue (default 1024)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args(arguments)
    results = {
        "plain decode": measure(options.requests, options.steps, turnover=False),
        "a tenth ends and joins": measure(options.requests, options.steps, turnover=True),
    }
    table = Table("step", "prepare µs", "collect µs", "both µs", "bar", title=f"{options.requests} running requests")
    for name, figures in results.items():
        table.add_row(name, *(f"{value:.0f}" for value in figures.values()), f"{BARS_US[name]:.0f}")
    Console().print(table)
    queue = {
        policy: {
            "one_us": measure_waiting(policy, 1, options.steps),
            "many_us": measure_waiting(policy, options.waiting, options.steps),
        }
        for policy in get_args(SchedulePolicy)
    }
    table = Table(
        "policy",
        "1 waits, µs",
        f"{options.waiting} wait, µs",
        "the queue adds, µs",
        title="prepare, one begins in every second",
    )
    for policy, figures in queue.items():
        one_us, many_us = figures.values()
        table.add_row(policy, f"{one_us:.0f}", f"{many_us:.0f}", f"{many_us - one_us:.0f}")
    Console().print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"requests": options.requests, "steps": results, "waiting": queue}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

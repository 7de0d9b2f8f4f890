#!/usr/bin/env python3
"""Run seeded schedules of the engine against the oracle, in virtual time, with every check after every step.

    scripts/torture.py --seed 1 --requests 20000 --jobs 2 [--hybrid]

Seeds N, N+1, ... run until the requests are done; each seed is a schedule of its own, of --seed-requests requests. The
table says how often each condition was met. A failure prints the one command that replays it.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import selectors
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator

import msgspec

from headrace.server.sim.torture import Report, torture

PROGRESS_S = 2.0


class Run(msgspec.Struct):
    """One seed's."""

    seed: int
    report: Report | None
    failure: str
    cpu_s: float


def one(seed: int, requests: int, hybrid: bool) -> Run:
    """Run one seed."""
    # Deaths and hangs are what this is about: that the engine reports them is no news here.
    logging.disable(logging.CRITICAL)
    gc.collect()
    # A collection looks at the whole world each time: a tenth of the time, for a few MB.
    gc.disable()
    began_s = time.process_time()
    try:
        report, failure = torture(seed, requests, hybrid=hybrid), ""
    except Exception:
        report, failure = None, traceback.format_exc()
    gc.enable()
    return Run(seed, report, failure, time.process_time() - began_s)


def runs(seeds: range, seed_requests: int, jobs: int, hybrid: bool) -> Iterator[Run]:
    """All seeds; with several jobs each process takes every so-manieth, and says a line of JSON for each."""
    if jobs == 1:
        for seed in seeds:
            yield one(seed, seed_requests, hybrid)
        return
    command = [sys.executable, "-P", os.path.abspath(__file__), "--seed-requests", str(seed_requests), "--every"]
    if hybrid:
        command.insert(-1, "--hybrid")
    with selectors.DefaultSelector() as selector:
        children: list[subprocess.Popen[bytes]] = []
        try:
            for first in seeds[:jobs]:
                part = f"{first}:{seeds.stop}:{jobs}"
                child = subprocess.Popen([*command, part], stdout=subprocess.PIPE)
                children.append(child)
                assert child.stdout is not None
                selector.register(child.stdout, selectors.EVENT_READ, child.stdout)
            while selector.get_map():
                for key, _ in selector.select():
                    # A child writes a line at once, and waits for the next seed before it writes another.
                    if line := key.data.readline():
                        yield msgspec.json.decode(line, type=Run)
                    else:
                        selector.unregister(key.data)
            assert not any(child.wait() for child in children), "a process of the run ended badly"
        finally:
            for child in children:
                child.kill()
                child.wait()


def natural(text: str) -> int:
    """A command line's number from 0 on. Raises ArgumentTypeError: random generators take no other seed."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 0 on")
    return int(text)


def positive(text: str) -> int:
    """A command line's number from 1 on. Raises ArgumentTypeError."""
    if natural(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 on")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=natural, default=0, help="the first seed (default 0)")
    parser.add_argument(
        "--requests", type=positive, default=1, help="run seeds until so many requests are done (default: one seed)"
    )
    parser.add_argument(
        "--seed-requests", type=positive, default=400, help="requests of a seed; part of the schedule (default 400)"
    )
    parser.add_argument("--hybrid", action="store_true", help="a window group beside the full one")
    parser.add_argument("--jobs", type=positive, default=1, help="processes (default 1)")
    parser.add_argument("--json", metavar="FILE", help="write the table to a file")
    parser.add_argument("--every", metavar="FIRST:END:STEP", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.json and (os.path.isdir(options.json) or not os.path.isdir(os.path.dirname(options.json) or ".")):
        parser.error(f"--json {options.json} can't be written: give the path of a file in a directory that exists")
    if options.every:
        for seed in range(*map(int, options.every.split(":"))):
            print(msgspec.json.encode(one(seed, options.seed_requests, options.hybrid)).decode(), flush=True)
        return 0
    totals: Counter[str] = Counter()
    seeds, requests, cpu_s, began_s = 0, 0, 0.0, time.monotonic()
    told_s = began_s
    todo = range(options.seed, options.seed + max(1, -(-options.requests // options.seed_requests)))
    for run in runs(todo, options.seed_requests, options.jobs, options.hybrid):
        if run.report is None:
            print(run.failure, file=sys.stderr)
            replay = f"{sys.executable} {sys.argv[0]} --seed {run.seed} --seed-requests {options.seed_requests}"
            print(f"replay: {replay}{' --hybrid' if options.hybrid else ''}")
            return 1
        seeds, cpu_s = seeds + 1, cpu_s + run.cpu_s
        totals.update(run.report.happened)
        requests += run.report.requests
        if time.monotonic() - told_s > PROGRESS_S:
            told_s = time.monotonic()
            line = f"{seeds} seeds, {requests} requests, {told_s - began_s:.0f} s"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
    if told_s > began_s:
        print(file=sys.stderr)
    table: dict[str, float] = {
        "seeds": seeds,
        "requests": requests,
        "requests a CPU-second": round(requests / cpu_s),
        "output tokens a CPU-second": round(totals["output tokens"] / cpu_s),
        **{name: totals[name] for name in sorted(totals)},
    }
    for name, value in table.items():
        print(f"{name:44} {value:>12,.0f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=1)
    print("Every id was the oracle's, all checks held after every step, and everything was given back.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

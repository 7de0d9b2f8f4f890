#!/usr/bin/env python3
"""headrace beside vLLM and llama.cpp on this CPU: real servers, over HTTP, driven by one client, in turns.

    scripts/bench/peers.py --json peers.json                     everything, five repeats: half an hour
    scripts/bench/peers.py --quick                               one repeat
    scripts/bench/peers.py --only decode shared --json peers.json --add    more repeats of some scenarios
    scripts/bench/peers.py --in-process --json peers.json --add            each engine without its server

The model is the default one: headrace reads the file as it is, in bfloat16 and in q8; vLLM 0.32 (its CPU build) a
Hugging Face folder in bfloat16; llama.cpp's server Q8_0, made from the same weights. All use two threads (`--threads`).
Peers are installed from the package index, llama.cpp compiled for this CPU, into environments below
$HEADRACE_CACHE/peers: some minutes and 4 GB, once. A peer that can't be had is named with the reason, and the others
are compared.

All servers are started and warmed up first. In a repeat each measures each scenario once, one server after the other,
while the processes of the others stand still. `scripts/bench/sides/scenarios.py` says what the scenarios are. A ratio
is taken within a repeat, then the median of the repeats, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.sides import comparison, servers
from bench.sides.comparison import Report
from bench.sides.completions import BadAnswer
from bench.sides.environments import Unavailable, say
from bench.sides.scenarios import SCENARIOS, measured
from bench.sides.servers import Launch, Server, at_work

from headrace.ops.device import device_name
from headrace.server.models import DEFAULT_MODEL, ModelProblem, cache_folder, resolve

SIDES: Final = ("headrace bf16", "headrace q8", "vLLM bf16", "llama.cpp Q8_0")
IN_PROCESS_S: Final = 600.0
WARM_UP: Final = ("decode 32", "prefill 2048")
"""Scenarios that go through what all of them need, once before the repeats."""


def launches(names: Sequence[str], gguf: Path, threads: int, cache: Path, report: Report) -> list[Launch]:
    """What can be had of the chosen sides; why not, goes into the report."""
    found = [servers.headrace(gguf, kind, threads) for kind in ("none", "q8")]
    for name, make in (("vLLM bf16", servers.vllm), ("llama.cpp Q8_0", servers.llama_q8_0)):
        if name in names:
            try:
                found.append(make(servers.models(gguf, cache), threads, cache))
            except Unavailable as problem:
                report.unavailable[name] = str(problem)
                say(f"{name} is left out: {problem}")
    return [launch for launch in found if launch.name in names]


@contextlib.contextmanager
def running(chosen: Sequence[Launch], report: Report) -> Iterator[list[Server]]:
    """The servers, started one after the other, each held still."""
    started: list[Server] = []
    try:
        for launch in chosen:
            say(f"starting {launch.name}")
            try:
                server = Server(launch)
            except Unavailable as problem:
                report.unavailable[launch.name] = str(problem)
                say(str(problem))
                continue
            server.hold()
            started.append(server)
            report.start_s[launch.name] = server.start_s
            report.versions[launch.name] = launch.version
            report.unavailable.pop(launch.name, None)
        yield started
    finally:
        for server in started:
            server.stop()


def compare(chosen: Sequence[Launch], scenarios: Sequence[str], repeats: int, report: Report) -> None:
    """Add `repeats` repeats to the report."""
    first = 1 + max((sample.repeat for sample in report.samples), default=0)
    with running(chosen, report) as sides:
        for repeat in range(first - 1, first + repeats):
            warming = repeat == first - 1
            say("warming up" if warming else f"repeat {repeat - first + 1} of {repeats}")
            for at in range(len(sides)):
                server = sides[(at + repeat) % len(sides)]
                chosen_ones = WARM_UP if warming else scenarios
                names = [name for name in chosen_ones if comparison.compares(server.launch.name, name)]
                with at_work(server):
                    for name in names:
                        _measure(server, name, -repeat if warming else repeat, None if warming else report)


def _measure(server: Server, name: str, repeat: int, report: Report | None) -> None:
    try:
        sample = asyncio.run(measured(server.launch.name, name, server.port, repeat))
    except (BadAnswer, OSError, ValueError) as problem:
        sys.exit(f"{server.launch.name}, {name}: {problem}\n{server.said()}")
    if report is not None:
        report.samples.append(sample)
        first = f", first token {sample.first_token_ms:.0f} ms" if sample.first_token_ms is not None else ""
        say(f"  {server.launch.name:16}{name:14}{sample.tokens_per_s:8.0f} tok/s{first}")


def without_http(chosen: Sequence[Launch], folder: Path, report: Report) -> None:
    """Each engine's own rates, one after the other."""
    for launch in chosen:
        say(f"{launch.name} without HTTP")
        target = folder / "in_process.json"
        command = [*launch.in_process, *(["--json", str(target)] if launch.name.startswith("headrace") else [])]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            env={**os.environ, **launch.environment},
            text=True,
            check=False,
            timeout=IN_PROCESS_S,
        )
        if done.returncode:
            say(f"  it failed: {' '.join(command)}")
            continue
        said = target.read_text() if launch.name.startswith("headrace") else done.stdout
        report.in_process[launch.name] = comparison.in_process_rates(launch.name, said)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="by default all four")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", default=[""], help=f"scenarios that begin so: {', '.join(SCENARIOS)}"
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side (default 5)")
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--threads", type=int, default=2, help="of each side's engine (default 2)")
    parser.add_argument("--in-process", action="store_true", help="measure each engine without its server instead")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--add", action="store_true", help="keep what that file has, and add to it")
    options = parser.parse_args(arguments)
    options.scenarios = [name for name in SCENARIOS if name.startswith(tuple(options.only))]
    if not options.scenarios:
        parser.error(f"--only {' '.join(options.only)} leaves no scenario of {', '.join(SCENARIOS)}")
    if options.add and options.json is None:
        parser.error("--add needs --json FILE to add to")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    cache = cache_folder(os.environ)
    try:
        gguf = resolve(DEFAULT_MODEL, cache)
    except ModelProblem as problem:
        sys.exit(str(problem))
    report = Report(device_name(options.threads))
    if options.add and options.json.exists():
        report = msgspec.json.decode(options.json.read_bytes(), type=Report)
    chosen = launches(options.sides, Path(gguf), options.threads, cache, report)
    try:
        if options.in_process:
            (cache / "peers").mkdir(parents=True, exist_ok=True)
            without_http(chosen, cache / "peers", report)
        else:
            compare(chosen, options.scenarios, 1 if options.quick else options.repeats, report)
    finally:
        # What was measured before something failed, or before Ctrl-C, is not lost.
        if options.json:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    console = Console()
    for table in comparison.tables(report):
        console.print(table)
    for name, reason in report.unavailable.items():
        console.print(f"{name} was not compared: {reason}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

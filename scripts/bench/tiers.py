#!/usr/bin/env python3
"""Time to first token by the tier that has the prompt's KV: cold, device, host, disk, disk after a restart.

    scripts/bench/tiers.py [--tokens 512 2048 7000] [--repeats 3] [--json FILE] [--plot FILE.png]
    scripts/bench/tiers.py --working-set [--sessions 32] [--turns 4] [--turn-tokens 1000] [--clients 8]
    scripts/bench/tiers.py --slow-storage [--tokens 1024] [--repeats 10]

Starts real servers on a free port, float32 by default so that the ids of all tiers must be equal (they are compared).
Between two measurements `/flush_cache?tier=…` takes the prompt out of the tiers above. A host or disk hit should cost a
device hit plus its bytes over the bandwidth measured in the same run; the last column says how many times that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

VOCAB = 40_000
OUTPUTS = 32
"""Of each turn of a working set."""
LOST = ("prefetch_declined_bytes", "prefetch_wasted_bytes", "prefetch_late_bytes", "host_skipped_pages", "retractions")
"""Counters that say why a tier gave less than it had."""
WARM_UP_PAIRS = 2
"""How slow storage is has to be seen before anyone can decide by it."""


class Server:
    """A `headrace serve` of our own."""

    def __init__(self, directory: Path | None, flags: Sequence[str]) -> None:
        disk = [] if directory is None else ["--disk-cache-dir", str(directory), "--disk-cache-size", "16GB"]
        command = [sys.executable, "-P", "-m", "headrace.server", "serve", "--port", "0", *disk, *flags]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the server)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if " at http://" not in line:
            self._log.seek(0)
            raise SystemExit(f"the server did not start:\n{self._log.read()}")
        self.url = line.split(" at ")[1].split(",")[0]

    def stop(self) -> None:
        """Let it finish its writes, and end."""
        self._process.terminate()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def post(self, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"headrace:{name} "))

    def settle(self) -> None:
        """Wait until nothing is on its way to a lower tier."""
        before = -1.0
        while (now := self.metric("storage_written_pages_total") + self.metric("host_copied_pages_total")) != before:
            before = now
            time.sleep(0.3)


class Answer(NamedTuple):
    first_token_ms: float
    ids: list[int]
    tiers: dict[str, int]


def ask(server: Server, ids: Sequence[int], outputs: int = 8) -> Answer:
    """Stream a prompt of ids; when its first token came, all ids, and which tier had how much."""
    body = {
        "input_ids": list(ids),
        "stream": True,
        "return_cached_tokens_details": True,
        "sampling_params": {"max_new_tokens": outputs, "temperature": 0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    first_ms, last = 0.0, {}
    with urllib.request.urlopen(request, timeout=600) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                first_ms = first_ms or (time.perf_counter() - began) * 1e3
                last = json.loads(line[6:])
    return Answer(first_ms, last["output_ids"], last["meta_info"]["cached_tokens_details"])


def prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, VOCAB) for _ in range(tokens)]


def memory_gbps() -> float:
    """Copying within memory, as a load from the host does: GB/s, the best of three."""
    source = np.ones(1 << 28, np.uint8)
    target = np.empty_like(source)
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        best = max(best, source.size / (time.perf_counter() - began) / 1e9)
    return best


def disk_gbps(directory: Path) -> float:
    """Reading a file in pieces of 1 MiB with O_DIRECT, one after the other: GB/s."""
    path, size = directory / "bandwidth", 256 << 20
    path.write_bytes(b"\1" * size)
    buffer = mmap.mmap(-1, 1 << 20)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        began = time.perf_counter()
        for at in range(0, size, 1 << 20):
            os.preadv(descriptor, [buffer], at)
        return size / (time.perf_counter() - began) / 1e9
    finally:
        os.close(descriptor)
        path.unlink()


@contextlib.contextmanager
def serving(directory: Path | None, flags: Sequence[str]) -> Iterator[Server]:
    server = Server(directory, flags)
    try:
        yield server
    finally:
        server.stop()


def measure(tokens: int, repeats: int, flags: Sequence[str]) -> dict[str, list[float]]:
    """TTFT in ms by tier, one value a repeat. Raises SystemExit where a tier did not give the tokens, or other ids."""
    times: dict[str, list[float]] = {name: [] for name in ("cold", "device", "host", "disk", "restart")}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        directory = Path(folder) / "kv"
        reference: dict[int, list[int]] = {}

        def check(name: str, seed: int, answer: Answer, tier: str | None) -> None:
            if tier is not None and answer.tiers[tier] < tokens * 0.9:
                raise SystemExit(f"{name}: the {tier} tier gave {answer.tiers} of {tokens} tokens")
            if answer.ids != reference.setdefault(seed, answer.ids):
                raise SystemExit(f"{name}: {answer.ids} are not the cold run's ids {reference[seed]}")
            times[name].append(answer.first_token_ms)

        with serving(directory, flags) as server:
            ask(server, prompt(64, 10**6))
            for seed in range(repeats):
                ids = prompt(tokens, seed)
                check("cold", seed, ask(server, ids), None)
                server.settle()
                check("device", seed, ask(server, ids), "device")
                server.post("/flush_cache?tier=device", {})
                check("host", seed, ask(server, ids), "host")
                server.settle()
                server.post("/flush_cache", {})
                check("disk", seed, ask(server, ids), "storage")
        with serving(directory, flags) as server:
            ask(server, prompt(64, 10**6))
            for seed in range(repeats):
                check("restart", seed, ask(server, prompt(tokens, seed)), "storage")
    return times


def without_storage(flags: Sequence[str]) -> list[str]:
    """The flags of a server that has no storage: one of a tier that is not there would be refused."""
    return [flag for flag in flags if flag not in ("--hicache-storage-prefetch-policy", "wait_complete")]


def working_set(sessions: int, turns: int, turn_tokens: int, clients: int, flags: Sequence[str]) -> dict[str, Any]:
    """Sessions that come back in turns, with the device alone and with all tiers; each pool holds a quarter of them.

    Figures of both: output tokens/s, mean TTFT in ms, in all and by turn, and prompt tokens that had to be computed.
    """
    total = sessions * turns * (turn_tokens + OUTPUTS)
    quarter = max(total // 4, turns * (turn_tokens + OUTPUTS) + 64)
    pool = ["--max-total-tokens", str(quarter)]
    results: dict[str, Any] = {}
    bare = without_storage(flags)
    for name, tiers in (("device alone", []), ("three tiers", ["--hicache-ratio", "1.0"])):
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, ThreadPoolExecutor(clients) as crowd:
            directory = Path(folder) / "kv" if tiers else None
            with serving(directory, [*(flags if tiers else bare), *pool, *tiers]) as server:
                ask(server, prompt(64, 10**6))
                histories = [prompt(turn_tokens, 1000 + i) for i in range(sessions)]
                by_turn: list[float] = []
                began = time.perf_counter()
                for turn in range(turns):
                    answers = list(crowd.map(lambda history: ask(server, history, OUTPUTS), histories))
                    by_turn.append(statistics.fmean(answer.first_token_ms for answer in answers))
                    for i, answer in enumerate(answers):
                        histories[i] += answer.ids + prompt(turn_tokens, 7000 + 100 * turn + i)
                    print(f"{name}: turn {turn + 1} of {turns}, mean TTFT {by_turn[-1]:.0f} ms", file=sys.stderr)
                elapsed_s = time.perf_counter() - began
                computed = server.metric("prompt_tokens_total") - server.metric("cached_prompt_tokens_total")
                lost = {name: server.metric(f"{name}_total") for name in LOST} if tiers else {}
        results[name] = {
            "output_tokens_per_s": sessions * turns * OUTPUTS / elapsed_s,
            "mean_first_token_ms": statistics.fmean(by_turn),
            "first_token_ms_by_turn": by_turn,
            "computed_prompt_tokens": computed,
            "lost": lost,
        }
    return results


def slow_storage(tokens: int, pairs: int, token_bytes: int, flags: Sequence[str]) -> dict[str, list[float]]:
    """TTFT in ms of prompts that a slowed disk has, asked in turns of three servers: one without storage, one that
    decides by `adaptive`, one by `wait_complete`. Reading a prompt takes twice as long as computing it."""
    prompts = [prompt(tokens, 50_000 + seed) for seed in range(pairs + WARM_UP_PAIRS)]
    pool = ["--max-total-tokens", str(max(4096, 2 * tokens))]
    times: dict[str, list[float]] = {"no storage": [], "adaptive": [], "wait_complete": []}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, contextlib.ExitStack() as stack:
        first = Path(folder) / "adaptive"
        with serving(first, [*flags, *pool]) as server:
            ask(server, prompt(64, 10**6))
            cold_ms = statistics.median(ask(server, ids).first_token_ms for ids in prompts)
            server.settle()
        second = shutil.copytree(first, Path(folder) / "wait_complete")
        slow = {"read_mb_per_s": tokens * token_bytes / (2 * cold_ms * 1e3), "transfer_timeout_s": 600}
        servers = {"no storage": stack.enter_context(serving(None, [*without_storage(flags), *pool]))}
        for policy, directory in (("adaptive", first), ("wait_complete", second)):
            slowed = [
                "--hicache-storage-backend-extra-config",
                json.dumps(slow),
                "--hicache-storage-prefetch-policy",
                policy,
            ]
            servers[policy] = stack.enter_context(serving(directory, [*flags, *pool, *slowed]))
        for server in servers.values():
            ask(server, prompt(64, 10**6))
        for number, ids in enumerate(prompts):
            for name, server in servers.items():
                first_ms = ask(server, ids).first_token_ms
                if number >= WARM_UP_PAIRS:
                    times[name].append(first_ms)
                print(f"prompt {number + 1} of {len(prompts)}, {name}: {first_ms:.0f} ms", file=sys.stderr)
    return times


def _show_working_set(console: Console, results: dict[str, Any], title: str) -> None:
    table = Table("", "output tokens/s", "mean TTFT ms", "by turn", "prompt tokens computed", title=title)
    for name, found in results.items():
        by_turn = " / ".join(f"{value:.0f}" for value in found["first_token_ms_by_turn"])
        table.add_row(
            *(name, f"{found['output_tokens_per_s']:.1f}", f"{found['mean_first_token_ms']:.0f}"),
            *(by_turn, f"{found['computed_prompt_tokens']:.0f}"),
        )
    alone, tiers = results["device alone"], results["three tiers"]
    ratios = {name: tiers[name] / alone[name] for name in ("output_tokens_per_s", "mean_first_token_ms")}
    table.add_row(
        *("ratio", f"{ratios['output_tokens_per_s']:.2f}", f"{ratios['mean_first_token_ms']:.2f}", ""),
        f"{tiers['computed_prompt_tokens'] / alone['computed_prompt_tokens']:.2f}",
    )
    console.print(table)
    console.print(", ".join(f"{name} {value:.0f}" for name, value in tiers["lost"].items()))
    console.print("The ratio of computed tokens is what both others could reach if nothing but prefill took time.")


def _show_slow_storage(console: Console, times: dict[str, list[float]], tokens: int) -> None:
    table = Table("", "median TTFT ms", "least", "most", "median of pairs", title=f"{tokens} tokens, slowed storage")
    for name, values in times.items():
        ratio = statistics.median(value / alone for value, alone in zip(values, times["no storage"]))
        table.add_row(name, *(f"{f(values):.0f}" for f in (statistics.median, min, max)), f"{ratio:.2f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 7000], help="prompt lengths")
    parser.add_argument("--repeats", type=int, default=3, help="prompts a length (default 3)")
    parser.add_argument("--dtype", default="float32", help="of the server (default float32)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page (default 16)")
    parser.add_argument("--working-set", action="store_true", help="sessions that come back, instead")
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=1000, help="that each turn adds (default 1000)")
    parser.add_argument("--clients", type=int, default=8, help="sessions that ask at a time (default 8)")
    parser.add_argument("--slow-storage", action="store_true", help="a disk that is slower than computing, instead")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw them as a PNG (needs matplotlib)")
    options = parser.parse_args()
    flags = ["--dtype", options.dtype, "--log-level", "warning", "--hicache-storage-prefetch-policy", "wait_complete"]
    flags += ["--page-size", str(options.page_size)]
    token_bytes = 30 * 2 * 3 * 64 * (4 if options.dtype == "float32" else 2)
    console = Console()
    if options.working_set:
        results = working_set(options.sessions, options.turns, options.turn_tokens, options.clients, flags)
        title = f"{options.sessions} sessions x {options.turns} turns of {options.turn_tokens} tokens, {options.dtype}"
        _show_working_set(console, results, title)
        _write(options.json, results)
        return 0
    if options.slow_storage:
        tokens = options.tokens[0]
        times = slow_storage(tokens, options.repeats, token_bytes, flags)
        _show_slow_storage(console, times, tokens)
        _write(options.json, {"ttft_ms": times, "tokens": tokens})
        return 0
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        bandwidth = {"host": memory_gbps(), "disk": disk_gbps(Path(folder))}
    bandwidth["restart"] = bandwidth["disk"]
    table = Table("tokens", "tier", "TTFT ms", "of cold", "floor ms", "over device / floor")
    figures: dict[str, dict[str, float]] = {}
    for tokens in options.tokens:
        times = measure(tokens, options.repeats, [*flags, "--max-total-tokens", str(max(4096, tokens + 1024))])
        medians = {name: statistics.median(values) for name, values in times.items()}
        figures[str(tokens)] = medians
        for name, value in medians.items():
            floor_ms = tokens * token_bytes / bandwidth[name] / 1e6 if name in bandwidth else 0.0
            over = f"{(value - medians['device']) / floor_ms:.1f}" if floor_ms else ""
            floor = f"{floor_ms:.1f}" if floor_ms else ""
            table.add_row(str(tokens), name, f"{value:.1f}", f"{value / medians['cold']:.3f}", floor, over)
    console.print(table)
    console.print(
        f"memory {bandwidth['host']:.1f} GB/s, disk {bandwidth['disk']:.1f} GB/s, in this run; {options.dtype}"
    )
    _write(options.json, {"ttft_ms": figures, "bandwidth_gbps": bandwidth, "dtype": options.dtype})
    if options.plot:
        _plot(figures, options.plot)
    return 0


def _write(path: str | None, figures: object) -> None:
    if path:
        Path(path).write_text(json.dumps(figures, indent=1))


def _plot(figures: dict[str, dict[str, float]], path: str) -> None:
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    figure, axes = pyplot.subplots(figsize=(7, 4))
    names = ("cold", "device", "host", "disk", "restart")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [x + i * width for x in range(len(figures))]
        bars = axes.bar(at, [medians[name] for medians in figures.values()], width, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(figures))], [f"{tokens} tokens" for tokens in figures])
    axes.set_yscale("log")
    axes.set_ylabel("time to first token, ms")
    axes.legend(title="KV comes from")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())

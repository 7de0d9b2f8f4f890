#!/usr/bin/env python3
"""Time to first token by the tier that has the prompt's KV: cold, device, host, disk, disk after a restart.

    scripts/bench/tiers.py [--tokens 512 2048 7000] [--repeats 3] [--json FILE] [--plot FILE.png]
    scripts/bench/tiers.py --working-set [--sessions 8] [--turns 4] [--turn-tokens 256]

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
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

VOCAB = 40_000
START_S = 60.0


class Server:
    """A `headrace serve` of our own."""

    def __init__(self, directory: Path | None, flags: Sequence[str]) -> None:
        disk = [] if directory is None else ["--disk-cache-dir", str(directory), "--disk-cache-size", "8GB"]
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


def working_set(sessions: int, turns: int, turn_tokens: int, flags: Sequence[str]) -> dict[str, dict[str, float]]:
    """Sessions that come back in turns, with the device alone and with all tiers: tokens/s and mean TTFT."""
    total = sessions * turns * (turn_tokens + 32)
    quarter = max(total // 4, turns * (turn_tokens + 32) + 64)
    pool = ["--max-total-tokens", str(quarter)]
    results: dict[str, dict[str, float]] = {}
    # A tier flag without a tier would be refused.
    bare = [flag for flag in flags if flag not in ("--hicache-storage-prefetch-policy", "wait_complete")]
    for name, tiers in (("device alone", []), ("three tiers", ["--hicache-ratio", "1.0"])):
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            directory = Path(folder) / "kv" if tiers else None
            with serving(directory, [*(flags if tiers else bare), *pool, *tiers]) as server:
                histories = [prompt(turn_tokens, 1000 + i) for i in range(sessions)]
                firsts: list[float] = []
                began = time.perf_counter()
                for turn in range(turns):
                    for i, history in enumerate(histories):
                        answer = ask(server, history, 32)
                        firsts.append(answer.first_token_ms)
                        histories[i] = history + answer.ids + prompt(turn_tokens, 7000 + 100 * turn + i)
                elapsed_s = time.perf_counter() - began
        tokens = sessions * turns * 32
        results[name] = {"output_tokens_per_s": tokens / elapsed_s, "mean_first_token_ms": statistics.fmean(firsts)}
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 7000], help="prompt lengths")
    parser.add_argument("--repeats", type=int, default=3, help="prompts a length (default 3)")
    parser.add_argument("--dtype", default="float32", help="of the server (default float32)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page (default 16)")
    parser.add_argument("--working-set", action="store_true", help="sessions that come back, instead")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=256)
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw them as a PNG (needs matplotlib)")
    options = parser.parse_args()
    flags = ["--dtype", options.dtype, "--log-level", "warning", "--hicache-storage-prefetch-policy", "wait_complete"]
    flags += ["--page-size", str(options.page_size)]
    console = Console()
    if options.working_set:
        results = working_set(options.sessions, options.turns, options.turn_tokens, flags)
        table = Table(
            "", "output tokens/s", "mean TTFT ms", title=f"{options.sessions} sessions x {options.turns} turns"
        )
        for name, found in results.items():
            table.add_row(name, *(f"{value:.1f}" for value in found.values()))
        console.print(table)
        _write(options.json, results)
        return 0
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        bandwidth = {"host": memory_gbps(), "disk": disk_gbps(Path(folder))}
    bandwidth["restart"] = bandwidth["disk"]
    token_bytes = 30 * 2 * 3 * 64 * (4 if options.dtype == "float32" else 2)
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

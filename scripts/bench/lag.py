#!/usr/bin/env python3
"""How long the server's event loop is held under load, and by what.

    scripts/bench/lag.py [--streams 64] [--seconds 30] [--long-tokens 7000] [--long-every-s 1] [--json FILE]

Starts a real server with the default model, and in a second process clients: so many short streams that are begun anew
as they end, and long prompts, as text and as ids, that arrive beside them. Two things are measured in the server: the
lag (how late a clock tick came; on a machine with other work this counts what the system gave to others), and the CPU
time that one turn of the loop took. Whenever a turn has used more than 5 ms of CPU, a signal looks where it is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np

HELD_S: Final = 0.005
TICK_S: Final = 0.002
WORDS: Final = ("the", "river", "ran", "under", "old", "stone", "bridges", "while", "people", "talked", "of", "water")


class Sampler:
    """In the server's process: ticks, and an alarm clock in CPU time that each tick winds up."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._turns_ms: list[float] = []
        self._where: Counter[str] = Counter()
        self._cpu_s = 0.0

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._look)
        self._loop = asyncio.get_running_loop()
        self._cpu_s = time.thread_time()
        self._tick()

    def write(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._file.write_text(json.dumps({"turns_ms": self._turns_ms, "where": self._where.most_common(20)}))

    def _tick(self) -> None:
        now_s = time.thread_time()
        self._turns_ms.append((now_s - self._cpu_s) * 1e3)
        self._cpu_s = now_s
        signal.setitimer(signal.ITIMER_PROF, HELD_S)
        self._loop.call_later(TICK_S, self._tick)

    def _look(self, number: int, frame: FrameType | None) -> None:
        names: list[str] = []
        while frame is not None and len(names) < 6:
            path = frame.f_code.co_filename
            if "asyncio" not in path:
                names.append(f"{Path(path).stem}.{frame.f_code.co_qualname}:{frame.f_lineno}")
            frame = frame.f_back
        self._where[" < ".join(names)] += 1
        signal.setitimer(signal.ITIMER_PROF, HELD_S)


def serve(file: Path, flags: list[str]) -> int:
    """A server that is looked at."""
    from headrace.server import cli
    from headrace.server.lag import LagProbe

    sampler = Sampler(file)
    run = LagProbe.run

    async def watched(self: LagProbe) -> None:
        sampler.start()
        try:
            await run(self)
        finally:
            sampler.write()

    LagProbe.run = watched  # type: ignore[method-assign]
    sys.argv = ["headrace", "serve", "--port", "0", *flags]
    return cli.main()


# ---------------------------------------------------------------------------------------------------------------
# The clients' process


async def load(url: str, streams: int, seconds: float, long_tokens: int, long_every_s: float) -> None:
    """Print how many requests of each kind came to their end."""
    import aiohttp

    rng = random.Random(0)
    done: Counter[str] = Counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(kind: str, body: dict[str, Any]) -> None:
            async with session.post(f"{url}/v1/completions", json={"ignore_eos": True, **body}) as answer:
                async for _ in answer.content.iter_any():
                    pass
                done[kind if answer.status == 200 else f"{kind}: {answer.status}"] += 1

        async def stream() -> None:
            while True:
                prompt = " ".join(rng.choices(WORDS, k=rng.randint(8, 40)))
                await one("streams", {"prompt": prompt, "stream": True, "max_tokens": rng.randint(16, 64)})

        async def long(number: int) -> None:
            if number % 2:
                prompt: object = " ".join(rng.choices(WORDS, k=long_tokens))
            else:
                prompt = [rng.randrange(1000, 40_000) for _ in range(long_tokens)]
            await one("long prompts", {"prompt": prompt, "max_tokens": 4})

        # What still runs at the end is left: on a slow machine 7,000 tokens take many seconds.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                for _ in range(streams):
                    tasks.create_task(stream())
                for number in itertools.count():
                    tasks.create_task(long(number))
                    done["long prompts sent"] += 1
                    await asyncio.sleep(long_every_s)
                    async with session.get(f"{url}/metrics") as answer:
                        await answer.read()
    print(json.dumps(done))


# ---------------------------------------------------------------------------------------------------------------
# The bench


def histogram(text: str, name: str) -> dict[float, float]:
    """Upper bounds and cumulated counts, summed over labels."""
    found: dict[float, float] = {}
    for bound, count in re.findall(rf'^headrace:{name}_bucket{{[^}}]*le="([^"]+)"[^}}]*}} (\S+)$', text, re.MULTILINE):
        found[float(bound)] = found.get(float(bound), 0) + float(count)
    return found


def quantile(counts: dict[float, float], share: float) -> float:
    total = max(counts.values(), default=0.0)
    return next((bound for bound, count in sorted(counts.items()) if count >= share * total), float("inf"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--long-tokens", type=int, default=7000)
    parser.add_argument("--long-every-s", type=float, default=1.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--serve", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--load", metavar="URL", help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args()
    if options.serve:
        return serve(Path(options.serve), flags)
    if options.load:
        asyncio.run(load(options.load, options.streams, options.seconds, options.long_tokens, options.long_every_s))
        return 0
    me = [sys.executable, "-P", os.path.abspath(__file__)]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        file = Path(folder) / "samples.json"
        server = subprocess.Popen([*me, "--serve", str(file), *flags], stdout=subprocess.PIPE, stderr=log, text=True)
        assert server.stdout is not None
        line = server.stdout.readline()
        if " at http://" not in line:
            log.seek(0)
            raise SystemExit(f"the server did not start:\n{log.read()}")
        url = line.split(" at ")[1].split(",")[0]
        clients = subprocess.run([*me, "--load", url, *sys.argv[1:]], stdout=subprocess.PIPE, text=True, check=True)
        with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
            text = answer.read().decode()
        server.terminate()
        server.communicate(timeout=60)
        samples = json.loads(file.read_text())
    lags, pauses = histogram(text, "loop_lag_seconds"), histogram(text, "gc_pause_seconds")
    turns = np.array(samples["turns_ms"])
    result = {
        "done": json.loads(clients.stdout),
        "ticks": int(max(lags.values(), default=0)),
        "lag_p50_ms": quantile(lags, 0.5) * 1e3,
        "lag_p99_ms": quantile(lags, 0.99) * 1e3,
        "turns_cpu_p50_ms": float(np.median(turns)),
        "turns_cpu_p99_ms": float(np.quantile(turns, 0.99)),
        "turns_cpu_max_ms": float(turns.max()),
        "longest_turns_cpu_ms": np.sort(turns)[::-1][:5].round(1).tolist(),
        "turns_over_5_ms": int((turns > HELD_S * 1e3).sum()),
        "turns": len(turns),
        "gc_pauses": int(max(pauses.values(), default=0)),
        "gc_pause_p99_ms": quantile(pauses, 0.99) * 1e3,
        "held_by": samples["where"],
    }
    for name, value in result.items():
        if name != "held_by":
            print(f"{name:22} {value:>12.2f}" if isinstance(value, float) else f"{name:22} {value!s:>12}")
    print("where a turn was when it had used 5 ms of CPU:")
    for where, count in samples["where"]:
        print(f"{count:6}  {where}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Resident memory of a server and its children over a long run: random sessions over all three tiers.

    scripts/soak.py --minutes 10 [--clients 6] [--bound-mb 16] [--json FILE]

Serves the default model with small pools, so that pages move through device, host and disk all the time. Sessions grow
turn by turn, come back, share system prompts, have salts, are cut off in the middle; now and then the cache is flushed.
Prints resident memory (anonymous, and shared: the host pool is shared memory) of server, device worker and storage
agent as a table and a small plot, and ends with 1 if the second half of the run grows any process's by more than the
bound: in the first half, pools and buffers are touched for the first time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

START_S: Final = 120.0
SAMPLES: Final = 40
PROCESSES: Final = {"worker": "headrace.ops.worker", "agent": "headrace.kvcache.storage.agent"}
FLAGS: Final = (
    *("--device", "cpu", "--dtype", "bfloat16", "--cpu-threads", "1", "--port", "0", "--log-level", "warning"),
    *("--max-total-tokens", "2048", "--context-length", "1024", "--hicache-size", "0.1", "--disk-cache-size", "0.4GB"),
)
VOCAB: Final = 40_000
BARS: Final = "▁▂▃▄▅▆▇█"


class Sample(msgspec.Struct, frozen=True):
    """Resident MB by process at a time."""

    at_s: float
    requests: int
    megabytes: dict[str, float]


class Load:
    """Clients that ask until they are told to stop."""

    def __init__(self, url: str, seed: int) -> None:
        self.requests = self.cut = 0
        self.tiers = {"device": 0, "host": 0, "storage": 0}
        self._url = url
        self._rng = random.Random(seed)
        self._systems = [self._ids(160) for _ in range(3)]
        self._sessions: list[list[int]] = []

    async def client(self, session: aiohttp.ClientSession) -> None:
        """One turn of some session after the other."""
        rng = self._rng
        while True:
            history = self._next_session()
            prompt = history + self._ids(rng.randint(10, 60))
            if rng.random() < 0.02:
                async with session.post(self._url + "/flush_cache") as answer:
                    await answer.read()
            outputs = rng.randint(1, 24)
            body = {
                "input_ids": prompt,
                "stream": True,
                "return_cached_tokens_details": True,
                "cache_salt": rng.choice(("", "", "a")),
                "sampling_params": {"max_new_tokens": outputs, "temperature": 0, "ignore_eos": True},
            }
            reads = rng.randint(0, 3) if rng.random() < 0.1 else 1 << 20
            ids = await self._stream(session, body, reads)
            self.requests += 1
            history[:] = (prompt + ids)[:900]

    async def _stream(self, session: aiohttp.ClientSession, body: dict[str, Any], reads: int) -> list[int]:
        """Ids of the answer; the client goes away after so many events."""
        last: dict[str, Any] = {}
        async with session.post(self._url + "/generate", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
                    reads -= 1
                if reads < 0:
                    self.cut += 1
                    return []
        if "error" in last:
            raise SystemExit(f"the server failed a request: {last['error']}")
        for tier in self.tiers:
            self.tiers[tier] += last["meta_info"]["cached_tokens_details"][tier]
        ids: list[int] = last["output_ids"]
        return ids

    def _next_session(self) -> list[int]:
        rng = self._rng
        if len(self._sessions) < 24 or rng.random() < 0.1:
            self._sessions.append(list(rng.choice(self._systems)))
            del self._sessions[:-24]
        session = rng.choice(self._sessions)
        if len(session) > 800:
            session[:] = rng.choice(self._systems)
        return session

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(100, VOCAB) for _ in range(count)]


def children_of(pid: int) -> dict[str, int]:
    """The server's worker and agent."""
    found: dict[str, int] = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace")
        found |= {name: int(child) for name, module in PROCESSES.items() if module in command}
    return found


def resident_mb(pid: int) -> float:
    """Anonymous and shared memory that is resident; mapped files come and go with the page cache."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


async def soak(minutes: float, clients: int, seed: int, console: Console) -> list[Sample]:
    """Serve, ask, and look at the memory `SAMPLES` times. Raises SystemExit where a process or a request failed."""
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder:
        command = [sys.executable, "-P", "-m", "headrace.server", "serve", *FLAGS, "--disk-cache-dir", folder + "/kv"]
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=errors)
        try:
            assert server.stdout is not None
            async with asyncio.timeout(START_S):
                line = (await server.stdout.readline()).decode()
            if " at http://" not in line:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            pids = {"server": server.pid, **children_of(server.pid)}
            load = Load(line.split(" at ")[1].split(",")[0], seed)
            samples = await _sampled(load, pids, minutes, clients, console)
            if children_of(server.pid) != {name: pid for name, pid in pids.items() if name != "server"}:
                raise SystemExit(f"a process was started again:\n{log.read_text()}")
            console.print(f"{load.requests} requests, {load.cut} cut off; tokens reused: {load.tiers}")
            return samples
        finally:
            with suppress(ProcessLookupError):
                server.terminate()
            await server.wait()


async def _sampled(load: Load, pids: dict[str, int], minutes: float, clients: int, console: Console) -> list[Sample]:
    samples: list[Sample] = []
    began_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(load.client(session)) for _ in range(clients)]
        with Progress(console=console, transient=True) as progress:
            shown = progress.add_task("soaking", total=SAMPLES)
            for i in range(SAMPLES):
                await asyncio.sleep(began_s + (i + 1) * minutes * 60 / SAMPLES - time.monotonic())
                sizes = {name: resident_mb(pid) for name, pid in pids.items()}
                samples.append(Sample(time.monotonic() - began_s, load.requests, sizes))
                progress.update(shown, advance=1, description=f"{load.requests} requests")
        for task in asking:
            task.cancel()
    return samples


def growth_mb(samples: list[Sample], process: str) -> float:
    """From the middle of the run to its end: medians of a tenth each, so that one sample decides nothing."""
    sizes = [sample.megabytes[process] for sample in samples]
    half, tenth = len(sizes) // 2, max(1, len(sizes) // 10)
    return statistics.median(sizes[-tenth:]) - statistics.median(sizes[half : half + tenth])


def plot(sizes: list[float]) -> str:
    """One character a sample, from 0 to the largest."""
    most = max(sizes) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(size / most * len(BARS)))] for size in sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load (default 10); under 5, pools still fill")
    parser.add_argument("--clients", type=int, default=6, help="that ask at a time (default 6)")
    parser.add_argument("--bound-mb", type=float, default=16.0, help="that a process may grow by (default 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the samples as JSON")
    options = parser.parse_args()
    console = Console()
    samples = asyncio.run(soak(options.minutes, options.clients, options.seed, console))
    names = list(samples[0].megabytes)
    table = Table("minute", "requests", *(f"{name} MB" for name in names), title="resident memory")
    for sample in samples[:: max(1, len(samples) // 10)]:
        sizes = (f"{sample.megabytes[name]:.1f}" for name in names)
        table.add_row(f"{sample.at_s / 60:.1f}", str(sample.requests), *sizes)
    console.print(table)
    grown = {name: growth_mb(samples, name) for name in names}
    for name in names:
        console.print(f"{name:8}{plot([sample.megabytes[name] for sample in samples])}  second half {grown[name]:+.1f}")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"samples": samples, "grown_mb": grown})))
    leaking = [name for name in names if grown[name] > options.bound_mb]
    if leaking:
        console.print(f"over the bound of {options.bound_mb:g} MB: {', '.join(leaking)}")
    return 1 if leaking else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""How far the simulation is from the real CPU server: one trace through both, in one run.

    scripts/bench/simulation.py [--requests 80] [--load 0.6] [--rounds 1] [--json FILE]

Steps are recorded under workload A (random prompts, 1, 4 and 12 clients that wait for their answers), before and after
the trace, and the simulation is calibrated by them alone. Workload B is the trace: the beginning of a Mooncake trace
with every length divided by `--scale`, its arrivals timed so that the server is busy `--load` of the time. It is
replayed in real time against a server, and in virtual time. Ratios are simulated / real; the bars are 15 % for the
median time to first token and for throughput, 30 % for the 99th of a hundred.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from headrace.server.progress import Progress
from headrace.server.sim.replay import Figures, replay
from headrace.server.sim.scenario import Scenario
from headrace.server.sim.step_costs import Calibration, prefill_work, read_steps
from headrace.server.sim.workload import Workload, read_trace

VOCAB, BLOCK_TOKENS = 40_000, 512
RUNNING, POOL_TOKENS, CONTEXT_TOKENS = 16, 32_768, 4096
REQUEST_S: Final = 300.0
BARS: Final = {"TTFT p50": 0.15, "TTFT p99": 0.30, "output tok/s": 0.15}


@contextlib.asynccontextmanager
async def server(flags: Sequence[str]) -> AsyncIterator[str]:
    """The URL of a `headrace serve` of our own."""
    sizes = ["--max-running-requests", str(RUNNING), "--max-total-tokens", str(POOL_TOKENS)]
    sizes += ["--context-length", str(CONTEXT_TOKENS)]
    command = [sys.executable, "-P", "-m", "headrace.server", "serve", "--port", "0", *sizes, *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        try:
            line = (await process.stdout.readline()).decode()
            if " at http://" not in line:
                log.seek(0)
                raise SystemExit(f"the server did not start:\n{log.read()}")
            yield line.split(" at ")[1].split(",")[0]
        finally:
            if process.returncode is None:
                process.terminate()
            await asyncio.wait_for(process.wait(), 60)


class Timed(NamedTuple):
    """One request, in seconds since its arrival was due."""

    first_s: float
    end_s: float
    gaps_s: list[float]


async def ask(session: aiohttp.ClientSession, url: str, ids: Sequence[int], outputs: int, due_s: float) -> Timed:
    """Stream the answer to a prompt of ids."""
    sampling = {"max_new_tokens": outputs, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(ids), "stream": True, "sampling_params": sampling}
    first_s, last_s, gaps_s = 0.0, 0.0, []
    async with session.post(f"{url}/generate", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                if first_s:
                    gaps_s.append(now_s - last_s)
                first_s, last_s = first_s or now_s, now_s
    return Timed(first_s - due_s, last_s - due_s, gaps_s)


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_S), connector=aiohttp.TCPConnector(limit=0)
    )


# ---------------------------------------------------------------------------------------------------------------
# Workload A


async def calibrate(steps: Path, seed: int, each: int) -> float:
    """Record steps under workload A; ms that HTTP adds to a request."""
    rng = random.Random(seed)
    async with server(["--record-steps", str(steps)]) as url, client() as session:
        overhead_ms = [await _overhead_ms(session, url, rng) for _ in range(each)]
        for clients, count in ((1, each), (4, 2 * each), (12, 3 * each)):
            left = [count]

            async def one(left: list[int] = left) -> None:
                while left[0] > 0:
                    left[0] -= 1
                    ids = [rng.randrange(100, VOCAB) for _ in range(round(16 * 90 ** rng.random()))]
                    await ask(session, url, ids, rng.randint(4, 48), time.perf_counter())

            await asyncio.gather(*(one() for _ in range(clients)))
    return statistics.median(overhead_ms)


async def _overhead_ms(session: aiohttp.ClientSession, url: str, rng: random.Random) -> float:
    """A request alone: what the client saw, less what the engine says of itself."""
    ids = [rng.randrange(100, VOCAB) for _ in range(rng.randint(50, 800))]
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "return_cached_tokens_details": True}
    began_s = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        said = await answer.json()
    took_ms = (time.perf_counter() - began_s) * 1e3
    return max(0.0, took_ms - float(said["sglext"]["headrace"][0]["first_token_ms"]))


# ---------------------------------------------------------------------------------------------------------------
# Workload B


def scaled_trace(source: Path, target: Path, requests: int, scale: int) -> None:
    """The beginning of a trace with all lengths divided, its arrivals in ms as they were."""
    block = BLOCK_TOKENS // scale
    with source.open() as lines, target.open("w") as out:
        for _, line in zip(range(requests), lines):
            row = json.loads(line)
            row["input_length"] = max(1, min(row["input_length"] // scale, CONTEXT_TOKENS - 256))
            row["output_length"] = max(1, row["output_length"] // scale)
            row["hash_ids"] = row["hash_ids"][: -(-row["input_length"] // block)]
            out.write(json.dumps(row) + "\n")


def speed_for(workload: Workload, costs: Calibration, load: float) -> float:
    """The speed at which computing all prompts takes `load` of the trace's time."""
    cached = workload.shared_tokens() / workload.prompt_tokens
    prefill_ms = sum(costs.step_ms(prefill_work(request.prompt_tokens, 0)) for request in workload.requests)
    row_ms = costs.decode[1] + costs.decode[0] / 4
    busy_s = (prefill_ms * (1 - cached) + row_ms * workload.output_tokens) / 1e3
    return workload.requests[-1].arrival_ns / 1e9 / (busy_s / load)


async def real_time(workload: Workload) -> dict[str, float]:
    """The trace against a server, every request at its time."""
    async with server([]) as url, client() as session:
        await ask(session, url, [1, 2, 3], 2, time.perf_counter())
        prompts = [workload.prompt_ids(request, VOCAB).tolist() for request in workload.requests]
        began_s, tasks = time.perf_counter(), []
        with Progress(sys.stderr) as progress:
            for request, prompt in zip(workload.requests, prompts):
                due_s = began_s + request.arrival_ns / 1e9
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                tasks.append(asyncio.create_task(ask(session, url, prompt, request.output_tokens, due_s)))
                progress("requests sent in real time", len(tasks), len(prompts))
            timed = await asyncio.gather(*tasks)
    ends_s = [request.arrival_ns / 1e9 + one.end_s for request, one in zip(workload.requests, timed)]
    first_ms = [one.first_s * 1e3 for one in timed]
    return {
        "TTFT p50": float(np.percentile(first_ms, 50)),
        "TTFT p90": float(np.percentile(first_ms, 90)),
        "TTFT p99": float(np.percentile(first_ms, 99)),
        "ITL p50": float(np.percentile([gap * 1e3 for one in timed for gap in one.gaps_s], 50)),
        "output tok/s": workload.output_tokens / max(ends_s),
    }


def simulated(figures: Figures) -> dict[str, float]:
    return {
        "TTFT p50": figures.ttft_ms.p50,
        "TTFT p90": figures.ttft_ms.p90,
        "TTFT p99": figures.ttft_ms.p99,
        "ITL p50": figures.itl_ms.p50,
        "output tok/s": figures.output_tokens_per_s,
    }


async def one_round(options: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """A before, B, A after; the figures of B, real and simulated."""
    steps = [folder / f"before{number}.jsonl", folder / f"after{number}.jsonl"]
    trace, recorded = folder / f"trace{number}.jsonl", folder / f"steps{number}.jsonl"
    scaled_trace(options.trace, trace, options.requests, options.scale)
    block = BLOCK_TOKENS // options.scale
    before_ms = await calibrate(steps[0], 2 * number, options.calibration_requests)
    speed = speed_for(read_trace(trace, None, 1.0, block), Calibration(list(read_steps(steps[0]))), options.load)
    real = await real_time(read_trace(trace, None, speed, block))
    after_ms = await calibrate(steps[1], 2 * number + 1, options.calibration_requests)
    recorded.write_bytes(steps[0].read_bytes() + steps[1].read_bytes())
    scenario = Scenario(
        trace=str(trace),
        block_tokens=block,
        speed=speed,
        model_shape="smollm2-135m",
        device="cpu",
        calibration=str(recorded),
        request_ms=(before_ms + after_ms) / 2,
        max_running_requests=RUNNING,
        max_total_tokens=POOL_TOKENS,
        context_length=CONTEXT_TOKENS,
    )
    figures = await asyncio.to_thread(replay, scenario, read_trace(trace, None, speed, block))
    model = simulated(figures)
    drift = [Calibration(list(read_steps(path))).step_ms(prefill_work(512, 0)) for path in steps]
    return {
        "real": real,
        "simulated": model,
        "ratio": {name: model[name] / real[name] for name in real},
        "request_ms": scenario.request_ms,
        "speed": speed,
        "prefill_512_ms_before_after": drift,
        "figures": msgspec.to_builtins(figures),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="a Mooncake trace, such as conversation_trace.jsonl")
    parser.add_argument("--requests", type=int, default=80, help="of the trace (default 80)")
    parser.add_argument("--scale", type=int, default=32, help="all lengths are divided by it (default 32)")
    parser.add_argument("--load", type=float, default=0.6, help="share of the time that the server is busy (0.6)")
    parser.add_argument("--calibration-requests", type=int, default=8, help="of each client alone (default 8)")
    parser.add_argument("--rounds", type=int, default=1, help="how often all of it is done (default 1)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            rounds.append(asyncio.run(one_round(options, Path(folder), number)))
            _show(rounds[-1], number)
    if options.json:
        Path(options.json).write_text(json.dumps(rounds, indent=1))
    return 0


def _show(one: dict[str, Any], number: int) -> None:
    before, after = one["prefill_512_ms_before_after"]
    title = f"round {number}: 512 tokens of prefill took {before:.0f} ms before the trace, {after:.0f} ms after it"
    table = Table("", "real", "simulated", "ratio", "bar", title=title, title_justify="left")
    for name, value in one["real"].items():
        bar = BARS.get(name)
        off = abs(one["ratio"][name] - 1)
        verdict = "" if bar is None else f"within {bar:.0%}" if off <= bar else f"over {bar:.0%}"
        table.add_row(name, f"{value:.1f}", f"{one['simulated'][name]:.1f}", f"{one['ratio'][name]:.2f}", verdict)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())

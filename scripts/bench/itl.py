#!/usr/bin/env python3
"""The gap between two tokens of streams that decode, while long prompts arrive beside them.

    scripts/bench/itl.py [--streams 4] [--prompt-tokens 2000] [--every-s 4] [--seconds 40] [--targets 0 60 100]

For each target a real server with the default model is started with that `--target-itl-ms` (0: without the flag). The
streams' gaps are those between two tokens at the client (an event of several tokens, where text was held back for the
rest of a character, is as many gaps of equal length). A gap counts as mixed if a long prompt was being computed when it
began or ended, else as plain: no target can be below what a plain step takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

FIRST_ID: Final = 1000
LAST_ID: Final = 40_000


class Row(msgspec.Struct):
    target_ms: float
    plain_p50_ms: float
    mixed_p50_ms: float
    mixed_p99_ms: float
    mixed_max_ms: float
    gaps: int
    prompts: int
    prompt_ttft_p50_s: float


class Gaps:
    """What the clients saw."""

    def __init__(self) -> None:
        self.computing = 0
        """Long prompts that have no token yet."""
        self.plain: list[float] = []
        self.mixed: list[float] = []
        self.ttft_s: list[float] = []


async def _stream(url: str, gaps: Gaps, rng: random.Random) -> None:
    """Decode one answer after the other."""
    import aiohttp

    async with aiohttp.ClientSession() as session:
        while True:
            body = _body(rng, 32, 1000)
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                last_s, was_computing, tokens = 0.0, 0, 0
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now_s, before = time.perf_counter(), tokens
                    tokens = msgspec.json.decode(line[6:])["usage"]["completion_tokens"]
                    if tokens == before:
                        continue
                    if last_s:
                        kind = gaps.mixed if was_computing or gaps.computing else gaps.plain
                        kind += [(now_s - last_s) * 1e3 / (tokens - before)] * (tokens - before)
                    last_s, was_computing = now_s, gaps.computing


async def _prompt(url: str, gaps: Gaps, rng: random.Random, tokens: int) -> None:
    import aiohttp

    begin_s = time.perf_counter()
    gaps.computing += 1
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json=_body(rng, tokens, 2)) as answer,
        ):
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    gaps.ttft_s.append(time.perf_counter() - begin_s)
                    break
    finally:
        gaps.computing -= 1


def _body(rng: random.Random, prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
    prompt = [rng.randrange(FIRST_ID, LAST_ID) for _ in range(prompt_tokens)]
    usage = {"include_usage": True, "continuous_usage_stats": True}
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": usage,
        "ignore_eos": True,
    }


async def _load(url: str, options: argparse.Namespace) -> Gaps:
    gaps, rng = Gaps(), random.Random(0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(options.seconds), asyncio.TaskGroup() as tasks:
            for _ in range(options.streams):
                tasks.create_task(_stream(url, gaps, rng))
            for _ in itertools.count():
                await asyncio.sleep(options.every_s)
                tasks.create_task(_prompt(url, gaps, rng, options.prompt_tokens))
    return gaps


def _measured(target_ms: float, options: argparse.Namespace, flags: list[str]) -> Row:
    command = [sys.executable, "-P", "-m", "headrace.server", "serve", "--port", "0", *flags]
    if target_ms:
        command += ["--target-itl-ms", f"{target_ms:g}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if " at http://" not in line:
            raise SystemExit(f"the server did not start: {line}")
        gaps = asyncio.run(_load(line.split(" at ")[1].split(",")[0], options))
    finally:
        server.terminate()
        server.communicate(timeout=60)
    mixed = np.array(gaps.mixed)
    return Row(
        target_ms=target_ms,
        plain_p50_ms=float(np.median(gaps.plain)),
        mixed_p50_ms=float(np.median(mixed)),
        mixed_p99_ms=float(np.quantile(mixed, 0.99)),
        mixed_max_ms=float(mixed.max()),
        gaps=len(mixed),
        prompts=len(gaps.ttft_s),
        prompt_ttft_p50_s=float(np.median(gaps.ttft_s)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--every-s", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.0, 60.0, 100.0], metavar="MS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options, flags = parser.parse_known_args()
    rows = [_measured(target_ms, options, flags) for target_ms in options.targets]
    names = Row.__struct_fields__
    print(" ".join(f"{name:>18}" for name in names))
    for row in rows:
        print(" ".join(f"{getattr(row, name):>18.1f}" for name in names))
    if options.json:
        options.json.write_text(json.dumps([msgspec.to_builtins(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

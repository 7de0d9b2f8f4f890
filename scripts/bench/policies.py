#!/usr/bin/env python3
"""What a scheduling policy does to first tokens and to the cache, in virtual time: one workload under each of them.

    scripts/bench/policies.py [--clients 48] [--turns 4] [--seed 0] [--policies least-work,lpm] [--json FILE]

Clients hold conversations: a system prompt that a quarter of them share, then turns that each repeat all that was said.
Some paste a long text now and then. A client thinks between two turns, so the load is bounded, and more than the device
can do; the KV pool holds a third of what is said. The device takes 10 ms a step and 0.5 ms a prompt token, as a small
CPU does, give or take half. The scheduler and the cache are the real ones; times are those of the simulation, so that
figures repeat exactly. What nobody waits for is not in them: HTTP, text, and the scheduler's own time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from typing import Final, get_args

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from headrace.sched.policies import SchedulePolicy
from headrace.server.sim.virtual_loop import run
from headrace.server.sim.world import VOCAB, World, WorldShape

SHAPE: Final = WorldShape(
    slots=8,
    pages=512,
    page_tokens=16,
    context_tokens=2048,
    prefill_tokens=1024,
    target_itl_ms=200.0,
    forward_us=10_000,
    token_us=500.0,
    max_queued_requests=4096,
    max_queued_tokens=1 << 24,
)
SYSTEM_TOKENS, TURN_TOKENS, PASTED_TOKENS, OUTPUT_TOKENS = 256, 48, 900, 24


async def converse(world: World, client: int, turns: int, seed: int, first_ms: list[float]) -> None:
    """One client's conversation."""
    rng = random.Random(seed * 1000 + client)
    system = random.Random(client % 4)
    said = [system.randrange(VOCAB) for _ in range(SYSTEM_TOKENS)]
    await asyncio.sleep(rng.random() * 4)
    for turn in range(turns):
        pastes = turn == 1 and client % 6 == 0
        said += [rng.randrange(VOCAB) for _ in range(PASTED_TOKENS if pastes else TURN_TOKENS)]
        watched = world.submit(said, OUTPUT_TOKENS)
        await watched.ended.wait()
        assert watched.started is not None
        first_ms.append(watched.started.first_token_ms)
        said += watched.ids
        await asyncio.sleep(rng.expovariate(1 / 2.0))


def play(policy: SchedulePolicy, clients: int, turns: int, seed: int) -> dict[str, float]:
    """Figures of all conversations under one policy."""

    async def main() -> dict[str, float]:
        first_ms: list[float] = []
        async with World(seed, msgspec.structs.replace(SHAPE, schedule_policy=policy), check_every_step=False) as world:
            await asyncio.sleep(0.5)
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            async with asyncio.TaskGroup() as group:
                for client in range(clients):
                    group.create_task(converse(world, client, turns, seed, first_ms))
            status, lasted_s = world.engine.status(), loop.time() - began_s
        return {
            "first_p50_s": float(np.percentile(first_ms, 50)) / 1e3,
            "first_mean_s": float(np.mean(first_ms)) / 1e3,
            "first_p99_s": float(np.percentile(first_ms, 99)) / 1e3,
            "first_max_s": max(first_ms) / 1e3,
            "cached_percent": 100 * status.cached_tokens / status.prompt_tokens,
            "outputs_per_s": status.output_tokens / lasted_s,
        }

    return run(main(), max_virtual_s=86_400, max_turns=1 << 40)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=48, help="conversations side by side (default 48)")
    parser.add_argument("--turns", type=int, default=4, help="turns of each (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts, the pauses and the device (default 0)")
    parser.add_argument("--policies", default=",".join(get_args(SchedulePolicy)), help="default: all")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args()
    table = Table("policy", "first token p50 s", "mean s", "p99 s", "max s", "cached %", "output tok/s")
    results: dict[str, dict[str, float]] = {}
    console = Console()
    with console.status("") as progress:
        for policy in options.policies.split(","):
            if policy not in get_args(SchedulePolicy):
                parser.error(f"{policy} is no policy: give some of {', '.join(get_args(SchedulePolicy))}")
            progress.update(policy)
            results[policy] = play(policy, options.clients, options.turns, options.seed)
            table.add_row(policy, *(f"{value:.1f}" for value in results[policy].values()))
    console.print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"clients": options.clients, "turns": options.turns, "policies": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

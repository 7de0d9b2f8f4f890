"""A simulated engine over three tiers, and what tests of them do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec

from headrace.kvcache.prefetch import PrefetchOptions
from headrace.server.sim.judge import Watched
from headrace.server.sim.virtual_loop import run
from headrace.server.sim.world import World, WorldShape

Policy = Literal["best_effort", "wait_complete", "timeout", "adaptive"]

PROMPT = list(range(100, 137))
PAGES = 9
"""Whole pages of it that can be matched."""
HOST = WorldShape(pages=24, host_pages=64, context_tokens=64)
DISK = msgspec.structs.replace(
    HOST, storage_pages=400, prefetch=PrefetchOptions("wait_complete", threshold_tokens=4), token_us=200.0
)


def with_policy(shape: WorldShape, policy: Policy, **options: Any) -> WorldShape:
    return msgspec.structs.replace(shape, prefetch=PrefetchOptions(policy, threshold_tokens=4, **options))


def play(shape: WorldShape, scenario: Callable[[World], Coroutine[Any, Any, None]], seed: int = 0) -> World:
    async def main() -> World:
        async with World(seed, shape) as world:
            await asyncio.sleep(0.5)
            await scenario(world)
            await world.finish()
            return world

    return run(main())


async def ask(world: World, prompt: list[int] = PROMPT, outputs: int = 3) -> Watched:
    watched = world.submit(prompt, outputs)
    await watched.ended.wait()
    return watched


async def settled(world: World) -> None:
    """Everything that is on its way down has arrived."""
    await asyncio.sleep(2.0)
    assert not world.engine.writing


def cached(watched: Watched) -> tuple[int, int, int]:
    """Tokens from the device, the host, storage."""
    started = watched.started
    assert started is not None
    return started.cached_device_tokens, started.cached_host_tokens, started.cached_storage_tokens

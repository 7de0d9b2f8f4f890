"""The engine's stages: cancelled at any await, and woken by clocks that round."""

from __future__ import annotations

import asyncio

import pytest

from headrace.kvcache.prefetch import PrefetchOptions
from headrace.sched.budget import LaunchClock
from headrace.server.sim.virtual_loop import run, running_loop
from headrace.server.sim.world import World, WorldShape

TIERED = WorldShape(host_pages=64, storage_pages=500, prefetch=PrefetchOptions("wait_complete", 1))


@pytest.mark.parametrize("stage", ["device", "execute", "watch", "storage", "grammars"])
@pytest.mark.parametrize("after_ms", [0.0, 113.7, 131.0])
def test_a_stage_that_is_cancelled_alone_fails_the_engine_and_every_request_is_told(
    stage: str, after_ms: float
) -> None:
    async def main() -> None:
        async with World(0, TIERED) as world:
            await asyncio.sleep(after_ms / 1e3)
            requests = [world.submit([number, 2, 3, 4, 5, 6], 30) for number in range(3)]
            await asyncio.sleep(0.004)
            await world.cancel_engine(stage)
            ends = [watched.finished for watched in requests]
            assert all(end is not None and end.reason == "error" and stage in end.message for end in ends)

    run(main())


@pytest.mark.parametrize("after_ms", [0.0, 113.7, 131.0])
def test_a_cancelled_engine_gives_the_device_and_the_agent_back(after_ms: float) -> None:
    async def main() -> None:
        async with World(0, TIERED) as world:
            world.submit([1, 2, 3, 4, 5, 6], 30)
            await asyncio.sleep(after_ms / 1e3)
            await world.cancel_engine()
            assert world.engine.phase != "failed"

    run(main())


def test_a_launch_that_is_due_before_the_clock_can_say_so_is_made_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchClock, "launch_at_s", lambda self: running_loop().time() + 1e-10)

    async def main() -> None:
        async with World(0) as world:
            world.submit([1, 2, 3], 20)
            await world.finish()
            assert world.deepest == 2

    run(main())

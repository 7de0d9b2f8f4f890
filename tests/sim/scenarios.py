"""A scenario in a world of its own, for the tests of the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.server.sim.virtual_loop import run
from headrace.server.sim.world import World, WorldShape


def in_world(shape: WorldShape, scenario: Callable[[World], Coroutine[Any, Any, None]], seed: int = 0) -> World:
    """Run a scenario when the device is ready, let everything end, and judge it."""

    async def main() -> World:
        async with World(seed, shape) as world:
            await asyncio.sleep(0.2)
            await scenario(world)
            await world.finish()
            return world

    return run(main())

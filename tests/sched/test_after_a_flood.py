"""After a flood the engine is what it was before: as fast, and nothing of it is left in any list."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from sim.scenarios import in_world

from headrace.sched.messages import Overloaded
from headrace.server.sim.virtual_loop import running_loop
from headrace.server.sim.world import World, WorldShape

PROBES = 24
FLOOD = 1500


async def lone_ms(world: World) -> float:
    """What a request with nobody beside it takes on average: a prompt that nobody sent before, 12 outputs."""
    began_s = running_loop().time()
    for _ in range(PROBES):
        probe = len(world.requests)
        await world.submit([probe % 990, probe // 990, *range(20)], 12).ended.wait()
    return (running_loop().time() - began_s) * 1e3 / PROBES


async def flood(world: World) -> int:
    """Far more than fits, of which some leave and the rest waits; how many were refused."""
    rng, refused = random.Random(7), 0
    for i in range(FLOOD):
        prompt = [i % 990, *(rng.randrange(900) for _ in range(rng.randrange(4, 40)))]
        try:
            watched = world.submit(prompt, rng.randrange(1, 16), salt=rng.choice(["", "a", "b"]))
        except Overloaded:
            refused += 1
        else:
            if rng.random() < 0.2:
                running_loop().call_later(rng.random() * 0.02, _leave, world, watched.submit.request)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.005)
    await world.until(lambda: not world.unfinished)
    return refused


def _leave(world: World, request: int) -> None:
    if (watched := world.unfinished.get(request)) is not None:
        world.abort(watched)


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("target_itl_ms", [0.0, 4.0])
def test_b45_after_a_flood_a_request_takes_what_it_took_before(tiers: bool, target_itl_ms: float) -> None:
    took: list[float] = []

    async def scenario(world: World) -> None:
        took.append(await lone_ms(world))
        assert await flood(world) > 100, "it was a flood"
        took.append(await lone_ms(world))
        status = world.engine.status()
        assert status.running == status.waiting == 0

    shape = WorldShape(max_queued_requests=40, token_us=50.0, target_itl_ms=target_itl_ms, conservativeness=0.1)
    if tiers:
        shape = msgspec.structs.replace(shape, host_pages=64, storage_pages=512)
    in_world(shape, scenario)
    before_ms, after_ms = took
    assert after_ms < 1.1 * before_ms

"""Storage is detached and attached again while the server works: nobody waits for it, nothing is lost or held (B19)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from sim.tiered_world import DISK, PAGES, ask, cached, play, settled

from headrace.kvcache.prefetch import PrefetchOptions
from headrace.sched.messages import Overloaded
from headrace.server.sim.storage import StorageTimes
from headrace.server.sim.world import World, WorldShape

SLOW = StorageTimes(100, 20_000, 2)
CROWD = [[200 + i] * 37 for i in range(4)]


def with_times(times: StorageTimes, **options: object) -> WorldShape:
    prefetch = PrefetchOptions("wait_complete", threshold_tokens=4, piece_bytes=128)
    return msgspec.structs.replace(DISK, storage=times, prefetch=prefetch, **options)


async def stored_and_flushed(world: World) -> None:
    """The crowd's prompts are in storage alone."""
    for prompt in CROWD:
        await ask(world, prompt)
        await settled(world)
    world.engine.flush_cache()


def test_b19_storage_is_detached_under_load_and_what_is_under_way_is_completed() -> None:
    async def scenario(world: World) -> None:
        await stored_and_flushed(world)
        waiting = [world.submit(prompt, 5) for prompt in CROWD]
        # The lookups are answered, reads are under way.
        await asyncio.sleep(0.01)
        assert await world.engine.control.detach_storage()
        assert world.engine.status().storage_state == "detached"
        stored = world.engine.status().stored_pages
        await asyncio.gather(*(watched.ended.wait() for watched in waiting))
        assert sum(cached(watched)[2] for watched in waiting) > 0, "what had arrived was used"
        late = await ask(world, [9] * 37)
        assert late.started is not None and late.started.waited_ms["storage"] == 0
        assert late.started.prefetch_policy == "", "storage was not asked"
        await settled(world)
        assert world.engine.status().stored_pages == stored

    play(with_times(SLOW, host_pages=80), scenario)


def test_b19_what_was_stored_before_is_found_after_storage_is_attached_again() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        control = world.engine.control
        for _ in range(2):
            assert await control.detach_storage(), "harmless twice"
        world.engine.flush_cache()
        running = world.submit([3] * 9, 40)
        assert cached(await ask(world)) == (0, 0, 0)
        await running.ended.wait()
        await settled(world)
        world.engine.flush_cache()
        for _ in range(2):
            assert await control.attach_storage() == ""
        assert cached(await ask(world)) == (0, 0, PAGES * 4)
        assert world.agents == 2 and world.engine.status().storage_restarts == 0

    play(msgspec.structs.replace(DISK, pages=48), scenario)


def test_b19_an_agent_that_hangs_is_killed_when_it_is_detached_and_gives_its_pages_back() -> None:
    async def scenario(world: World) -> None:
        await stored_and_flushed(world)
        waiting = [world.submit(prompt, 5) for prompt in CROWD]
        await asyncio.sleep(0.01)
        world.hang_agent(1000.0)
        began_s = asyncio.get_running_loop().time()
        assert not await world.engine.control.detach_storage()
        assert asyncio.get_running_loop().time() - began_s <= 5.1
        await asyncio.gather(*(watched.ended.wait() for watched in waiting))
        await settled(world)
        world.engine.flush_cache()
        assert world.engine.status().host_pages_free == world.shape.host_pages
        assert await world.engine.control.attach_storage() == ""
        assert await world.engine.control.detach_storage(), "what the last agent gave up is forgotten"

    play(with_times(SLOW, host_pages=80), scenario)


def test_b19_a_store_that_does_not_open_stays_detached_and_says_why() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        control = world.engine.control
        await control.detach_storage()
        async with asyncio.TaskGroup() as tasks:
            attaching = tasks.create_task(control.attach_storage())
            # The agent takes 10 ms to start; the command that opens the store is on its way then.
            await asyncio.sleep(0.010001)
            with pytest.raises(Overloaded, match="just being attached"):
                await control.detach_storage()
            world.hang_agent(1000.0)
        assert attaching.result() == "the store was not open after 30 s"
        assert world.engine.status().storage_state == "detached" and not control.storage_attached
        assert cached(await ask(world)) == (PAGES * 4, 0, 0), "the server goes on without it"
        assert await control.attach_storage() == ""

    play(DISK, scenario)

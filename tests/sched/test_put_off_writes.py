"""What storage did not take when the host got it, it gets when it can, once, and while it has nothing else to write."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
from sim.tiered_world import DISK, PAGES, PROMPT, ask, cached, play, settled

from headrace.kvcache.prefetch import PrefetchOptions
from headrace.server.sim.storage import StorageTimes
from headrace.server.sim.world import World, WorldShape


def test_b12_pages_that_were_copied_while_storage_was_detached_are_written_when_it_is_back() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await control.detach_storage()
        await ask(world)
        await settled(world)
        status = world.engine.status()
        assert status.put_off_pages == status.copied_pages > 0 and status.stored_pages + status.unstored_pages == 0
        assert await control.attach_storage() == ""
        await settled(world)
        status = world.engine.status()
        assert status.stored_pages == status.copied_pages and status.put_off_pages + status.unstored_pages == 0
        world.engine.flush_cache()
        assert cached(await ask(world)) == (0, 0, PAGES * 4)

    play(DISK, scenario)


def test_b12_pages_that_were_copied_while_the_breaker_was_open_are_written_when_it_closes() -> None:
    async def scenario(world: World) -> None:
        await ask(world, [1] * 9, 1)
        await settled(world)
        # A lookup is not answered in time: for a second nothing is asked.
        world.hang_agent(0.2)
        await ask(world)
        assert world.engine.status().storage_deadlines_missed == 1
        await asyncio.sleep(0.5)
        assert world.engine.status().put_off_pages > 0
        await asyncio.sleep(1.0)
        status = world.engine.status()
        assert status.put_off_pages == 0 and status.stored_pages == status.copied_pages

    play(DISK, scenario)


def test_what_the_agent_took_with_it_is_written_by_the_next_one() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        world.kill_agent()
        await asyncio.sleep(3)
        status = world.engine.status()
        assert world.agents == 2 and status.put_off_pages == 0 and status.stored_pages == status.copied_pages

    play(with_slow_writes(), scenario)


def test_what_the_host_has_no_more_is_given_up() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await control.detach_storage()
        await ask(world)
        await settled(world)
        lost = world.engine.status().put_off_pages
        world.engine.flush_cache()
        assert await control.attach_storage() == ""
        await settled(world)
        status = world.engine.status()
        assert (status.put_off_pages, status.stored_pages, status.unstored_pages) == (0, 0, lost)

    play(DISK, scenario)


def test_a_prefix_that_the_host_has_half_of_is_written_so_far() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await control.detach_storage()
        await ask(world)
        await settled(world)
        pages = world.engine.status().put_off_pages
        assert world.engine.flush_cache(most_pages=pages - 4).dropped_host_pages == pages - 4
        assert await control.attach_storage() == ""
        await settled(world)
        status = world.engine.status()
        assert (status.put_off_pages, status.stored_pages, status.unstored_pages) == (0, 4, pages - 4)
        assert (await control.lookup(np.array(PROMPT, np.int32), "")).storage == 16

    play(DISK, scenario)


def test_what_is_deleted_from_storage_is_not_written_afterwards() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await control.detach_storage()
        for salt in ("", "tenant"):
            watched = world.submit(PROMPT, 3, salt=salt)
            await watched.ended.wait()
        await settled(world)
        assert await control.delete_stored("tenant")
        assert await control.attach_storage() == ""
        await settled(world)
        ids = np.array(PROMPT, np.int32)
        assert (await control.lookup(ids, "tenant")).storage == 0
        assert (await control.lookup(ids, "")).storage == PAGES * 4

    play(msgspec.structs.replace(DISK, pages=48), scenario)


def test_what_is_put_off_is_bounded_by_the_host() -> None:
    async def scenario(world: World) -> None:
        await world.engine.control.detach_storage()
        for i in range(60):
            await ask(world, [i + 1] * 37, 1)
        await settled(world)
        status = world.engine.status()
        # Each prefix has 9 pages; the oldest are given up.
        assert status.put_off_pages + status.unstored_pages == status.copied_pages == 60 * PAGES
        assert status.put_off_pages == 4 * world.shape.host_pages // PAGES * PAGES

    play(msgspec.structs.replace(DISK, host_pages=24), scenario)


def test_what_was_put_off_does_not_keep_others_from_being_written() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await control.detach_storage()
        for i in range(8):
            await ask(world, [i + 1] * 37, 1)
        await settled(world)
        assert await control.attach_storage() == ""
        put_off = world.engine.status().put_off_pages
        assert put_off > 60
        await ask(world)
        # Its pages wait for one write at most of what was put off; that takes 0.04 s, all of them 0.8.
        await asyncio.sleep(0.15)
        assert (await control.lookup(np.array(PROMPT, np.int32), "")).storage == PAGES * 4
        assert world.engine.status().put_off_pages > put_off // 2

    play(with_slow_writes(host_pages=200), scenario)


def test_a_write_that_nothing_waits_for_is_begun_however_slow_storage_is() -> None:
    async def scenario(world: World) -> None:
        for i in range(10):
            await ask(world, [i + 1] * 37, 1)
            await settled(world)
        status = world.engine.status()
        assert status.stored_pages == status.copied_pages and status.unstored_pages + status.put_off_pages == 0

    # Nine pages take 0.5 s, the most that all writes together may be expected to take.
    slow = StorageTimes(50, 65_000, 1)
    play(msgspec.structs.replace(DISK, storage=slow, host_pages=200, prefill_tokens=64), scenario)


def with_slow_writes(**changes: object) -> WorldShape:
    """A page takes 4 to 15 ms, one after the other."""
    prefetch = PrefetchOptions("wait_complete", threshold_tokens=400)
    return msgspec.structs.replace(DISK, storage=StorageTimes(50, 10_000, 1), prefetch=prefetch, **changes)

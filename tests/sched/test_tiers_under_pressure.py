"""Copies, evictions, storage and priorities where pages, room or clients are short: each found by a reviewer once."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from sim.tiered_world import DISK, HOST, PROMPT, ask, cached, play

from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.prefetch import PrefetchOptions
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.radix_nodes import Node
from headrace.server.sim.storage import StorageTimes
from headrace.server.sim.world import World, WorldShape


def test_b31_pages_that_only_wait_for_their_copies_are_not_missing() -> None:
    async def scenario(world: World) -> None:
        await ask(world, [i % 900 + 1 for i in range(160)], 1)
        assert world.engine.writing
        watched = await ask(world, [7, 8, 9], 60)
        assert watched.finished is not None and watched.finished.reason == "length" and len(watched.ids) == 60

    # Copies are slow: many steps pass before a long prompt has been copied.
    shape = msgspec.structs.replace(HOST, pages=48, host_pages=400, context_tokens=192, prefill_tokens=256)
    play(msgspec.structs.replace(shape, copy_pages=1, copy_page_us=1000.0), scenario)


@pytest.mark.parametrize("together", [1, 2])
def test_b18_write_back_copies_all_that_it_evicts_while_the_host_has_room(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []
    drop = RadixIndex._drop_device

    def watched(self: RadixIndex, node: Node, keep: int) -> object:
        lost.append(max(0, node.num_device - max(keep, node.num_host)))
        return drop(self, node, keep)

    monkeypatch.setattr(RadixIndex, "_drop_device", watched)

    async def scenario(world: World) -> None:
        for i in range(0, 30, together):
            prompts = [[(i + k) * 17 + j + 1 for j in range(33)] for k in range(together)]
            requests = [world.submit(prompt, 6) for prompt in prompts]
            for request in requests:
                await request.ended.wait()
            await asyncio.sleep(0.2)
        assert world.engine.status().host_pages_free > 0

    play(msgspec.structs.replace(HOST, write_policy="write_back", pages=24 * together, host_pages=600), scenario)
    assert len(lost) > 5 and sum(lost) == 0


def test_b30_making_room_for_an_urgent_request_retracts_no_more_than_it_needs() -> None:
    async def scenario(world: World) -> None:
        high = [world.submit([10 + i] * 4, 200, priority=5) for i in range(2)]
        low = [world.submit([100 + i] * 32, 100, priority=0) for i in range(5)]
        await world.until(lambda: all(len(request.ids) > 2 for request in (*high, *low)))
        urgent = world.submit([900] * 60, 20, priority=9)
        await world.until(lambda: bool(urgent.ids))
        assert world.engine.status().retractions == 2

    shape = WorldShape(slots=12, pages=64, context_tokens=256, prefill_tokens=64, preempt_above=2, conservativeness=0.0)
    play(msgspec.structs.replace(shape, schedule_policy="fcfs"), scenario)


def test_a_detach_whose_client_leaves_ends_the_agent_and_storage_can_be_attached_again() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await asyncio.sleep(1)
        world.engine.flush_cache()
        slow = world.submit(PROMPT, 1)
        await asyncio.sleep(0.01)
        detach = asyncio.create_task(world.engine.control.detach_storage())
        await asyncio.sleep(0.01)
        detach.cancel()
        await asyncio.gather(detach, return_exceptions=True)
        await slow.ended.wait()
        await asyncio.sleep(2)
        began_s = asyncio.get_running_loop().time()
        assert await world.engine.control.attach_storage() == ""
        assert asyncio.get_running_loop().time() - began_s < 1.0
        assert world.engine.status().storage_state == "usable"

    play(msgspec.structs.replace(DISK, storage=StorageTimes(100, 20_000, 4)), scenario)


def test_b29_a_crowd_that_waits_for_hanging_storage_keeps_nobody_else_from_the_device() -> None:
    async def scenario(world: World) -> None:
        prompts = [[i + 1] * 9 + [900 - i] * 8 for i in range(70)]
        for prompt in prompts:
            await ask(world, prompt, 1)
        await asyncio.sleep(1)
        world.engine.flush_cache()
        crowd = [world.submit(prompt, 1) for prompt in prompts]
        await asyncio.sleep(0.02)
        world.hang_agent(60)
        began_s = asyncio.get_running_loop().time()
        await ask(world, [950] * 3, 2)
        assert asyncio.get_running_loop().time() - began_s < 0.05
        assert world.engine.status().waiting >= 65
        for request in crowd:
            await request.ended.wait()

    shape = msgspec.structs.replace(
        DISK, slots=16, pages=2000, host_pages=2000, storage_pages=5000, max_queued_requests=400, schedule_policy="fcfs"
    )
    play(msgspec.structs.replace(shape, storage=StorageTimes(100, 20_000, 400)), scenario)


def test_b11_what_follows_a_damaged_page_is_not_waited_for() -> None:
    prompt = [i % 990 + 1 for i in range(401)]

    async def scenario(world: World) -> None:
        await ask(world, prompt, 1)
        await asyncio.sleep(8)
        world.engine.flush_cache()
        key = PrefixKey(namespace(b"oracle", "", ""), 4, np.array(prompt, np.int32), len(prompt))
        world.store._sums[0, key.page_hashes(100)[0]] ^= 1
        watched = await ask(world, prompt, 1)
        started = watched.started
        assert started is not None and cached(watched) == (0, 0, 0)
        assert started.prefetch_decision == "cut_short" and started.waited_ms["storage"] < 100

    # Room for a tenth of the prompt at a time: the rest has not been begun when the damage shows.
    prefetch = PrefetchOptions("wait_complete", threshold_tokens=4, piece_bytes=256, host_share=0.025)
    shape = msgspec.structs.replace(DISK, pages=200, host_pages=400, context_tokens=512, prefill_tokens=256)
    play(msgspec.structs.replace(shape, storage=StorageTimes(100, 5_000, 2), prefetch=prefetch), scenario)


def test_b26_the_idle_check_sees_that_a_node_was_split_under_it() -> None:
    async def scenario(world: World) -> None:
        engine = world.engine
        await ask(world, PROMPT[:33], 1)
        await asyncio.sleep(3)
        engine._idle_check.launched(0, 0, 0)
        pin = engine.control.pin(np.array(PROMPT[:33], np.int32), "", 60)
        check = asyncio.create_task(engine._idle_check.check())
        await asyncio.sleep(0)
        engine.control.clear(np.array(PROMPT[:8], np.int32), "", True, True)
        await check
        assert engine.status().integrity_alarms == 0
        engine.control.unpin(pin.id)

    play(msgspec.structs.replace(HOST, pages=64), scenario)


def test_what_was_evicted_before_a_requests_turn_is_read_again_at_it() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await asyncio.sleep(2)
        # The only slot is taken, and by its end the cache has lost what the waiting request had in it.
        other = world.submit([5] * 20, 40)
        await world.until(lambda: bool(other.ids))
        watched = world.submit(PROMPT, 2)
        await asyncio.sleep(0.005)
        world.engine.flush_cache()
        await watched.ended.wait()
        assert cached(watched) == (0, 0, 36)
        assert watched.started is not None and watched.started.prefetch_decision == "complete"

    play(msgspec.structs.replace(DISK, slots=1), scenario)


def test_a_device_that_hangs_in_a_copy_is_started_again_though_no_step_can_run_until_then() -> None:
    async def scenario(world: World) -> None:
        await ask(world, list(range(100, 163)), 1)
        assert world.engine.writing and not world.engine.in_flight
        world.hang_device(3600.0)
        began_s = asyncio.get_running_loop().time()
        watched = await ask(world, list(range(300, 363)), 1)
        assert watched.finished is not None and watched.finished.reason == "length"
        assert world.engine.status().device_restarts == 1
        assert asyncio.get_running_loop().time() - began_s < 4 * world.shape.step_timeout_s

    # The second request needs pages that only the copy keeps.
    shape = msgspec.structs.replace(HOST, pages=18, copy_pages=1, copy_page_us=20_000.0)
    play(shape, scenario)

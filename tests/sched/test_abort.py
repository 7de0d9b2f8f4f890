"""Aborts at every stage of a request's way: what it had is given back when it must be, and nobody else notices.

`World.finish` judges the others' ids and that nothing is held at the end; here is when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import pytest
from sim.scenarios import in_world

from headrace.kvcache.prefetch import PrefetchOptions
from headrace.sched.messages import SamplingParams, Submit
from headrace.sched.request import Request, Stage
from headrace.server.sim.judge import Watched
from headrace.server.sim.storage import StorageTimes
from headrace.server.sim.world import World, WorldShape

PROMPT = list(range(40))
SHAPE = WorldShape(pages=64, prefill_tokens=8, context_tokens=64)
SLOW_STORAGE = msgspec.structs.replace(
    WorldShape(pages=24, host_pages=64, context_tokens=64, prefill_tokens=8, storage_pages=400),
    storage=StorageTimes(latency_us=30_000, page_us=0),
    prefetch=PrefetchOptions("wait_complete", threshold_tokens=4, piece_bytes=1),
)


def request_of(world: World, watched: Watched) -> Request:
    return world.engine._requests[watched.submit.request]


async def queue(world: World) -> Watched:
    """All slots are taken."""
    while world.engine.status().running < world.shape.slots:
        other = world.submit([900 + len(world.requests)], 40)
        await world.until(lambda other=other: bool(other.ids))  # type: ignore[misc]
    watched = world.submit(PROMPT, 8)
    await steps(world, 2)
    assert request_of(world, watched).waited_for == "slot"
    return watched


async def prefix(world: World) -> Watched:
    """Another computes the pages that it needs."""
    world.submit(PROMPT, 8)
    watched = world.submit(PROMPT, 8)
    await steps(world, 2)
    assert request_of(world, watched).waited_for == "prefix"
    return watched


async def chunk(world: World) -> Watched:
    """A part of its prompt is computed."""
    watched = world.submit(PROMPT, 8)
    await steps(world, 2)
    assert request_of(world, watched).stage is Stage.PREFILL
    return watched


async def running(world: World) -> Watched:
    """It has some output."""
    watched = world.submit(PROMPT, 20)
    await world.until(lambda: len(watched.ids) >= 3)
    assert request_of(world, watched).stage is Stage.DECODE
    return watched


async def retracted(world: World) -> Watched:
    """Its pages have been taken, and its last steps are not collected."""
    watched = world.submit(PROMPT, 20)
    await world.until(lambda: len(watched.ids) >= 3)
    request = request_of(world, watched)
    world.engine._scheduler.retract(request)
    assert request.stage is Stage.RETRACTED and world.engine.in_flight
    return watched


async def last_step(world: World) -> Watched:
    """Its last id is drawn by a step in flight."""
    watched = world.submit(PROMPT, 6)
    table = world.engine._scheduler.table
    await world.until(lambda: bool(watched.ids))
    slot = request_of(world, watched).slot
    await world.until(lambda: bool(table.extent[slot] == table.limit[slot]))
    assert len(watched.ids) < 6
    return watched


async def steps(world: World, count: int) -> None:
    done = world.engine.status().steps + count
    await world.until(lambda: world.engine.status().steps >= done)


@pytest.mark.parametrize("reach", [queue, prefix, chunk, running, retracted, last_step])
def test_b35_an_aborted_request_gives_back_its_slot_at_once_and_its_pages_within_two_steps(
    reach: Callable[[World], Awaitable[Watched]],
) -> None:
    async def scenario(world: World) -> None:
        other = world.submit([800, 801], 60)
        await world.until(lambda: bool(other.ids))
        watched = await reach(world)
        engine, had = world.engine, len(watched.ids)
        request = request_of(world, watched)
        engine.abort(watched.submit.request)
        assert (request.stage, request.slot, request.holding) == (Stage.ENDED, -1, None)
        assert request not in list(engine._scheduler.waiting)
        await watched.ended.wait()
        await steps(world, 2)
        assert not other.ended.is_set()
        stats = engine._scheduler.cache.stats()
        assert stats.fenced == 0, "what its last steps still touched is free"
        assert watched.finished is not None and watched.finished.reason == "abort"
        assert len(watched.ids) == had, "ids of steps in flight are dropped"

    in_world(SHAPE, scenario)


@pytest.mark.parametrize("after_ms", [0, 10, 45, 75])
def test_b35_a_request_aborted_while_storage_reads_for_it_ends_now_and_its_host_pages_come_back_when_the_reads_do(
    after_ms: int,
) -> None:
    """At once, in the lookup, and among the reads of its nine pages, of which four are made at a time."""

    async def scenario(world: World) -> None:
        loop = world.engine._loop
        await world.submit(PROMPT, 1).ended.wait()
        await asyncio.sleep(1.0)
        assert not world.engine.writing
        world.engine.flush_cache()
        watched = world.submit(PROMPT, 8)
        await asyncio.sleep(after_ms / 1e3)
        if after_ms:
            assert request_of(world, watched).waited_for == "storage"
        began_s = loop.time()
        world.engine.abort(watched.submit.request)
        await watched.ended.wait()
        assert loop.time() == began_s and not watched.ids
        prefetcher = world.engine._scheduler.cache._prefetcher
        assert prefetcher is not None
        reading.append(sum(len(pages) for pages in prefetcher.transferring))
        await asyncio.sleep(0.5)
        assert prefetcher.transferring == []
        status = world.engine.status()
        assert status.host_pages_free + status.host_pages_cached == status.host_pages_total

    reading: list[int] = []
    in_world(SLOW_STORAGE, scenario)
    assert (reading[0] > 0) == (after_ms > 40), "pages were under way"


def test_b35_pages_that_are_being_copied_stay_until_the_copy_is_acknowledged() -> None:
    async def scenario(world: World) -> None:
        other = world.submit([800, 801], 50)
        await world.until(lambda: bool(other.ids))
        watched = world.submit(PROMPT, 8)
        await world.until(lambda: bool(world.engine._copying.under_way) and bool(watched.ids))
        world.engine.abort(watched.submit.request)
        world.engine.flush_cache()
        held = world.engine._scheduler.cache.stats().indexed
        assert held > 1, "the copies hold them"
        await world.until(lambda: not world.engine.writing)
        world.engine.flush_cache()
        assert world.engine._scheduler.cache.stats().indexed < held

    in_world(WorldShape(pages=64, prefill_tokens=8, context_tokens=64, host_pages=64), scenario)


def test_b36_aborting_twice_or_after_the_end_does_nothing() -> None:
    async def scenario(world: World) -> None:
        watched = world.submit(PROMPT, 3)
        await watched.ended.wait()
        before = len(world.deltas)
        for handle in (watched.submit.request, watched.submit.request, 99):
            world.engine.abort(handle)
        await asyncio.sleep(0.1)
        assert len(world.deltas) == before
        assert watched.finished is not None and watched.finished.reason == "length"

    in_world(SHAPE, scenario)


def test_a_request_that_has_not_begun_in_time_ends_so_and_one_that_has_goes_on() -> None:
    async def scenario(world: World) -> None:
        running = submit(world, [1, 2], 60, queue_deadline_ms=20)
        await world.until(lambda: bool(running.ids))
        waiting = submit(world, [3, 4], 4, queue_deadline_ms=20)
        await waiting.ended.wait()
        assert waiting.finished is not None and waiting.finished.reason == "queue_timeout"
        assert "did not begin within 20 ms" in waiting.finished.message and not running.ended.is_set()
        assert world.engine.status().waiting == world.engine.status().waiting_tokens == 0
        await running.ended.wait()
        assert running.finished is not None and running.finished.reason == "length"

    in_world(msgspec.structs.replace(SHAPE, slots=1), scenario)


def test_a_retracted_request_has_begun_and_does_not_end_by_the_time_limit_of_the_queue() -> None:
    async def scenario(world: World) -> None:
        for i in range(3):
            submit(world, [i, *range(7)], 48, queue_deadline_ms=150)

    world = in_world(WorldShape(pages=22), scenario)
    assert world.engine.status().retractions > 0
    assert {watched.finished.reason for watched in world.requests.values() if watched.finished} == {"length"}


def submit(world: World, prompt: list[int], outputs: int, **terms: float) -> Watched:
    sampling = SamplingParams(max_tokens=outputs)
    return world.submit_message(Submit(len(world.requests) + 1, np.array(prompt, np.int32), sampling, **terms))  # type: ignore[arg-type]

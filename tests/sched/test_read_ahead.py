"""In which order storage is read for waiting requests, and who gets the host's room."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from sim.tiered_world import DISK, PAGES, PROMPT, ask, cached, play

from headrace.kvcache.prefetch import PrefetchOptions
from headrace.sched.messages import SamplingParams, Submit
from headrace.server.sim.judge import Watched
from headrace.server.sim.storage import StorageTimes
from headrace.server.sim.world import World

SLOW = StorageTimes(latency_us=100, page_us=2_000, lanes=2)
PATIENT = PrefetchOptions("wait_complete", threshold_tokens=4, room_timeout_ms=60_000.0, piece_bytes=128)


def story(of: int) -> list[int]:
    """A prompt of `PAGES` whole pages that shares nothing with another's."""
    return [of * 40 + i + 1 for i in range(len(PROMPT))]


async def stored(world: World, stories: int) -> None:
    """Storage has that many, and nobody else has any."""
    for of in range(stories):
        await ask(world, story(of), 1)
        await asyncio.sleep(3)
    assert not world.engine.writing
    world.engine.flush_cache()


def submit(world: World, prompt: list[int], priority: int) -> Watched:
    sampling = SamplingParams(max_tokens=2)
    return world.submit_message(
        Submit(len(world.requests) + 1, np.array(prompt, np.int32), sampling, priority=priority)
    )


@pytest.mark.parametrize("host_pages", [PAGES + 1, 2 * PAGES + 3])
def test_a_crowd_whose_prefixes_do_not_fit_the_host_together_reads_each_of_them_once(host_pages: int) -> None:
    async def scenario(world: World) -> None:
        await stored(world, 8)
        read = world.store.stats().read_pages
        crowd = [world.submit(story(of), 2) for of in range(8)]
        for watched in crowd:
            await watched.ended.wait()
            assert cached(watched) == (0, 0, PAGES * 4)
        status = world.engine.status()
        assert world.store.stats().read_pages - read == 8 * PAGES
        assert status.prefetch_wasted_bytes == status.prefetch_declined_bytes == 0

    play(msgspec.structs.replace(DISK, slots=1, host_pages=host_pages, prefetch=PATIENT, storage=SLOW), scenario)


def test_who_overtakes_in_the_queue_gets_the_room_of_the_last() -> None:
    async def scenario(world: World) -> None:
        await stored(world, 3)
        busy = world.submit([5] * 9, 50)
        await world.until(lambda: bool(busy.ids))
        first, last = submit(world, story(0), -1), submit(world, story(1), -2)
        await asyncio.sleep(0.1)
        prefetches = [request.prefetch for request in world.engine._scheduler.waiting]
        assert [prefetch is not None and prefetch.done for prefetch in prefetches] == [True, True]
        urgent = submit(world, story(2), 0)
        await asyncio.sleep(0.1)
        ahead = [request.prefetch for request in world.engine._scheduler.waiting]
        assert [prefetch is not None and prefetch.kept is not None for prefetch in ahead] == [True, True, False]
        assert not busy.ended.is_set()
        for watched in (urgent, first, last):
            await watched.ended.wait()
            assert cached(watched) == (0, 0, PAGES * 4)

    shape = msgspec.structs.replace(DISK, slots=1, host_pages=30, prefetch=PATIENT, storage=SLOW, token_us=10_000.0)
    play(shape, scenario)


def test_what_only_the_second_of_two_needs_is_read_after_what_both_do() -> None:
    async def scenario(world: World) -> None:
        longer = [*PROMPT[:20], *range(700, 717)]
        for prompt in (PROMPT, longer):
            await ask(world, prompt, 1)
            await asyncio.sleep(3)
        world.engine.flush_cache()
        read = world.store.stats().read_pages
        both = [world.submit(PROMPT, 2), world.submit(longer, 2)]
        for watched in both:
            await watched.ended.wait()
            assert sum(cached(watched)) == PAGES * 4
        assert cached(both[0])[2] == PAGES * 4
        assert world.store.stats().read_pages - read == PAGES + 4, "five pages are shared"

    play(msgspec.structs.replace(DISK, prefetch=PATIENT, storage=SLOW), scenario)


def test_when_all_who_need_the_same_pages_have_left_no_more_of_them_are_read() -> None:
    async def scenario(world: World) -> None:
        await stored(world, 1)
        read = world.store.stats().read_pages
        both = [world.submit([*story(0), i], 2) for i in range(2)]
        await asyncio.sleep(0.005)
        for watched in both:
            world.engine.abort(watched.submit.request)
        await asyncio.sleep(1.0)
        assert world.store.stats().read_pages - read < PAGES
        status = world.engine.status()
        assert status.prefetch_cancelled_bytes > 0
        assert status.host_pages_free + status.host_pages_cached == status.host_pages_total

    one_by_one = msgspec.structs.replace(PATIENT, piece_bytes=1)
    play(msgspec.structs.replace(DISK, host_pages=4, prefetch=one_by_one, storage=SLOW), scenario)


def test_a_request_gets_what_another_that_left_was_reading() -> None:
    async def scenario(world: World) -> None:
        await stored(world, 1)
        read = world.store.stats().read_pages
        first, second = (world.submit([*story(0), i], 2) for i in range(2))
        await asyncio.sleep(0.003)
        world.engine.abort(first.submit.request)
        await second.ended.wait()
        assert cached(second) == (0, 0, PAGES * 4)
        assert world.store.stats().read_pages - read == PAGES

    play(msgspec.structs.replace(DISK, prefetch=PATIENT, storage=SLOW), scenario)


def test_the_turn_to_wait_for_storage_comes_when_the_pool_has_pages_for_the_request() -> None:
    async def scenario(world: World) -> None:
        await stored(world, 1)
        busy = world.submit([5] * 40, 20)
        await world.until(lambda: bool(busy.ids))
        watched = world.submit(story(0), 2)
        await watched.ended.wait()
        assert watched.started is not None and watched.started.waited_ms["pages"] > 0
        assert cached(watched) == (0, 0, PAGES * 4), "it was not short of host room while others had the pool"
        assert watched.started.prefetch_decision == "complete"

    hasty = PrefetchOptions("wait_complete", threshold_tokens=4, room_timeout_ms=6.0)
    play(msgspec.structs.replace(DISK, pages=18, host_pages=18, prefetch=hasty, storage=SLOW), scenario)


def test_when_the_first_that_lacked_room_leaves_the_next_does_not_wait_for_ever() -> None:
    async def scenario(world: World) -> None:
        await stored(world, 2)
        # A request that runs on leases all of the host that it may.
        other = world.submit([5] * 37, 27)
        await world.until(lambda: world.engine.status().host_pages_free == 2)
        first, second = submit(world, story(0), 0), submit(world, story(1), -1)
        await asyncio.sleep(0.002)
        world.engine.abort(first.submit.request)
        await second.ended.wait()
        assert not other.ended.is_set()
        assert second.started is not None and second.started.prefetch_decision == "no_room"

    short = PrefetchOptions("wait_complete", threshold_tokens=34, room_timeout_ms=5.0)
    play(msgspec.structs.replace(DISK, pages=40, host_pages=9, prefetch=short), scenario)


def test_a_request_with_a_prefix_in_storage_counts_as_one_with_little_work() -> None:
    async def scenario(world: World) -> None:
        await stored(world, 1)
        busy = world.submit([5] * 9, 30)
        await world.until(lambda: bool(busy.ids))
        unknown, known = world.submit([9] * len(PROMPT), 2), world.submit(story(0), 2)
        await asyncio.sleep(0.05)
        assert not busy.ended.is_set()
        assert [request.submit.request for request in world.engine._scheduler.waiting] == [
            known.submit.request,
            unknown.submit.request,
        ]

    shape = msgspec.structs.replace(DISK, slots=1, prefetch=PATIENT, storage=SLOW, token_us=10_000.0)
    play(shape, scenario)

"""The engine over three tiers in virtual time: what is where after which event, and what a request waits for.

`test_bNN` names the line of the list of users' reports that it answers (docs/cache.md).
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from sim.tiered_world import DISK, HOST, PAGES, PROMPT, Policy, ask, cached, play, settled, with_policy

from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.prefetch import PrefetchOptions
from headrace.sched.messages import SamplingParams, Submit
from headrace.server.sim.storage import StorageTimes
from headrace.server.sim.virtual_loop import run
from headrace.server.sim.world import World


async def push_out(world: World) -> None:
    """Use the device for so much else that nothing of before is left on it."""
    for i in range(3):
        await ask(world, [i * 7 + 1] * 60, 1)


# ---------------------------------------------------------------------------------------------------------------
# Pages computed twice


def test_what_follows_a_page_computed_twice_can_be_reused() -> None:
    async def scenario(world: World) -> None:
        await ask(world, PROMPT[:36], 1)
        # All whole pages of a prompt but the last: whose last token's logits are wanted.
        second = await ask(world, PROMPT[:36], 13)
        assert second.started is not None and second.started.cached_tokens == 32
        third = await ask(world, [*PROMPT[:36], *second.ids], 2)
        assert third.started is not None and third.started.cached_tokens == 48

    play(HOST, scenario)


@pytest.mark.parametrize("host_pages", [0, 64])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_answer_that_fills_the_pool_can_be_asked_for_again(host_pages: int, overlap: bool) -> None:
    async def scenario(world: World) -> None:
        for _ in range(3):
            watched = await ask(world, PROMPT[:20], 44)
            assert watched.finished is not None and watched.finished.reason == "length"

    play(msgspec.structs.replace(HOST, pages=16, host_pages=host_pages, overlap=overlap), scenario)


def test_two_that_compute_the_same_hold_it_once() -> None:
    async def scenario(world: World) -> None:
        # Prompt logprobs are wanted: both compute all of it.
        twins = [world.submit(PROMPT, 12, prompt_logprobs=0) for _ in range(2)]
        await world.until(lambda: all(len(twin.ids) >= 8 for twin in twins))
        status = world.engine.status()
        held = status.pages_total - status.pages_free - status.pages_cached
        assert held <= (37 + 12) // 4 + 2 * 2, "but for the last pages, which are not full"
        await asyncio.gather(*(twin.ended.wait() for twin in twins))

    play(msgspec.structs.replace(HOST, pages=40), scenario)


# ---------------------------------------------------------------------------------------------------------------
# The host tier


def test_what_the_device_let_go_of_comes_back_from_the_host() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        await push_out(world)
        assert cached(await ask(world)) == (0, PAGES * 4, 0)
        assert cached(await ask(world)) == (PAGES * 4, 0, 0), "and is on the device for the next one"

    play(HOST, scenario)


def test_b07_backups_complete_while_the_server_is_idle() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await asyncio.sleep(0.2)
        assert not world.engine.writing
        assert world.engine.status().copied_pages >= PAGES

    play(HOST, scenario)


def test_b07_backups_complete_while_the_server_only_decodes() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        other = world.submit([1, 2], 60)
        await world.until(lambda: len(other.ids) > 10)
        assert world.engine.status().copied_pages >= PAGES
        assert not other.ended.is_set()

    play(HOST, scenario)


def test_b07_copies_of_what_runs_on_leave_a_quarter_of_the_host_to_what_is_read() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        before = world.engine.status().copied_pages
        other = world.submit([5] * 37, 27)
        await world.until(lambda: len(other.ids) > 12)
        assert world.engine.status().copied_pages - before == 9, "it has filled 12"
        assert world.engine.status().host_pages_free == 3
        watched = await ask(world, PROMPT[:13])
        assert not other.ended.is_set() and cached(watched) == (0, 0, 12)
        await other.ended.wait()
        await settled(world)
        assert world.engine.status().copied_pages - before == 12

    play(msgspec.structs.replace(DISK, host_pages=12), scenario)


def test_a_flush_waits_for_no_request_whose_copies_leave_room_to_what_is_read() -> None:
    async def scenario(world: World) -> None:
        other = world.submit([5] * 37, 27)
        await world.until(lambda: len(other.ids) > 12)
        assert world.engine.status().copied_pages == 9
        assert await world.engine.control.settle()
        assert not other.ended.is_set() and world.engine.status().copied_pages == 12

    play(msgspec.structs.replace(HOST, host_pages=12), scenario)


def test_b17_prompts_longer_than_a_chunk_are_backed_up_whole() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        await push_out(world)
        assert cached(await ask(world))[1] == PAGES * 4

    play(msgspec.structs.replace(HOST, prefill_tokens=5), scenario)


def test_b18_under_write_back_nothing_is_copied_before_the_device_evicts_it() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await asyncio.sleep(0.5)
        assert world.engine.status().copied_pages == 0
        await push_out(world)
        assert world.engine.status().copied_pages > 0
        assert cached(await ask(world))[1] == PAGES * 4

    play(msgspec.structs.replace(HOST, write_policy="write_back"), scenario)


def test_b18_under_write_through_everything_is_copied_also_what_is_evicted_early() -> None:
    async def scenario(world: World) -> None:
        for i in range(6):
            world.submit([i + 1] * 40, 1)
        await world.finish()
        assert world.engine.status().copied_pages == 6 * 10

    play(msgspec.structs.replace(HOST, host_pages=200), scenario)


def test_b18_selective_copies_what_is_used_again() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await asyncio.sleep(0.2)
        assert world.engine.status().copied_pages == 0
        await ask(world, [*PROMPT, *[1] * 8])
        await asyncio.sleep(0.2)
        assert world.engine.status().copied_pages >= PAGES

    play(msgspec.structs.replace(HOST, write_policy="write_through_selective"), scenario)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_host_smaller_than_the_device_starves_nobody(policy: Any) -> None:
    async def scenario(world: World) -> None:
        for i in range(12):
            world.submit([i % 5 + 1] * 40, 10)
        await world.finish()

    play(msgspec.structs.replace(HOST, host_pages=3, write_policy=policy), scenario)


def test_what_the_host_has_survives_the_device() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.kill_device()
        await asyncio.sleep(0.5)
        assert cached(await ask(world)) == (0, PAGES * 4, 0)

    world = play(HOST, scenario)
    assert world.lives == 2


def test_a_device_that_dies_amid_copies_leaves_no_page_behind() -> None:
    async def scenario(world: World) -> None:
        for i in range(6):
            world.submit([i + 1] * 40, 20)
        await world.until(lambda: world.engine.writing)
        world.kill_device()

    play(HOST, scenario)


# ---------------------------------------------------------------------------------------------------------------
# Storage


def test_b10_what_was_stored_is_used_when_neither_device_nor_host_has_it() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        assert cached(await ask(world)) == (0, 0, PAGES * 4)

    play(DISK, scenario)


def test_b10_what_was_stored_is_used_by_the_next_server() -> None:
    async def main() -> None:
        async with World(0, DISK) as first:
            await asyncio.sleep(0.5)
            await ask(first)
            await settled(first)
            store = first.store
        async with World(1, DISK) as second:
            second.store = store
            await asyncio.sleep(0.5)
            assert cached(await ask(second)) == (0, 0, PAGES * 4)
            await second.finish()

    run(main())


def test_b01_a_hit_below_the_threshold_leaves_the_request_runnable_at_once() -> None:
    async def scenario(world: World) -> None:
        await ask(world, PROMPT[:10])
        await settled(world)
        world.engine.flush_cache()
        watched = await ask(world, PROMPT[:10])
        assert cached(watched) == (0, 0, 0)
        assert watched.started is not None and watched.started.queue_ms < 2

    shape = msgspec.structs.replace(DISK, prefetch=PrefetchOptions("wait_complete", threshold_tokens=16))
    play(shape, scenario)


@pytest.mark.parametrize(("start", "pages"), [(1, 0), (3, 0), (22, 5), (36, 8), (37, PAGES)])
def test_a_request_that_wants_prompt_logprobs_gets_from_storage_what_lies_before_them(start: int, pages: int) -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        watched = world.submit(PROMPT, 3, prompt_logprobs=0, prompt_logprobs_from=start)
        await watched.ended.wait()
        assert cached(watched) == (0, 0, 4 * pages)
        assert world.engine.status().prefetch_wasted_bytes == 0

    play(DISK, scenario)


def test_b02_a_time_limit_is_absolute_and_what_has_arrived_is_used() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        watched = await ask(world)
        assert watched.started is not None and 15 < watched.started.queue_ms < 25
        assert 0 < cached(watched)[2] < PAGES * 4

    shape = with_policy(DISK, "timeout", timeout_base_ms=20.0, timeout_per_ki_token_ms=0.0, piece_bytes=1)
    slow = msgspec.structs.replace(shape, storage=StorageTimes(latency_us=8000, page_us=0, lanes=1))
    play(slow, scenario)


def test_best_effort_does_not_wait_even_for_the_lookup() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        watched = await ask(world)
        assert watched.started is not None and watched.started.queue_ms < 2
        assert cached(watched) == (0, 0, 0)

    play(with_policy(DISK, "best_effort"), scenario)


def test_adaptive_waits_where_that_is_quicker_than_computing_and_only_there() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        for _ in range(3):
            world.engine.flush_cache()
            watched = await ask(world)
        assert watched.started is not None
        seen.append((cached(watched)[2], watched.started.first_token_ms))

    seen: list[tuple[int, float]] = []
    play(with_policy(DISK, "adaptive"), scenario)
    slow = StorageTimes(latency_us=50_000, page_us=5_000, lanes=1)
    play(msgspec.structs.replace(with_policy(DISK, "adaptive"), storage=slow), scenario)
    cold_ms = 0.9 + 37 * 0.2
    (quick_tokens, quick_ms), (slow_tokens, slow_ms) = seen
    assert quick_tokens == PAGES * 4 and quick_ms < cold_ms
    assert slow_tokens == 0 and slow_ms < 2.5 * cold_ms


def test_what_was_prefetched_for_a_waiting_request_stays_until_its_turn() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        before = world.engine.status().copied_pages
        others = [world.submit([i * 7 + 1] * 29, 8) for i in range(6)]
        sampling = SamplingParams(max_tokens=3)
        last = world.submit_message(Submit(len(world.requests) + 1, np.array(PROMPT, np.int32), sampling, priority=-1))
        await asyncio.gather(*(other.ended.wait() for other in others))
        assert world.engine.status().copied_pages - before > 24, "the host has been filled with others meanwhile"
        await last.ended.wait()
        assert cached(last) == (0, 0, PAGES * 4)

    play(msgspec.structs.replace(DISK, slots=1, host_pages=24), scenario)


def test_b03_host_pages_that_are_on_their_way_back_are_waited_for() -> None:
    # One write at a time, so that the host's pages come back one prompt after the other.
    slow = StorageTimes(50, 3000, 1)

    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        for i in range(2):
            await ask(world, [i + 1] * 33, 1)
        # The host has the last pages; storage takes 3 ms for each.
        await asyncio.sleep(0.001)
        world.engine.flush_cache()
        status = world.engine.status()
        assert status.host_pages_cached == 0 and status.host_pages_free < 4, "storage still reads most of them"
        watched = await ask(world)
        assert cached(watched) == (0, 0, PAGES * 4)
        assert world.engine.status().prefetch_declined_bytes == 0

    prefetch = PrefetchOptions("wait_complete", threshold_tokens=34, piece_bytes=128)
    play(msgspec.structs.replace(DISK, host_pages=18, prefetch=prefetch, storage=slow), scenario)


def test_b03_a_host_that_stays_short_of_room_declines_and_the_request_computes() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        # A request that runs on leases all of the host that it may.
        other = world.submit([5] * 29, 35)
        await world.until(lambda: world.engine.status().host_pages_free == 2)
        watched = world.submit(PROMPT, 3)
        await watched.ended.wait()
        assert not other.ended.is_set() and cached(watched)[2] < PAGES * 4
        status, started = world.engine.status(), watched.started
        assert started is not None and started.prefetch_decision == "no_room"
        assert 4.5 <= started.waited_ms["storage"] < 8
        lost = (PAGES * 4 - cached(watched)[2]) // 4
        assert status.prefetch_declined_bytes == lost * status.page_bytes
        await other.ended.wait()

    prefetch = PrefetchOptions("wait_complete", threshold_tokens=34, room_timeout_ms=5.0)
    play(msgspec.structs.replace(DISK, pages=40, host_pages=9, prefetch=prefetch), scenario)


def test_b04_a_prefetch_takes_effect_wherever_its_request_stands_in_the_queue() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        before = [world.submit([i + 1] * 20, 20) for i in range(4)]
        watched = world.submit(PROMPT, 2)
        await watched.ended.wait()
        assert cached(watched)[2] == PAGES * 4
        assert any(not other.ended.is_set() for other in before) or all(other.ended.is_set() for other in before)

    play(DISK, scenario)


def test_b06_a_storage_miss_delays_a_request_by_one_lookup() -> None:
    async def scenario(world: World) -> None:
        watched = await ask(world)
        assert watched.started is not None and watched.started.queue_ms < 2
        assert watched.started.waited_ms["storage"] <= watched.started.queue_ms

    play(DISK, scenario)


def test_b08_two_requests_that_need_the_same_pages_share_one_read() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        reads = world.store.stats().read_pages
        both = [world.submit([*PROMPT, i], 2) for i in range(2)]
        for watched in both:
            await watched.ended.wait()
            assert sum(cached(watched)) >= PAGES * 4
        assert world.store.stats().read_pages - reads == PAGES

    play(DISK, scenario)


def test_b09_storage_that_hangs_costs_one_deadline_and_then_nothing_until_it_is_back() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        world.hang_agent(30.0)
        waits = []
        for i in range(4):
            watched = await ask(world, [i, *PROMPT])
            assert watched.started is not None
            waits.append(watched.started.queue_ms)
        assert 49 < waits[0] < 60, "the lookup's deadline"
        assert max(waits[1:]) < 2
        await asyncio.sleep(40)
        world.engine.flush_cache()
        assert cached(await ask(world))[2] == PAGES * 4

    play(DISK, scenario)


def test_a_hanging_read_gives_its_host_pages_back_when_the_agent_has_been_replaced() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        watched = world.submit(PROMPT, 2)
        await asyncio.sleep(0.003)
        world.hang_agent(600.0)
        await watched.ended.wait()
        await asyncio.sleep(5)
        assert world.agents == 2
        assert world.engine.status().host_pages_free + world.engine.status().host_pages_cached == HOST.host_pages

    slow = msgspec.structs.replace(DISK, storage=StorageTimes(latency_us=2000, page_us=1000, lanes=1))
    play(slow, scenario)


def test_b11_a_page_that_vanished_is_a_miss_and_the_earlier_ones_count() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        key = PrefixKey(namespace(b"oracle", "", ""), 4, np.array(PROMPT, np.int32), len(PROMPT))
        del world.store._pages[0, key.page_hashes(PAGES)[5]]
        watched = await ask(world)
        assert cached(watched)[2] == 5 * 4

    play(DISK, scenario)


def test_b16_a_salt_isolates_storage_and_still_hits_its_own() -> None:
    async def scenario(world: World) -> None:
        first = world.submit(PROMPT, 2, salt="tenant")
        await first.ended.wait()
        await settled(world)
        world.engine.flush_cache()
        assert cached(await ask(world)) == (0, 0, 0)
        again = world.submit(PROMPT, 2, salt="tenant")
        await again.ended.wait()
        assert cached(again)[2] == PAGES * 4

    play(DISK, scenario)


def test_a_killed_agent_is_started_again_and_its_store_used() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        world.kill_agent()
        assert cached(await ask(world)) == (0, 0, 0)
        await asyncio.sleep(2)
        world.engine.flush_cache()
        assert cached(await ask(world))[2] == PAGES * 4

    world = play(DISK, scenario)
    assert world.agents == 2


def test_b22_host_pages_that_storage_reads_are_not_used_again_though_the_device_and_their_prefix_are_gone() -> None:
    async def scenario(world: World) -> None:
        watched = world.submit(PROMPT, 3)
        await watched.ended.wait()
        world.hang_agent(0.8)
        await asyncio.sleep(0.05)
        assert world.engine.writing
        world.kill_device()
        await asyncio.sleep(0.3)
        for i in range(4):
            await ask(world, [i * 7 + 1] * 40, 1)
        await settled(world)
        world.engine.flush_cache()
        await ask(world)

    play(msgspec.structs.replace(DISK, host_pages=14), scenario)


def test_hanging_storage_fails_nobody_who_does_not_need_it() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        world.hang_agent(600.0)
        for i in range(3):
            other = world.submit([i, *range(1, 40)], 20)
            await other.ended.wait()
            assert other.finished is not None and other.finished.reason == "length"
            assert other.started is not None and other.started.queue_ms < 100

    play(msgspec.structs.replace(DISK, pages=16), scenario)


def mean_start_ms(policy: Policy | None, storage: StorageTimes) -> float:
    """Of sixty requests for what only storage has, the first, from which its speed is learned, among them."""
    starts: list[float] = []

    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        for _ in range(60):
            world.engine.flush_cache()
            watched = await ask(world)
            assert watched.started is not None
            starts.append(watched.started.first_token_ms)
            await asyncio.sleep(0.5)

    shape = msgspec.structs.replace(with_policy(DISK, policy or "adaptive"), storage=storage)
    play(shape if policy else msgspec.structs.replace(shape, storage_pages=0), scenario)
    return sum(starts) / len(starts)


@pytest.mark.parametrize(
    "storage", [StorageTimes(20_000, 2000, 1), StorageTimes(1000, 2000, 1), StorageTimes(50, 5000, 1)]
)
def test_b20_storage_slower_than_computing_costs_adaptive_next_to_nothing(storage: StorageTimes) -> None:
    without = mean_start_ms(None, storage)
    assert mean_start_ms("adaptive", storage) <= 1.05 * without
    assert mean_start_ms("wait_complete", storage) >= 2 * without, "the damage that it avoids"


def test_b20_storage_quicker_than_computing_is_waited_for() -> None:
    quick = StorageTimes(100, 100, 4)
    assert mean_start_ms("adaptive", quick) <= 0.3 * mean_start_ms(None, quick)

"""What a start tells: the parts of its time, what was saved, what came of the bytes that were read ahead."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from sim.tiered_world import DISK, HOST, PAGES, PROMPT, ask, cached, play, settled, with_policy

from headrace.server.sim.world import World


def test_the_parts_of_a_start_add_up() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        watched = await ask(world)
        started = watched.started
        assert started is not None
        assert started.cached_tokens == sum(cached(watched))
        assert started.first_token_ms == pytest.approx((world.first_ids_s[2] - world.submitted_s[2]) * 1e3)
        assert started.waited_ms["storage"] > 0 and started.waited_ms["prefill"] > 0
        assert started.saved_ms == pytest.approx(36 * 0.2, rel=0.5) and "tokens x 0.2000 ms" in started.saved_by
        told = started.prefetch_policy, started.prefetch_decision, started.prefetch_reason
        assert told == ("wait_complete", "complete", "everything that was found is awaited")
        waits = [other.started.waited_ms["storage"] for other in world.requests.values() if other.started is not None]
        assert world.engine.status().waited_ms["storage"] == pytest.approx(sum(waits))

    play(DISK, scenario)


def test_whose_pages_have_come_is_not_said_to_wait_for_storage_while_others_use_up_the_steps() -> None:
    prompts = [[40 + i, *PROMPT[1:]] for i in range(6)]

    async def scenario(world: World) -> None:
        for prompt in prompts:
            await world.submit(prompt, 1).ended.wait()
        await settled(world)
        world.engine.flush_cache()
        together = [world.submit(prompt + [i] * 60, 1) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*(watched.ended.wait() for watched in together))
        waits = [watched.started.waited_ms for watched in together if watched.started is not None]
        assert all(0 < wait["storage"] < 15 for wait in waits), "their pages come side by side"
        last = max(waits, key=lambda wait: sum(wait.values()))
        assert last["turn"] + last["budget"] > 40, "and then each computes a prompt of its own"

    shape = msgspec.structs.replace(
        with_policy(DISK, "wait_complete"), prefill_tokens=8, pages=400, host_pages=400, context_tokens=128
    )
    play(shape, scenario)


def test_time_in_which_another_computes_the_same_prefix_is_told() -> None:
    async def scenario(world: World) -> None:
        first, second = world.submit(PROMPT, 3), world.submit(PROMPT, 3)
        await asyncio.gather(first.ended.wait(), second.ended.wait())
        assert first.started is not None and second.started is not None
        assert first.started.waited_ms["prefix"] == 0
        assert second.started.waited_ms["prefix"] > 0 and second.started.waited_ms["storage"] == 0

    play(msgspec.structs.replace(HOST, prefill_tokens=5), scenario)


def test_prefetched_bytes_are_told_by_what_came_of_them() -> None:
    async def scenario(world: World) -> None:
        page_bytes = world.engine.status().page_bytes
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        await ask(world)
        assert world.engine.status().prefetch_useful_bytes == PAGES * page_bytes
        world.engine.flush_cache()
        gone = world.submit(PROMPT, 3)
        await asyncio.sleep(0.0004)
        world.engine.abort(gone.submit.request)
        await asyncio.sleep(1.0)
        status = world.engine.status()
        lost = status.prefetch_late_bytes + status.prefetch_wasted_bytes + status.prefetch_cancelled_bytes
        assert status.prefetch_useful_bytes == PAGES * page_bytes and lost == PAGES * page_bytes

    play(DISK, scenario)

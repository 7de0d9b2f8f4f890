"""An engine over a model with a full and a window group, in virtual time: every id depends on all of both that a token
may look at."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from sim.tiered_world import PROMPT, ask, cached, play, settled

from headrace.kvcache.prefetch import PrefetchOptions
from headrace.ops.wire import I32
from headrace.sched.cache_control import PinRefused
from headrace.server.sim.world import World, WorldShape

WINDOW = 6
RUNNING = 4
"""Pages of four tokens with which a request with this window gets on."""
HYBRID = WorldShape(pages=24, context_tokens=64, window_tokens=WINDOW, window_pages=24)
HOST = msgspec.structs.replace(HYBRID, host_pages=64, window_host_pages=32)
DISK = msgspec.structs.replace(
    HOST, storage_pages=400, prefetch=PrefetchOptions("wait_complete", threshold_tokens=4), token_us=200.0
)
MATCHED = 36
"""Tokens of the prompt's whole pages."""


def _ids() -> I32:
    return np.array(PROMPT, np.int32)


def test_a_conversation_goes_on_from_its_window_on_the_device() -> None:
    async def scenario(world: World) -> None:
        first = await ask(world, PROMPT, 9)
        assert cached(await ask(world, [*PROMPT, *first.ids, 7, 8, 9], 5)) == (44, 0, 0)
        # The same prompt once more: where a prompt ended is kept as well.
        assert cached(await ask(world, PROMPT, 9)) == (MATCHED, 0, 0)

    play(HYBRID, scenario)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefill_tokens", [3, 16, 64])
def test_long_contexts_run_in_as_many_window_pages_as_one_window_has(overlap: bool, prefill_tokens: int) -> None:
    async def scenario(world: World) -> None:
        watched = [world.submit([i, *PROMPT], 20) for i in range(4)]
        for one in watched:
            await one.ended.wait()
        (group,) = world.engine.status().window_groups
        assert group.pages_total == RUNNING and group.pages_claimed == 0

    shape = msgspec.structs.replace(HYBRID, window_pages=RUNNING, overlap=overlap, prefill_tokens=prefill_tokens)
    play(shape, scenario)


def test_requests_wait_until_their_windows_fit_beside_those_that_run() -> None:
    async def scenario(world: World) -> None:
        watched = [world.submit([i, *PROMPT], 20) for i in range(4)]
        most = 0
        while not all(one.ended.is_set() for one in watched):
            await asyncio.sleep(0.001)
            most = max(most, world.engine.status().running)
        assert most == 2
        for one in watched:
            await one.ended.wait()

    play(msgspec.structs.replace(HYBRID, pages=64, window_pages=2 * RUNNING), scenario)


def test_a_hit_on_the_host_loads_the_full_groups_pages_and_one_window() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        (group,) = world.engine.status().window_groups
        assert world.engine.status().copied_pages == 9 and group.copied_pages == 3
        world.engine.flush_cache(device=True, host=False)
        assert cached(await ask(world)) == (0, MATCHED, 0)
        assert (group.short_matches, world.lives) == (0, 1)

    play(HOST, scenario)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_window_that_only_the_host_lacks_is_a_miss(policy: str) -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache(device=True, host=False)
        assert cached(await ask(world)) == (0, 0, 0)
        assert world.engine.status().window_groups[0].short_matches == (policy == "write_through")

    play(msgspec.structs.replace(HOST, window_host_pages=0, write_policy=policy), scenario)


def test_under_the_selective_policy_a_window_goes_down_when_it_has_been_matched() -> None:
    async def scenario(world: World) -> None:
        for prompt, copied in ((PROMPT, 0), ([*PROMPT, 1, 2, 3, 4], 3)):
            await ask(world, prompt)
            await settled(world)
            assert world.engine.status().window_groups[0].copied_pages == copied
        world.engine.flush_cache(device=True, host=False)
        assert cached(await ask(world)) == (0, MATCHED, 0)

    play(msgspec.structs.replace(HOST, write_policy="write_through_selective"), scenario)


def test_a_hit_in_storage_brings_the_full_groups_pages_and_one_window() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        assert world.engine.status().stored_pages == 9 + 3
        world.engine.flush_cache()
        assert (await world.engine.control.lookup(_ids(), "")).cached == MATCHED
        assert cached(await ask(world)) == (0, 0, MATCHED)
        assert world.engine.status().prefetch_useful_bytes == 9 * world.engine.status().page_bytes

    play(DISK, scenario)


def test_a_window_that_only_storage_has_is_read_for_pages_that_are_here() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        windows = world.engine._cache.windows
        assert windows is not None
        windows.flush(True, True, 1 << 30)
        assert world.engine._cache.windows is windows and windows.stats()[0].host_pages_cached == 0
        watched = await ask(world)
        assert watched.started is not None and watched.started.cached_tokens == MATCHED
        assert watched.started.prefetch_decision == "complete"

    play(DISK, scenario)


def test_requests_that_need_the_same_window_share_its_read() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.engine.flush_cache()
        reads: list[int] = []
        windows = world.engine._cache.windows
        assert windows is not None and windows.reads is not None
        client = windows.reads._client
        read = client.read

        def counted(group: int, *others: object) -> int:
            reads.append(group)
            return read(group, *others)  # type: ignore[arg-type]

        client.read = counted  # type: ignore[method-assign, assignment]
        watched = [world.submit([*PROMPT[:36], i], 3) for i in range(3)]
        for one in watched:
            await one.ended.wait()
            assert one.started is not None and one.started.cached_tokens == MATCHED
        assert reads.count(1) == 1

    play(DISK, scenario)


def test_a_damaged_window_page_is_a_shorter_prefix_and_never_a_wrong_one() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        store = world.store
        name, page = [(name, page) for name, page in store._pages.items() if name[0] == 1][-1]
        store._pages[name] = page._replace(payload=bytes(len(page.payload)))
        world.engine.flush_cache()
        watched = await ask(world)
        assert watched.started is not None and watched.started.cached_tokens == 0
        # It has been computed, and stored once more.
        await settled(world)
        world.engine.flush_cache()
        assert cached(await ask(world)) == (0, 0, MATCHED)

    play(DISK, scenario)


def test_windows_survive_the_device_on_the_host() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        await settled(world)
        world.kill_device()
        await asyncio.sleep(2.0)
        assert cached(await ask(world)) == (0, MATCHED, 0)

    play(HOST, scenario)


def test_a_pin_is_refused_where_running_requests_would_lack_a_window() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        with pytest.raises(PinRefused, match="no room for one more pinned window"):
            world.engine.control.pin(_ids(), "", 60.0)

    play(msgspec.structs.replace(HYBRID, pages=64, window_pages=RUNNING + 1), scenario)


def test_a_pinned_prompt_is_there_after_a_flush() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        pin = world.engine.control.pin(_ids(), "", 60.0)
        world.engine.flush_cache()
        assert cached(await ask(world)) == (MATCHED, 0, 0)
        world.engine.control.unpin(pin.id)

    play(msgspec.structs.replace(HYBRID, pages=64), scenario)


def test_what_the_window_group_saves_is_told() -> None:
    async def scenario(world: World) -> None:
        (group,) = world.engine.status().window_groups
        assert group.saved_bytes == (64 - 24) * 4 * 16 and group.window_tokens == WINDOW

    play(msgspec.structs.replace(HYBRID, pages=64), scenario)

"""Pins, warm-ups, flushes and events in virtual time: what they keep, what they bring, and when they give up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.kvcache.events import MAX_READERS, Gap, Removed, Stored, TooManyReaders
from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.prefetch import PrefetchOptions
from headrace.ops.wire import I32
from headrace.sched.cache_control import MAX_PINS, MAX_WAITING, PinRefused
from headrace.sched.messages import Overloaded
from headrace.server.sim.judge import Watched
from headrace.server.sim.storage import StorageTimes
from headrace.server.sim.virtual_loop import run, running_loop
from headrace.server.sim.world import World, WorldShape

PROMPT = list(range(100, 137))
TOKENS = 36
"""Of its whole pages."""
HOST = WorldShape(pages=24, host_pages=64, context_tokens=64)
DISK = msgspec.structs.replace(
    HOST, storage_pages=400, prefetch=PrefetchOptions("wait_complete", threshold_tokens=4), token_us=200.0
)


def play(shape: WorldShape, scenario: Callable[[World], Coroutine[Any, Any, None]], seed: int = 0) -> World:
    async def main() -> World:
        async with World(seed, shape) as world:
            await asyncio.sleep(0.5)
            await scenario(world)
            await world.finish()
            return world

    return run(main())


def ids(prompt: list[int] | None = None) -> I32:
    return np.array(PROMPT if prompt is None else prompt, np.int32)


async def ask(world: World, prompt: list[int] | None = None, outputs: int = 3, salt: str = "") -> Watched:
    watched = world.submit(PROMPT if prompt is None else prompt, outputs, salt=salt)
    await watched.ended.wait()
    return watched


async def push_out(world: World) -> None:
    """Use the device for so much else that nothing unpinned of before is left on it."""
    for i in range(4):
        await ask(world, [i * 7 + 1] * 60, 1)


def cached(watched: Watched) -> int:
    assert watched.started is not None
    return watched.started.cached_tokens


# ---------------------------------------------------------------------------------------------------------------
# Pins


def test_a_pinned_prefix_stays_on_the_device_whatever_else_runs() -> None:
    async def scenario(world: World) -> None:
        await ask(world, PROMPT[:29])
        pin = world.engine.control.pin(ids(PROMPT[:28]), "", 600)
        await push_out(world)
        assert (await world.engine.control.lookup(ids(), "")).device == 28 == pin.tokens
        world.engine.check_integrity()
        assert world.engine.control.unpin(pin.id)
        await push_out(world)
        assert (await world.engine.control.lookup(ids(), "")).device == 0

    play(WorldShape(pages=24, context_tokens=64), scenario)


def test_a_pin_ends_with_its_time_to_live() -> None:
    async def scenario(world: World) -> None:
        await ask(world, PROMPT[:29])
        control = world.engine.control
        pin = control.pin(ids(PROMPT[:28]), "", 30)
        world.engine.flush_cache()
        await asyncio.sleep(29)
        assert [held.expires_in_s for held in control.pins()] == [pytest.approx(1, abs=0.01)]
        await asyncio.sleep(1.5)
        assert control.pins() == [] and not control.unpin(pin.id)
        assert world.engine.flush_cache().dropped_pages == 7

    play(WorldShape(pages=24, context_tokens=64), scenario)


def test_the_longest_request_still_runs_beside_all_pins() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        for start in (100, 200, 300):
            await ask(world, list(range(start, start + 17)), 1)
        pins = [control.pin(ids(list(range(start, start + 16))), "", 600) for start in (100, 200)]
        with pytest.raises(PinRefused, match="at most 8 may be"):
            control.pin(ids(list(range(300, 316))), "", 600)
        longest = await ask(world, list(range(500, 540)), 24)
        assert longest.finished is not None and longest.finished.reason == "length"
        for pin in pins:
            control.unpin(pin.id)
        assert control.pin(ids(list(range(100, 116))), "", 1).pages == 4

    play(WorldShape(pages=24, context_tokens=64), scenario)


def test_what_is_not_cached_is_not_pinned() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(PinRefused, match="send it as a request"):
            world.engine.control.pin(ids(), "", 600)
        await ask(world, salt="tenant")
        with pytest.raises(PinRefused, match="send it as a request"):
            world.engine.control.pin(ids(), "", 600)

    play(HOST, scenario)


def test_pins_are_bounded_in_number() -> None:
    async def scenario(world: World) -> None:
        await ask(world, [1, 2], 1)
        control = world.engine.control
        pins = [control.pin(ids([1]), "", 600) for _ in range(MAX_PINS)]
        with pytest.raises(PinRefused, match="unpin one"):
            control.pin(ids([1]), "", 600)
        for pin in pins:
            control.unpin(pin.id)

    play(WorldShape(pages=1000, page_tokens=1, context_tokens=64), scenario)


def test_after_the_loss_of_the_device_a_pin_holds_what_the_host_has() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await ask(world, PROMPT[:29])
        assert await control.settle()
        pin = control.pin(ids(PROMPT[:28]), "", 600)
        world.kill_device()
        await asyncio.sleep(2)
        world.engine.check_integrity()
        assert [held.tokens for held in control.pins()] == [28]
        assert world.engine.flush_cache().pinned_host_pages == 7
        assert cached(await ask(world, PROMPT[:29])) == 28
        control.unpin(pin.id)

    play(HOST, scenario)


def test_after_the_loss_of_a_device_without_a_host_a_pin_holds_nothing() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await ask(world, PROMPT[:29])
        pin = control.pin(ids(PROMPT[:28]), "", 600)
        world.kill_device()
        await asyncio.sleep(2)
        world.engine.check_integrity()
        assert [held.tokens for held in control.pins()] == [0]
        control.unpin(pin.id)
        world.engine.check_integrity()

    play(WorldShape(pages=24, context_tokens=64), scenario)


# ---------------------------------------------------------------------------------------------------------------
# Warming, flushing, clearing


def test_a_warm_up_brings_a_prefix_from_storage_to_the_host() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await ask(world)
        assert await control.settle()
        world.engine.flush_cache()
        assert await control.warm(ids(), "", 10) == (TOKENS, True)
        watched = await ask(world)
        assert watched.started is not None and watched.started.cached_host_tokens == TOKENS

    play(DISK, scenario)


def test_a_warm_up_ends_at_its_limit() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await ask(world)
        assert await control.settle()
        world.engine.flush_cache()
        world.hang_agent(0.03)
        began_s = running_loop().time()
        warmed = await control.warm(ids(), "", 0.01)
        assert not warmed.complete and running_loop().time() - began_s == pytest.approx(0.01, abs=1e-3)

    play(DISK, scenario)


def test_a_flush_waits_for_the_writes_that_read_from_a_tier() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await ask(world)
        assert world.engine.writing
        assert await control.settle()
        flushed = world.engine.flush_cache()
        assert (flushed.pinned_pages, flushed.pinned_host_pages) == (0, 0)
        assert (await control.lookup(ids(), "")).storage == TOKENS

    play(DISK, scenario)


def test_a_flush_under_load_ends_when_what_was_under_way_is_written() -> None:
    async def scenario(world: World) -> None:
        control, asked = world.engine.control, asyncio.Event()

        async def load() -> None:
            for i in range(1, 150):
                world.submit([i] * 21, 1)
                await asyncio.sleep(0.004)
                if i == 40:
                    asked.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load())
            await asked.wait()
            before, began_s = world.engine.status(), running_loop().time()
            assert world.engine.writing
            assert await control.settle(), "though something is always on its way"
            assert world.engine.writing and running_loop().time() - began_s < 0.2
            assert world.engine.status().stored_pages >= before.copied_pages, "all that the host had at the call"

    # Storage needs 2 of the 4 ms between two requests for their pages.
    shape = msgspec.structs.replace(
        DISK, pages=200, host_pages=400, copy_page_us=50.0, storage=StorageTimes(50, 600, 2)
    )
    play(msgspec.structs.replace(shape, token_us=20.0, storage_pages=4000), scenario)


def test_a_flush_waits_for_a_prompt_that_is_being_computed_no_further_than_it_was() -> None:
    async def scenario(world: World) -> None:
        # 60 chunks of 10 ms: what the first ones have filled is copied meanwhile.
        long = world.submit([i % 900 + 1 for i in range(960)], 1)
        await asyncio.sleep(0.1)
        assert world.engine.writing
        assert await world.engine.control.settle()
        assert world.engine.status().stored_pages >= 16 and not long.ids
        await long.ended.wait()

    shape = msgspec.structs.replace(DISK, pages=260, host_pages=520, context_tokens=1000, forward_us=10_000)
    play(msgspec.structs.replace(shape, storage_pages=1000), scenario)


def test_a_flush_does_not_wait_for_ever() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await ask(world, outputs=1)
        world.hang_agent(0.9)
        began_s = running_loop().time()
        assert not await control.settle(0.5)
        assert running_loop().time() - began_s == pytest.approx(0.5, abs=1e-3)
        world.engine.flush_cache()
        status = world.engine.status()
        assert status.host_pages_cached == 0 and status.host_pages_free < status.host_pages_total, "storage reads them"
        assert await control.settle()
        assert world.engine.status().host_pages_free == status.host_pages_total

    play(DISK, scenario)


def test_deleting_a_salt_from_storage_leaves_the_others() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await ask(world)
        await ask(world, salt="tenant")
        assert await control.settle()
        deleted = await control.delete_stored("tenant")
        assert (deleted.pages, deleted.message) == (9, "")
        assert (await control.lookup(ids(), "tenant")).storage == 0
        assert (await control.lookup(ids(), "")).storage == TOKENS

    play(DISK, scenario)


def test_a_deletion_that_storage_does_not_confirm_says_so() -> None:
    async def scenario(world: World) -> None:
        world.hang_agent(30)
        deleted = await world.engine.control.delete_stored(None)
        assert deleted.pages == 0 and "may still be" in deleted.message

    play(DISK, scenario)


def test_clearing_a_prompt_takes_what_continues_it_and_leaves_what_branches_off_before() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        other = [*PROMPT[:16], *range(300, 321)]
        await ask(world)
        await ask(world, other)
        cleared = control.clear(ids(PROMPT[:24]), "", device=True, host=True)
        assert cleared.device == 5
        assert (await control.lookup(ids(), "")).device == 16
        assert (await control.lookup(ids(other), "")).device == TOKENS
        world.engine.check_integrity()

    play(WorldShape(pages=40, context_tokens=64), scenario)


def test_clearing_a_salt_leaves_the_others_and_what_is_in_use() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await ask(world)
        await ask(world, salt="tenant")
        assert await control.settle()
        pin = control.pin(ids(PROMPT[:8]), "tenant", 600)
        cleared = control.clear(ids([]), "tenant", device=True, host=True)
        assert (cleared.device, cleared.host) == (7, 7)
        assert (await control.lookup(ids(), "tenant")).cached == 8
        assert (await control.lookup(ids(), "")).cached == TOKENS
        world.engine.check_integrity()
        control.unpin(pin.id)

    play(HOST, scenario)


def test_clearing_the_device_alone_leaves_the_host() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await ask(world)
        assert await control.settle()
        control.clear(ids(), "", device=True, host=False)
        found = await control.lookup(ids(), "")
        assert (found.device, found.host, found.cached) == (0, TOKENS, TOKENS)
        assert cached(await ask(world)) == TOKENS

    play(HOST, scenario)


def test_operations_that_wait_are_bounded() -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        await ask(world)
        world.hang_agent(0.04)
        waiting = [asyncio.ensure_future(control.delete_stored("x")) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await control.lookup(ids(), "")
        await asyncio.gather(*waiting)
        assert (await control.lookup(ids(), "")).cached == TOKENS

    play(DISK, scenario)


# ---------------------------------------------------------------------------------------------------------------
# Events


def test_events_name_pages_by_their_hashes_and_parents() -> None:
    async def scenario(world: World) -> None:
        reader = world.engine.control.events.subscribe()
        await ask(world)
        assert await world.engine.control.settle()
        root = world.engine.namespace("", "")
        hashes = [root, *PrefixKey(root, 4, ids(), len(PROMPT)).page_hashes(9)]
        told = [event for event in reader.take() if isinstance(event, Stored)]
        for tier in ("device", "host", "storage"):
            pages: list[int] = []
            for event in (event for event in told if event.tier == tier):
                at = [page.hex() for page in hashes].index(event.parent)
                assert event.first == hashes[at + 1].hex()
                pages.extend(range(at, at + event.pages))
            assert sorted(pages) == list(range(9)), tier
        reader.close()

    play(DISK, scenario)


@pytest.mark.parametrize("seed", range(4))
def test_what_was_stored_less_what_was_removed_is_what_is_there(seed: int) -> None:
    async def scenario(world: World) -> None:
        control = world.engine.control
        reader = control.events.subscribe(1 << 20)
        for turn in range(12):
            prompt = [*range(100, 100 + 8 * (turn % 5)), *range(turn * 3, turn * 3 + 20)]
            asking = [asyncio.ensure_future(ask(world, prompt, 5)), asyncio.ensure_future(ask(world, prompt[:30], 9))]
            await asyncio.gather(*asking)
            if turn == 6:
                world.kill_device()
                await asyncio.sleep(1)
            if turn == 9:
                control.clear(ids(list(range(100, 108))), "", device=True, host=turn % 2 == 0)
        assert await control.settle()
        there: Counter[str] = Counter()
        for event in reader.take():
            assert not isinstance(event, Gap)
            there[event.tier] += event.pages if isinstance(event, Stored) else -event.pages
            assert there[event.tier] >= 0
        stats = world.engine._cache.stats()
        assert (there["device"], there["host"]) == (stats.indexed, stats.host_indexed)
        reader.close()

    play(msgspec.structs.replace(HOST, host_pages=30), scenario, seed)


def test_a_slow_reader_is_told_how_much_it_missed() -> None:
    async def scenario(world: World) -> None:
        slow, quick = (world.engine.control.events.subscribe(most) for most in (3, 1000))
        await push_out(world)
        everything = quick.take()
        gap, *rest = slow.take()
        assert gap == Gap(len(everything) - 3) and rest == everything[-3:]
        assert slow.take() == []
        slow.close()
        quick.close()

    play(WorldShape(pages=24, context_tokens=64), scenario)


def test_without_a_reader_the_index_tells_nobody() -> None:
    async def scenario(world: World) -> None:
        events, index = world.engine.control.events, world.engine._cache._index
        listening = [index.listener is not None]
        reader = events.subscribe()
        listening.append(index.listener is not None)
        reader.close()
        reader.close()
        listening.append(index.listener is not None)
        assert listening == [False, True, False] and events.readers == 0

    play(HOST, scenario)


def test_a_flush_of_a_tier_is_told() -> None:
    async def scenario(world: World) -> None:
        await ask(world)
        assert await world.engine.control.settle()
        reader = world.engine.control.events.subscribe()
        world.engine.flush_cache(device=False, host=True)
        await world.engine.control.delete_stored(None)
        gone: Counter[str] = Counter()
        for event in reader.take():
            assert isinstance(event, Removed)
            gone[event.tier] += event.pages
        assert gone == {"host": 9, "storage": 9}
        reader.close()

    play(DISK, scenario)


def test_readers_are_bounded() -> None:
    async def scenario(world: World) -> None:
        events = world.engine.control.events
        readers = [events.subscribe() for _ in range(MAX_READERS)]
        with pytest.raises(TooManyReaders):
            events.subscribe()
        for reader in readers:
            reader.close()

    play(HOST, scenario)

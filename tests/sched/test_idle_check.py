"""The integrity check of a serving engine: what it finds, how it gives way, and that the server goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace.kvcache import integrity
from headrace.kvcache.pool import Owner
from headrace.server.sim.virtual_loop import run
from headrace.server.sim.world import World, WorldShape

PROMPT = list(range(1, 30))


def in_world(scenario: Callable[[World], Coroutine[Any, Any, None]], shape: WorldShape | None = None) -> None:
    async def main() -> None:
        async with World(0, shape or WorldShape(), check_every_step=False) as world:
            await scenario(world)

    run(main())


async def served(world: World, prompt: list[int] = PROMPT) -> None:
    watched = world.submit(prompt, 4)
    await watched.ended.wait()
    assert watched.finished is not None and watched.finished.reason == "length"


@pytest.mark.parametrize("what", ["a lost page", "a page with two owners", "a forgotten lease", "a broken node"])
def test_b26_a_fault_gives_an_alarm_with_evidence_and_the_server_goes_on(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    def break_it(world: World) -> None:
        cache = world.engine._cache
        node = next(node for node in cache._index.nodes() if node.parent is not None)
        pool = cache._pools[0]
        if what == "a lost page":
            free = pool._free[0]
            pool.owner[free] = Owner.REQUEST
        elif what == "a page with two owners":
            node.device[0, 0] = node.device[0, 1]
        elif what == "a forgotten lease":
            node.leases += 1
        else:
            del node.filled_by

    async def scenario(world: World) -> None:
        await served(world)
        break_it(world)
        await asyncio.sleep(3.0)
        assert world.engine.status().integrity_alarms == 1
        await served(world, [7, 8, 9])
        assert world.engine.phase == "ready"

    with caplog.at_level(logging.CRITICAL, "headrace.sched.idle_check"):
        in_world(scenario)
    alarm = caplog.messages[0]
    assert "integrity check failed" in alarm and "CacheStats(total=32" in alarm
    assert "decode rows" in alarm, "the last steps are evidence"
    if what in ("a lost page", "a page with two owners"):
        assert "page" in alarm and any(word.strip(":,").isdigit() for word in alarm.split())


def test_an_engine_that_is_right_raises_no_alarm_and_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        looked: list[int] = []
        real = world.engine._cache.checking

        def counted() -> object:
            looked.append(1)
            return real()

        monkeypatch.setattr(world.engine._cache, "checking", counted)
        await served(world)
        await asyncio.sleep(10.0)
        assert world.engine.status().integrity_alarms == 0
        assert len(looked) == 1

    in_world(scenario)


def test_a_check_gives_way_after_each_run_of_nodes_and_begins_anew_when_something_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(integrity, "RUN_NODES", 2)

    async def scenario(world: World) -> None:
        for first in range(8):
            await served(world, [100 + first, *PROMPT])
        check = world.engine._idle_check
        cache = world.engine._cache
        looking = asyncio.create_task(check.check())
        turns = 0
        while not looking.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= cache.stats().nodes // 2, "it gave way after every second node"
        check.launched(99, 0, 0)
        looking = asyncio.create_task(check.check())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        world.engine.flush_cache()
        await looking
        assert check._due, "what it saw was no longer true: it looks again"
        await check.check()
        assert (check._due, check.alarms) == (False, 0)

    in_world(scenario, WorldShape(pages=128))

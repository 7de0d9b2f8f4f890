"""Whose grammar is compiled when: short ones beside long ones, hostile ones beside all, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace.sched.grammar import BadGrammar, Grammar
from headrace.sched.messages import Overloaded
from headrace.server.grammar_service import SHORT_BYTES, SHORT_S
from headrace.server.sim.virtual_loop import run, running_loop
from headrace.server.sim.world import World, WorldShape


def slow(number: int, compile_ms: int = 4000) -> Grammar:
    """A long grammar, as those are that take long to compile."""
    return Grammar("toy", f"{number} 5 {compile_ms}".ljust(SHORT_BYTES + 1))


async def refusal(world: World, text: str) -> str:
    with pytest.raises(BadGrammar) as error:
        await world.engine.check_grammar(Grammar("toy", text))
    return str(error.value)


def in_world(shape: WorldShape, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with World(0, shape) as world:
            await scenario(world)
            await world.finish()

    run(main())


def test_b33_short_grammars_wait_for_no_slow_one() -> None:
    async def scenario(world: World) -> None:
        slow_ones = [asyncio.ensure_future(world.engine.check_grammar(slow(number))) for number in range(4)]
        await asyncio.sleep(0.5)
        async with asyncio.timeout(0.1):
            for seed in range(4):
                await world.engine.check_grammar(Grammar("toy", f"{seed} 5"))
        assert not any(task.done() for task in slow_ones)
        # The last of them would wait for longer than it may.
        await asyncio.wait(slow_ones[:3])
        slow_ones[3].cancel()

    in_world(WorldShape(), scenario)


def test_b33_a_short_grammar_that_never_ends_keeps_another_waiting_for_three_seconds() -> None:
    async def scenario(world: World) -> None:
        await world.engine.check_grammar(slow(1, 1))
        began_s = running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.engine.check_grammar(slow(2)))
            hostile = tasks.create_task(refusal(world, "3 5 1000000"))
            await asyncio.sleep(0.1)
            await world.engine.check_grammar(Grammar("toy", "4 5"))
            assert SHORT_S < running_loop().time() - began_s < SHORT_S + 1
            assert "more than 3 s of a core" in await hostile
        assert world.grammar_lives == 2

    in_world(WorldShape(), scenario)


def test_b33_short_grammars_are_compiled_as_they_came() -> None:
    done: list[int] = []

    async def scenario(world: World) -> None:
        async def check(number: int, text: str) -> None:
            await world.engine.check_grammar(Grammar("toy", text))
            done.append(number)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.engine.check_grammar(slow(1)))
            tasks.create_task(check(0, "2 5 1000"))
            await asyncio.sleep(0.1)
            tasks.create_task(check(1, "3 5 1000".ljust(400)))
            await asyncio.sleep(0.1)
            tasks.create_task(check(2, "4 5"))

    in_world(WorldShape(), scenario)
    assert done == [0, 1, 2]


def test_b33_of_several_short_grammars_that_take_long_two_are_compiled_at_a_time() -> None:
    async def scenario(world: World) -> None:
        async with asyncio.timeout(4.5), asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(world.engine.check_grammar(Grammar("toy", f"{number} 5 2000")))

    in_world(WorldShape(), scenario)


def test_b33_a_long_grammar_does_not_wait_for_short_ones_that_keep_coming() -> None:
    async def scenario(world: World) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(world.engine.check_grammar(Grammar("toy", f"{number} 5 500")))
            await asyncio.sleep(0.1)
            async with asyncio.timeout(1):
                await world.engine.check_grammar(slow(1, 400))

    in_world(WorldShape(), scenario)


@pytest.mark.parametrize(("others", "is_overloaded"), [(3, False), (4, True)])
def test_b33_slow_grammars_make_slow_ones_wait_or_come_later_and_never_bad(others: int, is_overloaded: bool) -> None:
    async def scenario(world: World) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(others):
                tasks.create_task(world.engine.check_grammar(slow(number)))
            await asyncio.sleep(0.5)
            if is_overloaded:
                with pytest.raises(Overloaded, match="turn"):
                    await world.engine.check_grammar(slow(9))
            else:
                await world.engine.check_grammar(slow(9))
        assert world.grammar_lives == 1

    in_world(WorldShape(), scenario)


def test_b33_a_grammar_that_nobody_waits_for_any_more_is_not_compiled() -> None:
    async def scenario(world: World) -> None:
        unwanted = [asyncio.ensure_future(world.engine.check_grammar(slow(number))) for number in range(9)]
        await asyncio.sleep(0.5)
        for task in unwanted:
            task.cancel()
        await asyncio.wait(unwanted)
        async with asyncio.timeout(8):
            await world.engine.check_grammar(slow(9))

    in_world(WorldShape(), scenario)

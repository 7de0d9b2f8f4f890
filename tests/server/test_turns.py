"""Requests that arrive together take turns."""

from __future__ import annotations

import asyncio

from headrace.server.sim.virtual_loop import run
from headrace.server.turns import PER_TURN, Turns


def test_a_few_begin_in_each_turn_of_the_loop_in_the_order_of_arrival() -> None:
    async def main() -> None:
        turns, begun = Turns(), list[int]()

        async def handler(number: int) -> None:
            await turns.begin()
            begun.append(number)

        async with asyncio.TaskGroup() as handlers:
            for number in range(10 * PER_TURN):
                handlers.create_task(handler(number))
            most, before = 0, 0
            while len(begun) < 10 * PER_TURN:
                await asyncio.sleep(0)
                most, before = max(most, len(begun) - before), len(begun)
        assert begun == list(range(10 * PER_TURN))
        assert most <= PER_TURN

    run(main())


def test_one_that_comes_alone_does_not_wait() -> None:
    async def main() -> None:
        turns = Turns()
        for _ in range(3):
            waits = asyncio.create_task(turns.begin())
            await asyncio.sleep(0)
            assert waits.done()
            await asyncio.sleep(0.001)

    run(main())


def test_one_that_leaves_while_it_waits_costs_nobody_a_turn() -> None:
    async def main() -> None:
        turns = Turns()
        tasks = [asyncio.create_task(turns.begin()) for _ in range(3 * PER_TURN)]
        await asyncio.sleep(0)
        for task in tasks[PER_TURN : 2 * PER_TURN]:
            task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert all(task.done() for task in tasks)

    run(main())

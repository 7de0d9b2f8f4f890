"""The virtual loop: exact jumps, one order, and an exception in place of every hang."""

from __future__ import annotations

import asyncio
import asyncio.base_events
import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.sim.virtual_loop import (
    MAX_VIRTUAL_S,
    NothingToDo,
    TooManyTurns,
    VirtualLoop,
    VirtualTimeExceeded,
    run,
    running_loop,
)

# ---------------------------------------------------------------------------------------------------------------
# The clock


def test_an_hour_passes_at_once_and_exactly() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return running_loop().time()

    assert run(main()) == 3600.0


def test_a_tenth_of_a_second_ten_thousand_times_is_a_thousand_seconds_to_the_nanosecond() -> None:
    async def main() -> int:
        for _ in range(10_000):
            await asyncio.sleep(0.1)
        return running_loop().time_ns()

    assert run(main()) == 1000 * 10**9


@given(now_ns=st.integers(0, MAX_VIRTUAL_S * 10**9 // 2), delay_ns=st.integers(0, MAX_VIRTUAL_S * 10**9 // 2))
def test_a_deadline_computed_in_float_seconds_is_met_to_the_nanosecond(now_ns: int, delay_ns: int) -> None:
    async def main() -> int:
        loop = running_loop()
        woken = loop.create_future()
        loop.call_at_ns(now_ns, lambda: loop.call_at(loop.time() + delay_ns / 1e9, woken.set_result, None))
        await woken
        return loop.time_ns()

    assert run(main(), max_virtual_s=MAX_VIRTUAL_S) == now_ns + delay_ns


def test_a_sleep_and_a_timeout_of_equal_length_end_at_the_same_instant_in_the_order_they_were_set() -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        await asyncio.sleep(0.3)

        async def late() -> None:
            try:
                async with asyncio.timeout(0.7):
                    await asyncio.sleep(9)
            except TimeoutError:
                seen.append(f"timeout at {running_loop().time_ns()}")

        async def sleeper() -> None:
            await asyncio.sleep(0.7)
            seen.append(f"sleep at {running_loop().time_ns()}")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sleeper())
            tasks.create_task(late())
        return seen

    assert run(main()) == ["sleep at 1000000000", "timeout at 1000000000"]


def test_the_clock_stands_still_while_something_is_ready() -> None:
    async def main() -> set[float]:
        loop = running_loop()
        loop.call_later(1, lambda: None)
        times = set()
        for _ in range(100):
            await asyncio.sleep(0)
            times.add(loop.time())
        return times

    assert run(main()) == {0.0}


def test_a_deadline_in_the_past_is_due_now_and_never_turns_the_clock_back() -> None:
    async def main() -> float:
        loop = running_loop()
        await asyncio.sleep(5)
        woken = loop.create_future()
        loop.call_at(2, woken.set_result, None)
        await woken
        return loop.time()

    assert run(main()) == 5.0


# ---------------------------------------------------------------------------------------------------------------
# The order


def test_timers_of_one_instant_run_in_the_order_they_were_set() -> None:
    async def main() -> list[int]:
        loop = running_loop()
        seen: list[int] = []
        for number in range(8):
            loop.call_at(1.0, seen.append, number)
        await asyncio.sleep(2)
        return seen

    assert run(main()) == [0, 1, 2, 3, 4, 5, 6, 7]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=300))
def test_timers_run_by_deadline_then_age_whatever_is_cancelled(timers: list[tuple[int, bool]]) -> None:
    async def main() -> list[tuple[int, int]]:
        loop = running_loop()
        seen: list[tuple[int, int]] = []
        handles = [loop.call_at(at, seen.append, (at, number)) for number, (at, _) in enumerate(timers)]
        for handle, (_, cancelled) in zip(handles, timers):
            if cancelled:
                handle.cancel()
        await asyncio.sleep(10)
        return seen

    assert run(main()) == sorted((at, number) for number, (at, cancelled) in enumerate(timers) if not cancelled)


def test_ready_callbacks_run_before_timers_that_are_due_and_what_they_add_runs_a_turn_later() -> None:
    async def main() -> list[str]:
        loop = running_loop()
        seen: list[str] = []
        loop.call_later(0, seen.append, "due")

        def ready() -> None:
            seen.append("ready")
            loop.call_soon(seen.append, "added")

        loop.call_soon(ready)
        await asyncio.sleep(1)
        return seen

    assert run(main()) == ["ready", "due", "added"]


def test_a_timer_cancelled_by_one_of_the_same_instant_does_not_run() -> None:
    async def main() -> list[str]:
        loop = running_loop()
        seen: list[str] = []
        timers: list[asyncio.TimerHandle] = []
        loop.call_at(1, lambda: timers[0].cancel())
        timers.append(loop.call_at(1, seen.append, "second"))
        loop.call_at(1, seen.append, "third")
        await asyncio.sleep(2)
        return seen

    assert run(main()) == ["third"]


def test_cancelled_timers_do_not_pile_up_behind_a_live_one() -> None:
    async def main() -> int:
        loop = running_loop()
        loop.call_later(1, lambda: None)
        for _ in range(5000):
            loop.call_later(1000, lambda: None).cancel()
            await asyncio.sleep(0)
        return len(loop._timers)

    assert run(main()) < 250


def test_timers_keep_their_order_when_many_others_are_taken_out() -> None:
    async def main() -> list[int]:
        loop = running_loop()
        seen: list[int] = []
        timers = [loop.call_later(number * 7919 % 1000 + 1, seen.append, number) for number in range(1000)]
        for timer in timers[:800]:
            timer.cancel()
        await asyncio.sleep(0)
        assert len(loop._timers) == 200
        await asyncio.sleep(2000)
        return seen

    assert run(main()) == sorted(range(800, 1000), key=lambda number: number * 7919 % 1000)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=250))
def test_the_loop_knows_how_many_cancelled_timers_it_holds(timers: list[tuple[int, int]]) -> None:
    async def main() -> None:
        loop = running_loop()
        for at, cancelled_at in timers:
            loop.call_at(cancelled_at, loop.call_at(at, lambda: None).cancel)
        for _ in range(8):
            await asyncio.sleep(0.5)
            assert loop._timers_cancelled == sum(timer.cancelled() for _, _, timer in loop._timers)

    run(main())


def test_a_group_that_fails_cancels_its_tasks_in_the_order_of_their_numbers_in_a_set() -> None:
    async def main(ballast: list[object]) -> list[str]:
        seen: list[str] = []

        async def wait(name: str) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                seen.append(name)

        async def fail() -> None:
            await asyncio.sleep(1)
            raise ValueError

        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                for number in range(20):
                    tasks.create_task(wait(str(number)))
                    ballast.append(bytearray(100 * len(ballast)))  # other addresses in every round
                tasks.create_task(fail())
        return seen

    ballast: list[object] = []
    orders = [run(main(ballast)) for _ in range(5)]
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) == 20


def test_tasks_are_numbered_afresh_in_every_run() -> None:
    async def main() -> list[str]:
        task = asyncio.create_task(asyncio.sleep(0))
        named = asyncio.create_task(asyncio.sleep(0), name="named")
        await asyncio.gather(task, named)
        return [task.get_name(), named.get_name()]

    assert run(main()) == run(main()) == ["Task-2", "named"]


# ---------------------------------------------------------------------------------------------------------------
# Ends that would be hangs


async def wait_for_nobody() -> None:
    await asyncio.Event().wait()


def test_a_deadlock_ends_the_run_and_names_who_waits_and_where() -> None:
    async def main() -> None:
        task = asyncio.create_task(wait_for_nobody(), name="reader")
        await asyncio.sleep(2)
        await task

    with pytest.raises(NothingToDo) as caught:
        run(main())
    message = str(caught.value)
    assert "at 2.000000000 s" in message
    assert "reader, wait_for_nobody at " in message
    assert "Task-1, " in message


def test_a_cancelled_timer_is_nothing_to_do() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(50, lambda: None).cancel()
        await wait_for_nobody()

    with pytest.raises(NothingToDo, match=r"at 0\.000000000 s"):
        run(main())


def test_a_long_list_of_waiting_tasks_is_cut() -> None:
    async def main() -> None:
        await asyncio.gather(*(wait_for_nobody() for _ in range(100)))

    with pytest.raises(NothingToDo, match="and 81 more"):
        run(main())


def test_a_timer_beyond_the_bound_ends_the_run_before_the_clock_moves() -> None:
    seen: list[float] = []

    async def main() -> None:
        try:
            await asyncio.sleep(10.5)
        finally:
            seen.append(running_loop().time())

    with pytest.raises(VirtualTimeExceeded, match=r"10\.500000000 s, beyond the bound of 10\.0"):
        run(main(), max_virtual_s=10)
    assert seen == [0.0]


def test_a_timer_at_the_bound_still_runs() -> None:
    run(asyncio.sleep(10), max_virtual_s=10)


def test_an_infinite_sleep_is_beyond_every_bound() -> None:
    with pytest.raises(VirtualTimeExceeded, match="runs never"):
        run(asyncio.sleep(math.inf), max_virtual_s=MAX_VIRTUAL_S)


async def spin() -> None:
    for _ in range(10**9):
        await asyncio.sleep(0)


def test_a_task_that_spins_at_one_instant_ends_the_run() -> None:
    with pytest.raises(TooManyTurns, match=r"(?s)100 turns were made at 0\.0.*spin"):
        run(spin(), max_turns_at_one_instant=100)


def test_turns_at_one_instant_are_counted_afresh_when_the_clock_moves() -> None:
    async def main() -> None:
        for _ in range(50):
            for _ in range(90):
                await asyncio.sleep(0)
            await asyncio.sleep(1)

    run(main(), max_turns_at_one_instant=100)


def test_all_turns_together_have_a_bound() -> None:
    async def main() -> None:
        for _ in range(10**9):
            await asyncio.sleep(1)

    with pytest.raises(TooManyTurns, match="1000 turns were made"):
        run(main(), max_turns=1000)


@pytest.mark.parametrize("bounds", [{"max_virtual_s": 0}, {"max_virtual_s": MAX_VIRTUAL_S + 1}, {"max_turns": 0}])
def test_bounds_that_cannot_be_kept_are_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        VirtualLoop(**bounds)

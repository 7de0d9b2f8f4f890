"""The virtual loop: no failure is lost, nothing of the real world gets in, and asyncio is what it was built on."""

from __future__ import annotations

import asyncio
import asyncio.base_events
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from headrace.server.sim.virtual_loop import (
    TESTED_PYTHONS,
    NothingToDo,
    NotSimulated,
    Unhandled,
    VirtualLoop,
    run,
    running_loop,
)


async def wait_for_nobody() -> None:
    await asyncio.Event().wait()


# ---------------------------------------------------------------------------------------------------------------
# Failures


def test_what_main_raises_comes_out() -> None:
    async def main() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(main())


def test_a_callback_that_raises_ends_the_run() -> None:
    def broken() -> None:
        raise AssertionError("an invariant")

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, broken)
        await asyncio.sleep(2)

    with pytest.raises(AssertionError, match="an invariant"):
        run(main())


def test_a_failed_task_that_nobody_awaits_fails_the_run() -> None:
    async def fail() -> None:
        raise LookupError("unseen")

    async def main() -> None:
        asyncio.create_task(fail())  # noqa: RUF006
        await asyncio.sleep(1)

    with pytest.raises(Unhandled, match="unseen"):
        run(main())


def test_a_leftover_that_fails_while_it_is_cancelled_fails_the_run() -> None:
    async def leftover() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            raise LookupError("on the way out")

    async def main() -> None:
        tasks.append(asyncio.create_task(leftover()))
        await asyncio.sleep(1)

    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(Unhandled, match="on the way out"):
        run(main())


def test_what_main_raises_carries_the_unhandled_failures_as_notes() -> None:
    async def leftover() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            raise LookupError("on the way out")

    async def main() -> None:
        tasks.append(asyncio.create_task(leftover()))
        await asyncio.sleep(1)
        raise KeyError

    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(KeyError) as caught:
        run(main())
    assert "on the way out" in caught.value.__notes__[0]


def test_leftovers_are_cancelled_oldest_first_and_may_still_wait() -> None:
    seen: list[int] = []

    async def leftover(number: int) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(1)
            seen.append(number)

    async def main() -> None:
        tasks.extend(asyncio.create_task(leftover(number)) for number in range(20))
        await asyncio.sleep(1)

    tasks: list[asyncio.Task[None]] = []
    run(main(), max_virtual_s=1)
    assert seen == list(range(20))


def test_a_leftover_that_will_not_end_is_named() -> None:
    async def stubborn() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(100)
        await wait_for_nobody()

    async def main() -> None:
        tasks.append(asyncio.create_task(stubborn(), name="stubborn"))
        await asyncio.sleep(1)

    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(NothingToDo, match="stubborn"):
        run(main())


def test_an_async_generator_that_was_left_is_closed() -> None:
    seen: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            seen.append("closed")

    kept = numbers()

    async def main() -> int:
        return await anext(kept)

    assert run(main()) == 1
    assert seen == ["closed"]


def test_it_does_not_run_inside_another_loop() -> None:
    async def outer() -> None:
        run(asyncio.sleep(1))

    with pytest.raises(RuntimeError, match="inside it"):
        asyncio.run(outer())


# ---------------------------------------------------------------------------------------------------------------
# The real world


SIMULATED = {
    *("run_forever", "run_until_complete", "stop", "is_running", "is_closed", "close", "shutdown_asyncgens"),
    *("call_soon", "call_soon_threadsafe", "call_at", "call_later", "time", "create_future", "create_task"),
    *("get_task_factory", "get_exception_handler", "set_exception_handler", "default_exception_handler"),
    *("call_exception_handler", "get_debug", "set_debug", "shutdown_default_executor"),
}


@pytest.mark.parametrize(
    "name", [name for name in dir(asyncio.AbstractEventLoop) if name[0] != "_" and name not in SIMULATED]
)
def test_every_way_out_of_the_simulation_is_refused(name: str) -> None:
    async def main() -> None:
        getattr(asyncio.get_running_loop(), name)(1, 2)

    with pytest.raises(NotSimulated, match=rf"loop\.{name}\(\) reaches outside"):
        run(main())


def connect() -> Coroutine[Any, Any, object]:
    return asyncio.open_connection("localhost", 1)


def start_thread() -> Coroutine[Any, Any, object]:
    return asyncio.to_thread(int)


def start_process() -> Coroutine[Any, Any, object]:
    return asyncio.create_subprocess_exec("true")


@pytest.mark.parametrize("way_out", [connect, start_thread, start_process])
def test_asyncios_own_functions_are_refused_with_it(way_out: Any) -> None:
    async def main() -> None:
        await way_out()

    with pytest.raises(NotSimulated):
        run(main())


def test_another_thread_may_not_schedule_anything() -> None:
    async def main() -> list[BaseException]:
        caught: list[BaseException] = []
        loop = running_loop()

        def call() -> None:
            try:
                loop.call_soon_threadsafe(lambda: None)
            except NotSimulated as error:
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return caught

    assert len(run(main())) == 1


def test_the_loop_holds_no_file_descriptor() -> None:
    loop = VirtualLoop()
    assert not hasattr(loop, "_selector")
    assert not hasattr(loop, "_ssock")
    loop.close()


def test_running_loop_refuses_another_loop() -> None:
    async def main() -> None:
        running_loop()

    with pytest.raises(NotSimulated, match="start it with"):
        asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------------
# asyncio's private parts


def test_this_python_is_one_that_the_loop_was_tested_on() -> None:
    assert sys.version_info[:2] in TESTED_PYTHONS, "run these tests, read asyncio's _run_once, then add it"


def test_asyncio_still_has_the_parts_that_the_loop_stands_on() -> None:
    plain = asyncio.SelectorEventLoop()
    try:
        assert isinstance(plain, asyncio.BaseEventLoop)
        for name in ("_ready", "_stopping", "_closed", "_thread_id", "_scheduled"):
            assert name in vars(plain), name
        timer = plain.call_later(0, int)
        fields = ("_callback", "_args", "_context", "_loop", "_cancelled", "_repr", "_source_traceback", "_when")
        for name in (*fields, "_scheduled"):
            assert hasattr(timer, name), name
        assert callable(timer._run)
        for name in ("_run_once", "_timer_handle_cancelled"):
            assert callable(getattr(asyncio.BaseEventLoop, name)), name
    finally:
        plain.close()


def test_a_virtual_timer_leaves_no_field_of_asyncios_handles_unset() -> None:
    loop = VirtualLoop()
    timer = loop.call_later(1.5, print, "x")
    for kind in (asyncio.Handle, asyncio.TimerHandle):
        for name in kind.__slots__:
            assert name == "__weakref__" or hasattr(timer, name), name
    assert timer.when() == 1.5
    assert "when=1.5" in repr(timer)
    loop.close()

"""The stages of the engine's task group: what a cancelled one means, and which failure came first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.sched.device import EngineFailed


async def run_stage(name: str, work: Callable[[], Awaitable[None]], engine: asyncio.Task[object]) -> None:
    """A stage of the engine's task. A task group takes no note of a child that is cancelled alone: the engine would go
    on without it, and requests would wait for ever."""
    try:
        await work()
    except asyncio.CancelledError:
        if engine.cancelling():
            raise
        raise EngineFailed(f"its stage {name!r} was cancelled") from None


def first_of(group: BaseExceptionGroup[Exception]) -> Exception:
    """The failure that came first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error

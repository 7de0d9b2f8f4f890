"""Long work on the loop, in slices: other coroutines run in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

SLICE_S: Final = 0.001

T = TypeVar("T")
U = TypeVar("U")


async def converted(items: Iterable[T], convert: Callable[[T], U]) -> list[U]:
    """`[convert(item) for item in items]`, giving way to the loop about every millisecond."""
    results: list[U] = []
    deadline_s = time.monotonic() + SLICE_S
    for item in items:
        results.append(convert(item))
        if time.monotonic() >= deadline_s:
            await asyncio.sleep(0)
            deadline_s = time.monotonic() + SLICE_S
    return results

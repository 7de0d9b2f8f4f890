"""What the torture run with a window group is good for: bugs of window pages that are put in by hand."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from headrace.kvcache.prefetch import PrefetchOptions
from headrace.kvcache.window_group import WindowGroup
from headrace.kvcache.window_reads import WindowReads
from headrace.kvcache.windows import Windows
from headrace.sched.device import EngineFailed
from headrace.server.sim.storage import StorageTimes
from headrace.server.sim.torture import torture
from headrace.server.sim.world import WorldShape

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SEED_REQUESTS: Final = 100
SEEDS: Final = 12


def wrap(patch: Patch, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def let_go_a_page_early(patch: Patch) -> None:
    """A request lets its window's first page go while its next token still looks at it."""

    def passed(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, hold, tokens, step: real(self, hold, tokens + self._page_tokens + 1, step)

    wrap(patch, WindowGroup, "passed", passed)


def match_without_a_window(patch: Patch) -> None:
    """A prefix counts as usable whatever the window groups have."""
    patch.setattr(Windows, "usable", lambda self, places: len(places))


def load_the_wrong_page(patch: Patch) -> None:
    """Two of the host pages that a request loads change places."""

    def open_(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: WindowGroup, *arguments: Any) -> Any:
            hold = real(self, *arguments)
            hold.host = hold.host[::-1].copy()
            return hold

        return wrong

    wrap(patch, WindowGroup, "open", open_)


def evict_the_pinned(patch: Patch) -> None:
    """Pages stay on offer although somebody reads them."""

    def pin(self: WindowGroup, places: Any) -> None:
        self.pins[places] += 1

    patch.setattr(WindowGroup, "pin", pin)


def put_pages_in_the_wrong_place(patch: Patch) -> None:
    """What storage brings is indexed one page too far."""

    def put(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: WindowReads, prefetch: Any, piece: Any, good: int) -> None:
            piece.host[:good] = np.roll(piece.host[:good], 1)
            real(self, prefetch, piece, good)

        return wrong

    wrap(patch, WindowReads, "_put", put)


def promise_too_much(patch: Patch) -> None:
    """Requests are admitted whatever the others may need."""
    patch.setattr(Windows, "admits", lambda self, holds, leaving=(): True)


ON_STORAGE: Final = WorldShape(
    slots=6,
    pages=40,
    page_tokens=2,
    context_tokens=40,
    prefill_tokens=64,
    delay_us=1,
    window_tokens=7,
    window_pages=60,
    host_pages=64,
    window_host_pages=64,
    storage_pages=4000,
    storage=StorageTimes(latency_us=20, page_us=100, lanes=2),
    prefetch=PrefetchOptions("wait_complete", 1, piece_bytes=256),
    step_timeout_s=2.0,
)
ON_THE_HOST: Final = msgspec.structs.replace(ON_STORAGE, pages=24, storage_pages=0, host_pages=200)
SCARCE: Final = msgspec.structs.replace(ON_STORAGE, window_pages=8, host_pages=0, window_host_pages=0, storage_pages=0)
BUGS: Final = (
    (let_go_a_page_early, SCARCE),
    (match_without_a_window, SCARCE),
    (load_the_wrong_page, ON_THE_HOST),
    (evict_the_pinned, SCARCE),
    (put_pages_in_the_wrong_place, ON_STORAGE),
    (promise_too_much, SCARCE),
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.collect()


@pytest.mark.parametrize(("bug", "shape"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_the_torture_finds(bug: Callable[[Patch], None], shape: WorldShape, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    for seed in range(SEEDS):
        try:
            torture(seed, SEED_REQUESTS, shape)
        except (AssertionError, EngineFailed) as found:
            print(f"{bug.__name__}: found in seed {seed}: {found!r}")
            return
    pytest.fail(f"{SEEDS} seeds of {SEED_REQUESTS} requests have not found it: {bug.__doc__}")


@pytest.mark.parametrize("shape", [SCARCE, ON_THE_HOST, ON_STORAGE], ids=["scarce", "host", "storage"])
def test_without_a_bug_it_finds_none(shape: WorldShape) -> None:
    assert torture(1, SEED_REQUESTS, shape).requests

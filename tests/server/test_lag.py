"""The lag probe, in virtual time with a clock that a test holds up; and when garbage is collected."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from headrace.sched.messages import EngineStatus
from headrace.server.lag import IDLE_S, LONGEST_S, MOST_OBJECTS, QUIET_TICKS, TICK_S, YOUNG_OBJECTS, LagProbe
from headrace.server.metrics import Metrics
from headrace.server.sim.virtual_loop import run


def no_status() -> EngineStatus:
    raise AssertionError("nobody scrapes the engine here")


class Bench:
    """A probe, and a clock that runs ahead of the loop's when something holds the loop."""

    def __init__(self) -> None:
        self.held_s = 0.0
        self.busy = True
        self.lags: list[float] = []
        self.collections: list[int] = []
        self.probe = LagProbe(Heard(self), lambda: self.busy, self._clock)

    def _clock(self) -> float:
        return asyncio.get_running_loop().time() + self.held_s


class Heard(Metrics):
    def __init__(self, bench: Bench) -> None:
        super().__init__(no_status)
        self._bench = bench

    def lag(self, late_s: float) -> None:
        self._bench.lags.append(late_s)

    def collected(self, generation: int, took_s: float) -> None:
        self._bench.collections.append(generation)


def with_probe(scenario: Callable[[Bench], Coroutine[Any, Any, None]]) -> Bench:
    async def main() -> Bench:
        bench = Bench()
        probe = asyncio.create_task(bench.probe.run())
        await asyncio.sleep(0)
        await scenario(bench)
        probe.cancel()
        await asyncio.wait([probe])
        return bench

    return run(main())


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()


def test_what_holds_the_loop_is_measured_by_the_next_tick() -> None:
    async def scenario(bench: Bench) -> None:
        await asyncio.sleep(2 * TICK_S)
        bench.held_s += 0.02
        await asyncio.sleep(2 * TICK_S)

    lags = with_probe(scenario).lags
    assert [round(lag, 6) for lag in lags] == [0, 0.02, 0] or [round(lag, 6) for lag in lags] == [0, 0, 0.02, 0]


def test_it_ticks_seldom_while_nobody_waits() -> None:
    async def scenario(bench: Bench) -> None:
        bench.busy = False
        await asyncio.sleep(TICK_S + 10 * IDLE_S)

    assert 9 <= len(with_probe(scenario).lags) <= 11


def test_the_longest_lag_is_the_one_since_the_last_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(no_status)
    monkeypatch.setattr("headrace.server.metrics._EngineCollector.collect", lambda self: iter(()))

    def longest() -> float:
        found = re.search(r"^headrace:loop_lag_max_seconds (\S+)$", metrics.exposition().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    metrics.lag(0.004)
    metrics.lag(0.012)
    assert longest() == 0.012
    assert longest() == 0.0
    metrics.lag(0.001)
    assert longest() == 0.001


def test_the_collector_does_not_run_by_itself_and_only_over_the_young_while_requests_wait() -> None:
    async def scenario(bench: Bench) -> None:
        assert not gc.isenabled()
        kept = [[] for _ in range(YOUNG_OBJECTS + 1000)]  # type: ignore[var-annotated]
        await asyncio.sleep(3 * TICK_S)
        assert kept and bench.collections == [0]

    with_probe(scenario)
    assert gc.isenabled()


def test_what_a_large_request_leaves_behind_is_collected_when_nobody_waits() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    async def scenario(bench: Bench) -> None:
        await asyncio.sleep(2 * TICK_S)
        bench.collections.clear()
        cycle = weakref.ref(Cycle())
        burst = [[] for _ in range(MOST_OBJECTS + 1000)]  # type: ignore[var-annotated]
        await asyncio.sleep(3 * TICK_S)
        assert not bench.collections and cycle() is not None
        burst.clear()
        bench.busy = False
        await asyncio.sleep((QUIET_TICKS + 2) * IDLE_S)
        assert bench.collections == [2] and cycle() is None

    with_probe(scenario)


def test_everything_is_collected_once_when_nobody_has_waited_for_a_while_and_what_is_left_is_frozen() -> None:
    async def scenario(bench: Bench) -> None:
        await asyncio.sleep(2 * TICK_S)
        bench.busy = False
        await asyncio.sleep(TICK_S + (QUIET_TICKS - 1.5) * IDLE_S)
        assert 2 not in bench.collections
        await asyncio.sleep(4 * IDLE_S)
        assert bench.collections.count(2) == 1
        assert gc.get_freeze_count() > 0

    with_probe(scenario)


def test_a_server_that_is_never_quiet_collects_everything_now_and_then() -> None:
    async def scenario(bench: Bench) -> None:
        await asyncio.sleep(3 * TICK_S)
        assert 2 not in bench.collections
        bench.held_s += LONGEST_S
        await asyncio.sleep(10 * TICK_S)
        assert bench.collections.count(2) == 1

    with_probe(scenario)

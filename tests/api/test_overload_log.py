"""What the log is told of requests that are answered 503."""

from __future__ import annotations

import asyncio

import pytest

from headrace.server.overload_log import PERIOD_S, OverloadLog
from headrace.server.sim.virtual_loop import run


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_flood_of_refusals_is_a_line_at_once_and_a_count_a_second(caplog: pytest.LogCaptureFixture) -> None:
    async def flood() -> None:
        log = OverloadLog()
        for i in range(3000):
            log.refused(f"refusal {i}")
            await asyncio.sleep(PERIOD_S / 1000)
        log.close()

    run(flood())
    first, *counts = lines(caplog)
    assert first == "refusal 0" and len(counts) == 3
    told = [int(line.split()[2]) for line in counts]
    assert sum(told) == 2999 and counts[-1].endswith("refusal 2999")


def test_refusals_far_apart_have_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    async def trickle() -> None:
        log = OverloadLog()
        for i in range(3):
            log.refused(f"refusal {i}")
            await asyncio.sleep(2 * PERIOD_S)
        log.close()

    run(trickle())
    assert lines(caplog) == ["refusal 0", "refusal 1", "refusal 2"]

"""The bound on read bandwidth: so many bytes a second, whoever reads, and nothing saved up."""

from __future__ import annotations

import pytest

from headrace.kvcache.storage.disk.pace import Pace


class Clock:
    """Time passes only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, wait_s: float) -> None:
        self.now_s += wait_s


def test_bytes_take_as_long_as_the_bound_says() -> None:
    clock = Clock()
    pace = Pace(1e6, lambda: clock.now_s, clock.sleep)
    for _ in range(4):
        pace.spend(500_000)
    assert clock.now_s == pytest.approx(102.0)


def test_bandwidth_that_was_not_used_is_not_saved_up() -> None:
    clock = Clock()
    pace = Pace(1e6, lambda: clock.now_s, clock.sleep)
    clock.now_s += 60
    pace.spend(500_000)
    assert clock.now_s == pytest.approx(160.5)


def test_two_lanes_share_the_bound() -> None:
    clock, waits = Clock(), list[float]()
    pace = Pace(1e6, lambda: clock.now_s, waits.append)
    pace.spend(500_000)
    pace.spend(500_000)
    assert waits == pytest.approx([0.5, 1.0])


def test_without_a_bound_nobody_waits() -> None:
    def fail(wait_s: float) -> None:
        raise AssertionError(f"slept {wait_s} s")

    Pace(0.0, sleep=fail).spend(1 << 30)

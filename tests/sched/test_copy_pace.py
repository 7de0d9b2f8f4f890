"""The size of copies to the host: as many pages as hold the device for no longer than a copy may."""

from __future__ import annotations

import pytest

from headrace.sched.budget import COPY_MS, COPY_SHARE, MAX_COPY_BYTES, CopyPace

PAGE_BYTES = 1 << 16


def behind_a_step(pace: CopyPace) -> int:
    """Pages of the first copy behind a short step."""
    return min(pace.most, pace.pages(10.0))


def after(pace: CopyPace, copies: int, ms_a_page: float, fixed_ms: float = 0.0) -> int:
    """Pages of a copy after so many of them at this speed."""
    for _ in range(copies):
        pages = behind_a_step(pace)
        pace.observe(pages, fixed_ms + pages * ms_a_page)
    return behind_a_step(pace)


@pytest.mark.parametrize("ms_a_page", [0.02, 0.1, 0.7])
def test_copies_become_as_long_as_they_may_be(ms_a_page: float) -> None:
    pages = after(CopyPace(PAGE_BYTES), 100, ms_a_page)
    assert 0.8 * COPY_MS <= pages * ms_a_page <= 1.001 * COPY_MS or pages == 1


def test_what_each_copy_costs_beside_its_pages_counts_too() -> None:
    pages = after(CopyPace(PAGE_BYTES), 200, 0.05, fixed_ms=0.2)
    assert 0.8 * COPY_MS <= 0.2 + 0.05 * pages <= 1.001 * COPY_MS


def test_one_stall_of_the_machine_does_not_make_copies_small_for_long() -> None:
    pace = CopyPace(PAGE_BYTES)
    usual = after(pace, 100, 0.05)
    pace.observe(behind_a_step(pace), 100.0)
    assert behind_a_step(pace) >= 0.7 * usual
    assert after(pace, 30, 0.05) >= 0.95 * usual


def test_however_fast_or_slow_a_copy_has_a_page_and_not_too_many() -> None:
    assert after(CopyPace(PAGE_BYTES), 200, 1e-6) == MAX_COPY_BYTES // PAGE_BYTES
    assert after(CopyPace(PAGE_BYTES), 200, 50.0) == 1
    assert behind_a_step(CopyPace(64 << 20)) == 1


def test_behind_a_long_step_copies_take_their_share_of_it() -> None:
    pace = CopyPace(PAGE_BYTES)
    usual = after(pace, 100, 0.05)
    assert pace.pages(COPY_MS / COPY_SHARE) == pace.pages(0.0), "no longer than that it is a short one"
    assert 9.9 * usual <= pace.pages(10 * COPY_MS / COPY_SHARE) <= 10.1 * (usual + 1)


def test_a_device_tells_whether_copies_delay_its_steps() -> None:
    pace = CopyPace(PAGE_BYTES)
    assert pace.delays, "until it has told"
    pace.observe(8, 0.0)
    assert not pace.delays

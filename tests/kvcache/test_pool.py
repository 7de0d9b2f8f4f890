"""The page allocator: one owner a page, and no page comes back before its fence is complete."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.pool import Fence, Owner, PagePool
from headrace.ops.wire import I32


def taken(pool: PagePool, count: int) -> I32:
    pages = pool.take(count)
    assert pages is not None
    return pages


def test_a_pool_hands_out_every_page_once_and_then_none() -> None:
    pool = PagePool(5)
    pages = [*taken(pool, 3), *taken(pool, 2)]
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert pool.take(1) is None
    pool.check()


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = PagePool(4)
    assert pool.take(5) is None
    assert pool.free_pages == 4


def test_a_page_is_free_only_when_the_step_that_it_must_outlive_has_completed() -> None:
    pool = PagePool(1)
    pool.give_back(taken(pool, 1), Owner.REQUEST, Fence(after_step=7))
    pool.complete_step(6)
    assert (pool.free_pages, pool.fenced_pages) == (0, 1)
    pool.complete_step(7)
    assert (pool.free_pages, pool.fenced_pages) == (1, 0)


def test_a_page_whose_step_has_completed_already_is_free_at_once() -> None:
    pool = PagePool(1)
    pool.complete_step(7)
    pool.give_back(taken(pool, 1), Owner.REQUEST, Fence(after_step=7))
    assert pool.free_pages == 1


@pytest.mark.parametrize("step_first", [True, False])
def test_a_page_waits_for_its_step_and_for_every_transfer_in_any_order(step_first: bool) -> None:
    pool = PagePool(1)
    pool.open_transfer(1)
    pool.open_transfer(2)
    pool.give_back(taken(pool, 1), Owner.REQUEST, Fence(3, (1, 2)))
    completions: list[Callable[[], None]] = [
        lambda: pool.complete_step(3),
        lambda: pool.complete_transfer(1),
        lambda: pool.complete_transfer(2),
    ]
    for complete in completions if step_first else completions[::-1]:
        assert pool.free_pages == 0
        complete()
        pool.check()
    assert pool.free_pages == 1


def test_giving_back_what_another_owns_is_refused() -> None:
    pool = PagePool(2)
    pages = taken(pool, 1)
    pool.hand_over(pages, Owner.REQUEST, Owner.INDEX)
    with pytest.raises(AssertionError):
        pool.give_back(pages, Owner.REQUEST, Fence())


def test_a_reset_frees_everything_and_forgets_fences_but_not_the_count_of_steps() -> None:
    pool = PagePool(3)
    pool.complete_step(4)
    pool.give_back(taken(pool, 2), Owner.REQUEST, Fence(9))
    pool.reset()
    assert (pool.free_pages, pool.completed_step) == (3, 4)
    pool.check()


def test_the_check_sees_a_page_that_is_free_and_owned() -> None:
    pool = PagePool(3)
    pool.owner[0] = Owner.INDEX
    with pytest.raises(AssertionError):
        pool.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 3)), max_size=60))
def test_pages_are_conserved_and_no_fence_is_jumped(actions: list[tuple[int, int, int]]) -> None:
    pool = PagePool(12)
    held: list[I32] = []
    fences: list[tuple[I32, int, int]] = []
    step = transfers = 0
    for kind, amount, which in actions:
        if kind == 0 and (pages := pool.take(amount)) is not None:
            held.append(pages)
        elif kind == 1 and held:
            pages = held.pop(which % len(held))
            transfers += 1
            pool.open_transfer(transfers)
            fences.append((pages, step + amount, transfers))
            pool.give_back(pages, Owner.REQUEST, Fence(step + amount, (transfers,)))
        elif kind == 2:
            step += amount
            pool.complete_step(step)
        elif kind == 3 and fences:
            pages, after, transfer = fences.pop(which % len(fences))
            pool.complete_transfer(transfer)
            if after > step:
                assert (pool.owner[pages] == Owner.FENCED).all()
        for pages, _, _ in fences:
            assert (pool.owner[pages] == Owner.FENCED).all(), "a transfer still reads or writes it"
        pool.check()
    live = np.concatenate(held) if held else np.zeros(0, np.int32)
    assert (pool.owner[live] == Owner.REQUEST).all()

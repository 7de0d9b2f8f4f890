"""A cache with a window group: how much of a prefix is usable, which window pages go when, who may take how many."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.kvcache.cache import KvCache
from headrace.kvcache.holding import Filled, Holding
from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.kvcache.pool import Fence
from headrace.kvcache.windows import Windows

PAGE = 4
WINDOW = 6
"""Tokens: behind a whole page, a token looks at its own page and the two before it."""
LAYOUT = KvLayout(PAGE, (LayerGroup("full", 0, (0,), 1, 8, 1), LayerGroup("window", WINDOW, (1, 2), 1, 8, 1)))
RUNNING = LAYOUT.groups[1].running_pages(PAGE)


def key(*tokens: int) -> PrefixKey:
    return PrefixKey(namespace(b"model", "", ""), PAGE, np.array(tokens, np.int32), len(tokens))


def windows_of(cache: KvCache) -> Windows:
    assert cache.windows is not None
    return cache.windows


def begin(cache: KvCache, tokens: PrefixKey, step: int, capacity: int = 0) -> Holding:
    """A request whose pages of the full group are there, and that `step` loads."""
    holding = cache.open(tokens, capacity or tokens.length)
    pages = cache.take(LAYOUT.pages(tokens.length) - holding.count)
    assert pages is not None and windows_of(cache).admits(holding.windows)
    cache.load(holding, pages, step)
    return holding


def compute(cache: KvCache, holding: Holding, tokens: PrefixKey, end: int, step: int) -> None:
    """A chunk up to token `end`."""
    windows = windows_of(cache)
    assert windows.reach(holding.windows, end) == end
    windows.grow(holding.windows, end)
    cache.publish([Filled(holding, tokens, end, step)])
    windows.passed(holding.windows, end, step)
    cache.check_integrity()


def run_through(cache: KvCache, tokens: PrefixKey, step: int, chunk: int = 4) -> int:
    """A request that computes its tokens in chunks, one a step, and ends → how many pages it reused."""
    holding = begin(cache, tokens, step)
    for start in range(holding.matched_pages * PAGE, tokens.length, chunk):
        compute(cache, holding, tokens, min(start + chunk, tokens.length), step)
        cache.complete_step(step)
        step += 1
    cache.close([holding], Fence(step - 1))
    cache.check_integrity()
    return int(holding.matched_pages)


def copy_all(cache: KvCache) -> None:
    """Everything that waits goes to the host."""
    while (copy := cache.next_copy(16)) is not None:
        cache.copied(copy.transfer)
        cache.check_integrity()


def test_a_prompt_of_any_length_needs_a_window_and_a_chunk_of_a_window_groups_pages() -> None:
    cache = KvCache(LAYOUT, [32, RUNNING])
    assert run_through(cache, key(*range(100)), 0) == 0


def test_what_a_request_has_passed_goes_behind_its_step() -> None:
    cache = KvCache(LAYOUT, [32, RUNNING], reuse=False)
    prompt = key(*range(40))
    holding = begin(cache, prompt, 0)
    compute(cache, holding, prompt, 8, 0)
    compute(cache, holding, prompt, 12, 1)
    pool = windows_of(cache).groups[0].device.pool
    assert holding.windows[0].first == 1 and (pool.free_pages, pool.fenced_pages) == (RUNNING - 3, 1)
    cache.complete_step(0)
    assert pool.fenced_pages == 1, "step 1 may be computed once more, and looks at the page"
    cache.complete_step(1)
    assert pool.fenced_pages == 0


def test_a_prefix_is_usable_where_the_window_behind_it_is_there() -> None:
    cache = KvCache(LAYOUT, [64, 64])
    run_through(cache, key(*range(41)), 0)
    windows = windows_of(cache)
    assert cache.peek(key(*range(41))) == 40
    group = windows.groups[0]
    group.drop(cache._index.places_of(key().namespace, key(*range(40)).raw(0, 10))[7:8], True, True)
    assert cache.peek(key(*range(41))) == 40, "a token at 40 looks at 35 and what follows"
    assert cache.peek(key(*range(37))) == 28, "those at 36 and 32 look at page 7"
    group.drop(cache._index.places_of(key().namespace, key(*range(40)).raw(0, 10))[9:], True, True)
    assert cache.peek(key(*range(41))) == 28
    holding = begin(cache, key(*range(41)), 20)
    assert (holding.matched_pages, holding.windows[0].first) == (7, 5)
    cache.close([holding], Fence(20))
    assert windows.stats()[0].short_matches == 1
    cache.check_integrity()


def test_what_was_missing_is_there_once_it_has_been_computed_again() -> None:
    cache = KvCache(LAYOUT, [64, 64])
    run_through(cache, key(*range(41)), 0)
    windows_of(cache).flush(True, True, 1 << 30)
    assert cache.peek(key(*range(41))) == 0
    assert run_through(cache, key(*range(41)), 20) == 0
    assert cache.peek(key(*range(41))) == 40


def test_ends_go_after_what_was_only_passed() -> None:
    cache = KvCache(LAYOUT, [64, 11])
    run_through(cache, key(*range(33)), 0)
    # Of eight pages, the last three are the end's; the others make room.
    run_through(cache, key(*range(100, 129)), 20)
    assert cache.peek(key(*range(33))) == 32
    assert cache.peek(key(*range(25))) == 0


def test_where_somebody_branched_off_and_found_nothing_an_end_is_kept() -> None:
    cache = KvCache(LAYOUT, [64, 13])
    shared = list(range(24))
    run_through(cache, key(*shared, *range(100, 109)), 0)
    windows_of(cache).groups[0].evict(5)
    assert cache.peek(key(*shared, 7)) == 0, "the pages before the branch have gone first"
    run_through(cache, key(*shared, *range(200, 201)), 20)
    run_through(cache, key(*range(300, 317)), 40)
    assert cache.peek(key(*shared, 7)) == 24


def test_a_running_request_is_never_short_of_its_window() -> None:
    cache = KvCache(LAYOUT, [64, 2 * RUNNING - 1])
    first = begin(cache, key(*range(9)), 0, capacity=60)
    other = cache.open(key(*range(100, 109)), 60)
    assert not windows_of(cache).admits(other.windows)
    assert windows_of(cache).admits(other.windows, [first.windows])
    short = cache.open(key(*range(100, 105)), 8)
    assert windows_of(cache).admits(short.windows), "two pages are all that it can ever have"
    for holding in (first, other, short):
        cache.close([holding], Fence())
    cache.check_integrity()


def test_a_chunk_leaves_to_others_what_they_may_need() -> None:
    cache = KvCache(LAYOUT, [64, 2 * RUNNING + 1])
    windows = windows_of(cache)
    first, second = begin(cache, key(*range(80)), 0), begin(cache, key(*range(100, 180)), 0)
    assert windows.reach(first.windows, 80) == (RUNNING + 1) * PAGE
    compute(cache, first, key(*range(80)), (RUNNING + 1) * PAGE, 0)
    assert windows.reach(second.windows, 80) == RUNNING * PAGE
    for holding in (first, second):
        cache.close([holding], Fence(0))


def test_only_the_windows_behind_ends_are_copied_and_only_they_are_loaded() -> None:
    cache = KvCache(LAYOUT, [64, 64], host_pages=64, window_host_pages=[64])
    run_through(cache, key(*range(61)), 0)
    copy_all(cache)
    assert cache.stats().host_copied == 15 and windows_of(cache).stats()[0].copied_pages == 3
    cache.flush(host=False)
    assert cache.peek(key(*range(61))) == 60 and cache.peek(key(*range(53))) == 0
    holding = begin(cache, key(*range(61)), 40)
    assert holding.host.shape == (1, 15) and len(holding.windows[0].host) == 2
    assert holding.num_loads == 17
    cache.close([holding], Fence(40))
    cache.check_integrity()


def test_a_prompt_that_ends_with_a_page_can_be_asked_for_again_from_the_host() -> None:
    cache = KvCache(LAYOUT, [64, 64], host_pages=64, window_host_pages=[64])
    run_through(cache, key(*range(60)), 0)
    copy_all(cache)
    cache.flush(host=False)
    assert cache.peek(key(*range(60))) == 56 and cache.peek(key(*range(61))) == 60


def test_a_window_that_goes_from_the_host_shortens_the_prefix_that_only_it_had() -> None:
    cache = KvCache(LAYOUT, [64, 64], host_pages=64, window_host_pages=[4])
    run_through(cache, key(*range(29)), 0)
    copy_all(cache)
    run_through(cache, key(*range(100, 129)), 20)
    copy_all(cache)
    cache.flush(host=False)
    assert cache.peek(key(*range(100, 129))) == 28
    assert cache.peek(key(*range(29))) == 0


def test_a_device_that_is_lost_takes_its_window_pages_along() -> None:
    cache = KvCache(LAYOUT, [64, 64], host_pages=64, window_host_pages=[64])
    run_through(cache, key(*range(29)), 0)
    copy_all(cache)
    run_through(cache, key(*range(100, 129)), 20)
    cache.next_copy(16)
    cache.complete_step(60)
    for _ in cache.forget_device():
        pass
    cache.check_integrity()
    assert cache.peek(key(*range(29))) == 28 and cache.peek(key(*range(100, 129))) == 0


def test_a_pin_keeps_the_window_behind_its_prefix_through_whatever_others_do() -> None:
    cache = KvCache(LAYOUT, [64, RUNNING + 3])
    windows = windows_of(cache)
    run_through(cache, key(*range(17)), 0)
    assert windows.can_pin(4)
    pin, pages = cache.pins.pin(key(*range(17)), 4)
    assert pages == 4 and not windows.can_pin(4), "a request must still get on"
    run_through(cache, key(*range(100, 180)), 10)
    assert cache.peek(key(*range(17))) == 16
    windows.flush(True, True, 1 << 30)
    assert cache.peek(key(*range(17))) == 16
    cache.unpin(pin)
    windows.flush(True, True, 1 << 30)
    assert cache.peek(key(*range(17))) == 0
    cache.check_integrity()


def test_a_clearing_takes_the_window_pages_of_its_prefix() -> None:
    cache = KvCache(LAYOUT, [64, 64], host_pages=64, window_host_pages=[64])
    run_through(cache, key(*range(29)), 0)
    copy_all(cache)
    cache.clear(key(*range(28)), device=True, host=False)
    group = windows_of(cache).groups[0]
    assert (group.device.pages >= 0).sum() == 0 and (group.host.pages >= 0).sum() == 3
    cache.clear(key(*range(28)), device=True, host=True)
    assert (group.host.pages >= 0).sum() == 0
    cache.check_integrity()


@pytest.mark.parametrize("what", ["pin", "owner", "claim", "place", "idle"])
def test_the_check_finds_what_is_wrong(what: str) -> None:
    cache = KvCache(LAYOUT, [64, 64])
    run_through(cache, key(*range(29)), 0)
    holding = begin(cache, key(*range(29)), 20)
    group = windows_of(cache).groups[0]
    place = int(np.flatnonzero((group.device.pages >= 0) & (group.pins == 0))[0])
    if what == "pin":
        group.pins[holding.windows[0].places[5]] += 1
    elif what == "owner":
        group.device.pages[place] = group.device.pages[holding.windows[0].places[5]]
    elif what == "claim":
        group.committed -= 1
    elif what == "place":
        windows_of(cache)._exists[place] = False
    else:
        group.device.withdraw(place)
    with pytest.raises(AssertionError):
        cache.check_integrity()


def test_a_layout_without_window_groups_has_no_places() -> None:
    cache = KvCache(msgspec.structs.replace(LAYOUT, groups=LAYOUT.groups[:1]), [8])
    assert cache.windows is None and cache._index.places_of(key().namespace, b"").size == 0


def test_a_window_that_the_host_has_no_room_for_is_copied_once_and_no_page_again() -> None:
    cache = KvCache(LAYOUT, [64, 64], host_pages=64, window_host_pages=[1])
    run_through(cache, key(*range(33)), 0)
    copies = 0
    while (copy := cache.next_copy(1)) is not None:
        cache.copied(copy.transfer)
        copies += 1
        assert copies < 100, "a page goes round and round"
    assert not cache.copying
    cache.check_integrity()


def test_pages_that_only_copies_hold_count_as_available_until_the_last_of_them_is_made() -> None:
    cache = KvCache(LAYOUT, [16, 16], host_pages=64, window_host_pages=[16])
    run_through(cache, key(*range(33)), 0)
    copies = []
    while (copy := cache.next_copy(1)) is not None:
        copies.append(copy)
        assert cache.available_pages == 16
    assert {copy.first_group for copy in copies} == {0, 1}
    for copy in copies:
        cache.copied(copy.transfer)
        assert cache.available_pages == 16
    cache.check_integrity()

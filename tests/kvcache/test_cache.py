"""The cache facade: what a request may reuse, what it owns, and when what it had may be used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from headrace.kvcache.cache import FORGOTTEN_NODES, KvCache
from headrace.kvcache.events import Stored
from headrace.kvcache.holding import Filled
from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.kvcache.pool import Fence
from headrace.kvcache.prefetch import PrefetchOptions
from headrace.kvcache.storage.client import PageSpan, StorageClient
from headrace.kvcache.storage.protocol import Written
from headrace.ops.wire import I32
from headrace.server.sim.virtual_loop import run

LAYOUT = KvLayout(4, (LayerGroup("full", 0, (0, 1), 2, 8, 4),))
NAMESPACE = namespace(b"model", "", "")


def key(*tokens: int, salt: str = "") -> PrefixKey:
    return PrefixKey(namespace(b"model", "", salt), 4, np.array(tokens, np.int32), len(tokens))


def run_through(cache: KvCache, tokens: PrefixKey, step: int) -> int:
    """A request that computes all its tokens in `step` and ends; how many pages it reused."""
    holding = cache.open(tokens, tokens.length)
    pages = cache.take(LAYOUT.pages(tokens.length) - holding.count)
    assert pages is not None
    cache.append(holding, pages)
    cache.publish([Filled(holding, tokens, tokens.length, step)])
    cache.check_integrity()
    cache.close([holding], Fence(step))
    cache.check_integrity()
    return int(holding.matched_pages)


def test_a_prompt_that_was_computed_before_is_reused_but_for_its_last_token() -> None:
    cache = KvCache(LAYOUT, [16])
    assert run_through(cache, key(*range(8)), 0) == 0
    assert cache.peek(key(*range(8))) == 4, "the last token must be computed for its logits"
    assert cache.peek(key(*range(9))) == 8
    assert run_through(cache, key(*range(9)), 1) == 2


def test_another_salt_reuses_nothing() -> None:
    cache = KvCache(LAYOUT, [16])
    run_through(cache, key(*range(9)), 0)
    assert cache.peek(key(*range(9), salt="tenant")) == 0


def test_without_reuse_nothing_is_matched_and_everything_comes_back() -> None:
    cache = KvCache(LAYOUT, [4], reuse=False)
    for step in range(3):
        assert run_through(cache, key(*range(9)), step) == 0
        cache.complete_step(step)
    assert cache.stats().free == 4


def test_pages_of_a_running_step_are_not_handed_out_again_before_it_completes() -> None:
    cache = KvCache(LAYOUT, [2])
    run_through(cache, key(*range(7)), step=5)
    assert cache.take(2) is None
    cache.complete_step(5)
    assert cache.take(2) is not None


def test_eviction_waits_for_the_last_reader_too() -> None:
    cache = KvCache(LAYOUT, [3])
    run_through(cache, key(*range(9)), step=0)
    cache.complete_step(0)
    reader = cache.open(key(*range(9)), 9)
    cache.close([reader], Fence(6))
    assert cache.take(3) is None, "step 6 reads two of them"
    cache.complete_step(6)
    assert cache.take(3) is not None


def test_two_requests_that_compute_the_same_keep_their_own_copies() -> None:
    cache = KvCache(LAYOUT, [8])
    tokens = key(*range(9))
    first, second = cache.open(tokens, 9), cache.open(tokens, 9)
    for step, holding in enumerate((first, second)):
        pages = cache.take(3)
        assert pages is not None
        cache.append(holding, pages)
        cache.publish([Filled(holding, tokens, 9, step)])
    assert [run.tolist() for run in first.own_runs] == [[[2]]]
    assert [run.tolist() for run in second.own_runs] == [[[5]], [[3, 4]]]
    cache.check_integrity()
    cache.close([second], Fence(1))
    cache.complete_step(1)
    assert (cache.stats().free, cache.peek(tokens)) == (5, 8)


def test_a_flush_drops_what_nobody_uses_and_says_what_it_kept() -> None:
    cache = KvCache(LAYOUT, [16])
    run_through(cache, key(*range(9)), 0)
    run_through(cache, key(*range(100, 109)), 1)
    cache.complete_step(1)
    reader = cache.open(key(*range(9)), 9)
    assert cache.flush()[:2] == (2, 2)
    cache.close([reader], Fence())
    assert cache.flush()[:2] == (2, 0)
    assert cache.flush()[:2] == (0, 0)
    assert cache.stats().free == 16


def test_the_integrity_check_sees_a_lost_page() -> None:
    cache = KvCache(LAYOUT, [4])
    holding = cache.open(key(1, 2, 3, 4, 5), 5)
    pages = cache.take(2)
    assert pages is not None
    cache.append(holding, pages)
    cache.check_integrity()
    holding.count = 1
    with pytest.raises(AssertionError):
        cache.check_integrity()


def test_page_hashes_name_the_whole_prefix_and_the_namespace() -> None:
    one, two = key(*range(12)), key(*range(4), 99, *range(5, 12))
    assert one.page_hashes(3)[0] == two.page_hashes(3)[0]
    assert one.page_hashes(3)[1:] != two.page_hashes(3)[1:] and one.page_hashes(3)[2] != two.page_hashes(3)[2]
    assert key(*range(12), salt="x").page_hashes(1) != one.page_hashes(1)


def test_hashing_goes_on_where_it_stopped() -> None:
    whole, growing = key(*range(32)), key(*range(32))
    growing.length = 9
    assert growing.page_hashes(2) == whole.page_hashes(8)[:2]
    growing.length = 32
    assert growing.page_hashes(8) == whole.page_hashes(8)


def test_a_namespace_tells_its_parts_apart() -> None:
    assert len({namespace(b"ab", "c", ""), namespace(b"a", "bc", ""), namespace(b"ab", "", "c")}) == 3


def test_sha256_chains_differ_from_xxh3_chains_and_so_do_their_namespaces() -> None:
    plain = key(*range(8))
    other = PrefixKey(plain.namespace, 4, plain.tokens, 8, "sha256")
    assert plain.page_hashes(2) != other.page_hashes(2) and len(other.page_hashes(2)[0]) == 16
    assert namespace(b"model", "", "") != namespace(b"model", "", "", page_hash="sha256")


def test_a_salt_enters_a_namespace_only_through_its_key() -> None:
    assert namespace(b"model", "", "tenant", b"key one") != namespace(b"model", "", "tenant", b"key two")
    assert namespace(b"model", "", "", b"key one") == namespace(b"model", "", "", b"key two")


def test_a_host_slot_starts_on_a_block_boundary() -> None:
    smol = KvLayout(16, (LayerGroup("full", 0, tuple(range(30)), 3, 64, 2),))
    assert smol.page_bytes(0) == smol.host_slot_bytes(0) == 368_640
    assert LAYOUT.page_bytes(0) == 4 * 2 * 2 * 2 * 8 * 4 and LAYOUT.host_slot_bytes(0) == 4096


def test_a_lost_device_is_forgotten_a_slice_at_a_time_whatever_is_pinned_and_dropped_meanwhile() -> None:
    cache = KvCache(LAYOUT, [1000], host_pages=10)
    prompts = [key(*range(i, i + 5)) for i in range(500)]
    for prompt in prompts:
        run_through(cache, prompt, 0)
    cache.complete_step(0)
    pins, slices, least = [cache.pins.pin(prompts[0])[0]], 0, 500
    for _ in cache.forget_device():
        cache.check_integrity()
        left = cache.stats().indexed
        assert least - left <= FORGOTTEN_NODES
        least, slices = left, slices + 1
        if slices == 2:
            pins.append(cache.pins.pin(prompts[-1])[0])
            cache.flush(most_pages=100)
            least = cache.stats().indexed
    assert slices >= 4 and least == 0
    assert [cache.pins.pages_of(pin) for pin in pins] == [0, 0]
    assert cache.stats().free == 1000


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Host pages that a transfer could get, each time that those who wait for them are told."""
    told: list[int] = []

    def room_came(cache: KvCache) -> None:
        assert cache._host is not None
        told.append(cache._host.room_pages)

    monkeypatch.setattr(KvCache, "_room_came", room_came)
    return told


def copied(cache: KvCache, *tokens: int) -> None:
    """A request's pages are on the host."""
    run_through(cache, key(*tokens), 0)
    cache.complete_step(0)
    copy = cache.next_copy(16)
    assert copy is not None
    cache.copied(copy.transfer)


def test_who_waits_for_host_room_is_told_when_a_copy_lets_go_of_its_prefix(told: list[int]) -> None:
    cache = KvCache(LAYOUT, [16], host_pages=8)
    copied(cache, *range(17))
    run_through(cache, key(*range(25)), 0)
    copy = cache.next_copy(16)
    assert copy is not None and cache._host is not None
    assert cache._host.room_pages == 2, "the copy holds its own pages and those that it continues"
    told.clear()
    cache.copied(copy.transfer)
    assert told == [8]


def test_who_waits_for_host_room_is_told_when_a_pin_goes(told: list[int]) -> None:
    cache = KvCache(LAYOUT, [16], host_pages=8)
    copied(cache, *range(17))
    pin, pages = cache.pins.pin(key(*range(17)))
    told.clear()
    cache.unpin(pin)
    assert (pages, told) == (4, [8])


def test_what_a_flush_or_a_clearing_drops_was_room_before() -> None:
    cache = KvCache(LAYOUT, [16], host_pages=8)
    copied(cache, *range(17))
    copied(cache, *range(100, 117))
    assert cache._host is not None and cache._host.room_pages == 8
    assert cache.clear(key(*range(16)), True, True).host == 4
    assert cache._host.room_pages == 8
    assert cache.flush().host == 4
    assert cache._host.room_pages == 8


class Store:
    """A storage client whose writes end when they are sent."""

    backend, usable = "memory", True

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []

    def write(self, group: int, span: PageSpan, host_pages: I32, done: Callable[[Written], None]) -> None:
        self.written.append((group, len(host_pages)))
        done(Written(0, len(host_pages), []))


def test_pages_of_several_layer_groups_are_told_of_once_when_storage_has_them() -> None:
    async def scenario() -> None:
        groups = (LayerGroup("full", 0, (0,), 2, 8, 4), LayerGroup("full", 0, (1,), 2, 8, 4))
        cache = KvCache(KvLayout(4, groups), [16, 16], host_pages=32)
        store = Store()
        cache.attach_storage(cast(StorageClient, store), PrefetchOptions(), lambda: None)
        events = cache.events.subscribe()
        copied(cache, *range(17))
        assert store.written == [(0, 4), (1, 4)] and cache.stored_pages == 8
        stored = [event for event in events.take() if isinstance(event, Stored) and event.tier == "storage"]
        assert [event.pages for event in stored] == [4]

    run(scenario())

"""The radix index: exact longest prefixes over two tiers, leases that hold, eviction in the order of use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.radix_nodes import Dropped, Lease, Span
from headrace.ops.wire import I32

PAGE = 2
ROOT = b"n" * 16


def raw(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def numbers(first: int, count: int) -> I32:
    return np.arange(first, first + count, dtype=np.int32)[None]


def stored(index: RadixIndex, tokens: bytes, pages: I32, step: int = 0) -> Lease:
    """A lease on freshly stored tokens."""
    match = index.acquire(ROOT, tokens)
    have = match.lease.num_pages
    index.extend(match.lease, tokens[have * PAGE * 4 :], pages[:, have:], step)
    return match.lease


def backed_up(index: RadixIndex, lease: Lease, first: int) -> list[Span]:
    """Copy all of a lease's path to host pages from `first` on."""
    spans, pages = index.begin_backup(lease, 1 << 40, 1 << 20, 0)
    index.end_backup(lease, spans, numbers(first, pages.shape[1]))
    return spans


def device(dropped: list[Dropped]) -> list[tuple[list[int], int]]:
    return [(run.device[0].tolist(), run.last_step) for run in dropped if run.device.shape[1]]


def host(dropped: list[Dropped]) -> list[int]:
    return [page for run in dropped for page in run.host[0].tolist()]


def test_an_empty_index_matches_nothing() -> None:
    index = RadixIndex(PAGE, 1)
    lease, pages, _ = index.acquire(ROOT, raw(1, 2, 3, 4))
    assert (lease.num_pages, pages.shape) == (0, (1, 0))
    index.release(lease, -1)
    index.check([])
    assert list(index.nodes()) == []


def test_what_was_stored_is_matched_page_by_page() -> None:
    index = RadixIndex(PAGE, 1)
    lease = stored(index, raw(1, 2, 3, 4, 5, 6), numbers(10, 3))
    for query, want in (((1, 2), [10]), ((1, 2, 3, 4), [10, 11]), ((1, 2, 3, 9), [10]), ((9, 2), [])):
        other, pages, _ = index.acquire(ROOT, raw(*query))
        assert pages[0].tolist() == want
        assert index.peek(ROOT, raw(*query)) == (len(want), len(want))
        index.release(other, -1)
    index.release(lease, -1)
    index.check([])


def test_namespaces_do_not_see_each_other() -> None:
    index = RadixIndex(PAGE, 1)
    stored(index, raw(1, 2), numbers(0, 1))
    assert index.peek(b"m" * 16, raw(1, 2)) == (0, 0)


def test_a_second_writer_is_shown_the_first_ones_pages_and_holds_those() -> None:
    index = RadixIndex(PAGE, 1)
    first, second = index.acquire(ROOT, raw(1, 2)).lease, index.acquire(ROOT, raw(1, 2)).lease
    assert not index.extend(first, raw(1, 2, 3, 4), numbers(0, 2), 5)
    had = index.extend(second, raw(1, 2, 3, 4, 5, 6), numbers(20, 3), 6)
    assert [(run.start, run.pages.tolist()) for run in had] == [(0, [[0, 1]])]
    assert second.num_pages == 3
    index.release(first, 5)
    assert index.evictable_device_pages == 0, "the second reads them too"
    index.check([second])


def test_a_second_writer_that_goes_another_way_shares_only_what_is_equal() -> None:
    index = RadixIndex(PAGE, 1)
    first, second = index.acquire(ROOT, raw(1, 2)).lease, index.acquire(ROOT, raw(1, 2)).lease
    index.extend(first, raw(1, 2, 3, 4, 5, 6), numbers(0, 3), 5)
    had = index.extend(second, raw(1, 2, 7, 8), numbers(20, 2), 6)
    assert [(run.start, run.pages.tolist()) for run in had] == [(0, [[0]])]
    index.release(first, 5)
    assert index.evictable_device_pages == 2
    index.check([second])


def test_leased_pages_are_never_evicted() -> None:
    index = RadixIndex(PAGE, 1)
    stored(index, raw(1, 2, 3, 4), numbers(0, 2))
    loose = stored(index, raw(1, 2, 5, 6), numbers(2, 2))
    index.release(loose, 3)
    assert device(index.evict_device(10)) == [([3], 3)]
    assert index.peek(ROOT, raw(1, 2, 3, 4)) == (2, 2)


def test_eviction_takes_the_longest_unused_first_and_only_as_much_as_asked() -> None:
    index = RadixIndex(PAGE, 1)
    for i, first in enumerate((1, 2, 3)):
        index.release(stored(index, raw(first, 0, first, 1, first, 2), numbers(10 * i, 3)), i)
    index.release(index.acquire(ROOT, raw(1, 0, 1, 1, 1, 2)).lease, 9)  # the first is used again
    assert device(index.evict_device(4)) == [([10, 11, 12], 1), ([22], 2)]
    assert index.peek(ROOT, raw(3, 0, 3, 1, 3, 2)) == (2, 2)
    index.check([])


def test_a_parent_goes_after_its_last_child() -> None:
    index = RadixIndex(PAGE, 1)
    a = stored(index, raw(1, 2, 3, 4), numbers(0, 2))
    b = stored(index, raw(1, 2, 5, 6), numbers(5, 2))
    index.release(a, 1)
    index.release(b, 2)
    assert sorted(page for pages, _ in device(index.evict_device(10)) for page in pages) == [0, 1, 6]
    assert index.num_nodes == index.device_pages == 0


def test_a_split_node_must_still_outlive_its_readers() -> None:
    index = RadixIndex(PAGE, 1)
    index.release(stored(index, raw(1, 2, 3, 4), numbers(0, 2)), 7)
    index.release(index.acquire(ROOT, raw(1, 2)).lease, -1)
    assert {step for _, step in device(index.evict_device(10))} == {7}


def test_a_request_that_grows_page_by_page_stays_one_node() -> None:
    index = RadixIndex(PAGE, 1)
    lease = index.acquire(ROOT, b"").lease
    for i in range(50):
        index.extend(lease, raw(i, i), numbers(i, 1), i)
    assert index.num_nodes == 1
    index.check([lease])


def test_an_empty_namespace_leaves_no_root_behind() -> None:
    index = RadixIndex(PAGE, 1)
    for salt in range(100):
        lease = index.acquire(salt.to_bytes(16, "little"), raw(1, 2)).lease
        index.extend(lease, raw(1, 2), numbers(salt, 1), 0)
        index.release(lease, 0)
    index.evict_device(100)
    assert list(index.nodes()) == []


def test_releasing_twice_is_refused() -> None:
    index = RadixIndex(PAGE, 1)
    lease = stored(index, raw(1, 2), numbers(0, 1))
    index.release(lease, 0)
    with pytest.raises(AssertionError):
        index.release(lease, 0)


# ---------------------------------------------------------------------------------------------------------------
# Two tiers


def test_pages_that_the_host_has_stay_indexed_when_the_device_lets_them_go() -> None:
    index = RadixIndex(PAGE, 1)
    lease = stored(index, raw(1, 2, 3, 4, 5, 6), numbers(0, 3), step=4)
    assert backed_up(index, lease, 100) == [Span(0, 3)]
    index.release(lease, 4)
    assert device(index.evict_device(2)) == [([1, 2], 4)]
    match = index.acquire(ROOT, raw(1, 2, 3, 4, 5, 6))
    assert (match.device[0].tolist(), match.host[0].tolist()) == ([0], [101, 102])
    assert index.peek(ROOT, raw(1, 2, 3, 4, 5, 6)) == (1, 3)
    index.check([match.lease])


def test_loaded_pages_are_on_the_device_for_whoever_comes_next() -> None:
    index = RadixIndex(PAGE, 1)
    lease = stored(index, raw(1, 2, 3, 4), numbers(0, 2))
    backed_up(index, lease, 100)
    index.release(lease, 0)
    index.evict_device(2)
    match = index.acquire(ROOT, raw(1, 2, 3, 4))
    index.load(match.lease, numbers(50, 2), 9)
    assert index.acquire(ROOT, raw(1, 2, 3, 4)).device[0].tolist() == [50, 51]
    index.release(match.lease, 9)


def test_only_pages_of_completed_steps_are_copied() -> None:
    index = RadixIndex(PAGE, 1)
    lease = stored(index, raw(1, 2), numbers(0, 1), step=3)
    index.extend(lease, raw(3, 4), numbers(1, 1), 5)
    spans, pages = index.begin_backup(lease, 4, 10, 0)
    assert (spans, pages[0].tolist()) == ([Span(0, 1)], [0])
    spans, pages = index.begin_backup(lease, 5, 10, 0)
    assert (spans, pages[0].tolist()) == ([Span(1, 2)], [1])


def test_a_page_is_copied_once_however_many_share_it() -> None:
    index = RadixIndex(PAGE, 1)
    a = stored(index, raw(1, 2, 3, 4), numbers(0, 2))
    b = stored(index, raw(1, 2, 5, 6), numbers(10, 2))
    assert index.begin_backup(a, 9, 10, 0)[1][0].tolist() == [0, 1]
    assert index.begin_backup(b, 9, 10, 0)[1][0].tolist() == [11]


def test_a_copy_survives_that_its_node_is_split_meanwhile() -> None:
    index = RadixIndex(PAGE, 1)
    lease = stored(index, raw(1, 2, 3, 4, 5, 6), numbers(0, 3))
    spans, _ = index.begin_backup(lease, 9, 10, 0)
    other = index.acquire(ROOT, raw(1, 2)).lease
    index.end_backup(lease, spans, numbers(100, 3))
    index.check([lease, other])
    index.release(lease, 0)
    index.release(other, 0)
    index.evict_device(3)
    assert index.acquire(ROOT, raw(1, 2, 3, 4, 5, 6)).host[0].tolist() == [100, 101, 102]


def test_what_follows_a_lost_page_is_forgotten_and_its_host_pages_come_back() -> None:
    index = RadixIndex(PAGE, 1)
    index.release(stored(index, raw(1, 2), numbers(0, 1)), 0)
    assert index.insert_host(ROOT, raw(1, 2, 3, 4, 5, 6), 1, numbers(100, 2)).all()
    assert index.peek(ROOT, raw(1, 2, 3, 4, 5, 6)) == (1, 3)
    dropped = index.evict_device(1)
    assert (device(dropped), host(dropped)) == ([([0], 0)], [100, 101])
    assert index.num_nodes == 0
    index.check([])


def test_prefetched_pages_without_their_prefix_are_not_taken() -> None:
    index = RadixIndex(PAGE, 1)
    assert not index.insert_host(ROOT, raw(1, 2, 3, 4), 1, numbers(100, 1)).any()
    assert index.insert_host(ROOT, raw(1, 2, 3, 4), 0, numbers(100, 2)).all()
    taken = index.insert_host(ROOT, raw(1, 2, 3, 4, 5, 6), 0, numbers(200, 3))
    assert taken.tolist() == [False, False, True]
    index.check([])


def test_a_request_that_computed_what_only_the_host_has_gives_it_to_the_device() -> None:
    index = RadixIndex(PAGE, 1)
    lease = index.acquire(ROOT, b"").lease
    index.insert_host(ROOT, raw(1, 2, 3, 4), 0, numbers(100, 2))
    assert not index.extend(lease, raw(1, 2, 3, 4, 5, 6), numbers(0, 3), 1), "it takes all"
    index.check([lease])


def test_host_pages_go_in_the_order_of_use_and_leave_device_pages_indexed() -> None:
    index = RadixIndex(PAGE, 1)
    for i, first in enumerate((1, 2)):
        lease = stored(index, raw(first, 0, first, 1), numbers(10 * i, 2))
        backed_up(index, lease, 100 + 10 * i)
        index.release(lease, i)
    assert host(index.evict_host(3)) == [100, 101, 111]
    assert index.peek(ROOT, raw(1, 0, 1, 1)) == (2, 2)
    index.check([])


def test_a_lost_device_leaves_what_the_host_has() -> None:
    index = RadixIndex(PAGE, 1)
    lease = stored(index, raw(1, 2, 3, 4), numbers(0, 2))
    backed_up(index, lease, 100)
    index.extend(lease, raw(5, 6), numbers(2, 1), 1)
    index.release(lease, 1)
    index.forget_device(9)
    index.check([])
    assert index.peek(ROOT, raw(1, 2, 3, 4, 5, 6)) == (0, 2)
    assert (index.device_pages, index.host_pages) == (0, 2)


def test_a_given_up_copy_can_be_made_again() -> None:
    index = RadixIndex(PAGE, 1)
    lease = stored(index, raw(1, 2), numbers(0, 1))
    spans, _ = index.begin_backup(lease, 9, 10, 0)
    index.end_backup(lease, spans, None)
    index.check([lease])
    assert index.begin_backup(lease, 9, 10, 0)[0] == [Span(0, 1)]


def test_the_coldest_paths_without_a_host_copy_are_leased_for_it() -> None:
    index = RadixIndex(PAGE, 1)
    for i in range(3):
        index.release(stored(index, raw(i, 0, i, 1), numbers(10 * i, 2)), i)
    ready, leases = index.coldest(3)
    assert ready == 0
    assert [int(lease.node.device[0, 0]) for lease in leases] == [0, 10]
    index.check(leases)


class AgainstAModel(RuleBasedStateMachine):
    """The index beside two dicts from token prefixes to page numbers, one a tier."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex(PAGE, 2)
        self.device: dict[bytes, int] = {}
        self.host: dict[bytes, int] = {}
        self.leases: list[tuple[Lease, bytes]] = []
        self.copies: list[tuple[Lease, bytes, list[Span]]] = []
        self.next_page = 0

    def fresh(self, count: int) -> I32:
        pages = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
        self.next_page += count
        return np.stack([pages, pages])

    @rule(tokens=st.lists(st.integers(0, 2), max_size=6))
    def acquire_load_and_extend(self, tokens: list[int]) -> None:
        text = raw(*[token for token in tokens for _ in range(PAGE)])
        prefixes = [text[: (i + 1) * PAGE * 4] for i in range(len(tokens))]
        known = on_device = 0
        while known < len(tokens) and (prefixes[known] in self.device or prefixes[known] in self.host):
            known += 1
        while on_device < known and prefixes[on_device] in self.device:
            on_device += 1
        assert self.index.peek(ROOT, text) == (on_device, known)
        lease, device, host = self.index.acquire(ROOT, text)
        assert device.tolist() == [[self.device[prefix] for prefix in prefixes[:on_device]]] * 2
        assert host.tolist() == [[self.host[prefix] for prefix in prefixes[on_device:known]]] * 2
        pages = self.fresh(len(tokens) - on_device)
        self.index.load(lease, pages[:, : known - on_device], 0)
        assert not self.index.extend(lease, text[known * PAGE * 4 :], pages[:, known - on_device :], 0), "it takes all"
        for prefix, page in zip(prefixes[on_device:], pages[0].tolist()):
            self.device[prefix] = page
        self.leases.append((lease, text))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        lease, _ = self.leases.pop(which % len(self.leases))
        self.index.release(lease, 0)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99), most=st.integers(1, 4))
    def begin_copy(self, which: int, most: int) -> None:
        lease, text = self.leases[which % len(self.leases)]
        mine = self.index.lease_again(lease)
        spans, _ = self.index.begin_backup(mine, 0, most, 0)
        self.copies.append((mine, text, spans))

    @precondition(lambda self: self.copies)
    @rule()
    def end_copy(self) -> None:
        lease, text, spans = self.copies.pop(0)
        wanted = [i for span in spans for i in range(span.start, span.end)]
        pages = self.fresh(len(wanted))
        self.index.end_backup(lease, spans, pages)
        for i, page in zip(wanted, pages[0].tolist()):
            prefix = text[: (i + 1) * PAGE * 4]
            assert prefix not in self.host
            self.host[prefix] = page
        self.index.release(lease, 0)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6), first=st.integers(0, 5))
    def prefetch(self, tokens: list[int], first: int) -> None:
        first = min(first, len(tokens) - 1)
        text = raw(*[token for token in tokens for _ in range(PAGE)])
        pages = self.fresh(len(tokens) - first)
        taken = self.index.insert_host(ROOT, text, first, pages)
        for i in np.flatnonzero(taken).tolist():
            prefix = text[: (first + i + 1) * PAGE * 4]
            assert prefix not in self.host and prefix not in self.device
            self.host[prefix] = int(pages[0, i])

    @rule(count=st.integers(1, 5))
    def evict_device(self, count: int) -> None:
        free = self.index.evictable_device_pages
        self._gone(self.index.evict_device(count), min(count, free), None)

    @rule(count=st.integers(1, 5))
    def evict_host(self, count: int) -> None:
        free = self.index.evictable_host_pages
        self._gone(self.index.evict_host(count), None, min(count, free))

    def _gone(self, dropped: list[Dropped], device: int | None, host: int | None) -> None:
        gone_device = [page for run in dropped for page in run.device[0].tolist()]
        gone_host = [page for run in dropped for page in run.host[0].tolist()]
        assert device is None or len(gone_device) == device
        assert host is None or len(gone_host) == host
        self.device = {text: page for text, page in self.device.items() if page not in gone_device}
        self.host = {text: page for text, page in self.host.items() if page not in gone_host}

    @invariant()
    def holds_together(self) -> None:
        self.index.check([lease for lease, _ in self.leases] + [lease for lease, _, _ in self.copies])
        assert (self.index.device_pages, self.index.host_pages) == (len(self.device), len(self.host))
        for _, text in self.leases:
            assert all(text[:end] in self.device for end in range(PAGE * 4, len(text) + 1, PAGE * 4))


TestAgainstAModel = AgainstAModel.TestCase


@given(st.lists(st.integers(0, 1), min_size=1, max_size=40), st.integers(0, 39))
def test_the_common_prefix_inside_a_node_is_counted_in_whole_pages(tokens: list[int], at: int) -> None:
    index = RadixIndex(PAGE, 1)
    pages = len(tokens) // PAGE
    text = raw(*tokens[: pages * PAGE])
    index.release(stored(index, text, numbers(0, pages)), 0)
    other = list(tokens[: pages * PAGE])
    if at < len(other):
        other[at] = 7
    assert index.peek(ROOT, raw(*other))[1] == min(at // PAGE, pages)


def on_host(index: RadixIndex, tokens: bytes, first: int) -> None:
    """Host pages numbered from `first` on for all of these tokens."""
    count = len(tokens) // (PAGE * 4)
    assert index.insert_host(ROOT, tokens, 0, numbers(first, count)).all()


def test_the_hosts_run_of_a_prefix_ends_where_another_goes_on_in_the_same_node() -> None:
    index = RadixIndex(PAGE, 1)
    on_host(index, raw(1, 1, 2, 2, 3, 3, 4, 4), 10)
    other = raw(1, 1, 2, 2, 9, 9, 4, 4)
    assert index.host_run(ROOT, other)[0].tolist() == [10, 11]
    assert index.host_run(ROOT, other, 1)[0].tolist() == [11]
    assert index.host_run(ROOT, other, 3)[0].tolist() == []
    assert index.host_run(ROOT, raw(1, 1, 2, 2))[0].tolist() == [10, 11]


def test_what_somebody_keeps_is_evicted_last_and_yet_holds_nobody_up() -> None:
    index = RadixIndex(PAGE, 1)
    on_host(index, raw(1, 1, 2, 2), 10)
    kept = index.keep(ROOT, raw(1, 1, 2, 2))
    on_host(index, raw(5, 5), 20)
    on_host(index, raw(6, 6), 21)
    assert index.evictable_host_pages == 4
    assert host(index.evict_host(2)) == [20, 21]
    assert host(index.evict_host(2)) == [10, 11]
    index.unkeep(kept)
    index.check([])


def test_what_is_not_kept_any_longer_goes_in_the_order_of_its_use() -> None:
    index = RadixIndex(PAGE, 1)
    on_host(index, raw(1, 1), 10)
    kept = index.keep(ROOT, raw(1, 1))
    on_host(index, raw(5, 5), 20)
    index.unkeep(kept)
    assert host(index.evict_host(1)) == [10]


def test_who_keeps_a_prefix_lets_go_of_what_is_left_after_its_end_was_evicted() -> None:
    index = RadixIndex(PAGE, 1)
    on_host(index, raw(1, 1, 2, 2, 3, 3), 10)
    kept, other = index.keep(ROOT, raw(1, 1, 2, 2, 3, 3)), index.keep(ROOT, raw(1, 1))
    assert host(index.evict_host(2)) == [11, 12]
    index.unkeep(kept)
    assert [node.kept for node in index.nodes() if node.length] == [1]
    index.unkeep(other)
    assert [node.kept for node in index.nodes()] == [0, 0]
    index.check([])

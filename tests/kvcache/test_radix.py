"""The radix index: exact longest prefixes, leases that hold, eviction from the ends in the order of use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kvcache.radix import Lease, RadixIndex
from headrace.ops.wire import I32

PAGE = 2
ROOT = b"n" * 16


def raw(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def numbers(first: int, count: int) -> I32:
    return np.arange(first, first + count, dtype=np.int32)[None]


def stored(index: RadixIndex, tokens: bytes, pages: I32, step: int = 0) -> Lease:
    """A lease on freshly stored tokens."""
    lease, found = index.acquire(ROOT, tokens)
    have = found.shape[1]
    index.extend(lease, tokens[have * PAGE * 4 :], pages[:, have:], step)
    return lease


def test_an_empty_index_matches_nothing() -> None:
    index = RadixIndex(PAGE, 1)
    lease, pages = index.acquire(ROOT, raw(1, 2, 3, 4))
    assert (lease.num_pages, pages.shape) == (0, (1, 0))
    index.release(lease, -1)
    index.check([])


def test_what_was_stored_is_matched_page_by_page() -> None:
    index = RadixIndex(PAGE, 1)
    lease = stored(index, raw(1, 2, 3, 4, 5, 6), numbers(10, 3))
    for query, want in (((1, 2), [10]), ((1, 2, 3, 4), [10, 11]), ((1, 2, 3, 9), [10]), ((9, 2), [])):
        other, pages = index.acquire(ROOT, raw(*query))
        assert pages[0].tolist() == want
        assert index.peek(ROOT, raw(*query)) == len(want)
        index.release(other, -1)
    index.release(lease, -1)
    index.check([])


def test_namespaces_do_not_see_each_other() -> None:
    index = RadixIndex(PAGE, 1)
    stored(index, raw(1, 2), numbers(0, 1))
    assert index.peek(b"m" * 16, raw(1, 2)) == 0


def test_a_second_writer_keeps_its_duplicates_and_shares_the_rest() -> None:
    index = RadixIndex(PAGE, 1)
    first, second = index.acquire(ROOT, raw(1, 2))[0], index.acquire(ROOT, raw(1, 2))[0]
    assert index.extend(first, raw(1, 2, 3, 4), numbers(0, 2), 5).all()
    taken = index.extend(second, raw(1, 2, 3, 4, 5, 6), numbers(20, 3), 6)
    assert taken.tolist() == [False, False, True]
    assert index.acquire(ROOT, raw(1, 2, 3, 4, 5, 6))[1][0].tolist() == [0, 1, 22]


def test_leased_pages_are_never_evicted() -> None:
    index = RadixIndex(PAGE, 1)
    stored(index, raw(1, 2, 3, 4), numbers(0, 2))
    loose = stored(index, raw(1, 2, 5, 6), numbers(2, 2))
    index.release(loose, 3)
    assert [(pages[0].tolist(), step) for pages, step in index.evict(10)] == [([3], 3)]
    assert index.peek(ROOT, raw(1, 2, 3, 4)) == 2


def test_eviction_takes_the_longest_unused_first_and_only_as_much_as_asked() -> None:
    index = RadixIndex(PAGE, 1)
    for i, first in enumerate((1, 2, 3)):
        index.release(stored(index, raw(first, 0, first, 1, first, 2), numbers(10 * i, 3)), i)
    index.release(index.acquire(ROOT, raw(1, 0, 1, 1, 1, 2))[0], 9)  # the first is used again
    assert [(pages[0].tolist(), step) for pages, step in index.evict(4)] == [([10, 11, 12], 1), ([22], 2)]
    assert index.peek(ROOT, raw(3, 0, 3, 1, 3, 2)) == 2
    index.check([])


def test_a_parent_goes_after_its_last_child() -> None:
    index = RadixIndex(PAGE, 1)
    a = stored(index, raw(1, 2, 3, 4), numbers(0, 2))
    b = stored(index, raw(1, 2, 5, 6), numbers(5, 2))
    index.release(a, 1)
    index.release(b, 2)
    assert sorted(page for pages, _ in index.evict(10) for page in pages[0].tolist()) == [0, 1, 6]
    assert index.num_nodes == index.num_pages == 0


def test_a_split_node_must_still_outlive_its_readers() -> None:
    index = RadixIndex(PAGE, 1)
    index.release(stored(index, raw(1, 2, 3, 4), numbers(0, 2)), 7)
    index.release(index.acquire(ROOT, raw(1, 2))[0], -1)
    assert {step for _, step in index.evict(10)} == {7}


def test_a_request_that_grows_page_by_page_stays_one_node() -> None:
    index = RadixIndex(PAGE, 1)
    lease = index.acquire(ROOT, b"")[0]
    for i in range(50):
        index.extend(lease, raw(i, i), numbers(i, 1), i)
    assert index.num_nodes == 1
    index.check([lease])


def test_an_empty_namespace_leaves_no_root_behind() -> None:
    index = RadixIndex(PAGE, 1)
    for salt in range(100):
        lease, _ = index.acquire(salt.to_bytes(16, "little"), raw(1, 2))
        index.extend(lease, raw(1, 2), numbers(salt, 1), 0)
        index.release(lease, 0)
    index.evict(100)
    assert list(index.nodes()) == []


def test_releasing_twice_is_refused() -> None:
    index = RadixIndex(PAGE, 1)
    lease = stored(index, raw(1, 2), numbers(0, 1))
    index.release(lease, 0)
    with pytest.raises(AssertionError):
        index.release(lease, 0)


class AgainstAModel(RuleBasedStateMachine):
    """The index beside a dict from token prefixes to page numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex(PAGE, 2)
        self.model: dict[bytes, int] = {}
        self.leases: list[tuple[Lease, bytes]] = []
        self.next_page = 0

    @rule(tokens=st.lists(st.integers(0, 2), max_size=6))
    def acquire_and_extend(self, tokens: list[int]) -> None:
        text = raw(*[token for token in tokens for _ in range(PAGE)])
        lease, pages = self.index.acquire(ROOT, text)
        known = 0
        while known < len(tokens) and text[: (known + 1) * PAGE * 4] in self.model:
            known += 1
        assert pages.tolist() == [[self.model[text[: (i + 1) * PAGE * 4]] for i in range(known)]] * 2
        fresh = np.arange(self.next_page, self.next_page + len(tokens) - known, dtype=np.int32)
        self.next_page += len(fresh)
        taken = self.index.extend(lease, text[known * PAGE * 4 :], np.stack([fresh, fresh]), 0)
        assert taken.all()
        for i, page in enumerate(fresh.tolist(), known):
            self.model[text[: (i + 1) * PAGE * 4]] = page
        self.leases.append((lease, text))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        lease, _ = self.leases.pop(which % len(self.leases))
        self.index.release(lease, 0)

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        free = self.index.evictable_pages
        gone = [page for pages, _ in self.index.evict(count) for page in pages[0].tolist()]
        assert len(gone) == min(count, free)
        self.model = {text: page for text, page in self.model.items() if page not in gone}
        for _, text in self.leases:
            assert all(text[:end] in self.model for end in range(PAGE * 4, len(text) + 1, PAGE * 4))

    @invariant()
    def holds_together(self) -> None:
        self.index.check([lease for lease, _ in self.leases])
        assert self.index.num_pages == len(self.model)


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
    assert index.peek(ROOT, raw(*other)) == min(at // PAGE, pages)

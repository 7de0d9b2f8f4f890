"""Which requests of a step are bundled, by the pages at the beginning of their tables."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.ops.shared_prefixes import LEAST_SHARED, MOST_FORKS, Bundles, SharedPrefixes
from headrace.ops.wire import I32

PAGE, STEP, PAGES = 16, 64, 40


def tables(*rows: list[tuple[str, int]]) -> tuple[I32, I32]:
    """Each row is runs of pages by name; → the table, and contexts that end in the middle of one more page."""
    numbers: dict[tuple[str, int], int] = {}
    table, kv_len = np.full((len(rows), PAGES), -1, np.int32), np.zeros(len(rows), np.int32)
    for row, runs in enumerate(rows):
        names = [(name, i) for name, count in runs for i in range(count)]
        pages = [numbers.setdefault(name, len(numbers)) for name in [*names, (f"own {row}", 0)]]
        table[row, : len(pages)], kv_len[row] = pages, len(names) * PAGE + 5
    return table, kv_len


def bundled(table: I32, kv_len: I32, most: int = 16, parts: int = 1) -> list[tuple[list[int], int]]:
    rows = np.arange(len(table))
    return as_list(SharedPrefixes(STEP, most, parts).find(rows.astype(np.int32), kv_len, rows, table, PAGE))


def as_list(bundles: Bundles) -> list[tuple[list[int], int]]:
    rows, start, shared, _ = bundles
    return [(sorted(rows[start[i] : start[i + 1]].tolist()), int(shared[i])) for i in range(len(shared))]


def test_rows_that_begin_with_the_same_pages_share_whole_steps_of_them() -> None:
    table, kv_len = tables([("a", 13), ("b", 2)], [("x", 20)], [("a", 13)], [("a", 13), ("c", 9)])
    assert bundled(table, kv_len) == [([0, 2, 3], 13 * PAGE // STEP * STEP)]


def test_what_is_short_is_not_worth_a_bundle() -> None:
    few = LEAST_SHARED // PAGE - 1
    assert bundled(*tables([("a", few), ("b", 9)], [("a", few), ("c", 9)])) == []


def test_those_who_share_more_among_themselves_are_bundled_apart_where_that_saves_more() -> None:
    table, kv_len = tables(
        [("system", 8), ("one", 30)], [("system", 8), ("two", 30)], [("system", 8), ("one", 30)], [("system", 8)]
    )
    assert sorted(bundled(table, kv_len)) == [([0, 2], 38 * PAGE // STEP * STEP), ([1, 3], 8 * PAGE)]
    table, kv_len = tables(*[[("system", 20), (f"{i // 2}", 4)] for i in range(8)])
    assert bundled(table, kv_len) == [(list(range(8)), 20 * PAGE)], "four pages are less than the twenty again"


def test_a_bundle_has_as_many_rows_as_a_block_and_threads_have_one_each() -> None:
    table, kv_len = tables(*[[("a", 16), (f"{i}", 3)] for i in range(40)])
    assert [len(rows) for rows, _ in bundled(table, kv_len, most=16)] == [14, 13, 13]
    assert [len(rows) for rows, _ in bundled(table[:16], kv_len[:16], parts=2)] == [8, 8]
    assert [len(rows) for rows, _ in bundled(table[:3], kv_len[:3], parts=2)] == [3], "one row alone is no bundle"


def test_rows_with_several_tokens_are_left_alone() -> None:
    table, kv_len = tables(*[[("a", 16), (f"{i}", 3)] for i in range(4)])
    found = SharedPrefixes(STEP, 16, 1).find(np.arange(4, dtype=np.int32), kv_len, np.array([1, 3]), table, PAGE)
    assert as_list(found) == [([1, 3], 256)]


def test_a_slot_whose_pages_become_others_is_noticed() -> None:
    table, kv_len = tables(*[[("a", 16), (f"{i}", 3)] for i in range(4)])
    prefixes, rows = SharedPrefixes(STEP, 16, 1), np.arange(4)
    slots = rows.astype(np.int32)
    assert as_list(prefixes.find(slots, kv_len, rows, table, PAGE)) == [([0, 1, 2, 3], 256)]
    table[2, 8] = 999
    assert as_list(prefixes.find(slots, kv_len, rows, table, PAGE)) == [([0, 1, 3], 256)]


def test_a_thousand_rows_that_leave_one_text_each_at_another_page_are_bundled() -> None:
    rows, first = np.arange(1024), LEAST_SHARED // PAGE
    pages = np.arange(first + len(rows) + 1)
    table = np.where(pages < first + rows[:, None], pages, len(pages) + rows[:, None]).astype(np.int32)
    kv_len = ((first + rows) * PAGE + 5).astype(np.int32)
    found = bundled(table, kv_len, most=len(rows))
    assert max(len(bundle) for bundle, _ in found) > len(rows) - 2 * MOST_FORKS


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=12), min_size=2, max_size=24),
    st.integers(2, 8),
    st.integers(1, 3),
)
def test_whatever_the_tree_bundles_are_apart_and_share_what_they_say(
    paths: list[list[int]], most: int, parts: int
) -> None:
    # A path's node is named by all before it; each is two pages.
    rows = [[(str(path[: depth + 1]), 2) for depth in range(len(path))] for path in paths]
    table, kv_len = tables(*rows)
    found = bundled(table, kv_len, most, parts)
    members = [row for bundle, _ in found for row in bundle]
    assert len(members) == len(set(members))
    for bundle, shared in found:
        assert 1 < len(bundle) <= most
        assert shared % STEP == 0 and LEAST_SHARED <= shared <= kv_len[bundle].min()
        assert (table[bundle, : shared // PAGE] == table[bundle[0], : shared // PAGE]).all()

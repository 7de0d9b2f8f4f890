"""A record counts only as a whole: every bit and every byte of it is looked at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage.pages import MODEL, PAGE_BYTES, PAGE_TOKENS, RECORD_BYTES, chain, empty, filled

from headrace.kvcache.storage.disk.files import Files
from headrace.kvcache.storage.disk.ownership import open_directory
from headrace.kvcache.storage.disk.record import HEADER_BYTES, MAX_PAGE_TOKENS, PageId, check, read_header, seal
from headrace.kvcache.storage.disk.records import Records
from headrace.kvcache.storage.disk.segments import Run, Segments, make_segment

RUN = chain("a", 1)
PAGE = PageId(0, PAGE_TOKENS, PAGE_BYTES, 7, RUN.keys, RUN.parents, RUN.namespace, MODEL, RUN.tokens)


def sealed(page: PageId = PAGE, content: bytes | None = None) -> bytearray:
    record = bytearray(HEADER_BYTES + page.payload_bytes)
    view = memoryview(record)
    view[HEADER_BYTES:] = filled(RUN)[0] if content is None else content
    seal(view[:HEADER_BYTES], page, view[HEADER_BYTES:])
    return record


def fault(record: bytearray, page: PageId = PAGE) -> str:
    view = memoryview(record)
    return check(view[:HEADER_BYTES], page, view[HEADER_BYTES:])


def test_a_record_that_was_sealed_is_in_order() -> None:
    assert fault(sealed()) == ""
    assert read_header(memoryview(sealed())) == PAGE


def test_every_single_wrong_bit_is_seen() -> None:
    record = sealed()
    unseen = []
    for bit in range(8 * len(record)):
        record[bit // 8] ^= 1 << bit % 8
        if not fault(record):
            unseen.append(bit)
        record[bit // 8] ^= 1 << bit % 8
    assert unseen == []
    assert fault(record) == ""


@given(
    st.lists(st.tuples(st.integers(0, RECORD_BYTES - 1), st.integers(1, 255)), min_size=1, unique_by=lambda x: x[0]),
)
def test_no_set_of_wrong_bytes_goes_unseen(changes: list[tuple[int, int]]) -> None:
    record = sealed()
    for at, change in changes:
        record[at] ^= change
    assert fault(record)


@given(st.integers(0, RECORD_BYTES - 1), st.binary(min_size=1, max_size=64))
def test_a_record_that_ends_in_something_else_is_seen(at: int, other: bytes) -> None:
    whole = sealed()
    record = bytearray(whole)
    record[at:] = (other * RECORD_BYTES)[: RECORD_BYTES - at]
    assert bool(fault(record)) == (record != whole)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"group": 1}, "group"),
        ({"generation": 8}, "generation"),
        ({"key": bytes(16)}, "key"),
        ({"parent": bytes(16)}, "parent"),
        ({"namespace": bytes(16)}, "namespace"),
        ({"model": bytes(16)}, "model"),
        ({"tokens": bytes(PAGE_TOKENS * 4)}, "tokens"),
    ],
)
def test_a_record_of_another_page_says_in_what_it_differs(change: dict[str, object], what: str) -> None:
    assert what in fault(sealed(PAGE._replace(**change)))  # type: ignore[arg-type]


def test_zeros_are_no_record() -> None:
    assert fault(bytearray(RECORD_BYTES)) == "it has no page header"


@given(st.integers(1, MAX_PAGE_TOKENS), st.data())
def test_any_number_of_tokens_that_fits_comes_back(page_tokens: int, data: st.DataObject) -> None:
    tokens = data.draw(st.binary(min_size=1, max_size=16)) * (page_tokens * 4)
    page = PAGE._replace(page_tokens=page_tokens, tokens=tokens[: page_tokens * 4])
    record = sealed(page)
    assert fault(record, page) == "" and read_header(memoryview(record)).tokens == page.tokens


def test_b11_a_record_cut_anywhere_is_a_miss_and_the_one_before_it_counts(tmp_path: Path) -> None:
    files = Files(open_directory(str(tmp_path)))
    run = chain("a", 2)
    pages = [
        PAGE._replace(key=part.keys, parent=part.parents, tokens=part.tokens)
        for part in (run.part(0, 1), run.part(1, 2))
    ]
    segment = make_segment(files, 0, RECORD_BYTES, 2, fsync=False)
    numbered = Segments(2)
    numbered.add(segment)
    both = Run(segment, segment.base, 0, 2)
    records = Records(files)
    records.write(both, pages, filled(run))
    into = empty(run)
    assert records.read(both, pages, into) == (2, None)
    # Every length in the second record, the last first; in the first one the ends of its parts.
    for size_bytes in [*range(2 * RECORD_BYTES - 1, RECORD_BYTES - 1, -1), HEADER_BYTES + 1, HEADER_BYTES, 1, 0]:
        os.truncate(tmp_path / segment.name, size_bytes)
        good, seen = records.read(both, pages, into)
        assert good == size_bytes // RECORD_BYTES
        assert seen is not None and seen.what == "its file ends before it"

"""Which page is which: the chain of hashes, and that no page is hashed twice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from bench.scheduler import PAGE_TOKENS, PROMPT_TOKENS, NullDevice
from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache import identity
from headrace.kvcache.identity import PrefixKey, namespace

ROOT = namespace(b"model", "", "")


@given(
    ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40),
    page_tokens=st.sampled_from([1, 2, 4, 16]),
    stops=st.lists(st.integers(0, 40), max_size=3),
)
def test_a_page_is_named_by_the_name_before_it_and_its_ids_however_the_key_grew(
    ids: list[int], page_tokens: int, stops: list[int]
) -> None:
    tokens = np.array(ids, np.int32)
    pages = len(ids) // page_tokens
    names = [ROOT]
    for page in range(pages):
        raw = b"".join(token.to_bytes(4, "little", signed=True) for token in ids[page * page_tokens :][:page_tokens])
        names.append(xxhash.xxh3_128_digest(names[-1] + raw))
    key = PrefixKey(ROOT, page_tokens, tokens, len(ids))
    for stop in [*stops, pages]:
        assert key.page_hashes(min(stop, pages)) == names[1 : 1 + min(stop, pages)]


def test_ids_that_are_a_row_of_a_table_have_the_same_names() -> None:
    """A request's ids move into the slot table when it is admitted."""
    table = np.arange(64, dtype=np.int32).reshape(2, 32)
    assert PrefixKey(ROOT, 4, table[1], 16).page_hashes(4) == PrefixKey(ROOT, 4, table[1, :16].copy(), 16).page_hashes(
        4
    )


def test_from_its_first_match_to_its_last_token_a_request_hashes_each_page_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[bytes] = []
    digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest

    def counting(data: bytes) -> bytes:
        hashed.append(data)
        return digest(data)

    monkeypatch.setitem(identity._DIGESTS, "xxh3", counting)
    device, outputs = NullDevice(4), 3 * PAGE_TOKENS
    for _ in range(4):
        device.submit(outputs)
    device.prepare()
    ended = 0
    for _ in range(outputs - 1):
        device.prepare()
        ended += device.collect()
    ended += device.collect()
    pages = [data for data in hashed if len(data) == len(ROOT) + 4 * PAGE_TOKENS]
    assert ended == 4
    assert len(pages) == len(set(pages)) >= 4 * PROMPT_TOKENS // PAGE_TOKENS

"""What a stream says, piece by piece, is what all its ids say together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.server.detokenizer import Detokenizer
from headrace.server.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_tokenizer(small_metadata: Callable[..., dict[str, Any]]) -> Tokenizer:
    """Every byte is a token: any bytes can be said, and any split of them."""
    return Tokenizer.from_gguf_metadata(small_metadata(control=["<s>"]))


def ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_byte = {tokenizer.token_bytes(index): index for index in range(256)}
    return [by_byte[bytes([byte])] for byte in data]


def splits(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    places = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[begin:end] for begin, end in zip([0, *places], [*places, len(ids)])]


hard_bytes = st.lists(
    st.binary(max_size=4)
    | st.text(max_size=3).map(str.encode)
    | st.sampled_from([b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\xe0\x80"]),
    max_size=8,
).map(b"".join)


@settings(max_examples=500, deadline=None)
@given(content=hard_bytes, data=st.data())
@example(content=b"\xe2\x82", data=None)
def test_any_split_of_any_bytes_reads_like_the_whole(
    byte_tokenizer: Tokenizer, content: bytes, data: st.DataObject | None
) -> None:
    ids = ids_of(byte_tokenizer, content)
    stream = Detokenizer(byte_tokenizer)
    parts = [[index] for index in ids] if data is None else splits(data, ids)
    text = "".join(stream.push(part) for part in parts) + stream.flush()
    assert text == content.decode(errors="replace") == byte_tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), data=st.data(), skip=st.booleans())
def test_any_split_of_any_ids_reads_like_the_whole(
    tokenizer: Tokenizer, ids: list[int], data: st.DataObject, skip: bool
) -> None:
    stream = Detokenizer(tokenizer, skip)
    text = "".join(stream.push(part) for part in splits(data, ids)) + stream.flush()
    assert text == tokenizer.decode(ids, skip)


def test_half_a_character_is_kept_until_it_is_whole(byte_tokenizer: Tokenizer) -> None:
    ids = ids_of(byte_tokenizer, "a😀b".encode())
    stream = Detokenizer(byte_tokenizer)
    assert [stream.push([index]) for index in ids] == ["a", "", "", "", "😀", "b"]


def test_a_character_that_can_not_become_whole_is_given_out_at_once(byte_tokenizer: Tokenizer) -> None:
    stream = Detokenizer(byte_tokenizer)
    assert [stream.push([index]) for index in ids_of(byte_tokenizer, b"\xe2x")] == ["", "\ufffdx"]


def test_what_is_left_at_the_end_is_one_replacement_character(byte_tokenizer: Tokenizer) -> None:
    stream = Detokenizer(byte_tokenizer)
    assert stream.push(ids_of(byte_tokenizer, b"\xf0\x9f\x98")) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_control_tokens_are_silent_unless_asked_for(byte_tokenizer: Tokenizer) -> None:
    assert Detokenizer(byte_tokenizer).push([256]) == ""
    assert Detokenizer(byte_tokenizer, skip_special_tokens=False).push([256]) == "<s>"


@pytest.mark.parametrize("index", [-1, 257])
def test_an_id_out_of_the_vocabulary_is_refused(byte_tokenizer: Tokenizer, index: int) -> None:
    with pytest.raises(ValueError, match="no token"):
        Detokenizer(byte_tokenizer).push([index])

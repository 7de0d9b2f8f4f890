"""Bodies are counted before they are decoded, a slice at a time."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.server import body
from headrace.server.body import LEAST_BODY_BYTES, MAX_PARTS, MOST_BODY_BYTES, count_parts, most_body_bytes
from headrace.server.errors import ApiError

TEXTS = st.text(alphabet=st.sampled_from('\\",[{a日'), max_size=12)
VALUES = st.recursive(TEXTS | st.integers(0, 9), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))


def parts_of(value: object) -> int:
    """Strings, commas and opening brackets of a value's JSON."""
    if isinstance(value, str):
        return 1
    if isinstance(value, dict):
        return 1 + len(value) + max(0, len(value) - 1) + sum(map(parts_of, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(parts_of, value))
    return 0


@settings(max_examples=200, deadline=None)
@given(VALUES, st.integers(2, 40))
def test_parts_are_counted_wherever_a_slice_ends(value: object, slice_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_SLICE_BYTES", slice_bytes)
        assert asyncio.run(count_parts(json.dumps(value).encode())) == parts_of(value)


def test_the_loop_has_its_turn_between_slices() -> None:
    async def main() -> int:
        turns = 0
        counting = asyncio.ensure_future(count_parts(b'"' + b"\\\\" * MOST_BODY_BYTES + b'"'))
        while not counting.done():
            turns += 1
            await asyncio.sleep(0)
        assert counting.result() == 1
        return turns

    assert asyncio.run(main()) > 2 * MOST_BODY_BYTES // (1 << 18)


def test_too_many_strings_are_refused_before_they_are_taken_apart() -> None:
    with pytest.raises(ApiError, match="too many values"):
        asyncio.run(count_parts(b'["",' * MAX_PARTS + b'""]'))


def test_a_body_may_be_as_large_as_the_prompts_that_may_wait_within_what_the_loop_can_decode() -> None:
    assert most_body_bytes(1000) == most_body_bytes(1 << 18) == LEAST_BODY_BYTES
    assert most_body_bytes(1 << 19) == 2 * LEAST_BODY_BYTES
    assert most_body_bytes(1 << 30) == MOST_BODY_BYTES

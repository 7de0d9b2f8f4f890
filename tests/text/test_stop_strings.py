"""Stop strings end a text where the naive definition says, and are never sent, whole or in part."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.server.stop_strings import MAX_STOP_CHARS, StopMatch, StopMatcher, StopStrings


class Outcome(NamedTuple):
    text: str
    match: StopMatch | None


def naive(texts: list[str], stops: list[str], include: bool, min_tokens: int) -> Outcome:
    """The first character that completes a stop string, at or after `min_tokens`; of several, the longest."""
    whole = ""
    for count, text in enumerate(texts, 1):
        for char in text:
            whole += char
            complete = [stop for stop in stops if stop and whole.endswith(stop)]
            if complete and count >= min_tokens:
                stop = max(complete, key=len)
                return Outcome(whole if include else whole[: len(whole) - len(stop)], StopMatch(stop, count))
    return Outcome(whole, None)


def streamed(texts: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[list[str], Outcome]:
    matcher = StopMatcher(StopStrings(stops, include), min_tokens)
    sent = [matcher.push(text) for text in texts]
    sent.append(matcher.finish())
    return sent, Outcome("".join(sent), matcher.matched)


# Few letters, so that stop strings overlap, hold one another and nearly match all the time.
few = st.text("ab", max_size=4)


@settings(max_examples=1000, deadline=None)
@given(
    texts=st.lists(few, max_size=10),
    stops=st.lists(st.text("ab", max_size=5), max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
@example(texts=["ab", "ab", "c"], stops=["abc", "ababd"], include=False, min_tokens=0)
@example(texts=["aab"], stops=["b", "ab", "aab"], include=False, min_tokens=0)
def test_b38_a_stream_ends_where_the_definition_says(
    texts: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    _, outcome = streamed(texts, stops, include, min_tokens)
    assert outcome == naive(texts, stops, include, min_tokens)


@settings(max_examples=500, deadline=None)
@given(texts=st.lists(st.text("abc", max_size=4), max_size=10), stops=st.lists(st.text("ab", max_size=5), max_size=4))
def test_only_what_could_become_a_stop_string_is_held_back(texts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    sent = whole = ""
    for text in texts:
        sent += matcher.push(text)
        whole += text
        if matcher.matched is not None:
            return
        begun = [n for stop in stops for n in range(1, len(stop)) if whole.endswith(stop[:n])]
        assert len(whole) - len(sent) == max(begun, default=0)


@settings(max_examples=300, deadline=None)
@given(whole=st.text("ab<", max_size=20), stops=st.lists(st.text("ab<", max_size=4), max_size=3), data=st.data())
def test_b37_the_text_is_the_same_however_it_is_split(whole: str, stops: list[str], data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    parts = [whole[begin:end] for begin, end in zip([0, *places], [*places, len(whole)])]
    _, split = streamed(parts, stops, False, 0)
    _, at_once = streamed([whole], stops, False, 0)
    assert split.text == at_once.text
    assert (split.match and split.match.stop) == (at_once.match and at_once.match.stop)


def test_a_match_over_several_tokens_counts_the_one_that_completes_it() -> None:
    sent, outcome = streamed(["one ", "<", "EN", "D>x", "y"], ["<END>"], False, 0)
    assert sent == ["one ", "", "", "", "", ""]
    assert outcome.match == StopMatch("<END>", 4)


def test_what_was_held_back_is_sent_when_the_stream_ends() -> None:
    matcher = StopMatcher(StopStrings(["\n\nUser:"]))
    assert matcher.push("bye\n\nUse") == "bye"
    assert matcher.finish("d") == "\n\nUsed"
    assert matcher.matched is None


def test_the_rest_of_a_stream_can_complete_a_stop_string() -> None:
    matcher = StopMatcher(StopStrings(["a\ufffd"]))
    assert matcher.push("xa") == "x"
    assert matcher.finish("\ufffd") == ""
    assert matcher.matched == StopMatch("a\ufffd", 1)


def test_nothing_is_taken_after_a_match() -> None:
    matcher = StopMatcher(StopStrings(["b"], include_in_output=True))
    assert matcher.push("abc") == "ab"
    assert (matcher.push("d"), matcher.finish("e")) == ("", "")
    assert matcher.matched == StopMatch("b", 1)


def test_one_set_of_stop_strings_serves_many_streams() -> None:
    stops = StopStrings(["ab"])
    first, second = StopMatcher(stops), StopMatcher(stops)
    assert (first.push("a"), second.push("b"), first.push("c")) == ("", "b", "ac")


@pytest.mark.parametrize("stops", [["x"] * 65, ["x" * (MAX_STOP_CHARS + 1)]])
def test_too_many_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="at most 64"):
        StopStrings(stops)

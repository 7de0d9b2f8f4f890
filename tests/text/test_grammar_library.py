"""Masks of the grammar library: held against brute force on a toy vocabulary, and one behaviour a kind."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvcache.storage.lanes import InlineLanes
from headrace.sched.grammar import BadGrammar, Compile, Compiled, Grammar, Reply
from headrace.server.grammar_library import GrammarLibrary, LibraryMatcher
from headrace.server.grammar_service import GrammarService
from headrace.server.metered_lanes import MeteredLanes
from headrace.server.tokenizer import Tokenizer

TOKENS: Final = ["a", "b", "ab", "ba", "aab", "bbb", "{", "}", '"', ":", " ", "1", "<end>", "<other>"]
END, OTHER = 12, 13


def toy_library() -> GrammarLibrary:
    return GrammarLibrary(
        [text.encode() for text in TOKENS], [END, OTHER], [END], lambda text: list(map(TOKENS.index, text))
    )


@pytest.fixture(scope="module")
def toy() -> GrammarLibrary:
    return toy_library()


@pytest.fixture(scope="module")
def library(tokenizer: Tokenizer) -> GrammarLibrary:
    """Over the default model's vocabulary."""
    return GrammarLibrary.of(tokenizer)


def allowed(matcher: LibraryMatcher, vocab: int, *stop_ids: int) -> list[int] | None:
    """Ids that may come next; None where the output is complete."""
    bits = np.zeros((vocab + 31) // 32, np.uint32)
    if matcher.fill(bits, frozenset(stop_ids)):
        return None
    return list(map(int, np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))))


# A regular expression as text, and the set of all texts that match it.
LETTERS = st.sampled_from(["a", "b"]).map(lambda letter: (letter, frozenset((letter,))))
REGEXES = st.recursive(
    LETTERS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: (f"({two[0][0]}|{two[1][0]})", two[0][1] | two[1][1])),
        st.tuples(inner, inner).map(
            lambda two: (two[0][0] + two[1][0], frozenset(x + y for x in two[0][1] for y in two[1][1]))
        ),
        inner.map(
            lambda one: (f"({one[0]}){{0,2}}", frozenset(("",)) | one[1] | {x + y for x in one[1] for y in one[1]})
        ),
    ),
    max_leaves=6,
).filter(lambda regex: len(regex[1]) < 500)


@settings(max_examples=200, deadline=None)
@given(REGEXES, st.lists(st.integers(0, 1 << 16), max_size=12), st.booleans())
def test_a_mask_allows_only_what_can_still_become_a_match_and_bars_the_way_to_none(
    regex: tuple[str, frozenset[str]], choices: list[int], may_end: bool
) -> None:
    text, language = regex
    library = toy_library()
    matcher, written = library.compile(Grammar("regex", text)), ""
    for choice in choices:
        longer = {match for match in language if match.startswith(written) and match != written}
        got = allowed(matcher, len(TOKENS), *([END] if may_end else []))
        if not longer:
            assert got is None
            return
        want = [
            id for id, token in enumerate(TOKENS[:END]) if any(match.startswith(written + token) for match in longer)
        ]
        if may_end and written in language:
            want.append(END)
        # Where the next letters are certain the library insists on the tokenizer's own way to write them.
        assert got is not None and set(got) <= set(want)
        assert all(any(match.startswith(written + TOKENS[id]) for id in got if id != END) for match in longer)
        assert (END in got) == (END in want)
        id = got[choice % len(got)]
        if id == END:
            return
        assert matcher.accept(id)
        written += TOKENS[id]


def test_a_copy_goes_its_own_way(toy: GrammarLibrary) -> None:
    matcher = toy.compile(Grammar("regex", "(aab|ba)"))
    copy = matcher.copy()
    assert copy.accept(TOKENS.index("b"))
    assert allowed(copy, len(TOKENS)) == [TOKENS.index("a")]
    assert allowed(matcher, len(TOKENS)) == [TOKENS.index(text) for text in ("a", "b", "ba", "aab")]


def test_what_the_mask_forbids_is_not_accepted(toy: GrammarLibrary) -> None:
    assert not toy.compile(Grammar("regex", "a+")).accept(TOKENS.index("b"))


def test_control_tokens_match_no_text(toy: GrammarLibrary) -> None:
    ids = allowed(toy.compile(Grammar("regex", "[^x]*")), len(TOKENS), END)
    assert ids is not None and END in ids and OTHER not in ids


def test_white_space_between_the_parts_of_a_json_text_is_bounded(library: GrammarLibrary, tokenizer: Tokenizer) -> None:
    matcher = library.compile(Grammar("json_object"))
    blank = int(tokenizer.encode(" ")[0])
    assert matcher.accept(int(tokenizer.encode("{")[0]))
    taken = 0
    while matcher.accept(blank):
        taken += 1
        assert taken <= 40
    assert taken == 40


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_object"), ["{}", '{"a": [1, 2.5e3, null]}'], ["[]", "1", '{"a": }']),
        (Grammar("json_schema", '{"type": "array", "items": {"enum": ["x", 2]}}'), ['["x", 2]', "[]"], ['["y"]', "{}"]),
        (Grammar("json_schema", '{"type": "integer", "minimum": 10}'), ["10", "999"], ["9", "1.5"]),
        (Grammar("json_schema", "true"), ["[1]", "null"], ["nul!"]),
        (Grammar("regex", "(yes|no)[.!]"), ["yes!", "no."], ["yes?", "maybe"]),
        (Grammar("ebnf", 'root ::= "(" root ")" | "x"'), ["((x))", "x"], ["(x]", ")"]),
        (Grammar("ebnf", 'root ::= [a-c]+ ("é" | "日本")'), ["abé", "c日本"], ["é", "dé"]),
    ],
)
def test_each_kind_takes_what_matches_and_nothing_else(
    library: GrammarLibrary, tokenizer: Tokenizer, grammar: Grammar, good: list[str], bad: list[str]
) -> None:
    compiled = library.compile(grammar)

    def matches(text: str) -> bool:
        matcher = compiled.copy()
        if not all(matcher.accept(int(id)) for id in tokenizer.encode(text)):
            return False
        ids = allowed(matcher, tokenizer.vocab_size, *tokenizer.stop_ids)
        return ids is None or bool(set(ids) & set(tokenizer.stop_ids))

    assert [text for text in good if not matches(text)] == []
    assert [text for text in bad if matches(text)] == []


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "(((", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("json_schema", "{", "line 1 column 2"),
        ("json_schema", "[]", "object or a boolean"),
        ("json_schema", '{"type": "objec"}', "Invalid type: objec"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"oneOf": [{"type": "string"}, {"type": "string"}]}', "oneOf .* not supported. Send `anyOf`"),
        ("json_schema", '{"$ref": "http://127.0.0.1/a.json"}', "not fetch"),
        ("json_schema", "false", "nothing matches"),
        ("json_schema", '{"items":' * 5000 + "1" + "}" * 5000, "nested"),
        (
            "json_schema",
            '{"items": [{"properties": {"x": {"x-guidance": {"lenient": true}}}}]}',
            "`x-guidance` is not taken",
        ),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}', "."),
        ("ebnf", "root = 'a'", "`::=` must follow the name `root`"),
        ("ebnf", "root ::= missing", "missing"),
        ("xml", "<a/>", "no kind"),
    ],
)
def test_b33_a_bad_grammar_says_what_is_wrong(library: GrammarLibrary, kind: str, text: str, says: str) -> None:
    with pytest.raises(BadGrammar, match=says) as error:
        library.compile(Grammar(kind, text))
    assert len(str(error.value)) < 400


def test_b33_a_hostile_grammar_ends_in_a_bounded_time_or_an_error(library: GrammarLibrary) -> None:
    hostile: list[tuple[str, Any]] = [
        ("regex", "a{100000}"),
        ("regex", "(.*a.{200})+b"),
        ("regex", "(" * 5000 + "a" + ")" * 5000),
        (
            "json_schema",
            json.dumps({"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}),
        ),
        ("ebnf", 'root ::= root root | "a" | ""'),
    ]
    ended = 0
    for kind, text in hostile:
        try:
            matcher = library.compile(Grammar(kind, text))
            bits = np.zeros(49152 // 32, np.uint32)
            for _ in range(3):
                if matcher.fill(bits, frozenset()) or not matcher.accept(int(np.flatnonzero(bits)[0]) * 32):
                    break
        except BadGrammar:
            pass
        ended += 1
    assert ended == len(hostile)


def checked(library: GrammarLibrary, grammar: Grammar, words: int) -> str:
    """What the service says of a grammar; "" if it is one."""
    replies: list[Reply] = []
    lane = InlineLanes()
    GrammarService(replies.append, library.compile, MeteredLanes(lane), words).handle(Compile(1, grammar))
    lane.deliver()
    (error,) = (reply.error for reply in replies if isinstance(reply, Compiled))
    return error


def test_b33_a_grammar_that_is_too_much_at_its_first_id_is_refused_when_it_is_compiled(library: GrammarLibrary) -> None:
    error = checked(library, Grammar("regex", "((a{1000}){1000}){1000}"), 49152 // 32)
    assert "too many expressions" in error and "non-verbose" not in error


def test_an_object_may_have_thousands_of_optional_properties(library: GrammarLibrary, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3500)}}
    grammar = Grammar("json_schema", json.dumps(schema))
    assert checked(library, grammar, 49152 // 32) == ""
    matcher = library.compile(grammar)
    for token in tokenizer.encode('{"p7": "x", "p3499": ""}'):
        ids = allowed(matcher, tokenizer.vocab_size)
        assert ids is not None and matcher.accept(int(token))
    assert allowed(matcher, tokenizer.vocab_size) is None


def test_b33_what_nothing_matches_says_so(library: GrammarLibrary) -> None:
    error = checked(library, Grammar("regex", "[^\\x00-\\x{10FFFF}]"), 49152 // 32)
    assert error == "nothing matches it"


def test_going_on_with_more_work_than_is_allowed_is_the_grammars_fault(library: GrammarLibrary) -> None:
    matcher = library.compile(Grammar("regex", "((a{1000}){1000}){1000}"))
    ids = allowed(matcher, 49152)
    assert ids
    with pytest.raises(BadGrammar, match="too many expressions"):
        matcher.accept(ids[0])

"""GBNF: that what a grammar says is what is allowed, held against enumerated languages; and what bad ones are told."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sched.grammar import BadGrammar, Grammar
from headrace.server.gbnf import MAX_CHARS, translate
from headrace.server.grammar_library import GrammarLibrary

END: Final = 256
BYTES: Final = GrammarLibrary(
    [bytes([byte]) for byte in range(END)] + [b"<end>"], [END], [END], lambda text: list(text.encode())
)
JSON: Final = r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array ::= "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space, at most twenty deep
ws ::= | " " | "\n" [ \t]{0,20}
"""


def matching(grammar: str, *texts: str) -> list[str]:
    """Those of the texts that are a whole output under the grammar."""
    compiled = BYTES.compile(Grammar("ebnf", grammar))

    def matches(text: str) -> bool:
        matcher, bits = compiled.copy(), np.zeros(END // 32 + 1, np.uint32)
        if not all(matcher.accept(byte) for byte in text.encode()):
            return False
        return matcher.fill(bits, frozenset([END])) or bool(bits[END // 32])

    return [text for text in texts if matches(text)]


class Rules:
    """A grammar in the making: `(expression, language)` of parts, any of which may become a rule of its own."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def named(self, expression: str) -> str:
        self.lines.append(f"r-{len(self.lines)} ::= {expression}")
        return f"r-{len(self.lines) - 1}"


@st.composite
def grammars(draw: st.DrawFn) -> tuple[str, frozenset[str]]:
    """A grammar without recursion over a and b, and all that matches it."""
    rules = Rules()

    def part(depth: int) -> tuple[str, frozenset[str]]:
        kind = draw(st.sampled_from(["text", "set", *["or", "and", "times"] * (depth > 0)]))
        if kind == "text":
            text = draw(st.text("ab", max_size=2))
            expression, language = f'"{text}"', frozenset((text,))
        elif kind == "set":
            expression, language = draw(
                st.sampled_from([("[ab]", frozenset("ab")), ("[a-a]", frozenset("a")), (r"[\x62]", frozenset("b"))])
            )
        elif kind == "times":
            inner, once = part(depth - 1)
            least = draw(st.integers(0, 1))
            expression = f"{inner}{{{least},2}}"
            language = once | {x + y for x in once for y in once} | ({""} if least == 0 else set())
        else:
            (left, one), (right, two) = part(depth - 1), part(depth - 1)
            expression = f"({left} | {right})" if kind == "or" else f"({left} {right})"
            language = one | two if kind == "or" else frozenset(x + y for x in one for y in two)
        return (rules.named(expression) if draw(st.booleans()) else expression), frozenset(language)

    expression, language = part(3)
    return "\n".join([f"root ::= {expression}", *rules.lines]), language


@settings(max_examples=100, deadline=None)
@given(grammars(), st.lists(st.text("ab", max_size=6), max_size=4))
def test_what_a_grammar_without_recursion_says_is_allowed_and_nothing_else(
    grammar: tuple[str, frozenset[str]], others: list[str]
) -> None:
    text, language = grammar
    asked = dict.fromkeys([*sorted(language)[:12], *others])
    if language == {""}:
        return  # refused elsewhere: an output has at least one id
    assert matching(text, *asked) == [text for text in asked if text in language]


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        # What comes after a rule is not eaten by it.
        ('root ::= word "x"\nword ::= [a-z]+', ["abx", "xx"], ["x", "ab"]),
        ('root ::= "a" "b" "d" | "ab" "c"', ["abd", "abc"], ["ab"]),
        # Escapes: a digit after one belongs to the text.
        (r'root ::= "\u00e9ab"', ["éab"], ["\ue9ab"]),
        (r'root ::= "\x07F" "\U0001F389" "\n\t\"\\\[\]"', ['\x07F🎉\n\t"\\[]'], []),
        (r"root ::= [\u00e0-\u00ef\x41\]\\]", ["é", "A", "]", "\\"], ["B", "ð"]),
        # Signs of regular expressions mean themselves.
        ("root ::= [a&&b]", ["a", "b", "&"], ["c"]),
        ("root ::= [+--]", ["+", ",", "-"], ["."]),
        ("root ::= [a-]", ["a", "-"], ["b"]),
        ("root ::= [^a]", ["b", "\n", "é", "^"], ["a", "bb"]),
        ("root ::= [a^]", ["a", "^"], ["b"]),
        ('root ::= ".*" "/" [/[(]', [".*//", ".*/[", ".*/("], ["aa//"]),
        ("root ::= .", ["a", "\n", "日"], ["", "ab"]),
        # Repetitions, also of repetitions.
        ('root ::= ("a"{2} "b"){2}', ["aabaab"], ["aab", "aabb"]),
        ('root ::= ("a"+){2} "b"*?', ["aa", "aaabb"], ["a"]),
        ('root ::= "a"{2,} "b"{,2} "c"{0}', ["aa", "aaabb"], ["a", "aabbb", "aac"]),
        # Lines and names.
        ('root ::= "a"\n  | "b" |\n  "c" # or\nother ::= "d"', ["a", "b", "c"], ["d"]),
        ('root ::= a-b a_b A-B start\na-b ::= "1"\na_b ::= "2"\nA-B ::= "3"\nstart ::= "4"', ["1234"], []),
        ('root ::= ( "a"\r\n "b" ) ws\nws ::= " " |\n', ["ab", "ab "], ["a"]),
        # Recursion.
        ('root ::= "(" root ")" | list\nlist ::= "x" | list "," "x"', ["((x,x))", "x"], ["(x", ",x"]),
        (r'root ::= "\"" root "\"" | [\u00e9/] {2}', ['"é/"', "//"], ["é"]),
        ('root ::= "[" root? none "]"\nnone ::= ""', ["[[]]"], ["[[]"]),
        (JSON, ['{"a": [1, -2.5e1, "x\\u00e9\\n"], "b": {}}', "{}"], ["[]", '{"a"}', '{"a": "\n"}']),
    ],
)
def test_a_grammar_means_what_llama_cpp_reads_in_it(grammar: str, good: list[str], bad: list[str]) -> None:
    assert matching(grammar, *good, *bad) == good


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("", "there is no rule `root`"),
        ('start: "a"', "line 1, after 'start': `::=` must follow the name `start`"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "a rule such as `name ::= …` must stand here"),
        ("root ::= a\na ::= b", "the rule `b`, which `a` names, is not there"),
        ('root ::= "a"\nroot ::= "b"', "line 2, after .*: the rule `root` is there twice"),
        ('root ::= ("a"', r"`\)` must stand here"),
        ('root ::= "a")', "a rule such as"),
        ('root ::= "a', "the grammar ends within a literal or a set"),
        ("root ::= [a", "the grammar ends within a literal or a set"),
        ('root ::= "\\', "is not one of"),
        (r'root ::= "\q"', r"`\\q` is not one of"),
        (r'root ::= "\u12"', r"`\\u` needs 4 hexadecimal digits"),
        (r'root ::= "\ud800"', r"`\\ud800` is no character"),
        (r'root ::= "\U00110000"', "is no character"),
        ("root ::= []", "name no character"),
        ("root ::= [b-a]", "the range from 'b' to 'a' is empty"),
        ('root ::= "a"{2,1}', "can't be repeated 2 to 1 times"),
        ('root ::= "a"{}', "a repetition is"),
        ('root ::= "a"{,}', "a repetition is"),
        ('root ::= "a"{x}', "a repetition is"),
        ('root ::= "a"{1', "`}` must stand here"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
    ],
)
def test_b33_a_wrong_grammar_is_told_the_line_and_what_must_stand_there(grammar: str, says: str) -> None:
    with pytest.raises(BadGrammar, match=says):
        BYTES.compile(Grammar("ebnf", grammar))


def test_b33_a_chain_of_rules_may_be_as_long_as_the_text() -> None:
    chain = [f"r{index} ::= r{index + 1}" for index in range(4000)]
    assert matching("\n".join(["root ::= r0", *chain, 'r4000 ::= "a"']), "a", "b") == ["a"]


def test_b33_alternatives_in_alternatives_that_are_too_deep_for_an_expression_stay_rules() -> None:
    chain = [f'r{index} ::= "{index:03}" | r{index + 1}' for index in range(200)]
    grammar = "\n".join(["root ::= r0", *chain, 'r200 ::= "a"'])
    assert translate(grammar).kind == "lark"
    assert matching(grammar, "000", "199", "a", "200", "00") == ["000", "199", "a"]


def test_b33_rules_that_double_are_not_written_out_without_bound() -> None:
    doubling = [f"r{index} ::= r{index + 1} r{index + 1}" for index in range(60)]
    grammar = "\n".join(["root ::= r0 | root", *doubling, 'r60 ::= "a"'])
    assert MAX_CHARS < len(translate(grammar).text) < 2 * MAX_CHARS

"""GBNF, llama.cpp's grammars, in the words of the llguidance package.

The package has a translation of its own. It writes `\\u00e9ab` as `\\ue9ab`, another character; reads `[a&&b]` as a set
operation; and makes a lexeme of each rule that does not recurse, which takes all it can: `root ::= w "x"` with
`w ::= [a-z]+` then never comes to its `x`. Here a grammar without recursion becomes one regular expression, which
matches what the grammar says and nothing else. In one with recursion, a rule without is a lexeme here too: character by
character, a mask over 49k ids takes 1.4 to 3.6 ms, and 0.01 to 0.5 with lexemes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from headrace.sched.grammar import BadGrammar

MAX_CHARS: Final = 1 << 14
MAX_DEPTH: Final = 80
"""Of an expression. A rule that is named often is written out as often: thirty that double are a gigabyte. Past this,
rules stay rules. The package takes 250 nodes in each other, of which a group has three."""
_ROOT: Final = "root"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_DIGITS: Final = re.compile(r"[0-9]{1,9}")
_BLANK: Final = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]"}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_LAST_CHARACTER: Final = 0x10FFFF
_PLAIN: Final = frozenset(" _,:;\"'=<>!@%`")
"""ASCII that means itself everywhere in a regular expression."""


class _Text(NamedTuple):
    text: str


class _Set(NamedTuple):
    """One character, as a regular expression."""

    regex: str


class _Name(NamedTuple):
    name: str


class _Repeat(NamedTuple):
    part: _Part
    least: int
    most: int | None


class _Sequence(NamedTuple):
    parts: tuple[_Part, ...]


class _Either(NamedTuple):
    parts: tuple[_Part, ...]


_Part: TypeAlias = "_Text | _Set | _Name | _Repeat | _Sequence | _Either"


class _Expression(NamedTuple):
    """A regular expression that may stand in a sequence, and how many groups of it are in each other."""

    regex: str
    depth: int = 0


class Translated(NamedTuple):
    kind: Literal["regex", "lark"]
    text: str


def translate(text: str) -> Translated:
    """A grammar as one expression, or, where rules recurse or are too many to be written out, as rules.

    Raises BadGrammar, which names the line; RecursionError for hundreds of nested groups.
    """
    rules = _Reader(text).rules()
    if _ROOT not in rules:
        raise BadGrammar(f"there is no rule `{_ROOT}`")
    expressions = _expressions(rules)
    if _ROOT in expressions:
        return Translated("regex", expressions[_ROOT].regex)
    return Translated("lark", _lark(rules, expressions))


class _Reader:
    """Reads rules from the first character to the last."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, _Part]:
        """Raises BadGrammar."""
        rules: dict[str, _Part] = {}
        self._skip(_BLANK_LINES)
        while self._at < len(self._text):
            name = self._taken(_NAME)
            if not name:
                raise self._wrong("a rule such as `name ::= …` must stand here")
            self._skip(_BLANK)
            if not self._text.startswith("::=", self._at):
                raise self._wrong(f"`::=` must follow the name `{name}`")
            if name in rules:
                raise self._wrong(f"the rule `{name}` is there twice")
            self._at += 3
            rules[name] = self._either(nested=False)
            self._skip(_BLANK_LINES)
        return rules

    def _either(self, nested: bool) -> _Part:
        """Alternatives. Outside of parentheses a line's end is theirs, but before or after a `|`."""
        parts: list[_Part] = []
        while True:
            self._skip(_BLANK_LINES)
            parts.append(self._sequence(_BLANK_LINES if nested else _BLANK))
            end = self._at
            self._skip(_BLANK_LINES)
            if self._next != "|":
                self._at = end
                return parts[0] if len(parts) == 1 else _Either(tuple(parts))
            self._at += 1
            # An empty last alternative ends with its line: `ws ::= " " |`.
            self._skip(_BLANK)
            if not nested and self._next in "\r\n" and self._rule_follows():
                return _Either((*parts, _Sequence(())))

    def _sequence(self, blank: re.Pattern[str]) -> _Part:
        parts: list[_Part] = []
        while True:
            match self._next:
                case '"':
                    part: _Part = self._literal()
                case "[":
                    part = self._set()
                case ".":
                    self._at += 1
                    part = _Set("(?s:.)")
                case "(":
                    self._at += 1
                    part = self._either(nested=True)
                    self._skip(_BLANK_LINES)
                    self._take(")")
                case _:
                    if (blank is _BLANK and self._rule_follows()) or not (name := self._taken(_NAME)):
                        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))
                    part = _Name(name)
            self._skip(blank)
            while (repeated := self._repeated(part)) is not None:
                part = repeated
                self._skip(blank)
            parts.append(part)

    def _repeated(self, part: _Part) -> _Part | None:
        sign = self._next
        if sign not in ("*", "+", "?", "{"):
            return None
        self._at += 1
        if sign != "{":
            return _Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
        self._skip(_BLANK_LINES)
        least = self._taken(_DIGITS)
        self._skip(_BLANK_LINES)
        most: str | None = least
        if self._next == ",":
            self._at += 1
            self._skip(_BLANK_LINES)
            most = self._taken(_DIGITS) or None
            self._skip(_BLANK_LINES)
        if (not least and most is None) or most == "":
            raise self._wrong("a repetition is {3}, {3,}, {,5} or {3,5}")
        self._take("}")
        if most is not None and int(most) < int(least or 0):
            raise self._wrong(f"a part can't be repeated {least} to {most} times")
        return _Repeat(part, int(least or 0), None if most is None else int(most))

    def _literal(self) -> _Text:
        self._at += 1
        characters: list[str] = []
        while self._next != '"':
            characters.append(self._character())
        self._at += 1
        return _Text("".join(characters))

    def _set(self) -> _Set:
        self._at += 1
        inverted = self._next == "^"
        self._at += inverted
        spans: list[str] = []
        while self._next != "]":
            first = last = self._character()
            if self._next == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._character()
            if last < first:
                raise self._wrong(f"the range from {first!r} to {last!r} is empty")
            spans.append(_escape(first) if first == last else f"{_escape(first)}-{_escape(last)}")
        self._at += 1
        if not spans:
            raise self._wrong("`[]` and `[^]` name no character")
        return _Set(f"[{'^' * inverted}{''.join(spans)}]")

    def _character(self) -> str:
        """One of a literal or a set. Raises BadGrammar at the end of the text."""
        character = self._next
        if not character:
            raise self._wrong("the grammar ends within a literal or a set")
        self._at += 1
        if character != "\\":
            return character
        kind = self._next
        self._at += 1
        if kind in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[kind]]
            if not re.fullmatch(rf"[0-9A-Fa-f]{{{_HEX_DIGITS[kind]}}}", digits):
                raise self._wrong(f"`\\{kind}` needs {_HEX_DIGITS[kind]} hexadecimal digits")
            code = int(digits, 16)
            if code > _LAST_CHARACTER or 0xD800 <= code < 0xE000:
                raise self._wrong(f"`\\{kind}{digits}` is no character")
            self._at += len(digits)
            return chr(code)
        if kind not in _ESCAPED:
            raise self._wrong(f'`\\{kind}` is not one of \\n \\r \\t \\" \\\\ \\[ \\] \\x \\u \\U')
        return _ESCAPED[kind]

    # -------------------------------------------------------------------------------------------------------------

    @property
    def _next(self) -> str:
        """The next character; empty at the end."""
        return self._text[self._at : self._at + 1]

    def _taken(self, pattern: re.Pattern[str]) -> str:
        """What matches here, which may be nothing."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def _skip(self, blank: re.Pattern[str]) -> None:
        self._taken(blank)

    def _take(self, sign: str) -> None:
        if self._next != sign:
            raise self._wrong(f"`{sign}` must stand here")
        self._at += 1

    def _rule_follows(self) -> bool:
        """Whether the next word is the name of a rule that begins here, or nothing follows."""
        at = self._at
        self._skip(_BLANK_LINES)
        ended = self._at == len(self._text)
        named = bool(self._taken(_NAME))
        self._skip(_BLANK)
        follows = ended or (named and self._text.startswith("::=", self._at))
        self._at = at
        return follows

    def _wrong(self, what: str) -> BadGrammar:
        line = self._text.count("\n", 0, self._at) + 1
        before = self._text[max(0, self._at - 20) : self._at]
        return BadGrammar(f"line {line}, after {before!r}: {what}")


def _expressions(rules: Mapping[str, _Part]) -> dict[str, _Expression]:
    """The rules that don't recurse, as regular expressions. Raises BadGrammar for a name that no rule has."""
    expressions: dict[str, _Expression] = {}
    waiting: dict[str, int] = {}  # of how many rules that it names a rule waits
    named_by: dict[str, list[str]] = {name: [] for name in rules}
    for name, part in rules.items():
        for other in (names := set(_names(part))):
            if other not in rules:
                raise BadGrammar(f"the rule `{other}`, which `{name}` names, is not there")
            named_by[other].append(name)
        waiting[name] = len(names)
    # From the leaves up, without recursion: a chain of rules may be as long as the text.
    ready = [name for name, count in waiting.items() if count == 0]
    while ready:
        name = ready.pop()
        expression = _expression(rules[name], expressions)
        if len(expression.regex) > MAX_CHARS or expression.depth > MAX_DEPTH:
            continue
        expressions[name] = expression
        for user in named_by[name]:
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    return expressions


def _names(part: _Part) -> list[str]:
    match part:
        case _Name(name):
            return [name]
        case _Repeat(inner):
            return _names(inner)
        case _Sequence(parts) | _Either(parts):
            return [name for inner in parts for name in _names(inner)]
        case _:
            return []


def _expression(part: _Part, expressions: Mapping[str, _Expression]) -> _Expression:
    match part:
        case _Text(text):
            return _Expression("".join(map(_escape, text)))
        case _Set(regex):
            return _Expression(regex, 1)
        case _Name(name):
            return expressions[name]
        case _Repeat(inner, least, most):
            regex, depth = _expression(inner, expressions)
            return _Expression(f"(?:{regex}){_times(least, most)}" if most != 0 else "", depth + 1)
    inners = [_expression(inner, expressions) for inner in part.parts]
    depth = max((inner.depth for inner in inners), default=0)
    if isinstance(part, _Sequence):
        return _Expression("".join(inner.regex for inner in inners), depth)
    return _Expression(f"(?:{'|'.join(inner.regex for inner in inners)})", depth + 1)


def _lark(rules: Mapping[str, _Part], expressions: Mapping[str, _Expression]) -> str:
    """The rules that are used; those that don't recurse are lexemes, whose names the package wants in capitals."""
    names, waiting, lines = {_ROOT: "start"}, [_ROOT], ["%llguidance {}"]
    while waiting:
        name = waiting.pop()
        if name in expressions and expressions[name].regex:
            lines.append(f"{names[name]}: /{expressions[name].regex}/")
            continue
        for other in _names(rules[name]):
            if other not in names:
                is_lexeme = other in expressions and expressions[other].regex
                names[other] = f"{'R' if is_lexeme else 'r'}{len(names)}"
                waiting.append(other)
        lines.append(f"{names[name]}: {_in_lark(rules[name], names)}")
    return "\n".join(lines) + "\n"


def _in_lark(part: _Part, names: Mapping[str, str]) -> str:
    match part:
        case _Text(text):
            return json.dumps(text, ensure_ascii=False)
        case _Set(regex):
            return f"/{regex}/"
        case _Name(name):
            return names[name]
        case _Repeat(inner, least, most):
            return f"({_in_lark(inner, names)}){_times(least, most)}" if most != 0 else '""'
        case _Sequence(parts):
            return " ".join(_in_lark(inner, names) for inner in parts) or '""'
        case _Either(parts):
            return f"({' | '.join(_in_lark(inner, names) for inner in parts)})"


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _escape(character: str) -> str:
    """A character in a regular expression: no sign of its language, nor a slash, which would end it in Lark."""
    if character.isalnum() or character in _PLAIN or (not character.isascii() and character.isprintable()):
        return character
    return f"\\x{{{ord(character):x}}}"

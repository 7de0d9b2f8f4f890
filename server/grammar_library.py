"""Grammars by the llguidance package: texts of all kinds to matchers over this model's vocabulary.

Why this package, and what it costs: docs/structured-output.md. Only the grammar worker imports this file; the server
stays without 7 MB of parser, and without what a hostile grammar may do to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headrace.ops.wire import U32
from headrace.sched.grammar import BadGrammar, Grammar
from headrace.server.gbnf import translate
from headrace.server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MAX_SPACES: Final = 40
"""White space between two parts of a JSON text, at most: a newline and ten levels of four. Without a bound a small
model, which finds blanks likely at every place where they are allowed, may write nothing else until its last token."""
_JSON_OPTIONS: Final[JsonCompileOptions] = {"whitespace_pattern": f"[\\x20\\x0A\\x0D\\x09]{{1,{_MAX_SPACES}}}"}
_LIMITS: Final = LLParserLimits(
    max_lexer_states=50_000, max_items_in_row=20_000, step_max_items=100_000, verbose_errors=False
)
"""A state takes 1 to 2 kB. An optional property takes four items of a row: with the package's 2,000 an object of 600 is
too much, with these one of 3,500 is taken. 100,000 items are 5 ms a mask. The other limits are the package's: 14 ms a
mask, 20 ms to build a lexer."""
_OPTIONS_KEY: Final = "x-guidance"
"""A schema may switch the package's own checks off with it."""
_ONE_OF_HINT: Final = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""An option of the package's, for who compiles: what the one who sent the schema can do is another thing."""
_MAX_ERROR_CHARS: Final = 300


class LibraryMatcher:
    """A `Matcher`."""

    def __init__(self, matcher: LLMatcher, ends: Sequence[int]) -> None:
        """`ends`: all ids that end a text."""
        self._matcher = matcher
        self._ends = ends

    def copy(self) -> LibraryMatcher:
        return LibraryMatcher(self._matcher.deep_copy(), self._ends)

    def accept(self, token: int) -> bool:
        if self._matcher.try_consume_tokens([token]):
            return True
        if self._matcher.is_error():
            raise BadGrammar(_short(self._matcher.get_error()))
        return False

    def fill(self, bits: U32, stop_ids: frozenset[int]) -> bool:
        matcher = self._matcher
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            raise BadGrammar(_short(matcher.get_error()))
        if matcher.is_stopped():
            return True
        ends = [end for end in self._ends if bits[end // 32] >> (end % 32) & 1]
        for end in ends:
            bits[end // 32] &= ~np.uint32(1 << end % 32)
        if not bits.any():
            return True
        for end in stop_ids.intersection(ends):
            bits[end // 32] |= np.uint32(1 << end % 32)
        return False


class GrammarLibrary:
    """Compiles grammars for one vocabulary."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        control_ids: Iterable[int],
        stop_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """`tokens`: what each id stands for. Control tokens match no text. Takes 0.15 s for 49k tokens."""
        self._ends = list(stop_ids)
        vocabulary = _Vocabulary(tokens, list(control_ids), self._ends[0], encode)
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(tokens), eos_token=self._ends)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> GrammarLibrary:
        """For a model's vocabulary. Raises BadGrammar for one that has no id that ends a text."""
        if not tokenizer.stop_ids:
            raise BadGrammar("the model has no token that ends a text")
        ids = range(tokenizer.vocab_size)

        def encode(text: str) -> list[int]:
            return list(map(int, tokenizer.encode(text)))

        tokens = [tokenizer.token_bytes(index) for index in ids]
        return cls(tokens, [index for index in ids if tokenizer.is_control(index)], tokenizer.stop_ids, encode)

    def compile(self, grammar: Grammar) -> LibraryMatcher:
        """Raises BadGrammar."""
        matcher = LLMatcher(self._tokenizer, _definition(grammar), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise BadGrammar(_short(matcher.get_error()))
        return LibraryMatcher(matcher, self._ends)


class _Vocabulary:
    """What the package asks of a tokenizer."""

    def __init__(
        self, tokens: Sequence[bytes], control_ids: list[int], end: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = control_ids
        self.eos_token_id = end
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


def _definition(grammar: Grammar) -> str:
    """A grammar in the package's own form. Raises BadGrammar."""
    try:
        match grammar.kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)
            case "json_schema":
                text = _checked_schema(grammar.text)
                return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "ebnf":
                kind, text = translate(grammar.text)
                return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)
    except RecursionError:
        raise BadGrammar("it is nested too deeply") from None
    except ValueError as error:
        raise BadGrammar(_short(str(error))) from None
    raise BadGrammar(f"there is no kind {grammar.kind!r}")


def _checked_schema(text: str) -> str:
    """A schema that is an object: the package takes options for no other. Raises ValueError, BadGrammar."""
    schema = json.loads(text, object_hook=_without_options)
    if schema is False:
        raise BadGrammar("the schema is false, which nothing matches")
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise BadGrammar("a schema is an object or a boolean")
    return text


def _without_options(part: dict[str, Any]) -> dict[str, Any]:
    if _OPTIONS_KEY in part:
        raise BadGrammar(f"`{_OPTIONS_KEY}` is not taken in a schema; leave it out")
    return part


def _short(message: str) -> str:
    """The first lines of the package's messages say what is wrong; then they repeat the grammar."""
    message = " ".join(message.replace("<non-verbose/>", "").split())
    message = message.replace(_ONE_OF_HINT, "Send `anyOf`, which takes what matches one or more")
    if message.endswith("NoExtensionBias"):
        return "nothing matches it"
    return message if len(message) <= _MAX_ERROR_CHARS else f"{message[:_MAX_ERROR_CHARS]}…"

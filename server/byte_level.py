"""Byte-level byte-pair encoding: GPT-2's, and the families that differ from it in how text is cut into words.

The encoding itself is the `tokenizers` package's. Its vocabulary is built here *without* the model's control tokens, so
that no text whatever becomes one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from headrace.ops.wire import I32
from headrace.server.vocabulary import CONTROLS, BadTokenizer, Kind, Vocabulary, cut_unless_within, text_of

# ---------------------------------------------------------------------------------------------------------------
# How text is cut into words

_WORD_PUNCTUATION: Final = r"(?<=[^\W_])(?=[!-/:-@\[-`{-~、。，！？：；「」（）])"
_CUT: Final = rf"(?<=\S)(?= )|(?<=[^\W_])(?=\n)|{_WORD_PUNCTUATION}"
"""In all families a word ends before a space, and letters and numbers end before a line's end and before punctuation
(the other way round there is 's). Only punctuation that all versions of Unicode know."""

_GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(letters: str, numbers: str, line_ends: str) -> str:
    """The pattern that Tiktoken's families share."""
    return rf"{letters}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[{line_ends}]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ONE_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_LETTERS: Final = rf"{_ONE_BEFORE}{_UPPER}*{_LOWER}+|{_ONE_BEFORE}{_UPPER}+{_LOWER}*"


@dataclass(frozen=True)
class PreTokenization:
    """How a family cuts text into words before merging; no merge crosses a word's border."""

    patterns: tuple[str, ...] = ()
    """One after the other cuts what the ones before left, at both ends of all that it matches."""
    gpt2_words: bool = False
    """What is left is cut by GPT-2's pattern: contractions, letters, numbers and the rest, each with one space before
    it, and runs of white space less the last one before a word."""
    individual_digits: bool = False
    """Every numeric character (\\p{N}) is a word of its own; before anything else."""
    composed: bool = False
    """Characters and their marks are composed first (NFC)."""
    whole_words: bool = False
    """A word that is a token becomes it, even where no merges lead there."""
    begins_with_bos: bool = False
    """Where the file does not say."""
    cut: str = _CUT
    """`TextEncoder.cut`"""

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` package's own steps for two of these are 1.4 times as fast as the patterns."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.individual_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        return pre_tokenizers.Sequence(steps)


_LLAMA_3: Final = PreTokenization(
    patterns=(_words(rf"{_CONTRACTIONS}|{_ONE_BEFORE}\p{{L}}+", r"\p{N}{1,3}", r"\r\n"),),
    whole_words=True,
    begins_with_bos=True,
)

PRE_TOKENIZATIONS: Final = {
    # SmolLM: numbers digit by digit, the rest as GPT-2's.
    "smollm": PreTokenization(
        individual_digits=True,
        gpt2_words=True,
        cut=rf"(?<=\S)(?=[ \n0-9])|{_WORD_PUNCTUATION}",
    ),
    "gpt-2": PreTokenization(gpt2_words=True),
    # Llama 3: the pattern of its tokenizer's source, https://github.com/meta-llama/llama-models
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    # Qwen 2 to 3: Llama 3's with single digits.
    "qwen2": PreTokenization(
        patterns=(_words(rf"{_CONTRACTIONS}|{_ONE_BEFORE}\p{{L}}+", r"\p{N}", r"\r\n"),),
        composed=True,
    ),
    # Mistral's Tekken: a word may begin with capitals, and not end with them; no contractions.
    "tekken": PreTokenization(
        patterns=(_words(_CASED_LETTERS, r"\p{N}", r"\r\n/"),),
        whole_words=True,
        begins_with_bos=True,
    ),
    # What llama.cpp does with files of its own family "default": punctuation, GPT-2's words, numbers, three digits.
    "default": PreTokenization(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
}
"""By `tokenizer.ggml.pre`. One that is not here is refused: a wrong guess gives ids that are nearly right."""


# ---------------------------------------------------------------------------------------------------------------
# The vocabulary and its encoder


class ByteLevelVocabulary(Vocabulary):
    """A GGUF file's tokenizer of the kind "gpt2"."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        """Raises BadTokenizer."""
        super().__init__(metadata)
        pre = text_of(metadata, "pre")
        if pre not in PRE_TOKENIZATIONS:
            raise BadTokenizer(
                f"its text is cut into words by the rules of {pre[:80]!r} (tokenizer.ggml.pre). Supported: "
                f"{', '.join(map(repr, PRE_TOKENIZATIONS))}"
            )
        self.pre = PRE_TOKENIZATIONS[pre]
        self.merges: list[str] = self.list_of("merges", str)
        self.add_bos = self.adds_bos(self.pre.begins_with_bos)

    def missing_bytes(self) -> list[str]:
        """Characters of the byte alphabet that are no token."""
        return sorted(_BYTE_OF.keys() - set(self.texts))

    def encoder(self) -> ByteLevelEncoder:
        """Raises BadTokenizer."""
        return ByteLevelEncoder(self)


class ByteLevelEncoder:
    """Built in 0.08 s for 49k tokens."""

    def __init__(self, vocabulary: ByteLevelVocabulary) -> None:
        """Raises BadTokenizer."""
        self.cut = cut_unless_within(vocabulary.pre.cut, vocabulary.user_defined())
        self._bpe = _build_bpe(vocabulary)
        self._vocab_size = len(vocabulary.texts)
        self._has_fillers = len(vocabulary.missing_bytes()) > 0

    def begun(self, text: str, is_first: bool) -> str:
        return text

    def encode(self, text: str) -> I32:
        """A byte that the vocabulary does not have gives no id, as in llama.cpp. SmolLM2 lacks 0x04, 0x06, 0x13, 0x14,
        0x16, 0x1d, and the first byte of planes 4 to 11."""
        ids = np.array(self._bpe.encode(text, add_special_tokens=False).ids, np.int32)
        return ids[ids < self._vocab_size] if self._has_fillers else ids

    def token_bytes(self, text: str, kind: int) -> bytes:
        if kind in (*CONTROLS, Kind.USER_DEFINED):
            return text.encode()
        if kind == Kind.BYTE and (match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)):
            return bytes.fromhex(match[1])
        return byte_level_bytes(text)


def _build_bpe(vocabulary: ByteLevelVocabulary) -> tokenizers.Tokenizer:
    controls = set(vocabulary.control_ids())
    ids = {text: index for index, text in enumerate(vocabulary.texts) if index not in controls}
    # The package drops a byte without a token *before* merging, so that its neighbours may merge; in the reference
    # (llama.cpp) it stands between them and is dropped at the end. Ids past the vocabulary's end keep its place.
    ids.update({char: len(vocabulary.texts) + number for number, char in enumerate(vocabulary.missing_bytes())})
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    try:
        bpe = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=vocabulary.pre.whole_words))
    except Exception as error:  # the package raises no narrower one
        raise BadTokenizer(f"the model file's merges do not fit its tokens: {error}") from error
    if vocabulary.pre.composed:
        bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = vocabulary.pre.build()
    bpe.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in vocabulary.user_defined()])
    return bpe


# ---------------------------------------------------------------------------------------------------------------
# The byte alphabet: GPT-2 writes each byte as one printable character


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()
_LATIN1_OF: Final = {ord(char): byte for char, byte in _BYTE_OF.items()}


def byte_level_bytes(text: str) -> bytes:
    """What a token in the byte alphabet stands for; one that is not written in it stands for its own text."""
    if all(char in _BYTE_OF for char in text):
        return text.translate(_LATIN1_OF).encode("latin-1")
    return text.encode()

"""Text to token ids and back, from the vocabulary in a model file.

The byte-pair encoding itself is the `tokenizers` package's. Its vocabulary is built here *without* the model's control
tokens, so that no text whatever becomes one: they are found by `ControlTokens`, and only where a caller asks for it.

in     a GGUF file's metadata; text; ids
out    int32 ids; bytes and text of ids
state  the vocabulary, fixed once built; the bytes of tokens, looked up once each
owner  whoever built it; everybody may call it, on one thread
ready  when it is built (0.08 s for 49k tokens)
end    with its last reference
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self, TypeVar

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from headrace.ops.wire import I32

_Element = TypeVar("_Element")

PIECE_CHARS: Final = 8192
"""Long text is encoded in pieces of about this size: 3 to 10 ms each, and the `tokenizers` package takes some 100 bytes
of memory per token of a piece."""

# Token types of the GGUF format.
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_BYTE: Final = 6

_END_TEXTS: Final = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|return|>"),
        *("<|call|>", "<|endofturn|>", "<end_of_turn>", "<end_of_utterance>", "</s>", "<eos>", "<EOT>", "<|EOT|>"),
    }
)
"""Control tokens by which a model says that it is done. Files name one or two of a model's by id, and models draw any
of them: SmolLM2's file names <|im_end|>, and its base model was taught <|endoftext|>."""


class BadTokenizer(ValueError):
    """The model file's vocabulary can't be used; the message says why, and what is supported."""


class BadText(ValueError):
    """The text has no UTF-8 form: it holds half of a surrogate pair."""

    def __init__(self) -> None:
        super().__init__("the text holds half of a surrogate pair (\\ud800 to \\udfff), which is no character")


@dataclass(frozen=True)
class PreTokenization:
    """How a family cuts text into words before merging; no merge crosses a word's border."""

    individual_digits: bool
    """Every numeric character (\\p{N}) is a word of its own."""
    gpt2_words: bool
    """What is left is cut by GPT-2's pattern: contractions, letters, numbers and the rest, each with one space before
    it, and runs of white space less the last one before a word."""
    cut: str
    """Matches, with no width, only where every text is cut, whatever stands before and after."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` package's own steps for these patterns are 1.4 times as fast as the patterns."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.individual_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        return pre_tokenizers.Sequence(steps)


_PRE_TOKENIZATIONS: Final = {
    # llama.cpp: `\p{N}`, then GPT-2's pattern. A word ends before white space and around numbers, and letters end
    # before punctuation (the other way round there is 's). Only punctuation that all versions of Unicode know.
    "smollm": PreTokenization(
        individual_digits=True,
        gpt2_words=True,
        cut=r"(?<=\S)(?=[ \n0-9])|(?<=[^\W_])(?=[!-/:-@\[-`{-~、。，！？：；「」（）])",
    ),
}
"""By `tokenizer.ggml.pre`. One that is not here is refused: a wrong guess gives ids that are nearly right."""


class ControlTokens:
    """Finds control tokens in text: the leftmost, and of those the longest."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        assert "" not in ids
        self.ids = dict(ids)
        self._lengths = sorted({len(text) for text in ids}, reverse=True)
        first = "".join(re.escape(char) for char in sorted({text[0] for text in ids}))
        self._first = re.compile(f"[{first}]" if first else r"(?!)")

    def split(self, text: str) -> Iterator[int | str]:
        """The ids of control tokens and the texts between them, in order; no text is empty."""
        begin = 0
        # Only the places of a first character are looked at: 1.5 µs each, and memory speed in between.
        for place in self._first.finditer(text):
            at = place.start()
            if at < begin:
                continue
            for length in self._lengths:
                found = self.ids.get(text[at : at + length])
                if found is not None:
                    if begin < at:
                        yield text[begin:at]
                    yield found
                    begin = at + length
                    break
        if begin < len(text):
            yield text[begin:]


class Tokenizer:
    """A model's vocabulary."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        """Use `from_gguf_metadata`."""
        self._texts = vocabulary.texts
        self._types = vocabulary.types
        self.vocab_size = len(vocabulary.texts)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.stop_ids = vocabulary.stop_ids()
        """All ids that end a generation, ascending."""
        self.add_bos = vocabulary.add_bos
        """Whether a prompt begins with `bos_id`. Chat templates say so themselves."""
        self.special_texts = vocabulary.special_texts()
        """What templates know by name: `bos_token`, `eos_token` …"""
        self._bpe = _build_bpe(vocabulary)
        self._has_fillers = len(vocabulary.missing_bytes()) > 0
        self._cut = vocabulary.cut()
        self._raw: list[bytes | None] = [None] * self.vocab_size
        self._printed = self._raw.copy()
        self._control_ids = frozenset(vocabulary.control_ids())
        for index in self._control_ids:
            self._printed[index] = b""

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, object]) -> Self:
        """Raises BadTokenizer."""
        return cls(_Vocabulary(metadata))

    @cached_property
    def control(self) -> ControlTokens:
        """All control tokens."""
        return ControlTokens({self._texts[index]: index for index in self._control_ids if self._texts[index]})

    # -----------------------------------------------------------------------------------------------------------
    # Text to ids

    def encode(self, text: str) -> I32:
        """The ids of a text in which nothing is a control token, whatever it says. Raises BadText.

        A byte that the vocabulary does not have gives no id, as in llama.cpp. SmolLM2 lacks 0x04, 0x06, 0x13, 0x14,
        0x16, 0x1d, and the first byte of planes 4 to 11.
        """
        return self.encode_parts([text])

    def encode_with_control(self, text: str) -> I32:
        """The same, but control tokens count: for text that the operator wrote, never for a client's."""
        return self.encode_parts(self.control.split(text))

    def encode_parts(self, parts: Iterable[int | str]) -> I32:
        """Ids stand for themselves, texts between them are encoded."""
        ids = [self.encode_piece(piece) for piece in self.pieces(parts)]
        return np.concatenate(ids) if ids else np.empty(0, np.int32)

    def pieces(self, parts: Iterable[int | str]) -> Iterator[int | str]:
        """The parts, with long texts cut where all texts are cut: encoding the pieces one by one gives the same ids."""
        for part in parts:
            if isinstance(part, int) or self._cut is None:
                yield part
                continue
            begin = 0
            while place := self._cut.search(part, begin + PIECE_CHARS):
                yield part[begin : place.start()]
                begin = place.start()
            yield part[begin:]

    def encode_piece(self, piece: int | str) -> I32:
        """One of the `pieces`. Raises BadText."""
        if isinstance(piece, int):
            return np.array([piece], np.int32)
        try:
            piece.encode()
        except UnicodeEncodeError:
            raise BadText from None
        ids = np.array(self._bpe.encode(piece, add_special_tokens=False).ids, np.int32)
        return ids[ids < self.vocab_size] if self._has_fillers else ids

    # -----------------------------------------------------------------------------------------------------------
    # Ids to bytes and text

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. Raises ValueError for an id out of the vocabulary."""
        return b"".join([self.token_bytes(index, skip_special_tokens) for index in ids]).decode(errors="replace")

    def token_bytes(self, index: int, skip_special_tokens: bool = False) -> bytes:
        """The bytes that a token stands for; a character may need those of several tokens."""
        if not 0 <= index < self.vocab_size:
            raise ValueError(f"there is no token {index}: the vocabulary has the ids 0 to {self.vocab_size - 1}")
        table = self.byte_table(skip_special_tokens)
        found = table[index]
        if found is None:
            found = table[index] = _bytes_of(self._texts[index], self._types[index])
        return found

    def token_text(self, index: int) -> str:
        """How a token reads by itself, control tokens too: for logprobs."""
        return self.token_bytes(index).decode(errors="replace")

    def byte_table(self, skip_special_tokens: bool) -> list[bytes | None]:
        """Bytes by id, None where nobody has asked `token_bytes` yet. Looking here first saves 0.2 µs a token."""
        return self._printed if skip_special_tokens else self._raw

    def is_control(self, index: int) -> bool:
        return index in self._control_ids


# ---------------------------------------------------------------------------------------------------------------
# Reading the file's description


def check_vocabulary(metadata: Mapping[str, object]) -> None:
    """Raises BadTokenizer for a vocabulary that can't be used. Building nothing, it takes 5 ms for 49k tokens."""
    _Vocabulary(metadata)


class _Vocabulary:
    """What a GGUF file says of its tokenizer, checked."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        family = self._text("model")
        if family != "gpt2":
            raise BadTokenizer(
                f"its tokenizer is of the kind {family[:80]!r} (tokenizer.ggml.model). Supported: 'gpt2' (byte-level "
                "byte-pair encoding)"
            )
        pre = self._text("pre")
        if pre not in _PRE_TOKENIZATIONS:
            raise BadTokenizer(
                f"its text is cut into words by the rules of {pre[:80]!r} (tokenizer.ggml.pre). Supported: "
                f"{', '.join(map(repr, _PRE_TOKENIZATIONS))}"
            )
        self.pre = _PRE_TOKENIZATIONS[pre]
        self.texts: list[str] = self._list("tokens", str)
        self.types: list[int] = self._list("token_type", int)
        self.merges: list[str] = self._list("merges", str)
        if not self.texts or len(self.types) != len(self.texts):
            raise BadTokenizer(f"the model file has {len(self.texts)} tokens and {len(self.types)} token types")
        self.bos_id = self._id("bos_token_id")
        self.eos_id = self._id("eos_token_id")
        self.add_bos = self._metadata.get("tokenizer.ggml.add_bos_token", False) is True
        if self.add_bos and self.bos_id is None:
            raise BadTokenizer("the model file has add_bos_token, and no bos_token_id that says which token it is")

    def control_ids(self) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in (_CONTROL, _UNKNOWN)]

    def user_defined(self) -> list[str]:
        """Whole words that are found in any text before it is cut (<think> in some models)."""
        return [text for text, kind in zip(self.texts, self.types) if kind == _USER_DEFINED and text]

    def stop_ids(self) -> tuple[int, ...]:
        named = (self._id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
        known = (index for index in self.control_ids() if self.texts[index] in _END_TEXTS)
        return tuple(sorted({*known, *(index for index in named if index is not None)}))

    def special_texts(self) -> dict[str, str]:
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: self._id(f"{key}_token_id") for name, key in keys.items()}
        return {name: self.texts[index] for name, index in ids.items() if index is not None}

    def missing_bytes(self) -> list[str]:
        """Characters of the byte alphabet that are no token."""
        return sorted(_BYTE_OF.keys() - set(self.texts))

    def cut(self) -> re.Pattern[str] | None:
        """Where long text may be cut; None if a user-defined token could lie across such a place."""
        cut = re.compile(self.pre.cut)
        return None if any(cut.search(text) for text in self.user_defined()) else cut

    def _text(self, key: str) -> str:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, str):
            raise BadTokenizer(f"the model file does not say which tokenizer it needs: tokenizer.ggml.{key} is missing")
        return value

    def _list(self, key: str, kind: type[_Element]) -> list[_Element]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or not all(type(element) is kind for element in value):
            raise BadTokenizer(f"tokenizer.ggml.{key} is missing in the model file, or not a list of {kind.__name__}")
        return value

    def _id(self, key: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.texts):
            raise BadTokenizer(f"tokenizer.ggml.{key} is {value!r}; the model file has {len(self.texts)} tokens")
        return value


def _build_bpe(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    controls = set(vocabulary.control_ids())
    ids = {text: index for index, text in enumerate(vocabulary.texts) if index not in controls}
    # The package drops a byte without a token *before* merging, so that its neighbours may merge; in the reference
    # (llama.cpp) it stands between them and is dropped at the end. Ids past the vocabulary's end keep its place.
    ids.update({char: len(vocabulary.texts) + number for number, char in enumerate(vocabulary.missing_bytes())})
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    try:
        bpe = tokenizers.Tokenizer(models.BPE(ids, merges))
    except Exception as error:  # the package raises no narrower one
        raise BadTokenizer(f"the model file's merges do not fit its tokens: {error}") from error
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


def _bytes_of(text: str, kind: int) -> bytes:
    if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED):
        return text.encode()
    if kind == _BYTE and (match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)):
        return bytes.fromhex(match[1])
    if all(char in _BYTE_OF for char in text):
        return text.translate(_LATIN1_OF).encode("latin-1")
    return text.encode()

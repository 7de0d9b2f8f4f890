"""What a GGUF file says of its tokenizer, checked: the tokens, their kinds, the special ones, and how text is cut.

Nothing is built here, so that a server that starts can refuse a file in milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, Protocol, TypeVar

from headrace.ops.wire import I32

_Element = TypeVar("_Element")

END_TEXTS: Final = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|return|>"),
        *("<|call|>", "<|endofturn|>", "<end_of_turn>", "<end_of_utterance>", "</s>", "<eos>", "<EOT>", "<|EOT|>"),
    }
)
"""Control tokens by which a model says that it is done. Files name one or two of a model's by id, and models draw any
of them: SmolLM2's file names <|im_end|>, and its base model was taught <|endoftext|>."""


class BadText(ValueError):
    """The text can't be encoded: as a rule since it has no UTF-8 form."""

    def __init__(
        self, why: str = "the text holds half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    ):
        super().__init__(why)


class BadTokenizer(ValueError):
    """The model file's vocabulary can't be used; the message says why, and what is supported."""


class Kind(IntEnum):
    """Of a token, as the GGUF format (and SentencePiece) numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


CONTROLS: Final = (Kind.CONTROL, Kind.UNKNOWN)
"""Kinds that no text becomes."""


class TextEncoder(Protocol):
    """Text to ids, and tokens to bytes: what differs between families of tokenizers."""

    cut: re.Pattern[str] | None
    """Matches, with no width, only where every text is cut, whatever stands before and after; None if nothing is known
    of such places."""

    def begun(self, text: str, is_first: bool) -> str:
        """A text that stands between control tokens, with what is put before it; `is_first`: nothing stands before."""

    def encode(self, text: str) -> I32:
        """Ids of a text in UTF-8; nothing in it is a control token."""

    def token_bytes(self, text: str, kind: int) -> bytes:
        """What a token of this text and kind stands for."""


class Vocabulary:
    """What all families have."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        """Raises BadTokenizer."""
        self._metadata = metadata
        self.texts: list[str] = self.list_of("tokens", str)
        self.types: list[int] = self.list_of("token_type", int)
        if not self.texts or len(self.types) != len(self.texts):
            raise BadTokenizer(f"the model file has {len(self.texts)} tokens and {len(self.types)} token types")
        if unknown := set(self.types) - set(Kind):
            raise BadTokenizer(f"it has tokens of the kind {min(unknown)} (tokenizer.ggml.token_type), which is none")
        if self.flag("add_eos_token", False):
            raise BadTokenizer("every prompt ends with eos_token_id (tokenizer.ggml.add_eos_token): not supported")
        self.bos_id = self.id_of("bos_token_id")
        self.eos_id = self.id_of("eos_token_id")

    def adds_bos(self, default: bool) -> bool:
        """Whether a prompt begins with `bos_id`. `default`: where the file says nothing."""
        adds = self.flag("add_bos_token", default)
        if adds and self.bos_id is None:
            raise BadTokenizer("a prompt begins with the token bos_token_id, which the model file does not have")
        return adds

    def control_ids(self) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in CONTROLS]

    def user_defined(self) -> list[str]:
        """Whole words that are found in any text before it is cut (<think> in some models)."""
        return [text for text, kind in zip(self.texts, self.types) if kind == Kind.USER_DEFINED and text]

    def stop_ids(self) -> tuple[int, ...]:
        named = (self.id_of(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
        known = (index for index in self.control_ids() if self.texts[index] in END_TEXTS)
        return tuple(sorted({*known, *(index for index in named if index is not None)}))

    def special_texts(self) -> dict[str, str]:
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: self.id_of(f"{key}_token_id") for name, key in keys.items()}
        return {name: self.texts[index] for name, index in ids.items() if index is not None}

    # Typed access to the keys below `tokenizer.ggml.`

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise BadTokenizer(f"tokenizer.ggml.{key} is {str(value)[:80]!r}, neither true nor false")
        return value

    def has(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self._metadata

    def list_of(self, key: str, kind: type[_Element]) -> list[_Element]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or not all(type(element) is kind for element in value):
            raise BadTokenizer(f"tokenizer.ggml.{key} is missing in the model file, or not a list of {kind.__name__}")
        return value

    def id_of(self, key: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.texts):
            raise BadTokenizer(f"tokenizer.ggml.{key} is {value!r}; the model file has {len(self.texts)} tokens")
        return value


def text_of(metadata: Mapping[str, object], key: str) -> str:
    """A text below `tokenizer.ggml.`, which must be there. Raises BadTokenizer."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, str):
        raise BadTokenizer(f"the model file does not say which tokenizer it needs: tokenizer.ggml.{key} is missing")
    return value


def cut_unless_within(pattern: str, texts: Sequence[str]) -> re.Pattern[str] | None:
    """The pattern, or None if one of these tokens could lie across such a place."""
    cut = re.compile(pattern)
    return None if any(cut.search(text) for text in texts) else cut

"""SentencePiece's byte-pair encoding, the tokenizer of Llama 2, Mistral 7B and Gemma.

The encoding is the `sentencepiece` package's own, from a model that is put together here of the file's vocabulary. The
control tokens keep their ids in it and lose their texts, so that no text whatever becomes one.

Format of the model: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Final

import numpy as np
import sentencepiece

from headrace.ops.wire import I32
from headrace.server.vocabulary import CONTROLS, BadTokenizer, Kind, Vocabulary

SPACE: Final = "\u2581"
"""How a space is written in tokens. A client's own U+2581 reads as a space too, as it does for the model."""
_PRE: Final = ("default", "")
_BYTE: Final = re.compile("<0x([0-9A-F]{2})>")
# Where a text may be cut if no token lies across: before a space, before a line's end, after a sentence of Chinese. Of
# Gemma's tokens one has a space after a mark.
_CUTS: Final = (
    rf"(?<=[^\s{SPACE}\x00])(?=[ {SPACE}])",
    rf"(?<=[^\W_])(?=[ {SPACE}])",
    r"(?<=[^\n\x00])(?=\n)",
    r"(?<=[。！？])(?=[^\W_])",
)


class SentencePieceVocabulary(Vocabulary):
    """A GGUF file's tokenizer of the kind "llama"."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        """Raises BadTokenizer."""
        super().__init__(metadata)
        # Converters write the spaces of whole words as spaces: of Gemma's runs of them none would be found.
        self.texts = [
            text.replace(" ", SPACE) if kind == Kind.USER_DEFINED else text
            for text, kind in zip(self.texts, self.types)
        ]
        pre = metadata.get("tokenizer.ggml.pre", "default")
        if pre not in _PRE:
            raise BadTokenizer(
                f"its text is cut into words by the rules of {str(pre)[:80]!r} (tokenizer.ggml.pre). A tokenizer of "
                "the kind 'llama' has none, or 'default'"
            )
        if self.has("precompiled_charsmap"):
            raise BadTokenizer("its text is rewritten before it is encoded (precompiled_charsmap): not supported")
        if self.flag("remove_extra_whitespaces", False):
            raise BadTokenizer("extra white space is removed from its text (remove_extra_whitespaces): not supported")
        self.scores: list[float] = self.list_of("scores", float)
        if len(self.scores) != len(self.texts):
            raise BadTokenizer(f"the model file has {len(self.texts)} tokens and {len(self.scores)} scores")
        if not np.isfinite(self.scores).all():
            raise BadTokenizer("the model file has scores of tokens that are no numbers")
        bytes_there = {text for text, kind in zip(self.texts, self.types) if kind == Kind.BYTE}
        if bytes_there != {f"<0x{byte:02X}>" for byte in range(256)}:
            raise BadTokenizer(
                f"it has {len(bytes_there)} tokens for single bytes (<0x00> to <0xFF>); it needs all 256"
            )
        self.add_bos = self.adds_bos(True)
        self.adds_space = self.flag("add_space_prefix", True)

    def encoder(self) -> SentencePieceEncoder:
        """Raises BadTokenizer."""
        return SentencePieceEncoder(self)


class SentencePieceEncoder:
    """Built in about 1 s for 262k tokens."""

    def __init__(self, vocabulary: SentencePieceVocabulary) -> None:
        """Raises BadTokenizer."""
        self._prefix = " " if vocabulary.adds_space else ""
        self.cut = _cut(vocabulary)
        self._vocab_size = len(vocabulary.texts)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=_model(vocabulary))
        except RuntimeError as error:
            raise BadTokenizer(f"the model file's tokens make no SentencePiece model: {error}") from error

    def begun(self, text: str, is_first: bool) -> str:
        return self._prefix + text

    def encode(self, text: str) -> I32:
        return np.array(self._model.encode(text), np.int32)

    def token_bytes(self, text: str, kind: int) -> bytes:
        if kind in CONTROLS:
            return text.encode()
        if kind == Kind.BYTE:
            match = _BYTE.fullmatch(text)
            assert match is not None, "the vocabulary was checked"
            return bytes.fromhex(match[1])
        return text.replace(SPACE, " ").encode()


def _cut(vocabulary: SentencePieceVocabulary) -> re.Pattern[str] | None:
    """The kinds of places that lie within no token: no merge crosses them, so that both sides are encoded alone."""
    said = (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED)
    texts = "\0".join(text for text, kind in zip(vocabulary.texts, vocabulary.types) if kind in said)
    cuts = [cut for cut in _CUTS if not re.search(cut, texts)]
    return re.compile("|".join(cuts)) if cuts else None


# ---------------------------------------------------------------------------------------------------------------
# The model, in protocol buffers' wire format

_VARINT, _BYTES, _FLOAT = 0, 2, 5
_BPE: Final = 2
_PIECE_TAIL: Final = struct.Struct("<BfBB")
_NO_TEXT: Final = "\U0010ffff"


def _model(vocabulary: SentencePieceVocabulary) -> bytes:
    """A ModelProto: 1 = the pieces (1 text, 2 score, 3 kind), 2 = the trainer's settings, 3 = the normalizer's."""
    pieces = []
    for index, (text, score, kind) in enumerate(zip(vocabulary.texts, vocabulary.scores, vocabulary.types)):
        if kind in CONTROLS:
            # Of several characters, so that no single one becomes it; and merges only make pieces of other kinds.
            text, kind = f"{_NO_TEXT}{index}", Kind.CONTROL
        pieces.append(_piece(text, score, kind))
    # With all bytes there nothing is unknown, but the package wants to know what would be; it has no id of the model.
    pieces.append(_piece(f"{_NO_TEXT}unknown", 0.0, Kind.UNKNOWN))
    trainer = _number(3, _BPE) + _number(35, 1)  # byte_fallback
    # add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces
    normalizer = _text(1, b"identity") + _number(3, 0) + _number(4, 0) + _number(5, 1)
    return b"".join([*pieces, _text(2, trainer), _text(3, normalizer)])


def _piece(text: str, score: float, kind: int) -> bytes:
    data = text.encode()
    tail = _PIECE_TAIL.pack(2 << 3 | _FLOAT, score, 3 << 3 | _VARINT, kind)
    if len(data) < 128 - 2 - len(tail):  # nearly all; 0.6 s less for 262k
        return b"\n%c\n%c%b%b" % (2 + len(data) + len(tail), len(data), data, tail)
    return _text(1, _text(1, data) + tail)


def _text(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(data)) + data


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes([value])
    return bytes([value & 127 | 128]) + _varint(value >> 7)

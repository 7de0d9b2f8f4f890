"""Text to token ids and back, from the vocabulary in a model file.

The encoding itself is a package's, per family (`byte_level`, `sentence_pieces`). Its vocabulary is built *without* the
model's control tokens, so that no text whatever becomes one: they are found by `ControlTokens`, and only where a caller
asks for it.

in     a GGUF file's metadata, or a folder's description; text; ids
out    int32 ids; bytes and text of ids
state  the vocabulary, fixed once built; the bytes of tokens, looked up once each
owner  whoever built it; everybody may call it, on one thread
ready  when it is built (0.08 s for 49k byte-level tokens, about 1 s for 262k of SentencePiece)
end    with its last reference
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from headrace.ops.weights.files import ModelFile
from headrace.ops.weights.gguf import GgufFile
from headrace.ops.wire import I32
from headrace.server.byte_level import ByteLevelVocabulary
from headrace.server.folder_text import FolderVocabulary
from headrace.server.vocabulary import BadText, BadTokenizer, TextEncoder, text_of

if TYPE_CHECKING:
    from headrace.server.sentence_pieces import SentencePieceVocabulary

__all__ = ["PIECE_CHARS", "BadText", "BadTokenizer", "ControlTokens", "Tokenizer", "check_vocabulary"]

PIECE_CHARS: Final = 8192
"""Long text is encoded in pieces of about this size: 3 to 10 ms each, and the `tokenizers` package takes some 100 bytes
of memory per token of a piece."""


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

    def __init__(self, vocabulary: ByteLevelVocabulary | SentencePieceVocabulary | FolderVocabulary) -> None:
        """Use `of`."""
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
        self._encoder: TextEncoder = vocabulary.encoder()
        self._raw: list[bytes | None] = [None] * self.vocab_size
        self._printed = self._raw.copy()
        self._control_ids = frozenset(vocabulary.control_ids())
        for index in self._control_ids:
            self._printed[index] = b""

    @classmethod
    def of(cls, file: ModelFile) -> Self:
        """A model's own. Raises BadTokenizer, BadModelFile."""
        return cls.from_gguf_metadata(file.metadata) if isinstance(file, GgufFile) else cls(FolderVocabulary(file))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, object]) -> Self:
        """Raises BadTokenizer."""
        return cls(_vocabulary(metadata))

    @cached_property
    def control(self) -> ControlTokens:
        """All control tokens."""
        return ControlTokens({self._texts[index]: index for index in self._control_ids if self._texts[index]})

    # -----------------------------------------------------------------------------------------------------------
    # Text to ids

    def encode(self, text: str) -> I32:
        """The ids of a text in which nothing is a control token, whatever it says. Raises BadText."""
        return self.encode_parts([text])

    def encode_with_control(self, text: str) -> I32:
        """The same, but control tokens count: for text that the operator wrote, never for a client's."""
        return self.encode_parts(self.control.split(text))

    def encode_parts(self, parts: Iterable[int | str]) -> I32:
        """Ids stand for themselves, texts between them are encoded."""
        ids = [self.encode_piece(piece) for piece in self.pieces(parts)]
        return np.concatenate(ids) if ids else np.empty(0, np.int32)

    def pieces(self, parts: Iterable[int | str]) -> Iterator[int | str]:
        """The parts, each text as the vocabulary begins one, and long ones cut where all texts are cut: encoding the
        pieces one by one gives the same ids."""
        cut = self._encoder.cut
        for number, part in enumerate(parts):
            if isinstance(part, int):
                yield part
                continue
            text = self._encoder.begun(part, number == 0) if part else part
            begin = 0
            while cut is not None and (place := cut.search(text, begin + PIECE_CHARS)):
                yield text[begin : place.start()]
                begin = place.start()
            yield text[begin:]

    def encode_piece(self, piece: int | str) -> I32:
        """One of the `pieces`. Raises BadText."""
        if isinstance(piece, int):
            return np.array([piece], np.int32)
        try:
            piece.encode()
        except UnicodeEncodeError:
            raise BadText from None
        return self._encoder.encode(piece)

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
            found = table[index] = self._encoder.token_bytes(self._texts[index], self._types[index])
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
# Families


def check_vocabulary(file: ModelFile) -> None:
    """Raises BadTokenizer, BadModelFile for a vocabulary that can't be used. Building nothing, it takes 5 ms for 49k
    tokens."""
    _ = _vocabulary(file.metadata) if isinstance(file, GgufFile) else FolderVocabulary(file)


def _vocabulary(metadata: Mapping[str, object]) -> ByteLevelVocabulary | SentencePieceVocabulary:
    family = text_of(metadata, "model")
    match family:
        case "gpt2":
            return ByteLevelVocabulary(metadata)
        case "llama":
            # Its package takes 30 ms to import, which only who needs it pays.
            from headrace.server.sentence_pieces import SentencePieceVocabulary

            return SentencePieceVocabulary(metadata)
    raise BadTokenizer(
        f"its tokenizer is of the kind {family[:80]!r} (tokenizer.ggml.model). Supported: 'gpt2' (byte-level byte-pair "
        "encoding), 'llama' (SentencePiece's byte-pair encoding)"
    )

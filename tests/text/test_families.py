"""Each family of tokenizers gives the ids of its original."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.server.byte_level import PRE_TOKENIZATIONS
from headrace.server.detokenizer import Detokenizer
from headrace.server.tokenizer import PIECE_CHARS, BadTokenizer, Tokenizer

Metadata = dict[str, Any]
SmallMetadata = Callable[..., Metadata]

WORDS = json.loads((Path(__file__).parent.parent / "data" / "words.json").read_text())
"""Texts, and for each family how its published pattern cuts them, by Python's `regex` package."""

# ---------------------------------------------------------------------------------------------------------------
# Byte-level families


@pytest.mark.parametrize("pre", WORDS["words"])
def test_a_family_cuts_text_into_its_words(pre: str) -> None:
    cutter = PRE_TOKENIZATIONS[pre].build()
    for text, words in zip(WORDS["texts"], WORDS["words"][pre], strict=True):
        assert [text[begin:end] for _, (begin, end) in cutter.pre_tokenize_str(text)] == words, text


def test_every_family_is_checked() -> None:
    others = {"smollm", "llama3", "llama-v3"}  # held to a definition of its own, and two names of llama-bpe
    assert {*WORDS["words"], *others} == PRE_TOKENIZATIONS.keys()


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [256]), ("tekken", [256]), ("gpt-2", [64, 65, 66])])
def test_a_whole_word_needs_no_merges_where_the_family_says_so(
    small_metadata: SmallMetadata, pre: str, ids: list[int]
) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(small_metadata(normal=["abc"], pre=pre, bos_token_id=0))
    assert tokenizer.encode("abc").tolist() == ids


def test_qwens_characters_are_composed_and_others_are_not(small_metadata: SmallMetadata) -> None:
    for pre, text in (("qwen2", "\u00e9"), ("gpt-2", "e\u0301")):
        tokenizer = Tokenizer.from_gguf_metadata(small_metadata(pre=pre))
        assert tokenizer.decode(tokenizer.encode("e\u0301").tolist()) == text


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)])
def test_a_family_knows_whether_a_prompt_begins_with_bos(small_metadata: SmallMetadata, pre: str, adds: bool) -> None:
    assert Tokenizer.from_gguf_metadata(small_metadata(pre=pre, bos_token_id=0)).add_bos is adds
    said = small_metadata(pre=pre, bos_token_id=0, add_bos_token=not adds)
    assert Tokenizer.from_gguf_metadata(said).add_bos is not adds


# ---------------------------------------------------------------------------------------------------------------
# SentencePiece

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "def main(argc, argv):\n    return 0\n",
    "a  b   c\n\n\nd",
    "日本語のテキストです。そうですか？はい。",
    "tokenization of unbelievably long words",
]


class Original:
    """A SentencePiece model trained here, and the same as a GGUF file has it."""

    def __init__(self, add_space: bool, user_defined: list[str]) -> None:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 3),
            model_writer=model,
            model_type="bpe",
            vocab_size=420,
            byte_fallback=True,
            character_coverage=0.98,
            normalization_rule_name="identity",
            add_dummy_prefix=add_space,
            remove_extra_whitespaces=False,
            user_defined_symbols=user_defined,
            control_symbols=["<start>"],
            minloglevel=2,
        )
        self.model = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        ids = range(self.model.vocab_size())
        self.metadata: Metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": [self._text(index, user_defined) for index in ids],
            "tokenizer.ggml.scores": [self.model.get_score(index) for index in ids],
            "tokenizer.ggml.token_type": [self._kind(index, user_defined) for index in ids],
            "tokenizer.ggml.bos_token_id": self.model.bos_id(),
            "tokenizer.ggml.eos_token_id": self.model.eos_id(),
            "tokenizer.ggml.add_space_prefix": add_space,
        }
        self.tokenizer = Tokenizer.from_gguf_metadata(self.metadata)

    def _text(self, index: int, user_defined: list[str]) -> str:
        """llama.cpp's converter writes whole words with the spaces that they stand for."""
        piece: str = self.model.id_to_piece(index)
        return piece.replace("\u2581", " ") if piece in user_defined else piece

    def _kind(self, index: int, user_defined: list[str]) -> int:
        if self.model.id_to_piece(index) in user_defined:
            return 4
        return {
            self.model.is_unknown(index): 2,
            self.model.is_control(index): 3,
            self.model.is_byte(index): 6,
        }.get(True, 1)


@pytest.fixture(scope="module")
def like_llama2() -> Original:
    return Original(add_space=True, user_defined=[])


@pytest.fixture(scope="module")
def like_gemma() -> Original:
    return Original(add_space=False, user_defined=["\n", "\n\n", "\u2581\u2581", "<table>"])


odd_text = st.lists(
    st.sampled_from(
        ["quick", "the", "日本", "。", "？", "😀", "e\u0301", "<start>", "</s>", "<unk>", "<table>", "<0x41>"]
    )
    | st.sampled_from([" ", "  ", "   ", "\n", "\n\n", "\t", "\u2581", "\u3000", "\x00", "\U0010ffff", "\U0010ffff3"])
    | st.text(max_size=4),
    max_size=12,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=odd_text)
@example(text="")
@example(text=" ")
@example(text="<s>")
def test_sentence_pieces_have_the_ids_of_the_original(like_llama2: Original, like_gemma: Original, text: str) -> None:
    for original in (like_llama2, like_gemma):
        ids = original.tokenizer.encode(text).tolist()
        assert ids == original.model.encode(text)
        assert not any(original.tokenizer.is_control(index) for index in ids)
        begin = " " if text and original is like_llama2 else ""
        assert original.tokenizer.decode(ids) == begin + text.replace("\u2581", " ")


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(odd_text, min_size=1, max_size=8), repeats=st.integers(1, 40))
def test_a_long_text_of_sentence_pieces_can_be_cut(
    like_llama2: Original, like_gemma: Original, parts: list[str], repeats: int
) -> None:
    text = "".join(parts) * repeats
    for original in (like_llama2, like_gemma):
        encoder = original.tokenizer._encoder
        assert encoder.cut is not None
        places = [0, *(place.start() for place in encoder.cut.finditer(text)), len(text)]
        ids = [encoder.encode(text[begin:end]) for begin, end in pairwise(places)]
        assert np.concatenate(ids).tolist() == encoder.encode(text).tolist()


def test_only_the_first_piece_of_a_long_text_begins_with_the_added_space(like_llama2: Original) -> None:
    text = "the quick brown fox。" * PIECE_CHARS
    pieces = list(like_llama2.tokenizer.pieces([text, 1, "dog"]))
    assert len(pieces) > 10
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == f" {text} dog"
    assert like_llama2.tokenizer.encode(text).tolist() == like_llama2.model.encode(text)


def test_no_kind_of_place_is_cut_that_a_token_lies_across(like_gemma: Original) -> None:
    metadata = like_gemma.metadata | {"tokenizer.ggml.tokens": list(like_gemma.metadata["tokenizer.ggml.tokens"])}
    metadata["tokenizer.ggml.tokens"][-1] = "fox\u2581x"
    text = "fox x" * PIECE_CHARS
    assert list(Tokenizer.from_gguf_metadata(metadata).pieces([text])) == [text]


def test_a_character_of_byte_tokens_is_given_out_when_it_is_whole(like_gemma: Original) -> None:
    tokenizer = like_gemma.tokenizer
    stream = Detokenizer(tokenizer)
    ids = tokenizer.encode("a😀b").tolist()
    assert [stream.push([index]) for index in ids] == ["a", "", "", "", "😀", "b"]
    assert stream.push(ids[1:3]) == "" and stream.push(ids[5:]) == "\ufffdb"


def test_control_tokens_of_sentence_pieces_count_in_the_operators_text(like_llama2: Original) -> None:
    tokenizer = like_llama2.tokenizer
    start = like_llama2.model.piece_to_id("<start>")
    assert tokenizer.encode_with_control("<start>the<start>").tolist() == [
        start,
        *like_llama2.model.encode("the"),
        start,
    ]
    assert tokenizer.decode([start]) == "" and tokenizer.token_text(start) == "<start>"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "gemma"}, "'gemma'.*'default'"),
        ({"precompiled_charsmap": [1]}, "precompiled_charsmap"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"scores": [0.5]}, "420 tokens and 1 scores"),
        ({"scores": None}, "scores is missing"),
        ({"scores": [float("nan")] * 420}, "scores of tokens that are no numbers"),
        ({"add_space_prefix": 1}, "add_space_prefix is '1'"),
        ({"token_type": [1] * 420}, "0 tokens for single bytes"),
        ({"bos_token_id": None}, "bos_token_id, which the model file does not have"),
    ],
)
def test_sentence_pieces_that_would_be_read_wrongly_are_refused(
    like_llama2: Original, keys: Metadata, message: str
) -> None:
    metadata = like_llama2.metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    with pytest.raises(BadTokenizer, match=message):
        Tokenizer.from_gguf_metadata(metadata)


def test_a_token_that_is_there_twice_is_refused(like_llama2: Original) -> None:
    tokens = list(like_llama2.metadata["tokenizer.ggml.tokens"])
    tokens[-1] = tokens[-2]
    with pytest.raises(BadTokenizer, match="make no SentencePiece model"):
        Tokenizer.from_gguf_metadata(like_llama2.metadata | {"tokenizer.ggml.tokens": tokens})

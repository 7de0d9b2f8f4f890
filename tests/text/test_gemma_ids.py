"""Gemma's ids, from the vocabulary in a real file, are those of `transformers`, which cuts text by another algorithm.

headrace gives the vocabulary to the `sentencepiece` package, which joins the best-scored pair of pieces. The tokenizer
of `transformers` is made of merges, which are drawn from the vocabulary here, by its own code for SentencePiece models.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import generate_merges  # type: ignore[attr-defined]

from headrace.ops.weights.gguf import GgufFile
from headrace.server.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
PARTS = [
    *(
        "The quick brown fox",
        " jumps over",
        "don't",
        " I'LL",
        "1234567",
        "3.14e-10",
        "ﬁnal",
        "naïve",
        "e\u0301",
        "Ωμέγα",
    ),
    *(
        "日本語のテキスト",
        "中文文本，标点。",
        "한국어",
        "ภาษาไทย",
        "हिन्दी",
        "العربية",
        "עברית",
        "𐍈",
        "𝔘𝔫𝔦",
        "￥",
        "\u3000",
    ),
    *("￥", "\u3000", "😀", "👩‍👩‍👧", "🏳️‍🌈", "👍🏽", "🇩🇪", "❤️", "\ufe0f", "\u200d"),
    *(" ", "  ", "   ", "    ", "        ", " " * 31, " " * 40, "\t", "\t\t"),
    *("\n", "\n\n", "\n" * 31, "\n" * 40, "\r\n", "\u00a0"),
    *("def f(x):\n    return x\n", "if (a && b) { c[i++]; }", "</div>", "<table>", "<td>", "<h1>", "`x`", "->", "\\n"),
    *("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<unused7>", "<0x41>", "<start_of", "[multimodal]"),
    *("\x00", "\x07", "\x7f", "\ufffd", "\ue000", "\U0010ffff", "x" * 70, "!?" * 20),
]
"""All but U+2581, which reads as a space for SentencePiece, wherever it comes from."""


@pytest.fixture(scope="module")
def gemma(gemma_file: Path) -> tuple[Tokenizer, Any]:
    """Ours, and that of `transformers`, both without control tokens in text."""
    with GgufFile.open(gemma_file) as file:
        metadata: dict[str, Any] = {**file.metadata}
        ours = Tokenizer.of(file)
    texts, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = {
        text: score for text, score, kind in zip(texts, metadata["tokenizer.ggml.scores"], kinds) if kind == NORMAL
    }
    vocabulary = {text: index for index, text in enumerate(texts)}
    theirs: Any = transformers.GemmaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary, scores))
    whole = [text for text, kind in zip(texts, kinds) if kind == USER_DEFINED]
    theirs.add_tokens([AddedToken(text, normalized=False, special=False) for text in whole])
    theirs.add_tokens(
        [AddedToken(text, normalized=False, special=True) for text, kind in zip(texts, kinds) if kind == CONTROL]
    )
    return ours, theirs


def test_texts_and_code_of_this_project_have_the_ids_of_transformers(gemma: tuple[Tokenizer, Any]) -> None:
    ours, theirs = gemma
    files = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("server/*.py"))[:40]]
    assert len(files) > 20
    for path in files:
        text = path.read_text()
        assert ours.encode_with_control(text).tolist() == theirs.encode(text, add_special_tokens=False), path


def test_any_mix_of_scripts_spaces_code_and_control_tokens_has_the_ids_of_transformers(
    gemma: tuple[Tokenizer, Any],
) -> None:
    ours, theirs = gemma
    rng = random.Random(0)
    texts = [*PARTS, *("".join(rng.choices(PARTS, k=rng.randrange(2, 12))) for _ in range(1000))]
    for text in texts:
        assert ours.encode_with_control(text).tolist() == theirs.encode(text, add_special_tokens=False), text
    assert ours.encode("\n    x").tolist() == theirs.encode("\n    x", add_special_tokens=False)


def test_an_indent_is_one_token(gemma: tuple[Tokenizer, Any]) -> None:
    ours, _ = gemma
    assert [ours.token_text(index) for index in ours.encode(":\n        x").tolist()] == [":", "\n", " " * 8, "x"]

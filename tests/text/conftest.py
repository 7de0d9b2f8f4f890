"""The default model's vocabulary and template, and small vocabularies of bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from headrace.ops.weights.gguf import GgufFile
from headrace.server.chat import TextModel
from headrace.server.models import DEFAULT_MODEL, cache_folder, fetch_model
from headrace.server.tokenizer import Tokenizer

Metadata: TypeAlias = dict[str, object]
SmallMetadata: TypeAlias = Callable[..., Metadata]


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file; downloaded where it is not cached yet."""
    return fetch_model(DEFAULT_MODEL, cache_folder(os.environ), lambda phase, done, total: None)


@pytest.fixture(scope="session")
def metadata(model_path: Path) -> Metadata:
    with GgufFile.open(model_path) as file:
        return {**file.metadata}


@pytest.fixture(scope="session")
def text_model(model_path: Path) -> TextModel:
    return TextModel.load(model_path)


@pytest.fixture(scope="session")
def tokenizer(text_model: TextModel) -> Tokenizer:
    return text_model.tokenizer


@pytest.fixture(scope="session")
def small_metadata() -> SmallMetadata:
    """`small_metadata(control=["<s>"], user_defined=["<think>"])`: every byte is a token, then come these."""

    def make(
        control: Sequence[str] = (), user_defined: Sequence[str] = (), normal: Sequence[str] = (), **keys: object
    ) -> Metadata:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [256 + number for number in range(256 - len(printable))]
        tokens = [chr(code) for code in printable + others]
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": [*tokens, *control, *user_defined, *normal],
            "tokenizer.ggml.token_type": [1] * 256 + [3] * len(control) + [4] * len(user_defined) + [1] * len(normal),
            "tokenizer.ggml.merges": [],
            **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
        }

    return make

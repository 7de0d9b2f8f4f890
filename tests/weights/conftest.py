"""Model files for the tests: the default model, and small ones written by the `gguf` package."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import pytest

from headrace.server.models import DEFAULT_MODEL, cache_folder, fetch_model

Value: TypeAlias = str | int | float | bool | list[Any]
WriteLlama: TypeAlias = Callable[..., Path]

KINDS = gguf.GGMLQuantizationType
SHAPE = {"vocab": 40, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "layers": 2}


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file; downloaded where it is not cached yet."""
    return fetch_model(DEFAULT_MODEL, cache_folder(os.environ), lambda phase, done, total: None)


@pytest.fixture(scope="session")
def write_llama(tmp_path_factory: pytest.TempPathFactory) -> WriteLlama:
    """`write_llama(keys={…}, shapes={…}, architecture="llama")`: a small Llama, with these keys and tensors changed.

    None takes a key or tensor away. Its tensors are of six kinds.
    """

    def write(
        keys: Mapping[str, Value | None] | None = None,
        shapes: Mapping[str, tuple[int, ...] | None] | None = None,
        architecture: str = "llama",
    ) -> Path:
        path = tmp_path_factory.mktemp("llama") / "small.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in (_small_keys() | dict(keys or {})).items():
            if value is not None:
                add_key(writer, key, value)
        for index, (name, shape) in enumerate((_small_shapes() | dict(shapes or {})).items()):
            if shape is not None:
                kinds = (KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1)
                add_tensor(writer, name, shape, kinds[index % 6] if len(shape) > 1 else KINDS.F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def add_key(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
    numbers = np.random.default_rng(len(name)).standard_normal(shape, dtype=np.float32)
    writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)


def _small_keys() -> dict[str, Value | None]:
    return {
        "general.name": "Small",
        "llama.vocab_size": SHAPE["vocab"],
        "llama.context_length": 256,
        "llama.embedding_length": SHAPE["hidden"],
        "llama.block_count": SHAPE["layers"],
        "llama.feed_forward_length": SHAPE["intermediate"],
        "llama.rope.dimension_count": SHAPE["head_dim"],
        "llama.rope.freq_base": 5000.0,
        "llama.attention.head_count": SHAPE["heads"],
        "llama.attention.head_count_kv": SHAPE["kv_heads"],
        "llama.attention.layer_norm_rms_epsilon": 0.00001,
        "tokenizer.ggml.tokens": [f"token {index} é" for index in range(SHAPE["vocab"])],
        "tokenizer.ggml.token_type": [1] * SHAPE["vocab"],
    }


def _small_shapes() -> dict[str, tuple[int, ...] | None]:
    hidden, intermediate = SHAPE["hidden"], SHAPE["intermediate"]
    query, key_value = SHAPE["heads"] * SHAPE["head_dim"], SHAPE["kv_heads"] * SHAPE["head_dim"]
    shapes: dict[str, tuple[int, ...] | None] = {
        "token_embd.weight": (SHAPE["vocab"], hidden),
        "output_norm.weight": (hidden,),
    }
    for layer in range(SHAPE["layers"]):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (hidden,),
            f"blk.{layer}.attn_q.weight": (query, hidden),
            f"blk.{layer}.attn_k.weight": (key_value, hidden),
            f"blk.{layer}.attn_v.weight": (key_value, hidden),
            f"blk.{layer}.attn_output.weight": (hidden, query),
            f"blk.{layer}.ffn_norm.weight": (hidden,),
            f"blk.{layer}.ffn_gate.weight": (intermediate, hidden),
            f"blk.{layer}.ffn_up.weight": (intermediate, hidden),
            f"blk.{layer}.ffn_down.weight": (hidden, intermediate),
        }
    return shapes

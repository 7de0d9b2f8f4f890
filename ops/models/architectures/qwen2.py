"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases of queries, keys and values.

Some configs give later layers a sliding window (`use_sliding_window`, `max_window_layers`); none of the published
models switches it on.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.ops.models.architecture import (
    Architecture,
    folder_decoder,
    folder_window_layers,
    gguf_decoder,
    must_have_windows,
    windows,
)
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.keys import Keys
from headrace.ops.weights.folder import ModelFolder
from headrace.ops.weights.gguf import GgufFile

WINDOW_TOKENS: Final = 4096
"""Where the config switches windows on, and doesn't say how long they are."""


def _from_gguf(keys: Keys, file: GgufFile) -> ModelConfig:
    return gguf_decoder(keys, file, "qwen2", rope_pairs="halves", qkv_bias=True)


def _from_folder(keys: Keys, file: ModelFolder) -> ModelConfig:
    return folder_decoder(keys, file, "qwen2", qkv_bias=True, **qwen_windows(keys))


def qwen_windows(keys: Keys) -> dict[str, Any]:
    """Fields of `ModelConfig`: the windows of a folder's config."""
    if not keys.flag("use_sliding_window", False) or keys.is_null("sliding_window"):
        must_have_windows(keys, ())
        return {}
    layers = keys.count("num_hidden_layers")
    chosen = folder_window_layers(keys)
    if chosen is None:
        full = keys.get("max_window_layers")
        if isinstance(full, bool) or not isinstance(full, int) or full < 0:
            raise keys.refused("it uses a sliding window, but says neither layer_types nor max_window_layers")
        chosen = tuple(range(min(full, layers), layers))
    return windows(keys.count("sliding_window", WINDOW_TOKENS), chosen, keys.count("max_position_embeddings"))


QWEN2: Final = Architecture("qwen2", "Qwen2ForCausalLM", "qwen2", _from_gguf, _from_folder)

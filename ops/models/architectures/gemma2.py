"""Gemma 2 (arXiv:2408.00118): norms behind attention and MLP too, GeGLU, soft caps of scores and logits, and a window
in every other layer, from the first on.

The residual stream begins with embeddings times sqrt(hidden). Weights of norms are stored less 1; in GGUF as they are.
GGUF has neither the order of the layers nor the scale of scores, and early files not even the caps and the window: then
those count that all published models have.
"""

from __future__ import annotations

import math
from typing import Any, Final

from headrace.ops.models.architecture import (
    Architecture,
    folder_decoder,
    folder_window_layers,
    gguf_decoder,
    windows,
)
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.keys import Keys
from headrace.ops.models.tensors import FOLDER_NAMES
from headrace.ops.weights.folder import ModelFolder
from headrace.ops.weights.gguf import GgufFile

NAME: Final = "gemma2"
HEAD_DIM: Final = 256
ATTENTION_CAP: Final = 50.0
LOGITS_CAP: Final = 30.0
WINDOW_TOKENS: Final = 4096
SHARED_SCALE_LAYERS: Final = 46
"""The 27B model's, see `gguf_attention_scale`."""
GEMMA_NAMES: Final = {
    **FOLDER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gemma_differences(keys: Keys, attention_cap: float = 0.0, logits_cap: float = 0.0) -> dict[str, Any]:
    """What the Gemmas have in common, as fields of `ModelConfig`. The caps: where the config doesn't say that there are
    others, or none."""

    def cap(key: str, default: float) -> float:
        return default if key not in keys and not keys.is_null(key) else keys.positive(key) if key in keys else 0.0

    keys.must_be("use_bidirectional_attention", (False,))
    return {
        "post_norms": True,
        "norm_offset": 1.0,
        "activation": "gelu",
        "embedding_scale": math.sqrt(keys.count("hidden_size")),
        "attention_scale": keys.positive("query_pre_attn_scalar") ** -0.5,
        "attention_cap": cap("attn_logit_softcapping", attention_cap),
        "logits_cap": cap("final_logit_softcapping", logits_cap),
    }


def gguf_attention_scale(keys: Keys, name: str, shared_scale_layers: int) -> float:
    """`ModelConfig.attention_scale` of a GGUF of the architecture `name`: the model with so many layers, and only that,
    scales scores by hidden / heads, of which the file says nothing."""
    if keys.count(f"{name}.block_count") != shared_scale_layers:
        return 0.0
    return float((keys.count(f"{name}.embedding_length") / keys.count(f"{name}.attention.head_count")) ** -0.5)


def _from_gguf(keys: Keys, file: GgufFile) -> ModelConfig:
    window = keys.count(f"{NAME}.attention.sliding_window", WINDOW_TOKENS)
    layers = _window_layers(keys.count(f"{NAME}.block_count"))
    return gguf_decoder(
        keys,
        file,
        NAME,
        rope_pairs="halves",
        post_norms=True,
        activation="gelu",
        embedding_scale=math.sqrt(keys.count(f"{NAME}.embedding_length")),
        attention_scale=gguf_attention_scale(keys, NAME, SHARED_SCALE_LAYERS),
        attention_cap=keys.positive(f"{NAME}.attn_logit_softcapping", ATTENTION_CAP),
        logits_cap=keys.positive(f"{NAME}.final_logit_softcapping", LOGITS_CAP),
        **windows(window, layers, keys.count(f"{NAME}.context_length")),
    )


def _from_folder(keys: Keys, file: ModelFolder) -> ModelConfig:
    layers = folder_window_layers(keys)
    if layers is None:
        layers = _window_layers(keys.count("num_hidden_layers"))
    window = windows(keys.count("sliding_window"), layers, keys.count("max_position_embeddings"))
    differences = gemma_differences(keys, ATTENTION_CAP, LOGITS_CAP)
    return folder_decoder(keys, file, NAME, head_dim=HEAD_DIM, names=GEMMA_NAMES, tied=True, **differences, **window)


def _window_layers(layers: int) -> tuple[int, ...]:
    return tuple(range(0, layers, 2))


GEMMA2: Final = Architecture(NAME, "Gemma2ForCausalLM", "gemma2", _from_gguf, _from_folder, GEMMA_NAMES)

"""Gemma 2 (arXiv:2408.00118): norms behind attention and MLP too, GeGLU, soft caps of scores and logits, and a window
in every other layer, from the first on.

The residual stream begins with embeddings times sqrt(hidden). Weights of norms are stored less 1.
"""

from __future__ import annotations

import math
from typing import Any, Final

from headrace.ops.models.architecture import Architecture, folder_decoder, folder_window_layers, windows
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.keys import Keys
from headrace.ops.models.tensors import FOLDER_NAMES
from headrace.ops.weights.folder import ModelFolder

HEAD_DIM: Final = 256
GEMMA_NAMES: Final = {
    **FOLDER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gemma_differences(keys: Keys) -> dict[str, Any]:
    """What the Gemmas have in common, as fields of `ModelConfig`."""
    keys.must_be("use_bidirectional_attention", (False,))
    return {
        "post_norms": True,
        "norm_offset": 1.0,
        "activation": "gelu",
        "embedding_scale": math.sqrt(keys.count("hidden_size")),
        "attention_scale": keys.positive("query_pre_attn_scalar") ** -0.5,
        "attention_cap": keys.positive("attn_logit_softcapping") if "attn_logit_softcapping" in keys else 0.0,
        "logits_cap": keys.positive("final_logit_softcapping") if "final_logit_softcapping" in keys else 0.0,
    }


def _from_folder(keys: Keys, file: ModelFolder) -> ModelConfig:
    layers = folder_window_layers(keys)
    if layers is None:
        layers = tuple(range(0, keys.count("num_hidden_layers"), 2))
    window = windows(keys.count("sliding_window"), layers, keys.count("max_position_embeddings"))
    return folder_decoder(
        keys, file, "gemma2", head_dim=HEAD_DIM, names=GEMMA_NAMES, **gemma_differences(keys), **window
    )


GEMMA2: Final = Architecture("gemma2", "Gemma2ForCausalLM", None, _from_folder, GEMMA_NAMES)

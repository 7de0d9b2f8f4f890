"""Gemma 3 (arXiv:2503.19786), its text models: Gemma 2 with norms of each head's query and key in place of soft caps,
and five layers with a window to each one without, the first five first.

The layers without a window turn by a larger theta, and only they are scaled for long contexts. GGUF stores weights of
norms with their 1, and neither the order of the layers nor, as a rule, the windows' theta.
"""

from __future__ import annotations

import math
from typing import Final

from headrace.ops.models.architecture import (
    Architecture,
    folder_decoder,
    folder_window_layers,
    gguf_decoder,
)
from headrace.ops.models.architectures.gemma2 import (
    GEMMA_NAMES,
    HEAD_DIM,
    gemma_differences,
    gguf_attention_scale,
)
from headrace.ops.models.config import ModelConfig, Rope
from headrace.ops.models.keys import Keys
from headrace.ops.models.rope import refuse_both, refuse_unread, scaled_rope
from headrace.ops.weights.folder import ModelFolder
from headrace.ops.weights.gguf import GgufFile

NAME: Final = "gemma3"
PATTERN: Final = 6
"""Every so many layers one has no window."""
FULL_THETA: Final = 1e6
WINDOW_THETA: Final = 1e4
SHARED_SCALE_LAYERS: Final = 62
"""The 27B model's, see `gguf_attention_scale`."""


def _from_gguf(keys: Keys, file: GgufFile) -> ModelConfig:
    layers, hidden = keys.count(f"{NAME}.block_count"), keys.count(f"{NAME}.embedding_length")
    window = keys.count(f"{NAME}.attention.sliding_window")
    theta = keys.positive(f"{NAME}.rope.freq_base_swa", WINDOW_THETA)
    return gguf_decoder(
        keys,
        file,
        NAME,
        rope_pairs="halves",
        qk_norm=True,
        post_norms=True,
        activation="gelu",
        embedding_scale=math.sqrt(hidden),
        attention_scale=gguf_attention_scale(keys, NAME, SHARED_SCALE_LAYERS),
        window_rope=Rope(theta),
        # Also where the window hides nothing: its layers turn by their own theta.
        window_tokens=window,
        window_layers=_window_layers(layers),
    )


def _from_folder(keys: Keys, file: ModelFolder) -> ModelConfig:
    layers = folder_window_layers(keys)
    if layers is None:
        layers = _window_layers(keys.count("num_hidden_layers"), keys.count("sliding_window_pattern", PATTERN))
    head_dim = keys.count("head_dim", HEAD_DIM)
    # Either one object for each kind of layer, or keys of their own for the windows' theta and the others' scaling.
    by_kind = keys.within("rope_parameters")
    full, window = by_kind.within("full_attention"), by_kind.within("sliding_attention")
    refuse_unread(by_kind, "rope_parameters")
    refuse_both(keys)
    theta = full.positive("rope_theta", keys.positive("rope_theta", FULL_THETA))
    window_theta = window.positive("rope_theta", keys.positive("rope_local_base_freq", WINDOW_THETA))
    return folder_decoder(
        keys,
        file,
        NAME,
        head_dim=head_dim,
        names=GEMMA_NAMES,
        tied=True,
        rope=scaled_rope(theta, keys.within("rope_scaling") if "rope_scaling" in keys else full, head_dim),
        window_rope=scaled_rope(window_theta, window, head_dim),
        qk_norm=True,
        **gemma_differences(keys),
        window_tokens=keys.count("sliding_window"),
        window_layers=layers,
    )


def _window_layers(layers: int, pattern: int = PATTERN) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if (layer + 1) % pattern)


GEMMA3: Final = Architecture(NAME, "Gemma3ForCausalLM", "gemma3_text", _from_gguf, _from_folder, GEMMA_NAMES)

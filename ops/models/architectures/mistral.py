"""Mistral (arXiv:2310.06825): Llama, with sliding-window attention in all layers where the config sets a window.

In GGUF it is called `llama`, and the files have no window.
"""

from __future__ import annotations

from typing import Final

from headrace.ops.models.architecture import Architecture, folder_decoder, must_have_windows, windows
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.keys import Keys
from headrace.ops.weights.folder import ModelFolder

WINDOW_TOKENS: Final = 4096
"""Where the config doesn't say null, or another number."""


def _from_folder(keys: Keys, file: ModelFolder) -> ModelConfig:
    window = 0 if keys.is_null("sliding_window") else keys.count("sliding_window", WINDOW_TOKENS)
    layers = tuple(range(keys.count("num_hidden_layers"))) if window else ()
    must_have_windows(keys, layers)
    return folder_decoder(keys, file, "mistral", **windows(window, layers, keys.count("max_position_embeddings")))


MISTRAL: Final = Architecture("mistral", "MistralForCausalLM", "mistral", None, _from_folder)

"""Mistral (arXiv:2310.06825): Llama, with sliding-window attention in all layers where the config sets a window.

In GGUF it is called `llama`, and the files have no window.
"""

from __future__ import annotations

from typing import Final

from headrace.ops.models.architecture import Architecture, folder_decoder, windows
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.keys import Keys
from headrace.ops.weights.folder import ModelFolder


def _from_folder(keys: Keys, file: ModelFolder) -> ModelConfig:
    window = keys.count("sliding_window") if "sliding_window" in keys else 0
    layers, context = keys.count("num_hidden_layers"), keys.count("max_position_embeddings")
    return folder_decoder(keys, file, "mistral", **windows(window, tuple(range(layers)), context))


MISTRAL: Final = Architecture("mistral", "MistralForCausalLM", None, _from_folder)

"""Qwen3 (arXiv:2505.09388), its dense models: Llama with RMSNorm of each head's query and key before they are turned.

A head has 128 dimensions, whatever the hidden size is divided by.
"""

from __future__ import annotations

from typing import Final

from headrace.ops.models.architecture import Architecture, folder_decoder, gguf_decoder
from headrace.ops.models.architectures.qwen2 import qwen_windows
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.keys import Keys
from headrace.ops.weights.folder import ModelFolder
from headrace.ops.weights.gguf import GgufFile

HEAD_DIM: Final = 128


def _from_gguf(keys: Keys, file: GgufFile) -> ModelConfig:
    return gguf_decoder(keys, file, "qwen3", rope_pairs="halves", qk_norm=True)


def _from_folder(keys: Keys, file: ModelFolder) -> ModelConfig:
    return folder_decoder(keys, file, "qwen3", head_dim=HEAD_DIM, qk_norm=True, **qwen_windows(keys))


QWEN3: Final = Architecture("qwen3", "Qwen3ForCausalLM", "qwen3", _from_gguf, _from_folder)

"""Llama (arXiv:2302.13971) up to 3.3, and all that took its form: SmolLM, Mistral in GGUF, many others.

RMSNorm before attention and MLP, rotary embedding, grouped-query attention, a gated MLP with SiLU. Embeddings tied or
not. Llama 3.1 and later scale their rotary embedding (`rope.llama3`).
"""

from __future__ import annotations

from typing import Final

from headrace.ops.models.architecture import Architecture, folder_decoder, gguf_decoder, must_have_windows
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.keys import Keys
from headrace.ops.weights.folder import ModelFolder
from headrace.ops.weights.gguf import GgufFile


def _from_gguf(keys: Keys, file: GgufFile) -> ModelConfig:
    return gguf_decoder(keys, file, "llama", rope_pairs="interleaved")


def _from_folder(keys: Keys, file: ModelFolder) -> ModelConfig:
    must_have_windows(keys, ())
    return folder_decoder(keys, file, "llama")


LLAMA: Final = Architecture("llama", "LlamaForCausalLM", "llama", _from_gguf, _from_folder)

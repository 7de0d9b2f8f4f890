"""From a model file to a model: which class builds which architecture.

A new architecture is one file beside `llama.py` and one line in `_ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from headrace.ops.models.config import ModelConfig
from headrace.ops.models.llama import Llama
from headrace.ops.models.model import Model
from headrace.ops.models.stored_weights import StoredWeights
from headrace.ops.weights.gguf import GgufFile

_TORCH: Final[dict[str, Callable[[StoredWeights, ModelConfig, int], Model]]] = {"llama": Llama}
"""By `ModelConfig.architecture`, which refuses all others."""


def load_model(path: str, dtype: torch.dtype, context_tokens: int, progress: Callable[[int, int], None]) -> Model:
    """Read a GGUF file into layers of torch. Raises OSError, BadModelFile or UnsupportedModel with a sentence for the
    user.

    `context_tokens`: the longest context that will be asked for; `progress(done, total)` is called with bytes of the
    file, after each tensor.
    """
    with GgufFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        return _TORCH[config.architecture](StoredWeights(file, dtype, progress), config, context_tokens)


def load_compiled(
    path: str,
    dtype: torch.dtype,
    quantized: bool,
    context_tokens: int,
    threads: int,
    progress: Callable[[int, int], None],
) -> Model:
    """The same for the compiled kernels, which must have been compiled (`ops.simd.prepare`)."""
    from headrace.ops.models.compiled_llama import CompiledLlama  # numba, half a second

    with GgufFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        assert config.architecture == "llama"
        return CompiledLlama(StoredWeights(file, dtype, progress), config, context_tokens, quantized, threads)

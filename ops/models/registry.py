"""From a model file to a model, in torch's layers or in compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from headrace.ops.models.architectures import read_config
from headrace.ops.models.decoder import Decoder
from headrace.ops.models.model import Model
from headrace.ops.models.stored_weights import StoredWeights
from headrace.ops.weights.files import open_model_file

if TYPE_CHECKING:
    from headrace.ops.cuda.decoder import DeviceDecoder


def load_model(path: str, dtype: torch.dtype, context_tokens: int, progress: Callable[[int, int], None]) -> Model:
    """Read a GGUF file or a folder into layers of torch. Raises OSError, BadModelFile or UnsupportedModel with a
    sentence for the user.

    `context_tokens`: the longest context that will be asked for; `progress(done, total)` is called with bytes of the
    weights, after each tensor.
    """
    with open_model_file(path) as file:
        config = read_config(file)
        return Decoder(StoredWeights(file, config, dtype, progress), config, context_tokens)


def load_on_device(
    path: str,
    dtype: torch.dtype,
    context_tokens: int,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> DeviceDecoder:
    """The same for a card, tensor by tensor: what the host holds of them is one at a time."""
    from headrace.ops.cuda.decoder import DeviceDecoder  # triton

    with open_model_file(path) as file:
        config = read_config(file)
        return DeviceDecoder(StoredWeights(file, config, dtype, progress), config, context_tokens, device)


def load_compiled(
    path: str,
    dtype: torch.dtype,
    quantized: bool,
    context_tokens: int,
    threads: int,
    progress: Callable[[int, int], None],
) -> Model:
    """The same for the compiled kernels, which must have been compiled (`ops.simd.prepare`)."""
    from headrace.ops.models.compiled_decoder import CompiledDecoder  # numba, half a second

    with open_model_file(path) as file:
        config = read_config(file)
        return CompiledDecoder(StoredWeights(file, config, dtype, progress), config, context_tokens, quantized, threads)

"""From a model file to a model, in torch's layers or in compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from headrace.ops.models.architectures import read_config
from headrace.ops.models.decoder import Decoder
from headrace.ops.models.model import Model
from headrace.ops.models.stored_weights import StoredWeights
from headrace.ops.weights.dequantize import PLAIN
from headrace.ops.weights.files import ModelFile, open_model_file

if TYPE_CHECKING:
    from headrace.ops.cuda.decoder import DeviceDecoder
    from headrace.ops.models.compiled_decoder import CompiledDecoder


def load_model(
    path: str,
    dtype: torch.dtype,
    context_tokens: int,
    progress: Callable[[int, int], None],
    kernel_cache: str = "",
) -> Model:
    """Read a GGUF file or a folder into layers of torch. Raises OSError, BadModelFile or UnsupportedModel with a
    sentence for the user.

    `context_tokens`: the longest context that will be asked for; `progress(done, total)` is called with bytes of the
    weights, after each tensor; `kernel_cache`: a folder for what is compiled.
    """
    with open_model_file(path) as file:
        config = read_config(file)
        _keep_decoders(file, kernel_cache)
        return Decoder(StoredWeights(file, config, dtype, progress), config, context_tokens)


def load_on_device(
    path: str,
    dtype: torch.dtype,
    context_tokens: int,
    device: torch.device,
    progress: Callable[[int, int], None],
    kernel_cache: str = "",
) -> DeviceDecoder:
    """The same for a card, tensor by tensor: what the host holds of them is one at a time."""
    from headrace.ops.cuda.decoder import DeviceDecoder  # triton

    with open_model_file(path) as file:
        config = read_config(file)
        _keep_decoders(file, kernel_cache)
        return DeviceDecoder(StoredWeights(file, config, dtype, progress), config, context_tokens, device)


def load_compiled(
    path: str,
    dtype: torch.dtype,
    quantized: bool,
    context_tokens: int,
    threads: int,
    progress: Callable[[int, int], None],
) -> CompiledDecoder:
    """The same for the compiled kernels, which must have been compiled (`ops.simd.prepare`)."""
    from headrace.ops.models.compiled_decoder import CompiledDecoder  # numba, half a second

    with open_model_file(path) as file:
        config = read_config(file)
        return CompiledDecoder(StoredWeights(file, config, dtype, progress), config, context_tokens, quantized, threads)


def _keep_decoders(file: ModelFile, folder: str) -> None:
    """Numba, which takes half a second to import, only for a file with blocks to decode."""
    if any(info.kind not in PLAIN for info in file.tensors.values()):
        from headrace.ops.simd.compiler import keep

        keep(folder)

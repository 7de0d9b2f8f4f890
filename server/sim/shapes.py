"""Shapes of models and figures of devices, by the names that `headrace simulate` takes.

A device's figures are its data sheet's (dense bf16, one direction of a link); what of them a server reaches is
`Efficiency`, one guess for all devices, stated here so that it can be argued with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.kvcache.layout import KvLayout, LayerGroup

VALUE_BYTES: Final = 2
"""Weights, activations and KV are bfloat16."""


class ModelShape(msgspec.Struct, frozen=True):
    """A dense Llama-like transformer: grouped-query attention, gated MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_tokens: int
    tied_embeddings: bool = False

    @property
    def layer_parameters(self) -> int:
        """Of all layers' projections; norms are a ten-thousandth of it."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Of the output projection."""
        return self.hidden * self.vocab

    @property
    def weights_bytes(self) -> int:
        tables = 1 if self.tied_embeddings else 2
        return (self.layer_parameters + tables * self.head_parameters) * VALUE_BYTES

    def layout(self, page_tokens: int) -> KvLayout:
        """The model's KV in pages, one group for all layers."""
        group = LayerGroup("full", 0, tuple(range(self.layers)), self.kv_heads, self.head_dim, VALUE_BYTES)
        return KvLayout(page_tokens, (group,))


class DeviceFigures(msgspec.Struct, frozen=True):
    """What one device can do at most."""

    flops: float
    """Of a dense bf16 product, per second."""
    memory_bytes_per_s: float
    memory_bytes: float
    copy_bytes_per_s: float
    """Between the device and host memory, in one direction."""
    link_bytes_per_s: float
    """Between devices, in one direction, for tensor parallelism."""
    loads_overlap: bool = True
    """Loads from the host have an engine of their own. Where not (a CPU), they take their time from the steps."""


class Efficiency(msgspec.Struct, frozen=True):
    """What of the data sheet a server reaches, and what a step costs beside."""

    flops: float = 0.6
    """Of large products. Published figures of serving engines are 0.5 to 0.7."""
    attention_flops: float = 0.5
    memory: float = 0.8
    copy: float = 0.85
    step_us: float = 300.0
    """Of a step, whatever is in it: the launch, the sampler, the way to the host and back."""
    layer_us: float = 5.0
    """Of a layer: its kernels' starts and ends."""
    reduce_us: float = 10.0
    """Latency of one all-reduce between devices, two a layer."""


EFFICIENCY: Final = Efficiency()

MODELS: Final[Mapping[str, ModelShape]] = {
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128_256, 131_072),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128_256, 131_072),
    "mistral-7b": ModelShape(32, 4096, 32, 8, 128, 14336, 32_768, 32_768),
    "qwen2.5-7b": ModelShape(28, 3584, 28, 4, 128, 18944, 152_064, 131_072),
    "qwen2.5-32b": ModelShape(64, 5120, 40, 8, 128, 27648, 152_064, 131_072),
    "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49_152, 8192, tied_embeddings=True),
    "smollm2-1.7b": ModelShape(24, 2048, 32, 32, 64, 8192, 49_152, 8192, tied_embeddings=True),
}

DEVICES: Final[Mapping[str, DeviceFigures]] = {
    "h200": DeviceFigures(989e12, 4.8e12, 141e9, 64e9, 450e9),
    "h100": DeviceFigures(989e12, 3.35e12, 80e9, 64e9, 450e9),
    "a100": DeviceFigures(312e12, 2.04e12, 80e9, 32e9, 300e9),
    "l4": DeviceFigures(121e12, 0.3e12, 24e9, 32e9, 32e9),
    # Two cores of a Zen 4 server, measured rather than from a sheet; hence no more than half of it is counted on.
    "cpu": DeviceFigures(0.6e12, 40e9, 16e9, 4e9, 4e9, loads_overlap=False),
}

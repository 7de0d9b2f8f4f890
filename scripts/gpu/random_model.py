"""Models of random weights that no file holds: the same ones for every decoder that asks for them."""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from headrace.ops.backend import DTYPES, Made, Weights
from headrace.ops.cuda.backend import CudaBackend
from headrace.ops.cuda.decoder import DeviceDecoder
from headrace.ops.device_worker import served_groups
from headrace.ops.models.config import ModelConfig, Rope
from headrace.ops.models.stored_weights import StoredWeights
from headrace.ops.streams import Streams
from headrace.ops.wire import BatchRing, Reply, RingGeometry, Start

RING_SLOTS: Final = 3
"""Two steps under way, and one being prepared."""


def llama(
    *, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int, context: int
) -> ModelConfig:
    """A Llama of any size."""
    return ModelConfig(
        architecture="llama",
        name=f"a random Llama of {layers} layers",
        vocab_size=vocab,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        rope=Rope(5e5),
        rotary_dim=head_dim,
        rope_pairs="interleaved",
        norm_eps=1e-5,
        context_tokens=context,
        tied_embeddings=False,
        parameters=0,
    )


def llama_8b(context: int) -> ModelConfig:
    """The shape of Llama 3's 8B: 8.03 billion weights."""
    return llama(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=128256,
        context=context,
    )


class RandomWeights(StoredWeights):
    """Drawn by name when asked for, in float32, then rounded: both dtypes have the same model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._config = config
        self._device = device

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        shape = self._shape(name)
        random = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(shape, generator=random, device=self._device)
        if len(shape) == 1:
            return (drawn.mul_(0.2) if name.endswith(".bias") else drawn.mul_(0.2).add_(1)).to(dtype)
        # Twice the usual scale: attention weights that differ, logits that are far apart.
        return drawn.mul_((4 if name.startswith("token") else 2) / math.sqrt(shape[1])).to(dtype)

    def fused(self, names: Sequence[str], dtype: torch.dtype | None = None) -> Tensor:
        return torch.cat([self.read(name, dtype or self.dtype) for name in names])

    def _shape(self, name: str) -> tuple[int, ...]:
        config = self._config
        inner, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        matrices = {
            "token_embd": (config.vocab_size, config.hidden),
            "output": (config.vocab_size, config.hidden),
            "attn_q": (inner, config.hidden),
            "attn_k": (kv, config.hidden),
            "attn_v": (kv, config.hidden),
            "attn_output": (config.hidden, inner),
            "ffn_gate": (config.intermediate, config.hidden),
            "ffn_up": (config.intermediate, config.hidden),
            "ffn_down": (config.hidden, config.intermediate),
        }
        return matrices.get(name.split(".")[-2], (config.hidden,))


class RandomBackend(CudaBackend):
    """A card's backend, pinned memory, pools, streams and graphs included, over a model that no file holds."""

    def __init__(
        self, config: ModelConfig, start: Start, streams: Streams | None = None, *, drawn_on_card: bool = False
    ) -> None:
        """`drawn_on_card`: eight billion numbers take minutes on a host. But other generators draw others, so that a
        decoder on the host would have another model."""
        super().__init__(start, _unheard, streams)
        self._config = config
        self._source = self._device if drawn_on_card else torch.device("cpu")

    def load(self, start: Start) -> Weights:
        weights = RandomWeights(self._config, DTYPES[start.dtype], self._source)
        self._model = DeviceDecoder(weights, self._config, start.max_context_tokens, self._device)
        return self._model


def _unheard(reply: Reply) -> None:
    """Nobody waits for this worker."""


def start_of(
    config: ModelConfig, dry: bool, dtype: str, slots: int, context: int, most_tokens: int, host_slot_bytes: int = 0
) -> Start:
    """What a server would tell a worker. `most_tokens`: of a batch. Layers with a window are a group of their own."""
    pages = -(-context // 16)
    words = 16 * (most_tokens + slots * (2 * pages + 32)) + 8192
    return Start(
        model_path="",
        dtype=dtype,
        quantization="none",
        threads=torch.get_num_threads(),
        max_slots=slots,
        max_context_tokens=context,
        page_tokens=16,
        ring=RingGeometry(RING_SLOTS, 4 * words, slots, 256, config.vocab_size),
        groups=served_groups(config)[-1],
        host_slot_bytes=host_slot_bytes,
        kernels="triton",
        device="cpu" if dry else "cuda",
    )


def shared_ring(start: Start) -> tuple[mmap.mmap, BatchRing]:
    """Memory that a card can reach, and the ring in it."""
    memory = mmap.mmap(-1, start.ring.size_bytes)
    return memory, BatchRing(memory, start.ring)


def made(
    backend: CudaBackend, start: Start, pages: int, ring: mmap.mmap, host: mmap.mmap | None = None
) -> tuple[Made, Weights]:
    """Pools and runner of a backend; each group has so many pages."""
    weights = backend.load(start)
    return backend.make_runner(start, [pages] * len(start.groups), ring, host), weights

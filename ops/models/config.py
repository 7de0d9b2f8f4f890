"""The shape of a model and all that makes its layers differ from Llama's: the server plans with it, the worker builds
from it. No torch here.

`architectures` reads it from model files. A key or tensor whose meaning is not known there is refused, never ignored:
it might be what makes the model's output differ (a rope scaling, a bias, a soft cap), and then every answer would be
quietly wrong.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

MAX_CONTEXT_TOKENS: Final = 1 << 24
KEY_BLOCK_TOKENS: Final = 64
"""Attention on a CPU reads so many keys at a time, from a multiple of so many on."""

Pairs = Literal["interleaved", "halves"]


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding (arXiv:2104.09864): pair i of a head turns by position · theta^(-2i / rotary_dim) / divisor."""

    theta: float
    divisors: tuple[float, ...] = ()
    """A scaling: of each pair. Empty: all are 1."""


class ModelConfig(msgspec.Struct, frozen=True):
    """The shape of a model, the constants of its layers, and how its weights are stored."""

    architecture: str
    name: str
    """For people: printable, at most `keys.MAX_NAME_CHARS`."""
    vocab_size: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope: Rope
    rotary_dim: int
    """How many of a head's dimensions are rotated, from the first on."""
    rope_pairs: Pairs
    """How the rows of q and k are stored: dimensions (2i, 2i + 1) rotate together, or (i, i + rotary_dim / 2). The
    layers turn interleaved pairs, `StoredWeights` reorders the others.

    Llama's GGUF is "interleaved" ("NORM" in llama.cpp): its converter reorders the rows, head by head, from Hugging
    Face's halves. With the default model and interleaved pairs all greedy ids of the reference come out and
    log-probabilities differ by 2e-5; with halves, a third of the ids."""
    norm_eps: float
    context_tokens: int
    """The longest context that the model was trained for."""
    tied_embeddings: bool
    """The output projection is the embedding table."""
    parameters: int
    qkv_bias: bool = False
    """A bias is added to queries, keys and values, before all else."""
    qk_norm: bool = False
    """Each head's query and key is RMS-normalized, with one weight for all heads, before it is turned."""
    post_norms: bool = False
    """What attention and the MLP give is normalized before it is added to the residual stream."""
    norm_offset: float = 0.0
    """What is to be added to the stored weights of norms."""
    activation: Literal["silu", "gelu"] = "silu"
    """Of the gate; "gelu" is its tanh form."""
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    """Of scores; 0: 1 / sqrt(head_dim)."""
    attention_cap: float = 0.0
    """Scores become cap · tanh(score / cap); 0: they stay as they are."""
    logits_cap: float = 0.0
    """The same of logits."""
    window_tokens: int = 0
    """In `window_layers` a token sees itself and so many - 1 before it."""
    window_layers: tuple[int, ...] = ()
    window_rope: Rope | None = None
    """Of the window layers, where it isn't that of the others."""

    @property
    def score_scale(self) -> float:
        """What a query's product with a key is multiplied by."""
        return self.attention_scale or self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """A token of the layer sees itself and so many - 1 before it; 0: all of them."""
        return self.window_tokens if layer in self.window_layers else 0

    @property
    def window_span(self) -> int:
        """How many positions up to its own a token of a window layer may touch: kernels read keys in blocks."""
        return self.window_tokens + KEY_BLOCK_TOKENS - 1 if self.window_layers else 0

    def rope_of(self, layer: int) -> Rope:
        return self.window_rope if self.window_rope is not None and layer in self.window_layers else self.rope

    @property
    def not_compiled(self) -> str:
        """Why the compiled kernels (`ops.simd`) can't run the model; empty where they can."""
        for name, size in (("heads", self.head_dim), ("rotated parts of heads", self.rotary_dim)):
            if size % 16:
                return f"its {name} have {size} dimensions, which is no multiple of 16"
        return ""

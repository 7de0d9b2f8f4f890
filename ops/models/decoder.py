"""A decoder of any of the architectures, in torch's layers: the meaning of what `simd` computes, and what runs where
that can't.

The layer is Llama's (arXiv:2302.13971); what others have besides is there where `ModelConfig` says so.
"""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.activation import gated
from headrace.ops.attention import Scores
from headrace.ops.kv_copy import CopyPages, copy_pages
from headrace.ops.linear import Linear, pack_linear
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.stored_weights import StoredWeights
from headrace.ops.norm import RmsNorm
from headrace.ops.output import OutputProjection
from headrace.ops.rotary import Rotary
from headrace.ops.step_kv import StepKv


class DecoderLayer:
    """The weights of one layer: `Wq Wk Wv` are one projection, gate and up are one."""

    def __init__(self, weights: StoredWeights, config: ModelConfig, index: int) -> None:
        def norm(name: str, dtype: torch.dtype = weights.dtype) -> RmsNorm:
            return RmsNorm(weights.norm(f"blk.{index}.{name}"), config.norm_eps, dtype)

        def linear(*names: str) -> Linear:
            return pack_linear(weights.fused([f"blk.{index}.{name}.weight" for name in names]))

        self.rope = config.rope_of(index)
        self.scores = Scores(config.score_scale, config.window(index), config.attention_cap)
        self.attention_norm = norm("attn_norm")
        self.qkv = linear("attn_q", "attn_k", "attn_v")
        biases = [f"blk.{index}.{name}.bias" for name in ("attn_q", "attn_k", "attn_v")]
        self.qkv_bias = weights.fused(biases) if config.qkv_bias else None
        self.query_norm = norm("attn_q_norm") if config.qk_norm else None
        self.key_norm = norm("attn_k_norm") if config.qk_norm else None
        self.output = linear("attn_output")
        # These are added to the residual stream, which is float32.
        self.after_attention = norm("post_attention_norm", torch.float32) if config.post_norms else None
        self.mlp_norm = norm("ffn_norm")
        self.gate_up = linear("ffn_gate", "ffn_up")
        self.down = linear("ffn_down")
        self.after_mlp = norm("post_ffw_norm", torch.float32) if config.post_norms else None

    @property
    def size_bytes(self) -> int:
        attention = (self.attention_norm, self.qkv, self.query_norm, self.key_norm, self.output, self.after_attention)
        parts = (*attention, self.mlp_norm, self.gate_up, self.down, self.after_mlp)
        biases = 0 if self.qkv_bias is None else self.qkv_bias.nbytes
        return biases + sum(part.size_bytes for part in parts if part is not None)


class Decoder:
    """The model of one file, in one dtype. The residual stream is float32 in every dtype."""

    def __init__(self, weights: StoredWeights, config: ModelConfig, context_tokens: int) -> None:
        """`context_tokens`: the longest context that will be asked for."""
        self.config = config
        self.copy_pages: CopyPages = copy_pages
        self.back_up_pages: CopyPages = partial(copy_pages, after_layer=os.sched_yield)
        self._embedding = weights.read("token_embd.weight", weights.dtype)
        self._layers = [DecoderLayer(weights, config, index) for index in range(config.layers)]
        self._norm = RmsNorm(weights.norm("output_norm"), config.norm_eps, weights.dtype)
        # Lookups need the table as rows, the output projection needs it packed: 56 MB more in bfloat16, and half the
        # time of the largest matrix product of a decode step.
        tied = config.tied_embeddings
        self._output = OutputProjection(self._embedding if tied else weights.read("output.weight", weights.dtype))
        self._rotaries = {
            rope: Rotary(context_tokens, config.rotary_dim, rope)
            for rope in dict.fromkeys(layer.rope for layer in self._layers)
        }

    @property
    def size_bytes(self) -> int:
        layers = sum(layer.size_bytes for layer in self._layers)
        return self._embedding.nbytes + layers + self._norm.size_bytes + self._output.size_bytes

    def forward(self, ids: NDArray[np.int64], kv: StepKv, keep: NDArray[np.int64]) -> Tensor:
        """→ `[kept, hidden]`, normed."""
        positions, kept = torch.from_numpy(kv.batch.positions.astype(np.int64)), torch.from_numpy(keep)
        turns = {rope: rotary.turns(positions) for rope, rotary in self._rotaries.items()}
        x = self._embedding.index_select(0, torch.from_numpy(ids)).float()
        if self.config.embedding_scale != 1:
            x.mul_(self.config.embedding_scale)
        for index, layer in enumerate(self._layers):
            qkv = self._projected(layer, x, turns[layer.rope])
            attended = kv.attend(index, qkv, layer.scores)
            if index == self.config.layers - 1:
                # Nothing reads what the other tokens would become now that the last layer's KV is written.
                x, attended = x.index_select(0, kept), attended.index_select(0, kept)
            added = layer.output(attended)
            x.add_(layer.after_attention(added.float()) if layer.after_attention else added)
            added = layer.down(gated(layer.gate_up(layer.mlp_norm(x)), self.config.activation))
            x.add_(layer.after_mlp(added.float()) if layer.after_mlp else added)
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` → float32 `[rows, vocab]`."""
        logits, cap = self._output(hidden), self.config.logits_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _projected(self, layer: DecoderLayer, x: Tensor, turns: Tensor) -> Tensor:
        """→ `[tokens, (heads + 2 · kv_heads) · head_dim]`, as attention takes it."""
        heads, kv_heads = self.config.heads, self.config.kv_heads
        qkv = layer.qkv(layer.attention_norm(x))
        if layer.qkv_bias is not None:
            qkv.add_(layer.qkv_bias)
        by_head = qkv.view(len(qkv), -1, self.config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            by_head[:, :heads] = layer.query_norm(by_head[:, :heads].float())
            by_head[:, heads : heads + kv_heads] = layer.key_norm(by_head[:, heads : heads + kv_heads].float())
        self._rotaries[layer.rope].rotate_(by_head[:, : heads + kv_heads], turns)
        return qkv

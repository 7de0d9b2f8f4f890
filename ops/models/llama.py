"""The Llama architecture (arXiv:2302.13971; grouped-query attention, tied embeddings or not)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.ops.activation import silu_mul
from headrace.ops.linear import Linear, pack_linear
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.stored_weights import StoredWeights
from headrace.ops.norm import RmsNorm
from headrace.ops.output import OutputProjection
from headrace.ops.rotary import Rotary
from headrace.ops.step_kv import StepKv


class LlamaLayer:
    """The weights of one layer: `Wq Wk Wv` are one projection, gate and up are one."""

    def __init__(self, weights: StoredWeights, config: ModelConfig, index: int) -> None:
        def norm(name: str) -> RmsNorm:
            return RmsNorm(weights.read(f"blk.{index}.{name}.weight", torch.float32), config.norm_eps, weights.dtype)

        def linear(*names: str) -> Linear:
            return pack_linear(weights.fused([f"blk.{index}.{name}.weight" for name in names]))

        self.attention_norm = norm("attn_norm")
        self.qkv = linear("attn_q", "attn_k", "attn_v")
        self.output = linear("attn_output")
        self.mlp_norm = norm("ffn_norm")
        self.gate_up = linear("ffn_gate", "ffn_up")
        self.down = linear("ffn_down")

    @property
    def size_bytes(self) -> int:
        parts = (self.attention_norm, self.qkv, self.output, self.mlp_norm, self.gate_up, self.down)
        return sum(part.size_bytes for part in parts)


class Llama:
    """The model of one file, in one dtype. The residual stream is float32 in every dtype."""

    def __init__(self, weights: StoredWeights, config: ModelConfig, context_tokens: int) -> None:
        """`context_tokens`: the longest context that will be asked for."""
        assert config.rope_pairs == "interleaved", "rotary.py turns interleaved pairs"
        self.config = config
        self._embedding = weights.read("token_embd.weight", weights.dtype)
        self._layers = [LlamaLayer(weights, config, index) for index in range(config.layers)]
        self._norm = RmsNorm(weights.read("output_norm.weight", torch.float32), config.norm_eps, weights.dtype)
        # Lookups need the table as rows, the output projection needs it packed: 56 MB more in bfloat16, and half the
        # time of the largest matrix product of a decode step.
        tied = config.tied_embeddings
        self._output = OutputProjection(self._embedding if tied else weights.read("output.weight", weights.dtype))
        self._rotary = Rotary(context_tokens, config.rotary_dim, config.rope_theta)

    @property
    def size_bytes(self) -> int:
        layers = sum(layer.size_bytes for layer in self._layers)
        return self._embedding.nbytes + layers + self._norm.size_bytes + self._output.size_bytes

    def forward(self, ids: Tensor, positions: Tensor, kv: StepKv, keep: Tensor) -> Tensor:
        """→ `[kept, hidden]`, normed."""
        rotated_heads = self.config.heads + self.config.kv_heads
        turns = self._rotary.turns(positions)
        x = self._embedding.index_select(0, ids).float()
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.attention_norm(x))
            self._rotary.rotate_(qkv.view(len(qkv), -1, self.config.head_dim)[:, :rotated_heads], turns)
            attended = kv.attend(index, qkv)
            if index == self.config.layers - 1:
                # Nothing reads what the other tokens would become now that the last layer's KV is written.
                x, attended = x.index_select(0, keep), attended.index_select(0, keep)
            x.add_(layer.output(attended))
            x.add_(layer.down(silu_mul(layer.gate_up(layer.mlp_norm(x)))))
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` → float32 `[rows, vocab]`."""
        return self._output(hidden)

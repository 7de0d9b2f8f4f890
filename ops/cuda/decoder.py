"""A decoder of any of the architectures on the card, by the kernels of `ops.triton` and the library's matrix products.

The same layer as `models.decoder`'s, where the text is shorter; here additions to the residual stream are one kernel
with the norm behind them, and ids that only the card knows are looked up by the kernel that embeds them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops.attention import Scores
from headrace.ops.cuda.kv import DeviceKv
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.stored_weights import StoredWeights
from headrace.ops.rotary import Rotary
from headrace.ops.triton.activation import gated
from headrace.ops.triton.embedding import embed
from headrace.ops.triton.norm import norm_heads_, rms_norm
from headrace.ops.triton.rotary import rotate_


class DeviceLayer:
    """The weights of one layer: `Wq Wk Wv` are one projection, gate and up are one."""

    def __init__(self, weights: StoredWeights, config: ModelConfig, index: int, device: torch.device) -> None:
        def norm(name: str) -> Tensor:
            return weights.norm(f"blk.{index}.{name}").to(device)

        def linear(*names: str) -> Tensor:
            return weights.fused([f"blk.{index}.{name}.weight" for name in names]).to(device)

        self.rope = config.rope_of(index)
        self.scores = Scores(config.score_scale, config.window(index), config.attention_cap)
        self.attention_norm = norm("attn_norm")
        self.qkv = linear("attn_q", "attn_k", "attn_v")
        biases = [f"blk.{index}.{name}.bias" for name in ("attn_q", "attn_k", "attn_v")]
        self.qkv_bias = weights.fused(biases).to(device) if config.qkv_bias else None
        self.head_norm: Tensor | None = None
        if config.qk_norm:
            # One row for each head that is turned, so that a kernel needn't know which are queries.
            query, key = norm("attn_q_norm"), norm("attn_k_norm")
            self.head_norm = torch.cat((query.expand(config.heads, -1), key.expand(config.kv_heads, -1)))
        self.output = linear("attn_output")
        self.after_attention = norm("post_attention_norm") if config.post_norms else None
        self.mlp_norm = norm("ffn_norm")
        self.gate_up = linear("ffn_gate", "ffn_up")
        self.down = linear("ffn_down")
        self.after_mlp = norm("post_ffw_norm") if config.post_norms else None

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))


class DeviceDecoder:
    """The model of one file, in one dtype. The residual stream is float32 in every dtype."""

    def __init__(self, weights: StoredWeights, config: ModelConfig, context_tokens: int, device: torch.device) -> None:
        """`context_tokens`: the longest context that will be asked for."""
        self.config = config
        self.device = device
        self._embedding = weights.read("token_embd.weight", weights.dtype).to(device)
        self._layers = [DeviceLayer(weights, config, index, device) for index in range(config.layers)]
        self._norm = weights.norm("output_norm").to(device)
        tied = config.tied_embeddings
        self._output = self._embedding if tied else weights.read("output.weight", weights.dtype).to(device)
        self._turns = {
            rope: torch.view_as_real(Rotary(context_tokens, config.rotary_dim, rope).table).contiguous().to(device)
            for rope in dict.fromkeys(layer.rope for layer in self._layers)
        }

    @property
    def size_bytes(self) -> int:
        tables = (self._embedding,) if self._output is self._embedding else (self._embedding, self._output)
        layers = sum(layer.size_bytes for layer in self._layers)
        return sum(table.nbytes for table in tables) + layers + self._norm.nbytes

    def forward(self, future_tokens: Tensor, kv: DeviceKv, keep: Tensor | None) -> Tensor:
        """Run the step's tokens through all layers, which write and read their KV.

        `future_tokens`: int64 `[slots]`; `keep`: int64 `[kept]`, the tokens whose result is wanted, None for all →
        `[kept, hidden]`, normed.
        """
        config, rows = self.config, kv.rows
        x = torch.empty((len(rows.ids), config.hidden), device=self.device)
        embed(rows.ids, future_tokens, self._embedding, x, config.embedding_scale)
        h = torch.empty(x.shape, dtype=self._embedding.dtype, device=self.device)
        added: Tensor | None = None
        for index, layer in enumerate(self._layers):
            rms_norm(x, layer.attention_norm, h, config.norm_eps, added)
            attended = kv.attend(index, self._projected(layer, h, rows.positions), layer.scores)
            if index == config.layers - 1 and keep is not None:
                # Nothing reads what the other tokens would become now that the last layer's KV is written.
                x, attended = x.index_select(0, keep), attended.index_select(0, keep)
                h = torch.empty(x.shape, dtype=h.dtype, device=self.device)
            added = self._normed(F.linear(attended, layer.output), layer.after_attention)
            rms_norm(x, layer.mlp_norm, h, config.norm_eps, added)
            gate_up = F.linear(h, layer.gate_up)
            active = torch.empty((len(h), config.intermediate), dtype=h.dtype, device=self.device)
            gated(gate_up, active, config.activation)
            added = self._normed(F.linear(active, layer.down), layer.after_mlp)
        rms_norm(x, self._norm, h, config.norm_eps, added)
        return h

    def _projected(self, layer: DeviceLayer, h: Tensor, positions: Tensor) -> Tensor:
        """→ `[tokens, (heads + 2 · kv_heads) · head_dim]`, as attention takes it."""
        config = self.config
        qkv = F.linear(h, layer.qkv, layer.qkv_bias)
        turned = qkv.view(len(qkv), -1, config.head_dim)[:, : config.heads + config.kv_heads]
        if layer.head_norm is not None:
            norm_heads_(turned, layer.head_norm, config.norm_eps)
        rotate_(turned, positions, self._turns[layer.rope], "interleaved")
        return qkv

    def _normed(self, branch: Tensor, weight: Tensor | None) -> Tensor:
        """What is added to the residual stream; float32 where it is normed."""
        if weight is None:
            return branch
        normed = torch.empty(branch.shape, device=self.device)
        rms_norm(branch, weight, normed, self.config.norm_eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` → float32 `[rows, vocab]`."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            # Not rounded to bfloat16 between sum and result: between 16 and 32 its steps are 1/8, and the best ids tie.
            logits = torch.mm(hidden, self._output.T, out_dtype=torch.float32)
        else:
            logits = F.linear(hidden.float(), self._output.float())
        cap = self.config.logits_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

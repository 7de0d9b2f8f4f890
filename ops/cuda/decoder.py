"""A Llama decoder on the card, by the kernels of `ops.triton` and the library's matrix products.

The same layer as Llama's in `models.decoder`. There the text is shorter; here additions to the residual stream are one
kernel with the norm behind them, and ids that only the card knows are looked up by the kernel that embeds them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.ops.cuda.kv import DeviceKv
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.stored_weights import StoredWeights
from headrace.ops.rotary import Rotary
from headrace.ops.triton.activation import silu_mul
from headrace.ops.triton.embedding import embed
from headrace.ops.triton.norm import rms_norm
from headrace.ops.triton.rotary import rotate_


def check_layers(config: ModelConfig) -> None:
    """Raises ValueError for a model with anything that Llama's layers don't have."""
    others = {
        "biases of queries, keys and values": config.qkv_bias,
        "norms of queries and keys": config.qk_norm,
        "norms behind attention and MLP": config.post_norms,
        f"{config.activation} for silu": config.activation != "silu",
        "a scale of embeddings": config.embedding_scale != 1,
        "caps of scores or logits": config.attention_cap or config.logits_cap,
        "windows": config.window_tokens,
    }
    found = [name for name, is_there in others.items() if is_there]
    if found:
        raise ValueError(f"{config.name} has {', '.join(found)}, which is not there on CUDA yet: give --device cpu")


class DeviceLayer:
    """The weights of one layer: `Wq Wk Wv` are one projection, gate and up are one."""

    def __init__(self, weights: StoredWeights, index: int, device: torch.device) -> None:
        def norm(name: str) -> Tensor:
            return weights.norm(f"blk.{index}.{name}").to(device)

        def linear(*names: str) -> Tensor:
            return weights.fused([f"blk.{index}.{name}.weight" for name in names]).to(device)

        self.attention_norm = norm("attn_norm")
        self.qkv = linear("attn_q", "attn_k", "attn_v")
        self.output = linear("attn_output")
        self.mlp_norm = norm("ffn_norm")
        self.gate_up = linear("ffn_gate", "ffn_up")
        self.down = linear("ffn_down")

    @property
    def size_bytes(self) -> int:
        parts = (self.attention_norm, self.qkv, self.output, self.mlp_norm, self.gate_up, self.down)
        return sum(part.nbytes for part in parts)


class DeviceDecoder:
    """The model of one file, in one dtype. The residual stream is float32 in every dtype."""

    def __init__(self, weights: StoredWeights, config: ModelConfig, context_tokens: int, device: torch.device) -> None:
        """`context_tokens`: the longest context that will be asked for."""
        self.config = config
        self.device = device
        self._embedding = weights.read("token_embd.weight", weights.dtype).to(device)
        self._layers = [DeviceLayer(weights, index, device) for index in range(config.layers)]
        self._norm = weights.norm("output_norm").to(device)
        tied = config.tied_embeddings
        self._output = self._embedding if tied else weights.read("output.weight", weights.dtype).to(device)
        turns = Rotary(context_tokens, config.rotary_dim, config.rope).table
        self._turns = torch.view_as_real(turns).contiguous().to(device)
        self._scale = config.score_scale

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
        embed(rows.ids, future_tokens, self._embedding, x)
        h = torch.empty(x.shape, dtype=self._embedding.dtype, device=self.device)
        added: Tensor | None = None
        for index, layer in enumerate(self._layers):
            rms_norm(x, layer.attention_norm, h, config.norm_eps, added)
            qkv = F.linear(h, layer.qkv)
            by_head = qkv.view(len(qkv), -1, config.head_dim)
            turned = by_head[:, : config.heads + config.kv_heads]
            rotate_(turned, rows.positions, self._turns, "interleaved")
            attended = kv.attend(index, qkv, self._scale)
            if index == config.layers - 1 and keep is not None:
                # Nothing reads what the other tokens would become now that the last layer's KV is written.
                x, attended = x.index_select(0, keep), attended.index_select(0, keep)
                h = torch.empty(x.shape, dtype=h.dtype, device=self.device)
            rms_norm(x, layer.mlp_norm, h, config.norm_eps, F.linear(attended, layer.output))
            gate_up = F.linear(h, layer.gate_up)
            active = torch.empty((len(h), config.intermediate), dtype=h.dtype, device=self.device)
            silu_mul(gate_up, active)
            added = F.linear(active, layer.down)
        rms_norm(x, self._norm, h, config.norm_eps, added)
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` → float32 `[rows, vocab]`."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            # Not rounded to bfloat16 between sum and result: between 16 and 32 its steps are 1/8, and the best ids tie.
            return torch.mm(hidden, self._output.T, out_dtype=torch.float32)
        return F.linear(hidden.float(), self._output.float())

"""A random Llama of two layers: its file, and what it computes, written down once more without any of its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 131, 64, 2, 6, 2, 16, 96
CONTEXT, THETA, EPS = 1024, 10000.0, 1e-5


class SmallLlama:
    """Weights drawn from a seed; `logits` computes them for all positions of one sequence, in float64."""

    def __init__(self, seed: int = 0, tied: bool = True) -> None:
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> NDArray[np.float32]:
            # Twice the usual scale: attention weights that differ, logits that are far apart.
            return (rng.standard_normal((rows, columns)) * 2 / math.sqrt(columns)).astype(np.float32)

        def norm() -> NDArray[np.float32]:
            return (1 + 0.2 * rng.standard_normal(HIDDEN)).astype(np.float32)

        self.weights = {"token_embd.weight": matrix(VOCAB, HIDDEN) * 2, "output_norm.weight": norm()}
        if not tied:
            self.weights["output.weight"] = matrix(VOCAB, HIDDEN)
        for layer in range(LAYERS):
            self.weights |= {
                f"blk.{layer}.attn_norm.weight": norm(),
                f"blk.{layer}.attn_q.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
                f"blk.{layer}.attn_k.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
                f"blk.{layer}.attn_v.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
                f"blk.{layer}.attn_output.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
                f"blk.{layer}.ffn_norm.weight": norm(),
                f"blk.{layer}.ffn_gate.weight": matrix(INTERMEDIATE, HIDDEN),
                f"blk.{layer}.ffn_up.weight": matrix(INTERMEDIATE, HIDDEN),
                f"blk.{layer}.ffn_down.weight": matrix(HIDDEN, INTERMEDIATE),
            }

    def write(self, path: Path) -> Path:
        """As a GGUF file of float32 tensors."""
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("Small")
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(INTERMEDIATE)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_rope_freq_base(THETA)
        writer.add_layer_norm_rms_eps(EPS)
        for name, weight in self.weights.items():
            writer.add_tensor(name, weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def logits(self, ids: Sequence[int]) -> F64:
        """`[len(ids), VOCAB]`."""
        weights = {name: weight.astype(np.float64) for name, weight in self.weights.items()}
        x = weights["token_embd.weight"][list(ids)]
        for layer in range(LAYERS):
            part = {
                name.removeprefix(f"blk.{layer}."): value
                for name, value in weights.items()
                if name.startswith(f"blk.{layer}.")
            }
            h = _normed(x, part["attn_norm.weight"])
            q = _turned(h @ part["attn_q.weight"].T, HEADS)
            k = _turned(h @ part["attn_k.weight"].T, KV_HEADS)
            v = (h @ part["attn_v.weight"].T).reshape(len(ids), KV_HEADS, HEAD_DIM)
            x = x + _attended(q, k, v) @ part["attn_output.weight"].T
            h = _normed(x, part["ffn_norm.weight"])
            gate = h @ part["ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ part["ffn_up.weight"].T)) @ part["ffn_down.weight"].T
        output = weights.get("output.weight", weights["token_embd.weight"])
        return np.asarray(_normed(x, weights["output_norm.weight"]) @ output.T)

    def logprobs(self, ids: Sequence[int]) -> F64:
        """Log-softmax of `logits`."""
        logits = self.logits(ids)
        highest = logits.max(-1, keepdims=True)
        return np.asarray(logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True)))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


def _normed(x: F64, weight: F64) -> F64:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight)


def _turned(x: F64, heads: int) -> F64:
    x = x.reshape(len(x), heads, HEAD_DIM)
    out = np.empty_like(x)
    for position in range(len(x)):
        for pair in range(HEAD_DIM // 2):
            angle = position * THETA ** (-2 * pair / HEAD_DIM)
            a, b = x[position, :, 2 * pair], x[position, :, 2 * pair + 1]
            out[position, :, 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
            out[position, :, 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def _attended(q: F64, k: F64, v: F64) -> F64:
    out = np.empty_like(q)
    for position in range(len(q)):
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            scores = k[: position + 1, shared] @ q[position, head] / math.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            out[position, head] = weights / weights.sum() @ v[: position + 1, shared]
    return out.reshape(len(q), -1)

"""What a model takes of a card beside its KV: counted from the tensors of `ops.cuda`, or an estimate that says so.

No torch here.
"""

from __future__ import annotations

from typing import Final

from headrace.ops.models.config import ModelConfig
from headrace.ops.triton.spans import max_spans

CARD_PROGRAM_BYTES: Final = 1280 << 20
"""CUDA's context, the libraries' code and workspaces, graphs: an estimate, until a card has been measured."""
HOST_PROGRAM_BYTES: Final = 3 << 30
"""Of the host: the server, and a worker with CUDA's libraries. An estimate too."""
CHUNK_TOKENS: Final = 8192
"""The longest prefill chunk that the warm-up may choose."""
_WANTS: Final = 64
"""Prompt positions whose logits exist at a time (`ops.cuda.step`)."""
_TABLE_BYTES: Final = 10
"""Of a slot and an id (`ops.triton.slot_tables`)."""
_EXTEND_BYTES: Final = 128 << 20
"""Mixtures of extend attention: two or three tiles for each program, whatever the batch."""


def card_weights_bytes(model: ModelConfig, value_bytes: int) -> int:
    """Every weight once; a tied table is not kept twice, as a CPU does."""
    return model.parameters * value_bytes


def card_workspace_bytes(
    model: ModelConfig, rows: int, chunk_tokens: int, context_tokens: int, page_tokens: int, value_bytes: int
) -> int:
    """An upper bound of what steps keep alive beside weights and KV."""
    tokens = chunk_tokens + rows
    # The residual stream is float32. In the dtype of the layers: the normed input, the fused qkv, attention's output,
    # the projection's, which is added by the next norm, gate and up, their product.
    narrow = 3 * model.hidden + (2 * model.heads + 2 * model.kv_heads) * model.head_dim + 3 * model.intermediate
    layer = tokens * (2 * model.hidden * 4 + narrow * value_bytes)
    # Logits, adjusted ones; those of wanted positions with what their sums and best ids take.
    logits = (2 * rows + 4 * _WANTS) * model.vocab_size * 4
    windows = {model.window(layer) for layer in range(model.layers)}
    most_spans = max(max_spans(context_tokens, window=window) for window in windows)
    spans = rows * most_spans * model.heads * (model.head_dim + 1) * 4
    # Page tables, one of each group: as many as there are windows, at most.
    page_numbers = len(windows) * -(-context_tokens // page_tokens)
    tables = rows * (model.vocab_size * _TABLE_BYTES + page_numbers * 4)
    # Turns of all positions, of both ropes where there are two.
    turns = context_tokens * model.rotary_dim * 4 * (2 if model.window_rope is not None else 1)
    return layer + logits + spans + tables + turns + _EXTEND_BYTES

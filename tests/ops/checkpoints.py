"""Small random models of each architecture as Hugging Face folders, and what `transformers` computes with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

VOCAB = 131
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Checkpoint(NamedTuple):
    """A model to make: the class of `transformers`, and its config where that isn't `SHAPE`."""

    name: str
    class_name: str
    changes: Mapping[str, Any] = {}
    config_name: str = ""
    """Where it isn't the class's own."""

    def build(self) -> transformers.PreTrainedModel:
        """The same weights each time. None of them is what it is initialized to: a bias of 0 would prove nothing."""
        name = self.config_name or f"{self.class_name.removesuffix('ForCausalLM')}Config"
        config = getattr(transformers, name)(**{**SHAPE, **self.changes}, attn_implementation="eager")
        model = getattr(transformers, self.class_name)(config).eval()
        random = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                drawn = torch.randn(weight.shape, generator=random)
                if weight.ndim == 2:
                    # Twice the usual scale: attention weights that differ, logits that are far apart.
                    drawn *= (4 if "embed" in key else 2) / math.sqrt(weight.shape[1])
                elif key.endswith(".bias"):
                    drawn *= 0.5
                else:
                    drawn = weight + 0.2 * drawn
                weight.copy_(drawn)
        return model  # type: ignore[no-any-return]


CHECKPOINTS = (
    Checkpoint("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    Checkpoint("llama3-rope", "LlamaForCausalLM", {"rope_parameters": LLAMA3, "head_dim": 32}),
    Checkpoint(
        "linear-rope",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}, "num_key_value_heads": 6},
    ),
    Checkpoint("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    Checkpoint(
        "qwen2-window",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1},
    ),
    Checkpoint("qwen3", "Qwen3ForCausalLM", {"head_dim": 32}),
    Checkpoint("mistral", "MistralForCausalLM", {"sliding_window": None}),
    Checkpoint(
        "gemma2",
        "Gemma2ForCausalLM",
        {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 23, "tie_word_embeddings": False},
    ),
    Checkpoint(
        "gemma3",
        "Gemma3ForCausalLM",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 23,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
        config_name="Gemma3TextConfig",
    ),
    Checkpoint("mistral-window", "MistralForCausalLM", {"sliding_window": 40, "head_dim": 32}),
)


class Reference:
    """A checkpoint's folder, and its answers in float32."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, max_shard_size: str = "1GB") -> None:
        self.name = checkpoint.name
        self.folder = folder
        self._model = checkpoint.build()
        self._model.save_pretrained(folder, max_shard_size=max_shard_size)

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """`[len(ids), VOCAB]`."""
        logits: Tensor = self._model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

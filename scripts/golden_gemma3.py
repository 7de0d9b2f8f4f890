"""Write the greedy ids that `transformers` draws, in float32, with the weights of a Gemma 3 GGUF.

    python scripts/golden_gemma3.py MODEL.gguf tests/data/gemma-3-270m-q4_k_m.json

The weights are unpacked by the `gguf` package, so that nothing of headrace but its tokenizer has a part in them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import msgspec
import torch
import transformers

from headrace.ops.weights.gguf import GgufFile
from headrace.server.tokenizer import Tokenizer

OUTPUTS = 48
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "日本の首都は",
    # Longer than the window of 512 tokens.
    "The quick brown fox jumps over the lazy dog. " * 60 + "In the end, the fox",
)
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Case(msgspec.Struct):
    prompt: str
    prompt_ids: list[int]
    greedy_ids: list[int]
    gaps: list[float]
    """The best logit less the second, for each id."""
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    with GgufFile.open(arguments.model) as file:
        metadata = file.metadata
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    model = build(metadata, gguf.GGUFReader(arguments.model))
    cases = [case(model, tokenizer, prompt) for prompt in PROMPTS]
    golden = {
        "model": arguments.model.name,
        "reference": "transformers fp32 eager, weights dequantized from GGUF, eos ignored",
        "cases": cases,
    }
    arguments.out.write_bytes(msgspec.json.encode(golden) + b"\n")


def build(metadata: Any, reader: gguf.GGUFReader) -> Any:
    """The file's model as `transformers` has it."""

    def key(name: str) -> Any:
        return metadata[f"gemma3.{name}"]

    options: dict[str, Any] = {
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count_kv"),
        "head_dim": key("attention.key_length"),
        "query_pre_attn_scalar": key("attention.key_length"),
        "max_position_embeddings": key("context_length"),
        "sliding_window": key("attention.sliding_window"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": key("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "attn_implementation": "eager",
    }
    model: Any = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**options))
    model.eval()
    weights = {}
    for tensor in reader.tensors:
        numbers = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        # GGUF stores norms as 1 + w, and transformers w.
        weights[their_name(tensor.name)] = numbers - 1 if "norm" in tensor.name else numbers
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def their_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, module, kind = name.split(".")
        return f"model.layers.{layer}.{NAMES[module]}.{kind}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


@torch.no_grad()
def case(model: Any, tokenizer: Tokenizer, prompt: str) -> Case:
    prompt_ids = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
    ids, gaps, cache, following = [], [], None, prompt_ids
    for _ in range(OUTPUTS):
        step = model(input_ids=torch.tensor([following]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        best = step.logits[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 4))
        cache, following = step.past_key_values, ids[-1:]
    return Case(prompt, prompt_ids, ids, gaps, tokenizer.decode(ids))


if __name__ == "__main__":
    main()

"""Which tensors a model has, and what each format calls them.

The layers ask for tensors by GGUF's names, which are the same for every architecture. Hugging Face's differ: a decoder
of theirs is described by a table from one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.ops.models.config import ModelConfig
from headrace.ops.models.keys import INCOMPLETE, Keys
from headrace.ops.weights.files import ModelFile
from headrace.ops.weights.gguf import KIND_NAMES, GgufFile, TensorInfo

Names = Mapping[str, str]

FOLDER_NAMES: Final[Names] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names → Hugging Face's, as most decoders have them."""

FOLDER_LAYER: Final = "model.layers."


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes, as torch has them, of all tensors of a model: projections are [out, in]."""
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, config.hidden),
        "output_norm.weight": (config.hidden,),
    }
    if not config.tied_embeddings:
        tensors["output.weight"] = (config.vocab_size, config.hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (config.hidden,),
        "attn_q.weight": (query, config.hidden),
        "attn_k.weight": (key_value, config.hidden),
        "attn_v.weight": (key_value, config.hidden),
        "attn_output.weight": (config.hidden, query),
        "ffn_norm.weight": (config.hidden,),
        "ffn_gate.weight": (config.intermediate, config.hidden),
        "ffn_up.weight": (config.intermediate, config.hidden),
        "ffn_down.weight": (config.hidden, config.intermediate),
    }
    if config.qkv_bias:
        layer |= {"attn_q.bias": (query,), "attn_k.bias": (key_value,), "attn_v.bias": (key_value,)}
    if config.qk_norm:
        layer |= {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
    if config.post_norms:
        layer |= {"post_attention_norm.weight": (config.hidden,), "post_ffw_norm.weight": (config.hidden,)}
    for index in range(config.layers):
        tensors |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return tensors


def folder_name(name: str, names: Names = FOLDER_NAMES) -> str:
    """Hugging Face's name of a tensor that GGUF calls `name`."""
    prefix = ""
    if name.startswith("blk."):
        _, index, name = name.split(".", 2)
        prefix = f"{FOLDER_LAYER}{index}."
    module, kind = name.rsplit(".", 1)
    return f"{prefix}{names[module]}.{kind}"


def stored_tensors(file: ModelFile, config: ModelConfig, names: Names) -> dict[str, TensorInfo]:
    """GGUF's names → the file's tensors, which must have been checked."""
    if isinstance(file, GgufFile):
        return {name: file.tensors[name] for name in expected_tensors(config)}
    return {name: file.tensors[folder_name(name, names)] for name in expected_tensors(config)}


def check_tensors(
    keys: Keys, file: ModelFile, config: ModelConfig, names: Names = FOLDER_NAMES, ignored: tuple[str, ...] = ()
) -> None:
    """Raises UnsupportedModel where one is missing, of another shape, or one more than the layers have.

    `ignored`: ends of names of tensors that change nothing.
    """
    in_folder = not isinstance(file, GgufFile)
    expected = {
        folder_name(name, names) if in_folder else name: shape for name, shape in expected_tensors(config).items()
    }
    for name, shape in expected.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise keys.refused(f"it lacks the tensor {name}", INCOMPLETE)
        if tensor.shape != shape:
            raise keys.refused(f"the tensor {name} has the shape {tensor.shape}, but its metadata ask for {shape}")
        if tensor.kind not in KIND_NAMES:
            raise keys.refused(f"the tensor {name} is stored as {tensor.kind}; {', '.join(KIND_NAMES)} are supported")
    for name, tensor in file.tensors.items():
        if name not in expected and not name.endswith(ignored):
            raise keys.refused(
                f"it has the tensor {name!r} ({_purpose(tensor)}), which headrace's {config.architecture} does not have"
            )


def parameters(file: ModelFile, *left_out: str) -> int:
    """Numbers in all tensors but those of these names."""
    return sum(tensor.elements for tensor in file.tensors.values() if tensor.name not in left_out)


def _purpose(tensor: TensorInfo) -> str:
    if tensor.name.startswith("rope_freqs"):
        return "a rope scaling, as in Llama 3.1"
    if "_exps" in tensor.name or "_gate_inp" in tensor.name or ".experts." in tensor.name:
        return "a mixture of experts"
    if ".lora_" in tensor.name:
        return "an adapter"
    if tensor.name.endswith(".bias"):
        return "a bias"
    return f"{tensor.kind}, {tensor.shape}"

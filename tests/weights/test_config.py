"""What a file says about its model, and everything about it that is refused instead of being ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.ops.models.architectures import read_config
from headrace.ops.models.config import MAX_CONTEXT_TOKENS, ModelConfig, Rope
from headrace.ops.models.keys import MAX_NAME_CHARS, UnsupportedModel
from headrace.ops.models.tensors import expected_tensors
from headrace.ops.weights.gguf import GgufFile

WriteLlama = Callable[..., Path]


def config_of(path: Path) -> ModelConfig:
    with GgufFile.open(path) as file:
        return read_config(file)


def test_the_default_models_shape(default_model: Path) -> None:
    assert config_of(default_model) == ModelConfig(
        architecture="llama",
        name="Smollm2 135M 8k Lc100K Mix1 Ep2",
        vocab_size=49152,
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        rope=Rope(100000.0),
        rotary_dim=64,
        rope_pairs="interleaved",
        norm_eps=9.999999747378752e-06,
        context_tokens=8192,
        tied_embeddings=True,
        parameters=134_515_008,
    )


def test_expected_tensors_are_the_files(write_llama: WriteLlama) -> None:
    with GgufFile.open(write_llama()) as file:
        expected = expected_tensors(read_config(file))
        assert expected == {name: info.shape for name, info in file.tensors.items()}


def test_an_output_projection_unties_the_embeddings(write_llama: WriteLlama) -> None:
    tied, untied = config_of(write_llama()), config_of(write_llama(shapes={"output.weight": (40, 64)}))

    assert tied.tied_embeddings and not untied.tied_embeddings
    assert untied.parameters == tied.parameters + 40 * 64


def test_what_a_file_leaves_out_has_the_formats_defaults(write_llama: WriteLlama) -> None:
    keys = {"llama.attention.head_count_kv": None, "llama.rope.freq_base": None, "llama.rope.dimension_count": None}
    full = {f"blk.{layer}.attn_{name}.weight": (64, 64) for layer in range(2) for name in "kv"}

    config = config_of(write_llama(keys, full))

    assert (config.kv_heads, config.rope.theta, config.rotary_dim) == (4, 10000.0, 16)


def test_heads_may_be_wider_than_the_hidden_size_says(write_llama: WriteLlama) -> None:
    keys = dict.fromkeys(("llama.attention.key_length", "llama.attention.value_length"), 32)
    wide = {f"blk.{layer}.attn_q.weight": (128, 64) for layer in range(2)}
    wide |= {f"blk.{layer}.attn_{name}.weight": (64, 64) for layer in range(2) for name in "kv"}
    wide |= {f"blk.{layer}.attn_output.weight": (64, 128) for layer in range(2)}

    assert config_of(write_llama({**keys, "llama.rope.dimension_count": 32}, wide)).head_dim == 32


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.expert_count", 0),
        ("llama.rope.scaling.type", "none"),
        ("llama.rope.scaling.factor", 1.0),
        ("llama.rope.scaling.original_context_length", 128),
        ("llama.attention.causal", True),
        ("general.type", "model"),
        ("general.author", "anybody"),
        ("quantize.imatrix.file", "x"),
    ],
)
def test_keys_that_change_nothing_are_accepted(write_llama: WriteLlama, key: str, value: Any) -> None:
    assert config_of(write_llama({key: value})) == config_of(write_llama())


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, None),
    ],
)
def test_a_linear_scaling_divides_all_frequencies(
    write_llama: WriteLlama, keys: dict[str, Any], factor: float | None
) -> None:
    assert config_of(write_llama(keys)).rope == Rope(5000.0, () if factor is None else (factor,) * 8)


def test_a_name_is_fit_for_a_log_line(write_llama: WriteLlama) -> None:
    assert config_of(write_llama({"general.name": "a\n\x1b[2Jb" + "c" * 1000})).name == "a[2Jb" + "c" * 113
    assert config_of(write_llama({"general.name": None})).name == "small"
    assert len(config_of(write_llama({"general.name": "é" * 500})).name) == MAX_NAME_CHARS


# ---------------------------------------------------------------------------------------------------------------
# What is refused


def refused(path: Path, because: str) -> None:
    with GgufFile.open(path) as file, pytest.raises(UnsupportedModel, match=because) as refusal:
        read_config(file)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("architecture", ["mistral", "gpt2", "LLAMA", "x" * 10_000])
def test_other_architectures_are_refused_by_name(write_llama: WriteLlama, architecture: str) -> None:
    refused(write_llama(architecture=architecture), f"architecture is '{architecture[:20]}.*Supported.*: llama, qwen2")


@pytest.mark.parametrize(
    ("key", "value", "because"),
    [
        ("general.type", "adapter", "general.type is 'adapter'"),
        ("llama.rope.scaling.type", "yarn", "rope.scaling.type is 'yarn'"),
        ("llama.rope.scaling.factor", -4.0, "rope.scaling.factor is -4.0"),
        ("llama.rope.scaling.attn_factor", 4.0, "rope.scaling.attn_factor is 4.0"),
        ("llama.expert_count", 8, "expert_count is 8"),
        ("llama.attention.sliding_window", 4096, "sliding_window is 4096"),
        ("llama.attention.causal", False, "causal is False"),
        ("llama.attention.scale", 0.1, "'llama.attention.scale'.*not implemented"),
        ("llama.logit_scale", 8.0, "'llama.logit_scale'.*not implemented"),
        ("llama.rope.dimension_count", 8, "dimension_count is 8; only 16"),
        ("llama.attention.value_length", 32, "value_length is 32; only 16"),
        ("llama.attention.head_count", 3, "64 can't be divided among 3 heads"),
        ("llama.attention.head_count", 0, "head_count is 0"),
        ("llama.attention.head_count_kv", 3, "4 attention heads can't share 3 KV heads"),
        ("llama.attention.head_count_kv", [2, 1], "head_count_kv is a list of 2"),
        ("llama.attention.head_count", 64, "head dimension of 1 can't be rotated"),
        ("llama.block_count", 3, "lacks the tensor blk.2.attn_norm.weight"),
        ("llama.block_count", 1, "has the tensor 'blk.1."),
        ("llama.block_count", 1 << 31, "block_count is 2147483648"),
        ("llama.block_count", 2_000_000_000, "block_count is 2000000000, but the file has 20 tensors"),
        ("llama.embedding_length", 128, "dimension_count is 16; only 32"),
        ("llama.embedding_length", True, "embedding_length is True"),
        ("llama.feed_forward_length", 97, "ffn_gate.weight has the shape"),
        ("llama.context_length", MAX_CONTEXT_TOKENS + 1, "context_length is"),
        ("llama.context_length", None, "lacks the key llama.context_length"),
        ("llama.rope.freq_base", float("inf"), "freq_base is inf"),
        ("llama.rope.freq_base", float("nan"), "freq_base is nan"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, "epsilon is 0.0"),
        ("llama.attention.layer_norm_rms_epsilon", None, "lacks the key .*epsilon"),
        ("llama.vocab_size", 41, "vocab_size is 41; only 40"),
        ("tokenizer.ggml.tokens", ["a", "b"], "tokenizer has 2 tokens, its embedding table 40 rows"),
    ],
)
def test_metadata_that_would_be_served_wrong_are_refused(
    write_llama: WriteLlama, key: str, value: Any, because: str
) -> None:
    refused(write_llama({key: value}), because)


@pytest.mark.parametrize(
    ("name", "shape", "because"),
    [
        ("token_embd.weight", None, "lacks the tensor token_embd.weight"),
        ("output_norm.weight", None, "lacks the tensor output_norm.weight"),
        ("blk.1.ffn_down.weight", None, "lacks the tensor blk.1.ffn_down.weight"),
        ("blk.0.attn_k.weight", (64, 64), r"attn_k.weight has the shape \(64, 64\).*\(32, 64\)"),
        ("output.weight", (41, 64), "output.weight has the shape"),
        ("rope_freqs.weight", (7,), r"rope_freqs.weight is F32 of shape \(7,\)"),
        ("rope_freqs.weight", (8,), "rope_freqs.weight has numbers that are not positive"),
        ("blk.0.attn_q.bias", (64,), "'blk.0.attn_q.bias' .a bias."),
        ("blk.0.ffn_gate_inp.weight", (8, 64), "mixture of experts"),
        ("blk.0.attn_q_norm.weight", (16,), "headrace's llama does not have"),
    ],
)
def test_tensors_that_are_not_the_architectures_are_refused(
    write_llama: WriteLlama, name: str, shape: tuple[int, ...] | None, because: str
) -> None:
    refused(write_llama(shapes={name: shape}), because)

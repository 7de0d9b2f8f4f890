"""Hugging Face folders: what is read of them, and a sentence for every way in which one can be incomplete or wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ops.checkpoints import SHAPE, Checkpoint, Reference
from safetensors.torch import load_file, save_file

from headrace.ops.models.architectures import read_config, tensors_of
from headrace.ops.models.config import ModelConfig, Rope
from headrace.ops.models.decoder import Decoder
from headrace.ops.models.keys import UnsupportedModel
from headrace.ops.models.stored_weights import StoredWeights
from headrace.ops.weights.files import open_model_file
from headrace.ops.weights.folder import INDEX, ModelFolder
from headrace.ops.weights.gguf import BadModelFile

LLAMA = Checkpoint("llama", "LlamaForCausalLM")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Reference(LLAMA, tmp_path_factory.mktemp("folder") / "Whole").folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def in_parts(folder: Path) -> list[str]:
    """Cut the weights into three files and an index, as large models come → their names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)]
    weight_map = {key: names[number % 3] for number, key in enumerate(sorted(tensors))}
    for name in names:
        save_file({key: tensor for key, tensor in tensors.items() if weight_map[key] == name}, folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def change_config(folder: Path, changes: Mapping[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def config_of(folder: Path) -> ModelConfig:
    with open_model_file(folder) as file:
        return read_config(file)


def test_the_shape_is_the_configs(whole: Path) -> None:
    assert config_of(whole) == ModelConfig(
        architecture="llama",
        name="Whole",
        vocab_size=SHAPE["vocab_size"],
        layers=3,
        hidden=96,
        heads=6,
        kv_heads=2,
        head_dim=16,
        intermediate=160,
        rope=Rope(10000.0),
        rotary_dim=16,
        rope_pairs="halves",
        norm_eps=1e-5,
        context_tokens=1024,
        tied_embeddings=False,
        parameters=sum(tensor.numel() for tensor in load_file(whole / "model.safetensors").values()),
    )


def test_parts_and_one_file_have_the_same_bytes(whole: Path, folder: Path) -> None:
    in_parts(folder)
    with ModelFolder.open(whole) as one, ModelFolder.open(folder) as parts:
        here, there = (tensors_of(file, read_config(file)) for file in (one, parts))
        assert here.keys() == there.keys()
        assert all(one.bytes_of(here[name]) == parts.bytes_of(there[name]) for name in here)


def test_old_and_new_configs_say_the_same_of_rotary_embedding(folder: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    change_config(folder, {"rope_parameters": new})
    rope = config_of(folder).rope
    change_config(folder, {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})

    assert config_of(folder).rope == rope
    assert rope.divisors[0] == 1.0 and rope.divisors[-1] == 8.0


def refused(folder: Path, because: str) -> None:
    with pytest.raises((BadModelFile, UnsupportedModel), match=because) as refusal:
        config_of(folder)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize(
    ("spoil", "because"),
    [
        (lambda folder: (folder / "config.json").unlink(), "without config.json. Name a GGUF file, or a folder"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json' is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json' is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json' is not a JSON object"),
        (lambda folder: (folder / "config.json").write_text(" " * (2 << 20)), "more than 1 MiB"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor .*fetch it again"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"only pickled weights \(pytorch_model.bin\): reading those runs code",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
            "only other.safetensors. Rename",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "is empty"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100), "not a whole safetensors file"),
        (
            lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            "Git LFS pointer.*git lfs pull",
        ),
        (lambda folder: cut(folder / "model.safetensors"), "not a whole safetensors file"),
        (lambda folder: (folder / in_parts(folder)[1]).unlink(), "lacks 1 of the 3 files .*model-00002-of-00003"),
        (lambda folder: swap_parts(folder), "lacks .*, which model.safetensors.index.json says it has"),
        (lambda folder: one_part(folder, "x" * 300), "can't be read: File name too long"),
        (lambda folder: pipe(folder / "model.safetensors"), "model.safetensors' can't be read: not a regular file"),
        (lambda folder: pipe(folder / "config.json"), "config.json' can't be read: not a regular file"),
        (lambda folder: link_nowhere(folder / "model.safetensors"), "is a link to a file that isn't there. The folder"),
        (
            lambda folder: change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight")),
            "lacks .*lm_head.weight",
        ),
        (lambda folder: point_outside(folder), "names '../model.safetensors', which is no safetensors file beside it"),
    ],
)
def test_a_folder_that_is_incomplete_or_damaged_is_refused_with_a_sentence(
    folder: Path, spoil: Callable[[Path], Any], because: str
) -> None:
    spoil(folder)
    refused(folder, because)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def swap_parts(folder: Path) -> None:
    names = in_parts(folder)
    shutil.copy(folder / names[0], folder / names[1])


def point_outside(folder: Path) -> None:
    one_part(folder, "../model")


def one_part(folder: Path, name: str) -> None:
    in_parts(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": f"{name}.safetensors"}}))


def pipe(path: Path) -> None:
    """Opened as a file is, it would wait for a writer for ever."""
    path.unlink()
    os.mkfifo(path)


def link_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "blobs" / "0")


def test_a_folder_of_gguf_files_says_which_to_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    refused(tmp_path, "with GGUF files. Name one: .*/model.gguf")


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'. Supported architectures: LlamaForCausalLM, Qwen2"),
        ({"architectures": None}, "architecture is None"),
        ({"auto_map": {"AutoModel": "code.py"}}, "nothing in a folder is ever executed"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized in a way that is not read"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'; linear and llama3 are supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope scaling is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks the key factor"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"num_hidden_layers": None}, "lacks the key num_hidden_layers"),
        ({"num_hidden_layers": 4}, "lacks the tensor model.layers.3."),
        ({"num_hidden_layers": 2}, "has the tensor 'model.layers.2."),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers is 1073741824, but the folder has"),
        ({"num_key_value_heads": 4}, "6 attention heads can't share 4 KV heads"),
        ({"intermediate_size": 161}, "has the shape"),
        ({"vocab_size": 130}, "embed_tokens.weight has the shape"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2', but that of LlamaForCausalLM is 'llama'"),
        (
            {"tie_word_embeddings": True},
            "are tied, but it has another lm_head.weight too. Set tie_word_embeddings to f",
        ),
        ({"hidden_activation": "silu", "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["sliding_attention"] * 3}, "gives a window to 3 layers, and the rest of the config to 0"),
        ({"layer_types": []}, "layer_types has 0 items for 3 layers"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, r"\(default\) has the key 'full_attention'"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "has the key 'mrope_section'"),
        ({"rope_parameters": {"rope_type": "linear", "type": "dynamic"}}, "type is 'dynamic'; only 'linear'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, "rope_theta is 10000.0; only 500000.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "has both rope_scaling and rope_parameters"),
    ],
)
def test_configs_that_would_be_served_wrong_are_refused(folder: Path, changes: Mapping[str, Any], because: str) -> None:
    change_config(folder, changes)
    refused(folder, because)


def test_a_tensor_that_the_layers_do_not_have_is_refused(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}))
    refused(folder, r"q_proj.bias' \(a bias\), which headrace's llama does not have")


def test_a_kind_of_numbers_that_is_not_read_is_refused(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].double()}))
    refused(folder, "lm_head.weight is stored as F64; F32, F16, ")


def test_a_tied_projection_that_is_stored_all_the_same_is_not_read(folder: Path) -> None:
    untied = config_of(folder)
    change_config(folder, {"tie_word_embeddings": True})
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0}))

    assert config_of(folder).tied_embeddings
    assert config_of(folder).parameters == untied.parameters - 131 * 96


def test_null_and_absent_keys_are_those_of_the_class(tmp_path: Path) -> None:
    shape = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 23}
    gemma = Reference(Checkpoint("gemma2", "Gemma2ForCausalLM", shape), tmp_path / "gemma2").folder
    theirs = json.loads((gemma / "config.json").read_text())
    (gemma / "config.json").write_text(json.dumps({key: theirs[key] for key in theirs if "softcapping" not in key}))
    assert (config_of(gemma).attention_cap, config_of(gemma).logits_cap) == (50.0, 30.0)
    change_config(gemma, {"attn_logit_softcapping": None, "final_logit_softcapping": 20})
    assert (config_of(gemma).attention_cap, config_of(gemma).logits_cap) == (0.0, 20.0)

    mistral = Reference(Checkpoint("mistral", "MistralForCausalLM"), tmp_path / "mistral").folder
    theirs = {**json.loads((mistral / "config.json").read_text()), "max_position_embeddings": 5000}
    del theirs["sliding_window"]
    (mistral / "config.json").write_text(json.dumps(theirs))
    assert (config_of(mistral).window_tokens, config_of(mistral).window_layers) == (4096, (0, 1, 2))
    change_config(mistral, {"sliding_window": None})
    assert config_of(mistral).window_tokens == 0


def test_windows_that_are_said_and_not_used_are_refused(tmp_path: Path) -> None:
    shape = {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1}
    qwen = Reference(Checkpoint("qwen2", "Qwen2ForCausalLM", shape), tmp_path / "qwen2").folder
    assert config_of(qwen).window_layers == (1, 2)
    change_config(qwen, {"use_sliding_window": False})
    refused(qwen, "gives a window to 2 layers, and the rest of the config to 0. Correct one")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"),
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", ""),
    ],
)
def test_weights_that_are_no_finite_numbers_are_refused_by_name(
    folder: Path, value: float, name: str, stored: str
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[7] = value

    change_tensors(folder, spoil)
    because = f"the tensor {name} holds values that are no finite numbers"
    with open_model_file(folder) as file:
        config = read_config(file)
        for dtype in (torch.float32, torch.bfloat16):
            weights = StoredWeights(file, config, dtype, lambda done, total: None)
            with pytest.raises(UnsupportedModel, match=because):
                Decoder(weights, config, 64)
        if stored:
            with pytest.raises(UnsupportedModel, match=because):
                weights.grouped([stored])

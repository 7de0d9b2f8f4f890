"""A checkpoint as a GGUF file computes what `transformers` does with the folder that it was made from.

Keys and names of tensors are those of the `gguf` package's own tables; what llama.cpp's converter does to weights
besides is done here: it adds to norms of Gemma the 1 that they are stored without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from ops.checkpoints import SHAPE, VOCAB, Checkpoint, Reference
from ops.driver import Driver, Feed
from ops.slot_inits import SlotInit
from safetensors.torch import load_file

from headrace.ops.models.architectures import read_config
from headrace.ops.models.architectures.gemma2 import SHARED_SCALE_LAYERS, gguf_attention_scale
from headrace.ops.models.keys import Keys, UnsupportedModel
from headrace.ops.weights.gguf import GgufFile

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 90)]
WINDOW = 23
GEMMA2_SHAPE = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW, "tie_word_embeddings": True}


class Converted(NamedTuple):
    """An architecture in both forms."""

    checkpoint: Checkpoint
    arch: gguf.MODEL_ARCH
    keys: Callable[[gguf.GGUFWriter], None] = lambda writer: None
    norm_offset: float = 0.0

    def write(self, folder: Path, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[self.arch])
        shape = {**SHAPE, **self.checkpoint.changes}
        head_dim = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
        writer.add_context_length(shape["max_position_embeddings"])
        writer.add_embedding_length(shape["hidden_size"])
        writer.add_block_count(shape["num_hidden_layers"])
        writer.add_feed_forward_length(shape["intermediate_size"])
        writer.add_head_count(shape["num_attention_heads"])
        writer.add_head_count_kv(shape["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
        writer.add_vocab_size(shape["vocab_size"])
        self.keys(writer)
        names = gguf.get_tensor_name_map(self.arch, shape["num_hidden_layers"])
        for name, tensor in load_file(folder / "model.safetensors").items():
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert known is not None, name
            offset = self.norm_offset if name.endswith("norm.weight") else 0.0
            writer.add_tensor(known, (tensor + offset).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def gemma2_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    writer.add_sliding_window(WINDOW)


GEMMA2 = Converted(Checkpoint("gemma2", "Gemma2ForCausalLM", GEMMA2_SHAPE), gguf.MODEL_ARCH.GEMMA2, gemma2_keys, 1.0)
CONVERTED = (
    Converted(Checkpoint("qwen2", "Qwen2ForCausalLM"), gguf.MODEL_ARCH.QWEN2),
    Converted(Checkpoint("qwen3", "Qwen3ForCausalLM", {"head_dim": 32}), gguf.MODEL_ARCH.QWEN3),
    GEMMA2,
)


@pytest.mark.parametrize("converted", CONVERTED, ids=lambda converted: converted.checkpoint.name)
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_a_gguf_has_the_logits_of_the_folder_it_was_made_from(
    converted: Converted, kernels: str, tmp_path: Path
) -> None:
    reference = Reference(converted.checkpoint, tmp_path / "folder")
    driver = Driver(converted.write(reference.folder, tmp_path / "model.gguf"), kernels=kernels, slots=4)
    driver.begin(SlotInit(0, PROMPT))
    model: Any = driver.worker._model
    inner = model.logits
    seen: list[torch.Tensor] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(inner(hidden).clone())
        return seen[-1]

    model.logits = logits
    driver.launch([Feed(0, PROMPT)])

    torch.testing.assert_close(seen[-1][-1], reference.logits(PROMPT)[-1], atol=2e-4, rtol=2e-4)


def test_gemma2s_windows_and_caps_are_those_of_the_published_models_where_the_file_has_none(tmp_path: Path) -> None:
    folder = Reference(GEMMA2.checkpoint, tmp_path / "folder").folder
    bare = GEMMA2._replace(keys=lambda writer: None)
    long = {**GEMMA2.checkpoint.changes, "max_position_embeddings": 8192}
    bare = bare._replace(checkpoint=GEMMA2.checkpoint._replace(changes=long))
    with GgufFile.open(bare.write(folder, tmp_path / "bare.gguf")) as file:
        config = read_config(file)
    assert (config.attention_cap, config.logits_cap) == (50.0, 30.0)
    assert [config.window(layer) for layer in range(3)] == [4096, 0, 4096]
    assert config.score_scale == 32**-0.5


def test_a_key_of_gemma2_that_is_not_read_is_refused(tmp_path: Path) -> None:
    folder = Reference(GEMMA2.checkpoint, tmp_path / "folder").folder
    odd = GEMMA2._replace(keys=lambda writer: writer.add_attention_scale(0.5))
    with (
        GgufFile.open(odd.write(folder, tmp_path / "odd.gguf")) as file,
        pytest.raises(UnsupportedModel, match=r"'gemma2\.attention\.scale', whose effect"),
    ):
        read_config(file)


def test_only_the_largest_gemma2_scales_scores_by_what_its_heads_share() -> None:
    def scale(layers: int) -> float:
        sizes = {"block_count": layers, "embedding_length": 4608, "attention.head_count": 32}
        keys = Keys("a file", {f"gemma2.{key}": size for key, size in sizes.items()})
        return gguf_attention_scale(keys, "gemma2", SHARED_SCALE_LAYERS)

    assert scale(46) == 144**-0.5
    assert scale(42) == 0.0, "by its heads"

"""A folder's pages belong to its weights and its config, wherever it lies and however its weights are cut."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ops.checkpoints import Checkpoint, Reference
from safetensors.torch import load_file, save_file

from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.ops.weights.folder import ModelFolder
from headrace.server import fingerprint
from headrace.server.fingerprint import model_fingerprint

LAYOUT = KvLayout(16, (LayerGroup("full", 0, (0, 1, 2), 2, 16, 4),))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = Checkpoint("llama", "LlamaForCausalLM", {"tie_word_embeddings": False})
    return Reference(checkpoint, tmp_path_factory.mktemp("fingerprint") / "model").folder


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """The same elsewhere, under another name."""
    return Path(shutil.copytree(original, tmp_path / "another"))


@pytest.fixture(params=["small", "large"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A model of which all is read, or only samples."""
    if request.param == "large":
        monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 0)
        monkeypatch.setattr(fingerprint, "_BLOCK_BYTES", 256)
    return bool(request.param == "large")


def of(folder: Path, **changed: Any) -> bytes:
    said = {
        "layout": LAYOUT,
        "dtype": "float32",
        "quantization": "none",
        "kernels": "compiled",
        "dot": "fma",
        **changed,
    }
    with ModelFolder.open(folder) as file:
        return model_fingerprint(file, **said)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.usefixtures("large")
def test_a_copy_elsewhere_is_the_same_model(original: Path, copy: Path) -> None:
    (copy / "README.md").write_text("what shapes no page")
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    assert of(copy) == of(original)


@pytest.mark.usefixtures("large")
def test_the_same_weights_in_parts_are_the_same_model(original: Path, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = ["one.safetensors", "two.safetensors"]
    weight_map = {key: names[number % 2] for number, key in enumerate(tensors)}
    for name in names:
        save_file({key: tensor for key, tensor in tensors.items() if weight_map[key] == name}, copy / name)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert of(copy) == of(original)


@pytest.mark.usefixtures("large")
def test_other_weights_of_the_same_config_are_another_model_whichever_tensor_differs(
    original: Path, copy: Path
) -> None:
    names = list(load_file(copy / "model.safetensors"))
    seen = {of(original)}
    for name in names:
        shutil.copy(original / "model.safetensors", copy / "model.safetensors")
        change_tensors(copy, lambda tensors, name=name: tensors[name].mul_(1.001))  # type: ignore[misc]
        seen.add(of(copy))
    assert len(seen) == len(names) + 1


def test_of_a_small_model_a_single_number_is_enough(original: Path, copy: Path) -> None:
    change_tensors(copy, lambda tensors: tensors["lm_head.weight"][70, 50].add_(1))
    assert of(copy) != of(original)


@pytest.mark.usefixtures("large")
def test_two_tensors_that_change_places_are_another_model(original: Path, copy: Path) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        one, two = (f"model.layers.{layer}.self_attn.k_proj.weight" for layer in (0, 1))
        tensors[one], tensors[two] = tensors[two], tensors[one]

    change_tensors(copy, swap)
    assert of(copy) != of(original)


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "bfloat16"},
        {"quantization": "q8"},
        {"kernels": "torch"},
        {"layout": KvLayout(32, LAYOUT.groups)},
    ],
)
def test_who_computes_and_how_pages_are_laid_out_counts(original: Path, changed: dict[str, Any]) -> None:
    assert of(original, **changed) != of(original)


def test_another_config_of_the_same_weights_is_another_model(original: Path, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_theta": 5e5}}))
    assert of(copy) != of(original)


def test_of_a_large_model_only_samples_are_read_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 0)
    path, tensors = tmp_path / "model.safetensors", 8
    save_file({f"weight.{number}": torch.rand(1 << 20) for number in range(tensors)}, path)
    (tmp_path / "config.json").write_text("{}")
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_bytes(path):
        pytest.skip("the file system keeps its files in memory")

    of(tmp_path)

    samples = tensors * 4 * (64 << 10)
    assert samples <= resident_bytes(path) < 1.5 * samples < path.stat().st_size / 8


def resident_bytes(path: Path) -> int:
    """How much of a file is in memory."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        data = np.frombuffer(mapping, np.uint8)
        pages = np.zeros(-(-len(data) // mmap.PAGESIZE), np.uint8)
        called = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data)), ctypes.c_void_p(pages.ctypes.data)
        )
        assert called == 0, os.strerror(ctypes.get_errno())
        del data
        return int((pages & 1).sum()) * mmap.PAGESIZE

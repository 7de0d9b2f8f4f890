"""The architectures that can be served: a file each, and a line here. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from headrace.ops.models.architecture import Architecture, refuse_foreign
from headrace.ops.models.architectures.gemma2 import GEMMA2
from headrace.ops.models.architectures.gemma3 import GEMMA3
from headrace.ops.models.architectures.llama import LLAMA
from headrace.ops.models.architectures.mistral import MISTRAL
from headrace.ops.models.architectures.qwen2 import QWEN2
from headrace.ops.models.architectures.qwen3 import QWEN3
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.keys import Keys, UnsupportedModel, shown
from headrace.ops.models.tensors import stored_tensors
from headrace.ops.weights.files import ModelFile
from headrace.ops.weights.folder import CONFIG, read_config_file
from headrace.ops.weights.gguf import GgufFile, TensorInfo

ARCHITECTURES: Final = (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA2, GEMMA3)


def read_config(file: ModelFile) -> ModelConfig:
    """Raises UnsupportedModel, also when tensors are missing, too many, or of another shape than they should be."""
    return _from_gguf(file) if isinstance(file, GgufFile) else _from_folder(file)


def check_folder_config(folder: Path) -> None:
    """What config.json tells before the weights are there. Raises UnsupportedModel, BadModelFile."""
    keys = Keys(f"{folder}/{CONFIG}", read_config_file(folder))
    _folder_architecture(keys)
    refuse_foreign(keys)


def tensors_of(file: ModelFile, config: ModelConfig) -> dict[str, TensorInfo]:
    """The tensors of a file whose config has been read, by GGUF's names."""
    (names,) = (each.folder_names for each in ARCHITECTURES if each.name == config.architecture)
    return stored_tensors(file, config, names)


def _from_gguf(file: GgufFile) -> ModelConfig:
    keys = Keys(file.path, file.metadata)
    name = keys.text("general.architecture")
    for architecture in ARCHITECTURES:
        if architecture.name == name and architecture.from_gguf is not None:
            keys.must_be("general.type", ("model",))
            return architecture.from_gguf(keys, file)
    raise _unknown(keys, name, [each.name for each in ARCHITECTURES if each.from_gguf is not None])


def _from_folder(file: ModelFile) -> ModelConfig:
    assert not isinstance(file, GgufFile)
    keys = Keys(f"{file.path}/{CONFIG}", file.config)
    return _folder_architecture(keys).from_folder(keys, file)


def _folder_architecture(keys: Keys) -> Architecture:
    names = keys.texts("architectures")
    for architecture in ARCHITECTURES:
        if architecture.class_name in names:
            _check_model_type(keys, architecture)
            return architecture
    raise _unknown(keys, names[0] if names else None, [each.class_name for each in ARCHITECTURES])


def _check_model_type(keys: Keys, architecture: Architecture) -> None:
    said = keys.text("model_type", architecture.model_type)
    if said != architecture.model_type:
        raise keys.refused(
            f"its model_type is {shown(said)}, but that of {architecture.class_name} is {architecture.model_type!r}",
            "Correct one of the two",
        )


def _unknown(keys: Keys, name: str | None, supported: list[str]) -> UnsupportedModel:
    return keys.refused(f"its architecture is {shown(name)}", f"Supported architectures: {', '.join(supported)}")

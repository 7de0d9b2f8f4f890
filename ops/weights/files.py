"""A model's weights on disk, in either format: a GGUF file, or a Hugging Face folder."""

from __future__ import annotations

import os
from typing import TypeAlias

from headrace.ops.weights.folder import ModelFolder
from headrace.ops.weights.gguf import GgufFile

ModelFile: TypeAlias = GgufFile | ModelFolder
"""Both have `path`, `tensors` by name, `bytes_of` a tensor, and `close`."""


def open_model_file(path: str | os.PathLike[str]) -> ModelFile:
    """Map what the path names, its headers checked. Raises BadModelFile."""
    return ModelFolder.open(path) if os.path.isdir(path) else GgufFile.open(path)

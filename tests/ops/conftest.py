"""A small model for tests that need any model, but not the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from ops.checkpoints import CHECKPOINTS, Reference
from ops.small_llama import SmallLlama


@pytest.fixture(scope="session")
def small_llama() -> SmallLlama:
    return SmallLlama()


@pytest.fixture(scope="session")
def small_model(small_llama: SmallLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of `small_llama`."""
    return small_llama.write(tmp_path_factory.mktemp("model") / "small.gguf")


@pytest.fixture(scope="session")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a Gemma 3: two layers see a window of 23 tokens."""
    (checkpoint,) = (each for each in CHECKPOINTS if each.name == "gemma3")
    return Reference(checkpoint, tmp_path_factory.mktemp("windowed") / checkpoint.name).folder

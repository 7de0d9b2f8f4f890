"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

# Triton looks when its kernels are made: here they run in numpy, on tensors of a CPU.
os.environ["TRITON_INTERPRET"] = "1"

import pytest

from headrace.server.models import DEFAULT_MODEL, cache_folder, fetch_model, resolve


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The default model: `HEADRACE_TEST_MODEL`, or the cached one. A test that needs it fails where it is missing."""
    named = os.environ.get("HEADRACE_TEST_MODEL")
    if named is None:
        return resolve(DEFAULT_MODEL, cache_folder(os.environ))
    path = Path(named)
    assert path.is_file(), f"HEADRACE_TEST_MODEL names {named}, which is no file"
    return path


@pytest.fixture(scope="session")
def gemma_file() -> Path:
    """Gemma 3 270M in Q4_K_M; downloaded where it is not cached yet."""
    return fetch_model("gemma-3-270m", cache_folder(os.environ), lambda phase, done, total: None)

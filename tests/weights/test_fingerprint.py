"""Pages are told apart by whatever shapes their bytes."""

from __future__ import annotations

import pytest
from weights.conftest import WriteLlama

from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.ops.weights.gguf import GgufFile
from headrace.server.fingerprint import model_fingerprint

LAYOUT = KvLayout(16, (LayerGroup("full", 0, (0, 1), 2, 16, 2),))


@pytest.mark.parametrize(
    ("dtype", "quantization", "told_apart"),
    [("bfloat16", "none", True), ("bfloat16", "q8", True), ("float32", "q8", True), ("float32", "none", False)],
)
def test_cpus_that_multiply_otherwise_share_pages_only_in_float32(
    write_llama: WriteLlama, dtype: str, quantization: str, told_apart: bool
) -> None:
    with GgufFile.open(write_llama()) as file:
        found = {
            model_fingerprint(file, LAYOUT, dtype, quantization, "compiled", dot) for dot in ("amx", "avx512", "fma")
        }
    assert len(found) == (3 if told_apart else 1)

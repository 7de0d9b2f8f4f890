"""Stored numbers become the very floats that the `gguf` package makes of them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.ops.simd.blocks import DECODERS
from headrace.ops.weights.dequantize import PLAIN, dequantize, dequantize_into
from headrace.ops.weights.gguf import KIND_NAMES, KINDS, GgufFile, TensorKind

SHAPES = [(256,), (3, 512), (2, 3, 256), (1100, 2048)]
"""The last is longer than one chunk of the decoder, and no multiple of it."""

FLOAT16_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block's float16 are, of the kinds that the `gguf` package can't write."""


def bits(tensor: torch.Tensor) -> NDArray[np.int32]:
    return tensor.numpy().view(np.int32)


def written(folder: Path, kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> Path:
    path = folder / f"{kind.name}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    rng = np.random.default_rng(7)
    if kind.name in FLOAT16_AT:
        stored = next(known for known in KINDS.values() if known.name == kind.name)
        blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, stored.block_bytes), dtype=np.uint8)
        writer.add_tensor("weight", finite(blocks, stored).reshape(*shape[:-1], -1), raw_dtype=kind)
    else:
        numbers = rng.standard_normal(shape, dtype=np.float32)
        writer.add_tensor("weight", gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def finite(blocks: NDArray[np.uint8], kind: TensorKind) -> NDArray[np.uint8]:
    """The blocks with exponents of their float16 below 1, so that no number is infinite or none."""
    for at in FLOAT16_AT[kind.name]:
        blocks[..., at + 1] &= 0xBF
    return blocks


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_a_kind_equals_the_gguf_package_bit_for_bit(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    path = written(tmp_path, gguf.GGMLQuantizationType[kind], shape)
    (theirs,) = gguf.GGUFReader(path).tensors
    expected = gguf.dequantize(theirs.data, theirs.tensor_type)

    with GgufFile.open(path) as file:
        info = file.tensors["weight"]
        ours = dequantize(info.kind, file.bytes_of(info), info.shape)

    assert info.kind == kind
    assert ours.shape == shape
    assert np.array_equal(bits(ours), expected.reshape(shape).view(np.int32))


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from([kind for kind in KINDS.values() if kind.name in FLOAT16_AT]), data=st.data())
def test_any_block_of_a_k_quant_equals_the_gguf_package_bit_for_bit(kind: TensorKind, data: st.DataObject) -> None:
    raw = np.frombuffer(data.draw(st.binary(min_size=2 * kind.block_bytes, max_size=2 * kind.block_bytes)), np.uint8)
    blocks = finite(raw.reshape(2, -1).copy(), kind)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind.name])

    ours = dequantize(kind.name, memoryview(blocks.tobytes()), expected.shape)

    assert np.array_equal(bits(ours), expected.view(np.int32))


def test_all_tensors_of_the_default_model_equal_the_gguf_package_bit_for_bit(default_model: Path) -> None:
    theirs = gguf.GGUFReader(default_model).tensors
    assert len(theirs) == 272
    with GgufFile.open(default_model) as file:
        for told in theirs:
            info = file.tensors[told.name]
            ours = dequantize(info.kind, file.bytes_of(info), info.shape)
            expected = gguf.dequantize(told.data, told.tensor_type)
            assert ours.shape == expected.shape, told.name
            assert np.array_equal(bits(ours), expected.view(np.int32)), told.name


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_bfloat16_is_the_rounded_float32(tmp_path: Path, kind: str) -> None:
    with GgufFile.open(written(tmp_path, gguf.GGMLQuantizationType[kind], (1100, 2048))) as file:
        info = file.tensors["weight"]
        exact = dequantize(info.kind, file.bytes_of(info), info.shape)
        rounded = dequantize(info.kind, file.bytes_of(info), info.shape, torch.bfloat16)

    assert torch.equal(rounded, exact.to(torch.bfloat16))


def test_weights_can_be_put_into_a_part_of_a_fused_tensor(tmp_path: Path) -> None:
    with GgufFile.open(written(tmp_path, gguf.GGMLQuantizationType.Q4_1, (3, 64))) as file:
        info = file.tensors["weight"]
        fused = torch.zeros(8, 64)
        dequantize_into(info.kind, file.bytes_of(info), fused[2:5])
        alone = dequantize(info.kind, file.bytes_of(info), info.shape)

    assert torch.equal(fused[2:5], alone)
    assert not fused[:2].any() and not fused[5:].any()


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_weights_are_not_the_files_memory(tmp_path: Path, kind: str) -> None:
    with GgufFile.open(written(tmp_path, gguf.GGMLQuantizationType[kind], (3, 256))) as file:
        info = file.tensors["weight"]
        before = bytes(file.bytes_of(info))
        dequantize(info.kind, file.bytes_of(info), info.shape).zero_()
        assert bytes(file.bytes_of(info)) == before


def test_every_kind_that_can_be_read_can_be_decoded() -> None:
    assert sorted([*DECODERS, *PLAIN]) == sorted(KIND_NAMES)

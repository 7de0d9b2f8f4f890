"""Reading GGUF headers: what is in the file, and every way in which a file can lie about it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from headrace.ops.weights import gguf as reader
from headrace.ops.weights.gguf import KINDS, BadModelFile, GgufFile

WriteLlama = Callable[..., Path]

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
HUGE = (0, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, value_type: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", value_type) + payload


def array(item_type: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", item_type, count) + payload


def tensor(name: str | bytes, dimensions: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def model(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data_bytes: int = 0,
    alignment: int = 32,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file of these parts; `counts` claims other numbers of tensors and keys than there are."""
    claimed = counts or (len(tensors), len(keys))
    header = b"GGUF" + struct.pack("<IQQ", version, *claimed) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + bytes(data_bytes)


def opened(folder: Path, content: bytes) -> GgufFile:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return GgufFile.open(path)


def refused(folder: Path, content: bytes, because: str) -> None:
    with pytest.raises(BadModelFile, match=because) as refusal:
        opened(folder, content)
    assert "model.gguf" in str(refusal.value)


# ---------------------------------------------------------------------------------------------------------------
# What is read


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_metadata_is_read(tmp_path: Path, version: int) -> None:
    scalars: dict[str, tuple[int, str, Any]] = {
        "u8": (U8, "<B", 255),
        "i8": (I8, "<b", -128),
        "u16": (U16, "<H", 65535),
        "i16": (I16, "<h", -32768),
        "u32": (U32, "<I", (1 << 32) - 1),
        "i32": (I32, "<i", -(1 << 31)),
        "f32": (F32, "<f", 0.5),
        "yes": (BOOL, "<B", True),
        "no": (BOOL, "<B", False),
        "u64": (U64, "<Q", (1 << 64) - 1),
        "i64": (I64, "<q", -(1 << 63)),
        "f64": (F64, "<d", 0.1),
    }
    keys = [key(name, kind, struct.pack(code, value)) for name, (kind, code, value) in scalars.items()]
    keys += [key("text", STRING, text("é\0😀")), key("flags", ARRAY, array(BOOL, 2, b"\x01\x00"))]
    keys += [key("words", ARRAY, array(STRING, 3, text("a") + text("") + text("ü")))]
    keys += [key("numbers", ARRAY, array(I32, 2, struct.pack("<2i", -1, 7))), key("empty", ARRAY, array(U8, 0, b""))]
    expected = {name: value for name, (_, _, value) in scalars.items()}
    expected |= {"text": "é\0😀", "flags": [True, False], "words": ["a", "", "ü"], "numbers": [-1, 7], "empty": []}

    metadata = opened(tmp_path, model(tuple(keys), version=version)).metadata

    assert metadata == expected
    assert metadata["yes"] is True and metadata["no"] is False


def test_a_tensors_shape_is_row_major_and_its_bytes_are_the_files(tmp_path: Path) -> None:
    content = model(tensors=(tensor("a", (3,), offset=0), tensor("b", (2, 5), offset=32)), data_bytes=32)
    values = struct.pack("<10f", *range(10))

    file = opened(tmp_path, content + values)

    assert file.tensors["b"].shape == (5, 2)
    assert file.tensors["b"].kind == "F32"
    assert file.tensors["b"].elements == 10
    assert file.bytes_of(file.tensors["b"]) == values
    assert file.bytes_of(file.tensors["b"]).readonly


def test_another_alignment_moves_the_data(tmp_path: Path) -> None:
    keys = (key("general.alignment", U32, struct.pack("<I", 256)),)
    content = model(keys, (tensor("a", (1,)),), alignment=256) + struct.pack("<f", 2.5)

    file = opened(tmp_path, content)

    assert file.tensors["a"].offset % 256 == 0
    assert file.bytes_of(file.tensors["a"]) == struct.pack("<f", 2.5)


def test_the_default_model_reads_as_the_gguf_package_reads_it(default_model: Path) -> None:
    theirs = gguf.GGUFReader(default_model)

    with GgufFile.open(default_model) as ours:
        expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
        assert ours.metadata == expected
        assert len(ours.tensors) == 272
        for told in theirs.tensors:
            info = ours.tensors[told.name]
            assert info.shape == tuple(int(size) for size in told.shape[::-1])
            assert info.kind == told.tensor_type.name
            assert (info.offset, info.size_bytes) == (told.data_offset, told.n_bytes)


def test_sizes_of_the_kinds_are_those_of_the_gguf_package() -> None:
    for number, kind in KINDS.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert kind.name == theirs.name
        assert (kind.block_elements, kind.block_bytes) == gguf.GGML_QUANT_SIZES[theirs]


def test_views_outlive_the_file(write_llama: WriteLlama) -> None:
    file = GgufFile.open(write_llama())
    view = file.bytes_of(file.tensors["output_norm.weight"])
    before = bytes(view)

    file.close()
    file.close()

    assert bytes(view) == before


def test_reading_a_header_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, headrace.ops.models.config; sys.exit(len({'torch', 'numpy', 'gguf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


# ---------------------------------------------------------------------------------------------------------------
# What is refused


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match=r"model\.gguf.*No such file.*--model-path"):
        GgufFile.open(tmp_path / "model.gguf")


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(BadModelFile, match="null byte"):
        GgufFile.open("a\0b")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="is a directory"):
        GgufFile.open(tmp_path)


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadModelFile, match="not a regular file"):
        GgufFile.open(tmp_path / "pipe")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, b"", "is empty")


@pytest.mark.parametrize("content", [b"G", b"PK\x03\x04" + bytes(100), b"GGML" + bytes(100), b"<html>" * 20])
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    refused(tmp_path, content, "is not a GGUF file")


@pytest.mark.parametrize("version", [0, 1, 4, 0xFFFFFFFF])
def test_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    refused(tmp_path, model(version=version), f"GGUF version {version}.*version 2 or 3")


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian")


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    keys = (key("words", ARRAY, array(STRING, 2, text("one") + text("two"))), key("u", U32, struct.pack("<I", 7)))
    whole = model(keys, (tensor("a", (8,)),), data_bytes=32)
    opened(tmp_path, whole)
    for size in range(4, len(whole)):
        refused(tmp_path, whole[:size], "damaged or incomplete")


@pytest.mark.parametrize("count", HUGE[1:])
def test_huge_counts_of_tensors_and_keys_are_refused(tmp_path: Path, count: int) -> None:
    refused(tmp_path, model(counts=(count, 0)), f"claims {count} tensors")
    refused(tmp_path, model(counts=(0, count)), f"claims {count} metadata keys")


@pytest.mark.parametrize("length", HUGE[1:])
def test_endless_strings_are_refused(tmp_path: Path, length: int) -> None:
    endless = struct.pack("<Q", length)
    refused(tmp_path, model((endless + b"key",)), "metadata key is .* bytes long")
    refused(tmp_path, model((key("k", STRING, endless + b"value"),)), "the value of 'k'")
    refused(tmp_path, model((key("k", ARRAY, array(STRING, 1, endless)),)), "passes the file's end")
    refused(tmp_path, model(tensors=(endless + b"name" + bytes(40),)), "name is .* bytes long")


@pytest.mark.parametrize("item_type", [U8, STRING, F64])
@pytest.mark.parametrize("count", HUGE[1:])
def test_huge_arrays_are_refused(tmp_path: Path, count: int, item_type: int) -> None:
    refused(tmp_path, model((key("k", ARRAY, array(item_type, count, bytes(64))),)), f"'k' has {count} items")


def test_an_array_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, model((key("k", ARRAY, array(U32, 100_000, bytes(64))),)), "passes the file's end")


def test_many_arrays_share_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_ARRAY_ELEMENTS", 100)
    halves = tuple(key(name, ARRAY, array(U8, 51, bytes(51))) for name in "ab")
    opened(tmp_path, model(halves[:1]))
    refused(tmp_path, model(halves), "all arrays together may have 100")


def test_a_header_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 1 << 20)
    refused(tmp_path, model((key("k", STRING, text(bytes(1 << 20))),)), "1 MiB that a header may have")


def test_nested_arrays_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, model((key("k", ARRAY, array(ARRAY, 1, array(U8, 1, b"\0"))),)), "array of arrays")


def test_unknown_value_types_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, model((key("k", 13, bytes(8)),)), "unknown type 13")
    refused(tmp_path, model((key("k", ARRAY, array(99, 1, bytes(8))),)), "unknown type 99")


def test_a_bool_is_true_or_false(tmp_path: Path) -> None:
    refused(tmp_path, model((key("k", BOOL, b"\x02"),)), "neither true nor false")


def test_names_must_be_utf8(tmp_path: Path) -> None:
    refused(tmp_path, model((key(b"\xff", U8, b"\0"),)), "metadata key is not UTF-8")
    refused(tmp_path, model((key("k", STRING, text(b"ab\xc3")),)), "value of 'k' is not UTF-8")
    refused(tmp_path, model((key("k", ARRAY, array(STRING, 1, text(b"\x80"))),)), "value of 'k' is not UTF-8")
    refused(tmp_path, model(tensors=(tensor(b"\xed\xa0\x80", (1,)),), data_bytes=4), "name is not UTF-8")


def test_a_key_occurs_once(tmp_path: Path) -> None:
    refused(tmp_path, model((key("k", U8, b"\0"), key("k", U8, b"\1"))), "'k' occurs twice")


def test_a_tensor_occurs_once(tmp_path: Path) -> None:
    refused(tmp_path, model(tensors=(tensor("a", (1,)), tensor("a", (1,), offset=32)), data_bytes=64), "'a' occurs")


def test_tensors_must_not_overlap(tmp_path: Path) -> None:
    tensors = (tensor("a", (9,)), tensor("b", (1,), offset=32))
    refused(tmp_path, model(tensors=tensors, data_bytes=64), "'a' and 'b' overlap")


@pytest.mark.parametrize("offset", [32, 1 << 32, (1 << 64) - 32])
def test_a_tensor_beyond_the_file_is_refused(tmp_path: Path, offset: int) -> None:
    refused(tmp_path, model(tensors=(tensor("a", (1,), offset=offset),), data_bytes=32), "'a' ends at byte")


@pytest.mark.parametrize("size", HUGE[1:])
def test_dimensions_that_overflow_are_refused(tmp_path: Path, size: int) -> None:
    refused(tmp_path, model(tensors=(tensor("a", (size, size, size, size)),), data_bytes=32), "'a' ends at byte")


def test_a_dimension_of_zero_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, model(tensors=(tensor("a", (4, 0)),), data_bytes=32), "dimension of 0")


@pytest.mark.parametrize("dimensions", [(), (1,) * 5])
def test_too_few_and_too_many_dimensions_are_refused(tmp_path: Path, dimensions: tuple[int, ...]) -> None:
    refused(tmp_path, model(tensors=(tensor("a", dimensions),), data_bytes=32), "dimensions, not 1 to 4")


def test_a_huge_number_of_dimensions_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, model(tensors=(text("a") + struct.pack("<I", 0xFFFFFFFF),)), "4294967295 dimensions")


def test_a_tensor_off_its_alignment_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, model(tensors=(tensor("a", (1,), offset=4),), data_bytes=32), "no multiple of the alignment 32")


def test_rows_are_whole_blocks(tmp_path: Path) -> None:
    refused(tmp_path, model(tensors=(tensor("a", (33, 2), kind=3),), data_bytes=80), "rows of 33, no multiple of Q4_1")


@pytest.mark.parametrize("value", [0, 4, 24, 1 << 31])
def test_bad_alignments_are_refused(tmp_path: Path, value: int) -> None:
    keys = (key("general.alignment", U32, struct.pack("<I", value)),)
    refused(tmp_path, model(keys), f"general.alignment is {value}")


def test_an_alignment_that_is_no_number_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, model((key("general.alignment", STRING, text("32")),)), "general.alignment is '32'")


@pytest.mark.parametrize("kind", sorted(set(gguf.GGMLQuantizationType) - set(KINDS)))
def test_unsupported_kinds_are_refused_by_name(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    because = f"tensor 'blk.0.w' has the unsupported kind {kind.name}\\. .*F32, F16, Q4_0, Q4_1, Q5_0, .*Q6_K, BF16"
    refused(tmp_path, model(tensors=(tensor("blk.0.w", (256,), kind=kind),), data_bytes=4096), because)


@pytest.mark.parametrize("kind", [1000, 0xFFFFFFFF])
def test_unknown_kinds_are_refused_by_number(tmp_path: Path, kind: int) -> None:
    refused(tmp_path, model(tensors=(tensor("a", (256,), kind=kind),), data_bytes=4096), f"kind number {kind}")


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, model((key("split.count", U16, struct.pack("<H", 3)),)), "one of 3 parts.*merge")
    opened(tmp_path, model((key("split.count", U16, struct.pack("<H", 1)),)))


def test_an_older_quantization_is_refused(tmp_path: Path) -> None:
    keys = (key("general.quantization_version", U32, struct.pack("<I", 1)),)
    refused(tmp_path, model(keys, (tensor("a", (32,), kind=3),), data_bytes=32), "quantization has version 1")


def test_a_hostile_name_is_escaped_and_cut_in_the_message(tmp_path: Path) -> None:
    name = "\x1b[2J\n" + "x" * 1000
    with pytest.raises(BadModelFile) as refusal:
        opened(tmp_path, model((key(name, U8, b"\0"), key(name, U8, b"\0"))))
    assert "\x1b" not in str(refusal.value) and "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500

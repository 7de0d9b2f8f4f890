"""No change to a file makes the reader do anything but read it or refuse it, in bounded time and memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ops.models.architectures import read_config
from headrace.ops.models.keys import UnsupportedModel
from headrace.ops.weights.gguf import BadModelFile, GgufFile

WriteLlama = Callable[..., Path]
Mutation = Callable[[bytearray], None]

MAX_PEAK_BYTES = 4 << 20
"""The small file has 130 kB; a claim in it that was believed would take more."""

# Most fall into the header; the magic is left alone, or every third change would be refused for it.
positions = st.one_of(st.integers(4, 4000), st.integers(4, 130_000))
interesting = st.sampled_from([0, 1, 31, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63, (1 << 64) - 1])


def flip(at: int, mask: int) -> Mutation:
    def mutate(content: bytearray) -> None:
        if at < len(content):
            content[at] ^= mask

    return mutate


def overwrite(at: int, value: int) -> Mutation:
    def mutate(content: bytearray) -> None:
        content[at : at + 8] = struct.pack("<Q", value)

    return mutate


def cut(at: int) -> Mutation:
    def mutate(content: bytearray) -> None:
        del content[at:]

    return mutate


def splice(source: int, length: int, target: int) -> Mutation:
    def mutate(content: bytearray) -> None:
        content[target:target] = content[source : source + length]

    return mutate


def remove(at: int, length: int) -> Mutation:
    def mutate(content: bytearray) -> None:
        del content[at : at + length]

    return mutate


mutations = st.lists(
    st.one_of(
        st.builds(flip, positions, st.integers(1, 255)),
        st.builds(overwrite, positions, interesting),
        st.builds(cut, positions),
        st.builds(splice, positions, st.integers(1, 200), positions),
        st.builds(remove, positions, st.integers(1, 200)),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="session")
def small_file(write_llama: WriteLlama) -> Path:
    return write_llama()


def read_or_refuse(path: Path) -> bool:
    """True when the file was read as a model."""
    try:
        with GgufFile.open(path) as file:
            for info in file.tensors.values():
                assert len(file.bytes_of(info)) == info.size_bytes
            read_config(file)
    except (BadModelFile, UnsupportedModel) as refusal:
        assert str(path) in str(refusal)
        return False
    return True


def test_the_unchanged_file_is_read(small_file: Path) -> None:
    assert read_or_refuse(small_file)


@settings(max_examples=400, deadline=timedelta(seconds=2))
@given(mutations)
def test_a_changed_file_is_read_or_refused(small_file: Path, changes: list[Mutation]) -> None:
    content = bytearray(small_file.read_bytes())
    for change in changes:
        change(content)
    changed = small_file.with_name("changed.gguf")
    changed.write_bytes(content)
    tracemalloc.start()
    try:
        read_or_refuse(changed)
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()


@settings(max_examples=200, deadline=timedelta(seconds=2))
@given(st.binary(max_size=400))
def test_any_bytes_behind_the_magic_are_read_or_refused(small_file: Path, tail: bytes) -> None:
    changed = small_file.with_name("random.gguf")
    changed.write_bytes(b"GGUF\x03\0\0\0" + tail)
    assert not read_or_refuse(changed)


def test_every_eight_bytes_of_the_header_may_be_a_huge_number(small_file: Path) -> None:
    content = small_file.read_bytes()
    with GgufFile.open(small_file) as file:
        header_bytes = min(info.offset for info in file.tensors.values())
    changed = small_file.with_name("huge.gguf")
    for at in range(0, header_bytes, 3):
        changed.write_bytes(content[:at] + b"\xff" * 8 + content[at + 8 :])
        read_or_refuse(changed)

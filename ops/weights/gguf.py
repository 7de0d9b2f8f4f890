"""A GGUF file, mapped: its metadata and where its tensors are. Nothing of a tensor is read here.

Written for hostile files: every count, length, offset and kind is checked against the file's size, and against a bound
of its own, before anything is allocated or read by it. The `gguf` package's reader takes 2.3 s for the default model,
this one 0.04 s (nearly all of it for 98k vocabulary strings), and it imports neither numpy nor torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

in     a path
out    `metadata`, `tensors`, and `bytes_of` a tensor: a read-only view into the mapping
state  the mapping
owner  whoever opened it
ready  when `open` returns: everything has been checked
end    `close`; the pages stay mapped until the last view from `bytes_of` is gone
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
from types import TracebackType
from typing import BinaryIO, Final, NamedTuple, Self, TypeAlias

Scalar: TypeAlias = str | int | float | bool
Metadata: TypeAlias = dict[str, Scalar | list[Scalar]]

MAX_HEADER_BYTES: Final = 128 << 20
"""Metadata and tensor descriptions. The default model has 1.8 MB with a vocabulary of 49k."""
MAX_ENTRIES: Final = 1 << 16
"""Metadata keys, and tensors. The largest mixtures of experts have about 2,000 tensors."""
MAX_ARRAY_ELEMENTS: Final = 1 << 22
"""In all arrays together. A vocabulary of 262k with types, scores and merges has 1.3 million. With the bound above, the
worst file of 128 MiB becomes 700 MB of Python objects."""
MAX_KEY_BYTES: Final = 65535
MAX_TENSOR_NAME_BYTES: Final = 64
MAX_DIMENSIONS: Final = 4

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 16
_QUANTIZATION_VERSION: Final = 2

_SUPPORTED: Final = "headrace reads single GGUF files of version 2 or 3, little-endian"
_AGAIN: Final = "The file is damaged or incomplete: fetch or convert it again"


class BadModelFile(ValueError):
    """The file can't be served. The message names the file, what is wrong, and what is supported or to be done."""


class TensorKind(NamedTuple):
    """How a tensor's numbers are stored: in blocks of so many numbers and bytes."""

    name: str
    block_elements: int
    block_bytes: int


KINDS: Final = {
    0: TensorKind("F32", 1, 4),
    1: TensorKind("F16", 1, 2),
    2: TensorKind("Q4_0", 32, 18),
    3: TensorKind("Q4_1", 32, 20),
    6: TensorKind("Q5_0", 32, 22),
    7: TensorKind("Q5_1", 32, 24),
    8: TensorKind("Q8_0", 32, 34),
    10: TensorKind("Q2_K", 256, 84),
    11: TensorKind("Q3_K", 256, 110),
    12: TensorKind("Q4_K", 256, 144),
    13: TensorKind("Q5_K", 256, 176),
    14: TensorKind("Q6_K", 256, 210),
    30: TensorKind("BF16", 1, 2),
}
"""By GGML's type number. A new kind is a line here and a function in `dequantize`."""

KIND_NAMES: Final = tuple(kind.name for kind in KINDS.values())

# All of GGML's kinds in the order of their numbers, so that a refusal can say more than a number.
_GGML_KINDS: Final = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S "
    "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 "
    "IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4 Q1_0"
)


class TensorInfo(NamedTuple):
    """Where a tensor's bytes are, checked against the file."""

    name: str
    shape: tuple[int, ...]
    """Row-major, as torch has it: GGML's dimensions reversed."""
    kind: str
    """A name of `KINDS`."""
    offset: int
    """From the file's beginning."""
    size_bytes: int

    @property
    def elements(self) -> int:
        return _product(self.shape)


class GgufFile:
    """A mapped model file whose header has been checked."""

    def __init__(self, path: str, mapping: mmap.mmap, metadata: Metadata, tensors: dict[str, TensorInfo]) -> None:
        """Use `open`."""
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._view: memoryview | None = memoryview(mapping)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Map the file and read its header. Raises BadModelFile."""
        name = os.fspath(path)
        mapping = _mapped(name)
        metadata, tensors = _Header(name, mapping).read()
        return cls(name, mapping, metadata, tensors)

    def bytes_of(self, info: TensorInfo) -> memoryview:
        """The tensor's bytes in the mapping: read-only, `size_bytes` long. Reading them may wait for the disk."""
        assert self._view is not None, "the file is closed"
        return self._view[info.offset : info.offset + info.size_bytes]

    def close(self) -> None:
        """Let go of the mapping. Views that were given out stay valid; harmless twice."""
        self._view = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, opened for reading; anything else is an OSError: IsADirectoryError, or EINVAL."""
    # Without O_NONBLOCK, opening a pipe by mistake would wait for its writer forever.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def _mapped(path: str) -> mmap.mmap:
    try:
        file = open_regular(path)
    except IsADirectoryError:
        raise BadModelFile(f"{path!r} is a directory. {_SUPPORTED}: name the .gguf file in it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadModelFile(f"{path!r} can't be opened: {reason}. Check --model-path") from error
    with file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            raise BadModelFile(f"{path!r} is empty. {_AGAIN}")
        try:
            return mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise BadModelFile(f"{path!r} can't be mapped: {error.strerror}") from error


_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9
# GGUF's value types that are plain numbers, as struct codes.
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}


class _Header:
    """Reads forward through the mapping. `_take` is the only place that moves, and it checks."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._size = len(data)
        self._end = min(self._size, MAX_HEADER_BYTES)
        self._array_elements = 0

    def read(self) -> tuple[Metadata, dict[str, TensorInfo]]:
        if self._data[:4] != _MAGIC:
            raise BadModelFile(f"{self._path!r} is not a GGUF file: it begins with {self._data[:4]!r}. {_SUPPORTED}")
        self._take(4, "the header")
        self._check_version(self._u32("the version"))
        tensor_count = self._count(self._u64("the number of tensors"), "tensors")
        key_count = self._count(self._u64("the number of metadata keys"), "metadata keys")
        metadata: Metadata = {}
        for _ in range(key_count):
            key = self._text(MAX_KEY_BYTES, "a metadata key")
            if key in metadata:
                raise self._bad(f"the metadata key {_shown(key)} occurs twice")
            metadata[key] = self._value(self._u32(f"the type of {_shown(key)}"), key)
        self._check_split(metadata)
        alignment = self._alignment(metadata)
        described = [self._tensor_description() for _ in range(tensor_count)]
        start = (self._at + alignment - 1) // alignment * alignment
        tensors = self._placed(described, start, alignment)
        self._check_quantization_version(metadata, tensors)
        return metadata, tensors

    # Moving -----------------------------------------------------------------------------------------------------

    def _bad(self, what: str, advice: str = _AGAIN) -> BadModelFile:
        return BadModelFile(f"{self._path!r}: {what}. {advice}")

    def _take(self, size_bytes: int, what: str) -> int:
        """Step over `size_bytes`; where they begin."""
        at = self._at
        if size_bytes > self._end - at:
            raise self._too_long(what)
        self._at = at + size_bytes
        return at

    def _too_long(self, what: str) -> BadModelFile:
        if self._end < self._size:
            return self._bad(f"{what} passes the {MAX_HEADER_BYTES >> 20} MiB that a header may have")
        return self._bad(f"{what} passes the file's end at byte {self._size}")

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._data, self._take(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._data, self._take(8, what))[0]
        return value

    def _text(self, max_bytes: int, what: str) -> str:
        length = self._u64(f"the length of {what}")
        if length > max_bytes:
            raise self._bad(f"{what} is {length} bytes long; {max_bytes} are allowed")
        at = self._take(length, what)
        try:
            return self._data[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise self._bad(f"{what} is not UTF-8 at byte {at + error.start}") from error

    # Metadata ---------------------------------------------------------------------------------------------------

    def _check_version(self, version: int) -> None:
        if version & 0xFFFF == 0 and version:
            raise self._bad("the file is big-endian", _SUPPORTED)
        if version not in _VERSIONS:
            raise self._bad(f"it is GGUF version {version}", _SUPPORTED)

    def _count(self, count: int, what: str) -> int:
        if count > MAX_ENTRIES:
            raise self._bad(f"it claims {count} {what}; {MAX_ENTRIES} are allowed")
        return count

    def _value(self, value_type: int, key: str) -> Scalar | list[Scalar]:
        what = f"the value of {_shown(key)}"
        if value_type == _STRING:
            return self._text(MAX_HEADER_BYTES, what)
        if value_type == _ARRAY:
            return self._array(key, what)
        return self._numbers(value_type, 1, what)[0]

    def _array(self, key: str, what: str) -> list[Scalar]:
        item_type = self._u32(f"the item type of {_shown(key)}")
        count = self._u64(f"the length of {_shown(key)}")
        self._array_elements += count
        if self._array_elements > MAX_ARRAY_ELEMENTS:
            raise self._bad(
                f"{what} has {count} items; all arrays together may have {MAX_ARRAY_ELEMENTS}", f"{_SUPPORTED}"
            )
        if item_type == _ARRAY:
            raise self._bad(f"{what} is an array of arrays", f"{_SUPPORTED}, without nested arrays")
        if item_type == _STRING:
            return self._strings(count, what)
        return self._numbers(item_type, count, what)

    def _strings(self, count: int, what: str) -> list[Scalar]:
        # The hot loop (98k strings in the default model), so it goes without the cursor's methods: 0.3 µs a string.
        data, end, at = self._data, self._end, self._at
        strings: list[Scalar] = []
        append, length_of = strings.append, int.from_bytes
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_of(data[at:start], "little")
                if at > end:
                    break
                append(data[start:at].decode())
        except UnicodeDecodeError as error:
            raise self._bad(f"{what} is not UTF-8 at byte {start + error.start}") from error
        if at > end:
            raise self._too_long(what)
        self._at = at
        return strings

    def _numbers(self, value_type: int, count: int, what: str) -> list[Scalar]:
        code = _NUMBERS.get(value_type)
        if code is None:
            raise self._bad(f"{what} has the unknown type {value_type}", _SUPPORTED)
        at = self._take(count * struct.calcsize(f"<{code}"), what)
        numbers: list[Scalar] = list(struct.unpack_from(f"<{count}{code}", self._data, at))
        if value_type != _BOOL:
            return numbers
        if any(number not in (0, 1) for number in numbers):
            raise self._bad(f"{what} is neither true nor false")
        return [number == 1 for number in numbers]

    def _check_split(self, metadata: Metadata) -> None:
        parts = metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            advice = f"{_SUPPORTED}: merge the parts first (llama-gguf-split --merge FIRST-PART OUTPUT)"
            raise self._bad(f"it is one of {parts} parts of a split model", advice)

    def _alignment(self, metadata: Metadata) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not 8 <= alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)  # not a power of two
        ):
            raise self._bad(f"general.alignment is {_shown(alignment)}, not a power of two from 8 to {_MAX_ALIGNMENT}")
        return alignment

    def _check_quantization_version(self, metadata: Metadata, tensors: dict[str, TensorInfo]) -> None:
        version = metadata.get("general.quantization_version", _QUANTIZATION_VERSION)
        if version != _QUANTIZATION_VERSION and any(tensor.kind.startswith("Q") for tensor in tensors.values()):
            raise self._bad(
                f"its quantization has version {_shown(version)}",
                f"headrace reads version {_QUANTIZATION_VERSION}: convert the model again with a current llama.cpp",
            )

    # Tensors ----------------------------------------------------------------------------------------------------

    def _tensor_description(self) -> tuple[str, tuple[int, ...], TensorKind, int]:
        """Name, shape, kind, and offset from the beginning of the data."""
        name = self._text(MAX_TENSOR_NAME_BYTES, "a tensor's name")
        shown = f"tensor {_shown(name)}"
        dimensions = self._u32(f"the number of dimensions of {shown}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._bad(f"{shown} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._u64(f"a dimension of {shown}") for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise self._bad(f"{shown} has a dimension of 0")
        number = self._u32(f"the kind of {shown}")
        offset = self._u64(f"the offset of {shown}")
        kind = KINDS.get(number)
        if kind is None:
            raise self._unsupported_kind(shown, number)
        if shape[-1] % kind.block_elements:
            raise self._bad(f"{shown} has rows of {shape[-1]}, no multiple of {kind.name}'s {kind.block_elements}")
        return name, shape, kind, offset

    def _unsupported_kind(self, shown: str, number: int) -> BadModelFile:
        names = _GGML_KINDS.split()
        kind = names[number] if number < len(names) else f"number {number}"
        supported = f"Use a file whose tensors are {', '.join(KIND_NAMES)}"
        return self._bad(f"{shown} has the unsupported kind {kind}", supported)

    def _placed(
        self, described: list[tuple[str, tuple[int, ...], TensorKind, int]], start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in described:
            size_bytes = _product(shape) // kind.block_elements * kind.block_bytes
            if name in tensors:
                raise self._bad(f"tensor {_shown(name)} occurs twice")
            if offset % alignment:
                raise self._bad(f"tensor {_shown(name)} stands at {offset}, no multiple of the alignment {alignment}")
            if start + offset + size_bytes > self._size:
                raise self._bad(
                    f"tensor {_shown(name)} ends at byte {start + offset + size_bytes}, the file at {self._size}"
                )
            tensors[name] = TensorInfo(name, shape, kind.name, start + offset, size_bytes)
        free_from, before = start, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < free_from:
                raise self._bad(f"tensors {_shown(before)} and {_shown(tensor.name)} overlap")
            free_from, before = tensor.offset + tensor.size_bytes, tensor.name
        return tensors


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for dimension in shape:
        product *= dimension
    return product


def _shown(value: object) -> str:
    """Text from the file, fit for a message: escaped and cut."""
    shown = repr(value[:80] if isinstance(value, str) else value)
    return shown if len(shown) <= 80 else f"{shown[:76]}...{shown[-1]}"

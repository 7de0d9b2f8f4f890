"""A Hugging Face folder: its config, and where its tensors are in mapped safetensors files. Nothing in it is executed.

The `safetensors` library checks each file's header: sizes, offsets and overlaps, against the file. Tensors are then
read from a mapping of our own, as those of a GGUF are, so that neither torch is needed to read them, nor a copy.

Formats: https://github.com/huggingface/safetensors#format; an index names the file of each tensor of a model in parts.

in     a path
out    `config`, `tensors`, and `bytes_of` a tensor: a read-only view into the mapping
state  the mappings
owner  whoever opened it
ready  when `open` returns: everything has been checked
end    `close`; the pages stay mapped until the last view from `bytes_of` is gone
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from headrace.ops.weights.gguf import MAX_ENTRIES, BadModelFile, TensorInfo, open_regular

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_INDEX_BYTES: Final = 16 << 20
MAX_PARTS: Final = 1000
VALUE_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
"""Kinds of tensors that are read."""

_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
_AGAIN: Final = "The folder is damaged or incomplete: fetch it again"
_LFS: Final = b"version https://git-lfs"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    """A tensor in a file's header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]
    """From the end of the header."""


class ModelFolder:
    """A folder whose config has been read and whose weights have been mapped."""

    def __init__(
        self,
        path: str,
        config: dict[str, Any],
        tensors: dict[str, TensorInfo],
        parts: dict[str, mmap.mmap],
        part_of: dict[str, str],
    ) -> None:
        """Use `open`."""
        self.path = path
        self.config = config
        self.tensors = tensors
        self._part_of = part_of
        self._views: dict[str, memoryview] | None = {name: memoryview(mapping) for name, mapping in parts.items()}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ModelFolder:
        """Read the config and map the weights. Raises BadModelFile."""
        folder = Path(path)
        config = read_config_file(folder)
        parts: dict[str, mmap.mmap] = {}
        tensors: dict[str, TensorInfo] = {}
        part_of: dict[str, str] = {}
        try:
            wanted = _parts(folder)
        except OSError as error:
            raise BadModelFile(f"{str(folder)!r} can't be read: {error.strerror}") from error
        for part, names in wanted.items():
            parts[part], inside = _mapped(folder / part)
            missing = sorted(names - inside.keys())
            if missing:
                raise BadModelFile(f"{str(folder / part)!r} lacks {missing[0]!r}, which {INDEX} says it has. {_AGAIN}")
            for name in names or inside:
                tensors[name], part_of[name] = inside[name], part
        return cls(str(folder), config, tensors, parts, part_of)

    def bytes_of(self, info: TensorInfo) -> memoryview:
        """The tensor's bytes in the mapping: read-only, `size_bytes` long. Reading them may wait for the disk."""
        assert self._views is not None, "the folder is closed"
        return self._views[self._part_of[info.name]][info.offset : info.offset + info.size_bytes]

    def close(self) -> None:
        """Let go of the mappings. Views that were given out stay valid; harmless twice."""
        self._views = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_config_file(folder: Path) -> dict[str, Any]:
    """Raises BadModelFile."""
    return read_json(folder / CONFIG, MAX_CONFIG_BYTES, f"{_missing_config(folder)}")


def read_json(path: Path, most_bytes: int, missing: str) -> dict[str, Any]:
    """A JSON object. Raises BadModelFile: with the sentence `missing` where there is no such file."""
    try:
        with open_regular(path) as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise BadModelFile(missing) from None
    except OSError as error:
        raise BadModelFile(f"{str(path)!r} can't be read: {error.strerror}") from error
    if len(content) > most_bytes:
        raise BadModelFile(f"{str(path)!r} has more than {most_bytes >> 20} MiB, which no such file has. {_AGAIN}")
    if content.startswith(_LFS):
        raise BadModelFile(_pointer(path))
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadModelFile(f"{str(path)!r} is not JSON: {error}. {_AGAIN}") from None
    if not isinstance(value, dict):
        raise BadModelFile(f"{str(path)!r} is not a JSON object. {_AGAIN}")
    return value


def _missing_config(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if found:
        return f"{str(folder)!r} is a folder without {CONFIG}, but with GGUF files. Name one: {folder / found[0]}"
    return (
        f"{str(folder)!r} is a folder without {CONFIG}. Name a GGUF file, or a folder as Hugging Face has them: "
        f"{CONFIG}, {WEIGHTS}, tokenizer.json"
    )


def _parts(folder: Path) -> dict[str, set[str]]:
    """Each file of weights, and what the index says is in it; nothing where there is no index. Raises BadModelFile."""
    if (folder / WEIGHTS).exists():
        return {WEIGHTS: set()}
    if not (folder / INDEX).exists():
        raise BadModelFile(_no_weights(folder))
    parts = indexed_parts(folder)
    missing = sorted(part for part in parts if not (folder / part).exists())
    if missing:
        raise BadModelFile(
            f"{str(folder)!r} lacks {len(missing)} of the {len(parts)} files that {INDEX} names, "
            f"the first is {missing[0][:200]!r}. {_AGAIN}"
        )
    return parts


def indexed_parts(folder: Path) -> dict[str, set[str]]:
    """Each file of weights that the index names, and what it says is in it: names alone, of files beside it. Raises
    BadModelFile."""
    try:
        index = msgspec.convert(read_json(folder / INDEX, MAX_INDEX_BYTES, f"{str(folder)!r} lacks {INDEX}"), _Index)
    except msgspec.ValidationError as error:
        raise BadModelFile(f"{str(folder / INDEX)!r} is not an index of weights: {error}. {_AGAIN}") from None
    parts: dict[str, set[str]] = {}
    for name, part in index.weight_map.items():
        if Path(part).name != part or not part.endswith(".safetensors"):
            raise BadModelFile(f"{str(folder / INDEX)!r} names {part[:200]!r}, which is no safetensors file beside it")
        parts.setdefault(part, set()).add(name)
    if not parts or len(parts) > MAX_PARTS:
        raise BadModelFile(f"{str(folder / INDEX)!r} names {len(parts)} files; 1 to {MAX_PARTS} can be served")
    return parts


def _no_weights(folder: Path) -> str:
    sentence = f"{str(folder)!r} has neither {WEIGHTS} nor {INDEX}"
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if name.endswith(_PICKLES)]
    if pickled:
        return (
            f"{sentence}, only pickled weights ({pickled[0]}): reading those runs code that is in them, so headrace "
            "doesn't. Convert the model to safetensors (save_pretrained of transformers), or fetch one that has them"
        )
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    for name in others:
        if not (folder / name).exists():
            return f"{str(folder / name)!r} is a link to a file that isn't there. {_AGAIN}"
    if others:
        return f"{sentence}, only {others[0]}. Rename a single file to {WEIGHTS}, name a GGUF file, or fetch it again"
    return f"{sentence}. {_AGAIN}"


def _mapped(path: Path) -> tuple[mmap.mmap, dict[str, TensorInfo]]:
    # Only here: other models need neither the package nor its import.
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(path) as file:
            if file.read(len(_LFS)) == _LFS:
                raise BadModelFile(_pointer(path))
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes == 0:
                raise BadModelFile(f"{str(path)!r} is empty. {_AGAIN}")
            mapping = mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ)
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise BadModelFile(f"{str(path)!r} is not a whole safetensors file: {error}. {_AGAIN}") from None
    except OSError as error:
        raise BadModelFile(f"{str(path)!r} can't be read: {error.strerror or error}") from error
    return mapping, _described(path, mapping)


def _described(path: Path, mapping: mmap.mmap) -> dict[str, TensorInfo]:
    """The tensors of a file whose header has been checked."""
    data = 8 + int.from_bytes(mapping[:8], "little")
    try:
        header = msgspec.json.decode(mapping[8:data], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except msgspec.DecodeError as error:
        raise BadModelFile(f"{str(path)!r} has a header that can't be read: {error}. {_AGAIN}") from None
    if len(entries) > MAX_ENTRIES:
        raise BadModelFile(f"{str(path)!r} has {len(entries)} tensors; {MAX_ENTRIES} are allowed")
    return {
        name: TensorInfo(
            name, tuple(entry.shape), entry.dtype, data + entry.data_offsets[0], _size_bytes(path, name, entry)
        )
        for name, entry in entries.items()
    }


def _size_bytes(path: Path, name: str, entry: _Entry) -> int:
    start, end = entry.data_offsets
    value_bytes = VALUE_BYTES.get(entry.dtype)
    elements = TensorInfo("", tuple(entry.shape), "", 0, 0).elements
    if value_bytes is not None and end - start != elements * value_bytes:
        raise BadModelFile(
            f"{str(path)!r}: the tensor {name!r} has {end - start} bytes, not those of its shape. {_AGAIN}"
        )
    return end - start


def _pointer(path: Path) -> str:
    return f"{str(path)!r} is a Git LFS pointer, not the file itself: run git lfs pull in its folder"

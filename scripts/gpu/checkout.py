"""The packages of this checkout, importable by a Python in which nothing of them is installed.

`headrace.ops` is the folder `ops`. Of the packages that it needs, a machine with a GPU may lack two. Where msgspec is
missing its structs are dataclasses, and messages between two processes of a check are JSON. Where xxhash is missing
pages are named and verified by BLAKE2, which is slower: what is read from disk says so.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final

ROOT: Final = Path(__file__).resolve().parents[2]


def make_importable() -> list[str]:
    """→ sentences about what was put in the place of something."""
    # Also where another version is installed: what is checked is this one.
    package = ModuleType("headrace")
    package.__path__ = [str(ROOT)]
    sys.modules["headrace"] = package
    said = []
    if importlib.util.find_spec("msgspec") is None:
        sys.modules["msgspec"] = plain_msgspec()
        said.append("msgspec is not installed: its structs are dataclasses in this run, and its messages JSON")
    if importlib.util.find_spec("xxhash") is None:
        sys.modules["xxhash"] = slow_xxhash()
        said.append("xxhash is not installed: pages are named and verified by BLAKE2 in this run")
    return said


class Struct:
    """msgspec's: a dataclass with the same options."""

    __struct_fields__: tuple[str, ...] = ()
    kinds: ClassVar[dict[str, type[Struct]]] = {}
    """By the names that messages bear."""

    def __init_subclass__(cls, *, frozen: bool = False, kw_only: bool = False, **encoding: object) -> None:
        for name, default in list(vars(cls).items()):
            if isinstance(default, list | dict | set) and not name.startswith("__"):
                setattr(cls, name, dataclasses.field(default_factory=partial(copy.copy, default)))
        dataclasses.dataclass(cls, frozen=frozen, kw_only=kw_only)
        cls.__struct_fields__ = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
        Struct.kinds[_kind(cls)] = cls


def _kind(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class Codec:
    """msgspec's for messages: structs with the names of their classes. Tuples arrive as lists."""

    def __init__(self, *kinds: object) -> None:
        pass

    def encode(self, message: object) -> bytes:
        """→ JSON."""

        def named(struct: Any) -> dict[str, Any]:
            return {"struct": _kind(type(struct)), **{name: getattr(struct, name) for name in struct.__struct_fields__}}

        return json.dumps(message, default=named).encode()

    def decode(self, packet: bytes | memoryview) -> Any:
        """What was encoded."""
        return json.loads(bytes(packet), object_hook=lambda fields: Struct.kinds[fields.pop("struct")](**fields))


def plain_msgspec() -> ModuleType:
    """What `ops` uses of msgspec when it is imported and when structs are made."""

    def values(struct: Any) -> tuple[Any, ...]:
        return tuple(getattr(struct, name) for name in struct.__struct_fields__)

    def to_json(struct: Any) -> bytes:
        return json.dumps(dataclasses.asdict(struct)).encode()

    def from_json(text: bytes, type: Any) -> Any:
        return type(**json.loads(text))

    structs, msgpack, module = ModuleType("msgspec.structs"), ModuleType("msgspec.msgpack"), ModuleType("msgspec")
    as_json = ModuleType("msgspec.json")
    vars(as_json).update(encode=to_json, decode=from_json)
    vars(structs).update(astuple=values, replace=dataclasses.replace)
    vars(msgpack).update(Decoder=Codec, Encoder=Codec)
    vars(module).update(Struct=Struct, Raw=bytes, field=dataclasses.field, structs=structs, msgpack=msgpack)
    vars(module).update(json=as_json, DecodeError=ValueError)
    return module


def slow_xxhash() -> ModuleType:
    """What the disk store uses of xxhash: digests of the same lengths."""

    def digest(data: Any) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    def number(data: Any) -> int:
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())

    module = ModuleType("xxhash")
    vars(module).update(xxh3_128_digest=digest, xxh3_64_intdigest=number)
    return module

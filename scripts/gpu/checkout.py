"""The packages of this checkout, importable by a Python in which nothing of them is installed.

`headrace.ops` is the folder `ops`. Of the packages that it needs, a machine with a GPU may lack msgspec: there its
structs are dataclasses, which is all that a check in one process needs of them. Nothing is encoded then, and nothing
that a check looks at is another.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

ROOT: Final = Path(__file__).resolve().parents[2]


def make_importable() -> list[str]:
    """→ sentences about what was put in the place of something."""
    # Also where another version is installed: what is checked is this one.
    package = ModuleType("headrace")
    package.__path__ = [str(ROOT)]
    sys.modules["headrace"] = package
    if importlib.util.find_spec("msgspec") is None:
        sys.modules["msgspec"] = plain_msgspec()
        return ["msgspec is not installed: its structs are dataclasses in this run, which encodes no message"]
    return []


class Struct:
    """msgspec's, without encoding: a dataclass with the same options."""

    __struct_fields__: tuple[str, ...] = ()

    def __init_subclass__(cls, *, frozen: bool = False, kw_only: bool = False, **encoding: object) -> None:
        for name, default in list(vars(cls).items()):
            if isinstance(default, list | dict | set) and not name.startswith("__"):
                setattr(cls, name, dataclasses.field(default_factory=partial(copy.copy, default)))
        dataclasses.dataclass(cls, frozen=frozen, kw_only=kw_only)
        cls.__struct_fields__ = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]


def plain_msgspec() -> ModuleType:
    """What `ops` uses of msgspec when it is imported and when structs are made."""

    def values(struct: Any) -> tuple[Any, ...]:
        return tuple(getattr(struct, name) for name in struct.__struct_fields__)

    class Codec:
        def __init__(self, *kinds: object) -> None:
            pass

        def encode(self, message: object) -> NoReturn:
            raise RuntimeError("messages can't be encoded or decoded without msgspec, which is not installed")

        decode = encode

    structs, msgpack, module = ModuleType("msgspec.structs"), ModuleType("msgspec.msgpack"), ModuleType("msgspec")
    vars(structs).update(astuple=values, replace=dataclasses.replace)
    vars(msgpack).update(Decoder=Codec, Encoder=Codec)
    vars(module).update(Struct=Struct, Raw=bytes, field=dataclasses.field, structs=structs, msgpack=msgpack)
    return module

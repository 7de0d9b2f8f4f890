"""Typed access to what a model file says about its model: a GGUF's metadata, or a folder's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

MAX_NAME_CHARS: Final = 120
INCOMPLETE: Final = "The file is incomplete: convert or fetch it again"


class UnsupportedModel(ValueError):
    """The file is well-formed, but not a model that can be served. The message says why, and what can."""


class Keys:
    """Keys and their values, remembering what was read: what nobody asked for may be what makes the model differ."""

    def __init__(self, path: str, values: Mapping[str, object]) -> None:
        """`path`: of the file, for messages."""
        self._path = path
        self._values = values
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether there is a value; JSON's null is none."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there, and its value is JSON's null: where a config's class has a default, this is not
        the same as an absent key."""
        return key in self._values and self.get(key) is None

    def get(self, key: str) -> object:
        """The value as it is; None where it is absent."""
        self._read.add(key)
        return self._values.get(key)

    def refused(self, what: str, advice: str = "See docs/models.md for what can be served") -> UnsupportedModel:
        return UnsupportedModel(f"{self._path!r} can't be served: {what}. {advice}")

    def within(self, key: str) -> Keys:
        """The keys of an object that is the key's value; none where it is absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refused(f"{key} is {shown(value)}, not an object")
        return Keys(self._path, value or {})

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refused(f"{key} is not a string")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty where it is absent."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refused(f"{key} is {shown(value)}, not a list of strings")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refused(f"{key} is {shown(value)}, not true or false")
        return value

    def count(self, key: str, default: int | None = None, most: int = (1 << 31) - 1) -> int:
        """An integer from 1 to `most`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.refused(f"{key} is {shown(value)}, not a whole number from 1 to {most}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.refused(f"{key} is {shown(value)}, not a positive number")
        return float(value)

    def must_be(self, key: str, allowed: tuple[object, ...]) -> None:
        """The key, if there, has one of these values."""
        value = self.get(key)
        if value is not None and not any(
            value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed
        ):
            raise self.refused(f"{key} is {shown(value)}; only {' or '.join(map(repr, allowed))} is supported")

    def name(self, key: str, otherwise: str) -> str:
        """The model's name, fit for a log line: the key's value, or the given one."""
        value = self.get(key)
        given = value if isinstance(value, str) else ""
        return _printable(given) or _printable(otherwise) or "unnamed"

    def unread(self, prefix: str) -> list[str]:
        return [key for key in self._values if key.startswith(prefix) and key not in self._read]

    def _value(self, key: str, default: object = None) -> object:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.refused(f"it lacks the key {key}", INCOMPLETE)
        return value


def _printable(text: str) -> str:
    return "".join(letter for letter in text[:MAX_NAME_CHARS] if letter.isprintable()).strip()


def shown(value: object) -> str:
    """For a message, however long or deep the value is."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    return repr(value[:80] if isinstance(value, str) else value)

"""The namespaces of a store: small numbers that stand for them in the index and the journal.

in     namespaces of pages that are written or replayed
out    their numbers
state  namespace and model of each number; which are in the journal; up to which generation each was cleared
owner  `DiskStore`, under its lock
ready  at once; in the journal no later than the first page of it
end    a number is forgotten when no page has it and the journal is written anew; it is not given again
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.kvcache.storage.disk.entries import Entries, new_entries, space_entry
from headrace.kvcache.storage.disk.hashing import I64


class Space:
    """One namespace."""

    __slots__ = ("cleared", "model", "namespace", "number", "written")

    def __init__(self, number: int, namespace: bytes, model: bytes) -> None:
        self.number = number
        self.namespace = namespace
        self.model = model
        self.cleared = 0
        """Pages of an earlier generation don't count."""
        self.written = False
        """Whether the journal knows it."""

    def entries(self) -> Entries:
        """What the journal needs to know of it."""
        return space_entry(self.number, self.namespace, self.model, self.cleared)


class Spaces:
    """All namespaces of a store."""

    def __init__(self) -> None:
        self._by_number: dict[int, Space] = {}
        self._by_namespace: dict[bytes, Space] = {}
        self._next = 0

    def __iter__(self) -> Iterator[Space]:
        return iter(self._by_number.values())

    def __len__(self) -> int:
        return len(self._by_number)

    def __getitem__(self, number: int) -> Space:
        return self._by_number[number]

    def of(self, namespace: bytes, model: bytes) -> Space:
        """The space of a namespace, now if there is none yet."""
        space = self._by_namespace.get(namespace)
        if space is None:
            space = self._keep(Space(self._next, namespace, model))
        return space

    def restore(self, number: int, namespace: bytes, model: bytes) -> None:
        """What the journal says."""
        if number not in self._by_number:
            self._keep(Space(number, namespace, model)).written = True

    def skip(self, number: int) -> None:
        """Don't give this number to a namespace: pages have it, of a namespace that the journal has lost."""
        self._next = max(self._next, number + 1)

    def clear(self, number: int, generation: int) -> None:
        """Pages of an earlier generation don't count. A number that nobody knows has no pages either."""
        space = self._by_number.get(number)
        if space is not None:
            space.cleared = max(space.cleared, generation)

    def cleared(self) -> tuple[I64, I64]:
        """(numbers, in order; generation up to which each was cleared)."""
        numbers = sorted(self._by_number)
        return np.array(numbers, np.int64), np.array([self._by_number[n].cleared for n in numbers], np.int64)

    def select(self, model: bytes | None, namespace: bytes | None) -> list[Space]:
        """The spaces of a model, or of all; of one namespace, or of all."""
        return [
            space
            for space in self._by_number.values()
            if model in (None, space.model) and namespace in (None, space.namespace)
        ]

    def forget_all_but(self, used: I64) -> None:
        """Forget numbers that no page has."""
        keep = frozenset(used.tolist())
        for number in [number for number in self._by_number if number not in keep]:
            space = self._by_number.pop(number)
            # Damage in a journal may have given one namespace two numbers.
            if self._by_namespace.get(space.namespace) is space:
                del self._by_namespace[space.namespace]

    def entries(self) -> Entries:
        """What the journal needs to know of all."""
        parts = [space.entries() for space in self._by_number.values()]
        return np.concatenate(parts) if parts else new_entries(0)

    def _keep(self, space: Space) -> Space:
        self._by_number[space.number] = space
        self._by_namespace[space.namespace] = space
        self._next = max(self._next, space.number + 1)
        return space

"""Checks that whatever two actors do to the same place is ordered between them, whichever came first by luck.

Vector clocks (Fidge, Mattern 1988): each actor counts what it does, and knows what it has learnt of the counts of
others. A use of a place is ordered behind an earlier one if its actor knows of it. Two uses need an order unless both
only read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.ops.streams import Operation, Region

MOST_CONFLICTS = 50


class Clock:
    """What an actor knows of what all have done."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self.counts = dict(counts or {})

    def copy(self) -> Clock:
        return Clock(self.counts)

    def learn(self, other: Clock) -> None:
        for actor, count in other.counts.items():
            self.counts[actor] = max(count, self.counts.get(actor, 0))

    def tick(self, actor: str) -> int:
        """The actor does one more thing."""
        self.counts[actor] = self.counts.get(actor, 0) + 1
        return self.counts[actor]


class _Use(NamedTuple):
    actor: str
    at: int
    name: str

    def known_to(self, clock: Clock) -> bool:
        return clock.counts.get(self.actor, 0) >= self.at


class Accesses:
    """The last uses of every place, and the conflicts found among them."""

    def __init__(self) -> None:
        self.conflicts: list[str] = []
        self._writes: dict[tuple[str, int, int], _Use] = {}
        self._reads: dict[tuple[str, int, int], dict[str, _Use]] = {}

    def note(self, actor: str, clock: Clock, operation: Operation) -> None:
        """The actor now does this, knowing what its clock says."""
        use = _Use(actor, clock.tick(actor), operation.name)
        for place in sorted(_places(operation.reads)):
            self._check(use, clock, "reads", place, "written", self._writes.get(place))
            self._reads.setdefault(place, {})[actor] = use
        for place in sorted(_places(operation.writes)):
            self._check(use, clock, "overwrites", place, "written", self._writes.get(place))
            for read in self._reads.pop(place, {}).values():
                self._check(use, clock, "overwrites", place, "read", read)
            self._writes[place] = use

    def _check(
        self, use: _Use, clock: Clock, does: str, place: tuple[str, int, int], did: str, earlier: _Use | None
    ) -> None:
        if earlier is None or earlier.known_to(clock) or len(self.conflicts) == MOST_CONFLICTS:
            return
        memory, layer, at = place
        self.conflicts.append(
            f"{use.name} {does} place {at} of {memory}, layer {layer}: nothing says that {earlier.name} has {did} it"
        )


def _places(regions: Sequence[Region]) -> set[tuple[str, int, int]]:
    return {(memory, layer, int(place)) for memory, layer, places in regions for place in places}

"""The load that every side of `scripts/bench/index.py` carries out, and its half of the conversation with that program.

Runs in each side's own environment: numpy and the standard library alone.

A *family* is a path of `path_nodes` nodes of `node_pages` pages, each with `siblings` others of the same length beside
it, and as many families as fill the index. A turn measures, for each of its families, in µs of CPU:

    hash      name the pages of the family's path (8192 tokens of a request that has not been seen before)
    match     look the path up, hold it, and get its page numbers
    take      pages for the second half of a prompt whose first half is the path's, in a full index: others are evicted
    publish   make those pages matchable
    finish    the request gives everything back; what was published stays

Each is what the side does for a real request; where a side does two of these in one call, the sum is what to compare.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

I32: TypeAlias = NDArray[np.int32]

PAGE_TOKENS, VOCAB = 16, 49_152


class Load(NamedTuple):
    """How large the index is, and how it branches."""

    pages: int
    path_nodes: int
    node_pages: int
    siblings: int

    @property
    def path_pages(self) -> int:
        return self.path_nodes * self.node_pages

    @property
    def families(self) -> int:
        """As many as fill `pages`."""
        own = (self.path_nodes + (self.path_nodes - 1) * self.siblings) * self.node_pages
        return -(-self.pages // own)

    def path(self, family: int) -> I32:
        """int32 [path tokens + 1]: the last one is left to compute, so that all pages may be matched."""
        return self._ids(family, 0, self.path_pages * PAGE_TOKENS + 1)

    def grown(self, family: int) -> I32:
        """The first half of a family's path, and as much that no other prompt has."""
        half = self.path_pages // 2 * PAGE_TOKENS
        return np.concatenate((self.path(family)[:half], self._ids(family, -1, half + 1)))

    def prompts(self) -> Iterator[I32]:
        """What fills the index: each family's path, then its siblings from the root on."""
        for family in range(self.families):
            path = self.path(family)
            yield path
            for node in range(1, self.path_nodes):
                head = path[: node * self.node_pages * PAGE_TOKENS]
                for sibling in range(1, self.siblings + 1):
                    number = node * self.siblings + sibling
                    yield np.concatenate((head, self._ids(family, number, self.node_pages * PAGE_TOKENS + 1)))

    def _ids(self, family: int, number: int, count: int) -> I32:
        return np.random.default_rng((family, number + 1)).integers(0, VOCAB, count).astype(np.int32)


class Side(Protocol):
    """One cache. A request is whatever the side knows of it, made from its ids before any clock runs."""

    def request(self, ids: I32) -> Any: ...

    def hash(self, request: Any) -> None:
        """Name its pages, where the side does this before it looks them up."""

    def match(self, request: Any) -> int:
        """Look it up and hold what was found; how many tokens."""

    def take(self, request: Any) -> None:
        """Pages for all that was not found."""

    def publish(self, request: Any) -> None: ...

    def finish(self, request: Any) -> None: ...

    def facts(self) -> dict[str, Any]:
        """Its `version`, the `pages` of its index, and the operations that it goes `without`."""


def whole(side: Side, ids: I32) -> int:
    """One request from its first match to its end; tokens matched."""
    request = side.request(ids)
    side.hash(request)
    matched = side.match(request)
    side.take(request)
    side.publish(request)
    side.finish(request)
    return matched


def measured(side: Side, load: Load, family: int) -> dict[str, float]:
    """µs of CPU of each operation. Raises SystemExit where the side matched other than it should have."""
    spent: dict[str, float] = {}

    def clocked(name: str, operation: Callable[[Any], Any], request: Any) -> Any:
        began = time.process_time_ns()
        result = operation(request)
        spent[name] = (time.process_time_ns() - began) / 1e3
        return result

    request = side.request(load.path(family))
    clocked("hash", side.hash, request)
    found = clocked("match", side.match, request)
    side.take(request)
    side.finish(request)
    request = side.request(load.grown(family))
    side.hash(request)
    half = side.match(request)
    clocked("take", side.take, request)
    clocked("publish", side.publish, request)
    clocked("finish", side.finish, request)
    expected = load.path_pages * PAGE_TOKENS
    if (found, half) != (expected, load.path_pages // 2 * PAGE_TOKENS):
        raise SystemExit(f"family {family}: {found} and {half} tokens matched, of {expected} and half of that")
    return spent


def serve(make: Callable[[Load], Side]) -> None:
    """Fill the side's index, then measure one turn for each line of family numbers that comes in."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What a library prints is no answer.
    load = Load(*map(int, sys.argv[1:5]))
    side = make(load)
    for ids in load.prompts():
        whole(side, ids)
    # The last families are those that eviction reaches last. One turn that nobody counts warms everything up.
    measured(side, load, load.families - 1)
    gc.collect()
    gc.freeze()
    gc.disable()
    answers.write(json.dumps({"families": load.families, **side.facts()}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps([measured(side, load, family) for family in json.loads(line)]) + "\n")
        gc.collect()

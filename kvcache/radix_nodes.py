"""The parts of the radix index: nodes, leases, and the order in which leaves of a tier were last used."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.ops.wire import I32

_NO_PLACES: Final[I32] = np.zeros(0, np.int32)
_NO_STEPS: Final[NDArray[np.int64]] = np.zeros(0, np.int64)


class Node:
    """A run of pages below its parent's. `device`: int32 [groups, d]; `host`: int32 [groups, h]."""

    __slots__ = (
        *("children", "device", "device_children", "filled_by", "hits", "host", "host_children", "key", "last_step"),
        *("kept", "leases", "length", "num_device", "num_host", "parent", "pending", "places", "used", "went_to"),
    )

    def __init__(self, parent: Node | None, key: bytes, length: int, device: I32, host: I32) -> None:
        assert not device.shape[1], "device pages come with the step that fills them"
        self.parent = parent
        self.key = key
        """Its token ids as bytes; a root's is its namespace."""
        self.length = length
        """Pages of the run, n."""
        self.set_device(device, _NO_STEPS)
        self.set_host(host)
        self.pending = self.num_host
        """Pages that are on the host, or being copied there."""
        self.places: I32 = _NO_PLACES
        """int32 [n]: what its pages are called where there are window groups; else empty."""
        self.children: dict[bytes, Node] = {}
        self.device_children = self.host_children = 0
        """Children with pages in the tier."""
        self.leases = 0
        self.kept = 0
        """How many want it and its path to be evicted last."""
        self.went_to: Node | None = None
        """Of a node that was evicted whole: the one that it continued, for whoever still keeps its path."""
        self.hits = 0
        """How often a request has matched through it."""
        self.used = 0
        self.last_step = -1
        """The last launched step that reads or writes these pages, as far as released leases have said."""

    def set_device(self, device: I32, filled_by: NDArray[np.int64]) -> None:
        """Its device pages, and the step whose launch made each of them matchable, int64 [d]."""
        self.device = device
        self.filled_by = filled_by
        self.num_device = device.shape[1]
        """d: a path has a node every few pages, and asking the array costs 80 ns a time."""

    def set_host(self, host: I32) -> None:
        self.host = host
        self.num_host = host.shape[1]

    def append_device(self, pages: I32, step: int) -> None:
        """Device pages behind those that it has, filled by `step`."""
        filled_by = np.empty(pages.shape[1], np.int64)
        filled_by.fill(step)  # `np.full` does the same in three times the time
        if self.num_device:
            pages, filled_by = np.concatenate((self.device, pages), axis=1), np.concatenate((self.filled_by, filled_by))
            self.set_device(pages, filled_by)
        else:
            self.set_device(pages.copy(), filled_by)

    def cut_device(self, keep: int) -> None:
        """All but the first `keep` device pages are gone."""
        # Most nodes go whole: an empty view takes a third of a copy's time, and they keep no memory alive for long.
        if keep:
            self.set_device(self.device[:, :keep].copy(), self.filled_by[:keep].copy())
        else:
            self.set_device(self.device[:, :0], self.filled_by[:0])

    def cut_host(self, keep: int) -> None:
        """All but the first `keep` host pages are gone."""
        self.set_host(self.host[:, :keep].copy() if keep else self.host[:, :0])


class Places(Protocol):
    """Who names the pages of the index (`windows`), where there are window groups."""

    def take(self, count: int) -> I32:
        """Names for new pages, int32 [count]."""

    def give_back(self, places: I32) -> None:
        """These pages are no longer in the index."""

    def drop(self, places: I32, device: bool, host: bool) -> None:
        """What else is kept under these names is to leave the tiers."""


class Lease:
    """A hold on the path from the root to the end of `node`: its pages stay in a tier from which they can be read."""

    __slots__ = ("node", "num_pages")

    def __init__(self, node: Node, num_pages: int) -> None:
        self.node = node
        self.num_pages = num_pages


def path_of(lease: Lease) -> tuple[bytes, bytes]:
    """`(namespace, token ids as bytes)` of a lease's path."""
    root, *path = path_to(lease.node)
    return root.key, b"".join(node.key for node in path)


def held_alone(lease: Lease) -> int:
    """Device pages at the end of the lease's path that no other lease is on."""
    pages = 0
    node: Node | None = lease.node
    while node is not None and node.leases == 1:
        pages += node.num_device
        node = node.parent
    return pages


def held_by_these(leases: Sequence[Lease]) -> int:
    """Device pages of the leases' paths that no other lease is on."""
    crossing: dict[Node, int] = {}
    for lease in leases:
        node: Node | None = lease.node
        # Towards the root a node has more leases, never fewer: from some point on others hold it too.
        while node is not None and node.leases <= len(leases):
            crossing[node] = crossing.get(node, 0) + 1
            node = node.parent
    return sum(node.num_device for node, count in crossing.items() if count == node.leases)


class Kept:
    """A wish that the path from the root to the end of `node` be evicted last."""

    __slots__ = ("node",)

    def __init__(self, node: Node | None) -> None:
        self.node = node


class Match(NamedTuple):
    """The longest stored prefix: its first pages are on the device, the others on the host."""

    lease: Lease
    device: I32
    """int32 [groups, d]"""
    host: I32
    """int32 [groups, h]: the pages that follow."""


class Dropped(NamedTuple):
    """Pages that left a tier: int32 [groups, k] each. They must outlive `last_step`."""

    device: I32
    host: I32
    last_step: int


class Change(NamedTuple):
    """What happened to pages of a node, for whoever listens to the index."""

    stored: bool
    """Else they were removed."""
    tier: Literal["device", "host"]


class Had(NamedTuple):
    """Device pages that the index had already, of those that it was given from number `start` on."""

    start: int
    pages: I32
    """int32 [groups, n]"""


class Span(NamedTuple):
    """Pages [start, end) of a path, counted from its root."""

    start: int
    end: int


def common_pages(key: bytes, raw: bytes, at: int, page_bytes: int) -> int:
    """Whole pages that `key` and `raw[at:]` share from their starts."""
    size = min(len(key), len(raw) - at)
    if raw.startswith(key[:size], at):
        return size // page_bytes
    left = np.frombuffer(key, np.int32, size // 4)
    right = np.frombuffer(raw, np.int32, size // 4, at)
    return int((left != right).argmax()) * 4 // page_bytes


def path_to(node: Node) -> list[Node]:
    """From the root to `node`."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def walk(root: Node, raw: bytes, page_bytes: int) -> tuple[Node, int, Node | None, int]:
    """`(node, pages, child, common)`: `pages` match up to the end of `node`, and `common` more inside `child`."""
    node, at = root, 0
    while at < len(raw):
        child = node.children.get(raw[at : at + page_bytes])
        if child is None:
            break
        key = child.key
        if not raw.startswith(key, at):
            return node, at // page_bytes, child, common_pages(key, raw, at, page_bytes)
        node = child
        at += len(key)
    return node, at // page_bytes, None, 0


def places_from(lease: Lease, start: int) -> I32:
    """Places of the lease's path from its page `start` on."""
    runs: list[I32] = []
    node: Node | None = lease.node
    depth = lease.num_pages
    while node is not None and depth > start:
        depth -= node.length
        runs.append(node.places if depth >= start else node.places[start - depth :])
        node = node.parent
    return np.concatenate(runs[::-1]) if runs else _NO_PLACES


def subtree(node: Node) -> list[Node]:
    """A node and all below it, parents first."""
    nodes, stack = [], [node]
    while stack:
        nodes.append(stack.pop())
        stack.extend(nodes[-1].children.values())
    return nodes


def is_device_leaf(node: Node) -> bool:
    return not node.leases and node.num_device > 0 and not node.device_children


def is_host_leaf(node: Node) -> bool:
    return not node.leases and node.num_host > 0 and not node.host_children


class Lru:
    """The leaves of a tier in the order of their last use, those that somebody keeps after all others. Entries that are
    no longer true are skipped when met, and swept out when they outnumber the nodes."""

    def __init__(self, is_leaf: Callable[[Node], bool]) -> None:
        self._is_leaf = is_leaf
        self._heap: list[tuple[bool, int, int, Node]] = []
        self._pushes = 0

    def push(self, node: Node, nodes: int = 1 << 62) -> None:
        """Add a leaf as it was last used; `nodes` is how many there are in all."""
        self._pushes += 1
        heapq.heappush(self._heap, (node.kept > 0, node.used, self._pushes, node))
        if len(self._heap) > 2 * nodes + 64:
            live = {id(entry[3]): entry for entry in self._heap if self._is_current(*entry)}
            self._heap = list(live.values())
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """The leaf that was unused for longest."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(*entry):
                return entry[3]
        return None

    def clear(self) -> None:
        self._heap.clear()

    def _is_current(self, kept: bool, used: int, _: int, node: Node) -> bool:
        return node.used == used and (node.kept > 0) == kept and self._is_leaf(node)

"""What must be true of the cache, counted afresh: every page has one owner, every lease is counted (invariant 1).

The functions are generators that pause every `RUN_NODES` nodes, so that a server with 100k pages can look at all of
them without holding its loop; whoever pauses sees to it that nothing has changed before going on. They raise
AssertionError, and the message names the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.pool import Owner, PagePool
from headrace.kvcache.radix_nodes import Lease, Node
from headrace.ops.wire import I32

RUN_NODES: Final = 128
"""Between two pauses: 0.2 ms."""
_NOT_COUNTED: Final = "a node's lease count is not the number of its leases"


class Claims:
    """Who says to own which pages of a pool, against what its owner bytes say."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._seen: NDArray[np.bool_] = np.zeros(pool.num_pages, np.bool_)
        self._claimed = 0
        self._counts = [0] * len(Owner.names)

    def claim(self, owner: int, pages: I32) -> None:
        """`owner` has these pages (int32 [n])."""
        if not len(pages):
            return
        right = self._pool.owner[pages] == owner
        if not right.all():
            page = int(pages[~right][0])
            has = Owner.names[int(self._pool.owner[page])]
            raise AssertionError(f"page {page} that {Owner.names[owner]} has is owned by {has}")
        again = self._seen[pages]
        if again.any():
            raise AssertionError(f"page {pages[again][0]} has two places as {Owner.names[owner]}")
        self._seen[pages] = True
        self._claimed += len(pages)
        self._counts[owner] += len(pages)
        if np.count_nonzero(self._seen) != self._claimed:
            numbers, counts = np.unique(pages, return_counts=True)
            raise AssertionError(f"page {numbers[counts > 1][0]} has two places as {Owner.names[owner]}")

    def finish(self, *owners: int) -> None:
        """Nobody else comes: all pages of these owners must have been claimed."""
        counted = np.bincount(self._pool.owner, minlength=len(self._counts))
        for owner in owners:
            if counted[owner] != self._counts[owner]:
                lost = np.flatnonzero((self._pool.owner == owner) & ~self._seen)
                shown = ", ".join(map(str, lost[:8].tolist()))
                raise AssertionError(f"{len(lost)} pages of {Owner.names[owner]} are lost: {shown}")


def check_tree(
    roots: Iterable[Node],
    leases: Iterable[Lease],
    page_bytes: int,
    is_root: Callable[[Node], bool],
    sums: Callable[[], list[int]],
) -> Iterator[list[Node]]:
    """Every node of the trees in runs, once it is known to be well formed and to have as many leases as `leases` say.

    `sums`: the index's own, `[nodes, device pages, host pages, those of both that nobody leases, and of these on the
    host those that somebody keeps]`.
    """
    held = _held(leases)
    counts = [0, 0, 0, 0, 0, 0]
    stack, run = list(roots), list[Node]()
    while stack:
        node = stack.pop()
        _check_node(node, held.pop(node, 0), page_bytes, is_root, stack, counts)
        run.append(node)
        if len(run) >= RUN_NODES:
            yield run
            run = []
    yield run
    assert not held, "a lease ends outside the tree"
    assert counts == sums(), f"{counts} counted, {sums()} summed"


def _held(leases: Iterable[Lease]) -> dict[Node, int]:
    held: dict[Node, int] = {}
    for lease in leases:
        depth = 0
        node: Node | None = lease.node
        while node is not None:
            held[node] = held.get(node, 0) + 1
            depth += node.length
            node = node.parent
        assert depth == lease.num_pages, f"a lease of {lease.num_pages} pages ends at depth {depth}"
    return held


def _check_node(
    node: Node, held: int, page_bytes: int, is_root: Callable[[Node], bool], stack: list[Node], counts: list[int]
) -> None:
    """One node and its edges to its children, which go onto the stack. Written for speed: 1 µs a node."""
    length, leases, pending, parent = node.length, node.leases, node.pending, node.parent
    device, host = node.num_device, node.num_host
    assert leases == held, _NOT_COUNTED
    assert node.device.shape[1] == len(node.filled_by) == device
    assert node.host.shape[1] == host and pending >= host
    assert leases or pending == host, "a copy is under way that nobody leases"
    if parent is None:
        assert not length and is_root(node) and (leases or node.children)
    else:
        assert length and len(node.key) == length * page_bytes
        assert (device if device > host else host) == length, "a page is indexed that no tier has"
        assert not device or parent.num_device == parent.length, "a gap on the device"
        counts[0] += 1
    device_children = host_children = 0
    for first, child in node.children.items():
        assert child.parent is node and child.leases <= leases
        assert len(first) == page_bytes and child.key.startswith(first)
        if child.num_device:
            device_children += 1
        if child.pending:
            host_children += 1
        stack.append(child)
    assert node.device_children == device_children and node.host_children == host_children
    counts[1] += device
    counts[2] += host
    if not leases:
        counts[3] += device
        counts[4] += host
        if node.kept:
            counts[5] += host


def joined(runs: list[I32]) -> I32:
    """Runs of pages (int32 [n] each) as one."""
    return np.concatenate(runs) if runs else np.zeros(0, np.int32)

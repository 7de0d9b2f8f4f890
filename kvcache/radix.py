"""The radix index: which token prefixes have pages, who holds them, which go first.

A compressed tree of whole pages. A node's edge is a run of token ids, a multiple of a page long; children are keyed by
the bytes of their first page, so siblings differ in it and every comparison is exact. The tree is an index, not the
tensors: it says where pages are, `PagePool` says who owns them, and a step's order says when they may be read.

in     acquired, extended and released leases; requests to evict
out    page numbers of the longest stored prefix; pages to give back, with the step they must outlive
state  one root a namespace, nodes, lease counts, an LRU heap of leaves
owner  `KvCache`; nothing else calls it
ready  a matched page may be read by steps launched after the match
end    a page leaves when it is evicted (nobody leases its node or one below) or the device is lost

Leases count on every node from their end to the root, so a node's count is at least each child's, and what nobody
leases is a set of whole subtrees.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.ops.wire import I32


class Node:
    """A run of pages below its parent's. `key`: its token ids as bytes (a root: its namespace); `pages`: int32
    [groups, run]; `filled_by`: int64 [run], the step whose launch made each matchable."""

    __slots__ = ("children", "filled_by", "key", "last_step", "leases", "pages", "parent", "used")

    def __init__(self, parent: Node | None, key: bytes, pages: I32, filled_by: NDArray[np.int64]) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.filled_by = filled_by
        self.children: dict[bytes, Node] = {}
        self.leases = 0
        self.used = 0
        self.last_step = -1
        """The last launched step that reads or writes these pages, as far as released leases have said."""

    def __len__(self) -> int:
        return int(self.pages.shape[1])


class Lease:
    """A hold on the path from the root to the end of `node`: its pages stay where they are."""

    __slots__ = ("node", "num_pages")

    def __init__(self, node: Node, num_pages: int) -> None:
        self.node = node
        self.num_pages = num_pages


class RadixIndex:
    """Prefixes of all namespaces over the pages of `groups` pools."""

    def __init__(self, page_tokens: int, groups: int) -> None:
        self._page_bytes = page_tokens * 4
        self._no_pages: I32 = np.zeros((groups, 0), np.int32)
        self._roots: dict[bytes, Node] = {}
        self._tick = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._pushes = 0
        self.num_nodes = 0
        self.num_pages = 0
        self.evictable_pages = 0

    def peek(self, namespace: bytes, raw: bytes) -> int:
        """Pages of the longest stored prefix of `raw` (whole pages of int32 ids); changes nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        _, pages, child, common = self._walk(root, raw)
        return pages + common if child is not None else pages

    def acquire(self, namespace: bytes, raw: bytes) -> tuple[Lease, I32]:
        """Lease the longest stored prefix of `raw`; its pages, int32 [groups, n]."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, namespace, self._no_pages, np.zeros(0, np.int64))
        node, pages, child, common = self._walk(root, raw)
        if child is not None and common:
            node = self._split(child, common)
            pages += common
        self._tick += 1
        found: list[I32] = []
        step: Node | None = node
        while step is not None:
            self._hold(step)
            step.used = self._tick
            found.append(step.pages)
            step = step.parent
        return Lease(node, pages), np.concatenate(found[::-1], axis=1)

    def extend(self, lease: Lease, raw: bytes, pages: I32, step: int) -> NDArray[np.bool_]:
        """Store pages (int32 [groups, n]) that follow the lease's end, filled by `step`; the lease moves behind them.

        Returns bool [n]: which pages the index took. Where it has pages for these tokens already, those stay, and the
        giver keeps its own as private ones.
        """
        count = pages.shape[1]
        assert len(raw) == count * self._page_bytes
        taken = np.zeros(count, np.bool_)
        node, at = lease.node, 0
        while at < count:
            start = at * self._page_bytes
            child = node.children.get(raw[start : start + self._page_bytes])
            if child is None:
                taken[at:] = True
                node = self._append(node, raw[start:], pages[:, at:], step)
                break
            common = self._common(child.key, raw, start)
            node = child if common == len(child) else self._split(child, common)
            self._hold(node)
            at += common
        lease.node = node
        lease.num_pages += count
        return taken

    def release(self, lease: Lease, last_step: int) -> None:
        """Give a lease back; its pages must outlive `last_step`."""
        self._tick += 1
        node: Node | None = lease.node
        while node is not None:
            assert node.leases > 0, "a lease was released twice"
            node.leases -= 1
            node.used = self._tick
            node.last_step = max(node.last_step, last_step)
            if not node.leases:
                self.evictable_pages += len(node)
            node = node.parent
        self._offer(lease.node)

    def evict(self, count: int) -> list[tuple[I32, int]]:
        """Drop up to `count` pages that nobody leases, the longest unused first and from the ends of prefixes.

        Returns `(pages [groups, n], last_step)` runs: the pages must outlive that step.
        """
        dropped: list[tuple[I32, int]] = []
        while count > 0 and self._heap:
            used, _, node = heapq.heappop(self._heap)
            if node.leases or node.children or node.used != used or node.parent is None:
                continue
            keep = max(0, len(node) - count)
            dropped.append((node.pages[:, keep:], node.last_step))
            count -= len(node) - keep
            self._drop_tail(node, keep)
        return dropped

    def clear(self) -> None:
        """Forget everything; no lease may be out."""
        assert not any(root.leases for root in self._roots.values()), "leases are out"
        self._roots.clear()
        self._heap.clear()
        self.num_nodes = self.num_pages = self.evictable_pages = 0

    def nodes(self) -> Iterator[Node]:
        """All nodes, roots included, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self, leases: list[Lease]) -> None:
        """Raise AssertionError unless the tree is well formed and its counts are those of `leases`."""
        held: dict[int, int] = {}
        for lease in leases:
            node: Node | None = lease.node
            depth = 0
            while node is not None:
                held[id(node)] = held.get(id(node), 0) + 1
                depth += len(node)
                node = node.parent
            assert depth == lease.num_pages, f"a lease of {lease.num_pages} pages ends at depth {depth}"
        nodes = pages = evictable = 0
        for node in self.nodes():
            assert node.leases == held.pop(id(node), 0), "a node's lease count is not the number of its leases"
            if node.parent is None:
                assert not len(node) and self._roots[node.key] is node and (node.leases or node.children)
            else:
                assert (
                    len(node)
                    and len(node.key) == len(node) * self._page_bytes == len(node.filled_by) * self._page_bytes
                )
            for first, child in node.children.items():
                assert child.parent is node and child.key.startswith(first) and child.leases <= node.leases
            nodes += node.parent is not None
            pages += len(node)
            evictable += 0 if node.leases else len(node)
        assert not held, "a lease ends outside the tree"
        counts = (self.num_nodes, self.num_pages, self.evictable_pages)
        assert (nodes, pages, evictable) == counts, f"{(nodes, pages, evictable)} counted, {counts} kept"

    def _walk(self, root: Node, raw: bytes) -> tuple[Node, int, Node | None, int]:
        """`(node, pages, child, common)`: `pages` match up to the end of `node`, and `common` more inside `child`."""
        node, at, size = root, 0, self._page_bytes
        while at < len(raw):
            child = node.children.get(raw[at : at + size])
            if child is None:
                break
            if not raw.startswith(child.key, at):
                return node, at // size, child, self._common(child.key, raw, at)
            node = child
            at += len(child.key)
        return node, at // size, None, 0

    def _common(self, key: bytes, raw: bytes, at: int) -> int:
        """Whole pages that `key` and `raw[at:]` share from their starts."""
        size = min(len(key), len(raw) - at)
        if raw.startswith(key[:size], at):
            return size // self._page_bytes
        left = np.frombuffer(key, np.int32, size // 4)
        right = np.frombuffer(raw, np.int32, size // 4, at)
        return int((left != right).argmax()) * 4 // self._page_bytes

    def _hold(self, node: Node) -> None:
        if not node.leases:
            self.evictable_pages -= len(node)
        node.leases += 1

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` pages. The head is new; the node keeps its tail, its children and its leases' ends."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node)
        cut = at * self._page_bytes
        head = Node(parent, node.key[:cut], node.pages[:, :at].copy(), node.filled_by[:at].copy())
        head.leases, head.used, head.last_step = node.leases, node.used, node.last_step
        parent.children[head.key[: self._page_bytes]] = head
        node.parent = head
        node.key, node.pages, node.filled_by = node.key[cut:], node.pages[:, at:].copy(), node.filled_by[at:].copy()
        head.children[node.key[: self._page_bytes]] = node
        self.num_nodes += 1
        return head

    def _append(self, node: Node, raw: bytes, pages: I32, step: int) -> Node:
        """Put pages behind `node`, which the caller has leased: into it where nobody else has and nothing follows (a
        request that grows page by page stays one node), else into a new child with the caller's lease."""
        filled_by = np.full(pages.shape[1], step, np.int64)
        self.num_pages += pages.shape[1]
        if node.leases == 1 and not node.children and node.parent is not None:
            node.key += raw
            node.pages = np.concatenate((node.pages, pages), axis=1)
            node.filled_by = np.concatenate((node.filled_by, filled_by))
            return node
        child = Node(node, raw, pages.copy(), filled_by)
        child.leases = 1
        child.used = self._tick
        node.children[raw[: self._page_bytes]] = child
        self.num_nodes += 1
        return child

    def _offer(self, node: Node) -> None:
        """Remember a node for eviction if it is a leaf that nobody leases. Stale entries are skipped when met, and
        swept out when they outnumber the nodes."""
        if node.leases or node.children:
            return
        if node.parent is None:
            del self._roots[node.key]
            return
        self._pushes += 1
        heapq.heappush(self._heap, (node.used, self._pushes, node))
        if len(self._heap) > 2 * self.num_nodes + 64:
            live = {id(leaf): (used, order, leaf) for used, order, leaf in self._heap if self._evictable(leaf, used)}
            self._heap = list(live.values())
            heapq.heapify(self._heap)

    def _evictable(self, node: Node, used: int) -> bool:
        return not node.leases and not node.children and node.used == used and node.parent is not None

    def _drop_tail(self, node: Node, keep: int) -> None:
        parent = node.parent
        assert parent is not None
        self.num_pages -= len(node) - keep
        self.evictable_pages -= len(node) - keep
        if keep:
            node.key = node.key[: keep * self._page_bytes]
            node.pages, node.filled_by = node.pages[:, :keep].copy(), node.filled_by[:keep].copy()
            self._offer(node)
        else:
            del parent.children[node.key[: self._page_bytes]]
            node.parent = None
            self.num_nodes -= 1
            self._offer(parent)

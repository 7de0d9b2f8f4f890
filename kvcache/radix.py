"""The radix index: which token prefixes have pages in which tier, who holds them, which go first.

A compressed tree of whole pages. A node's edge is a run of token ids, a multiple of a page long; children are keyed by
the bytes of their first page, so siblings differ in it and every comparison is exact. The tree is an index, not the
tensors: it says where pages are, `PagePool` says who owns them, and a step's order says when they may be read.

in     acquired, extended and released leases; loads, backups and prefetched pages; requests to evict
out    page numbers of the longest stored prefix; pages to give back, with the step they must outlive
state  one root a namespace, nodes, lease counts, an LRU heap of leaves per tier
owner  `KvCache`; nothing else calls it
ready  a matched device page may be read by steps launched after the match; a host page is there when it is indexed
end    a page leaves a tier when it is evicted (nobody leases its node or one below) or the device is lost

A node of n pages has its first `d` on the device and its first `h` on the host, and max(d, h) = n: every indexed page
is in one tier at least. A child has device pages only if its parent has all of its own there, so the device part of
any path is a prefix of it, and the rest is on the host::

    tokens   |----------- n -----------|
    device   |======== d =====|                      a request that matches it all loads [d, n)
    host     |=========== h ===========|             from the host

Leases count on every node from their end to the root, so a node's count is at least each child's, and what nobody
leases is a set of whole subtrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.integrity import check_tree
from headrace.kvcache.radix_copies import begin_copies, give_up_copies, host_parts, places_of
from headrace.kvcache.radix_nodes import (
    Change,
    Dropped,
    Had,
    Kept,
    Lease,
    Lru,
    Match,
    Node,
    Places,
    Span,
    common_pages,
    is_device_leaf,
    is_host_leaf,
    path_to,
    subtree,
    walk,
)
from headrace.ops.wire import I32

_DEVICE_STORED: Final = Change(True, "device")
_DEVICE_REMOVED: Final = Change(False, "device")
_HOST_STORED: Final = Change(True, "host")
_HOST_REMOVED: Final = Change(False, "host")


class RadixIndex:
    """Prefixes of all namespaces over the pages of `groups` pools a tier."""

    def __init__(self, page_tokens: int, groups: int, places: Places | None = None) -> None:
        """`places` names the pages where there are window groups beside these."""
        self._page_bytes = page_tokens * 4
        self._places = places
        self._none: I32 = np.zeros((groups, 0), np.int32)
        self._roots: dict[bytes, Node] = {}
        self.listener: Callable[[Change, Node, int, int], None] | None = None
        """Told of pages [start, end) of a node that came to a tier or left it; None while nobody wants to know."""
        self._tick = 0
        self._device_lru = Lru(is_device_leaf)
        self._host_lru = Lru(is_host_leaf)
        self.num_nodes = 0
        self.device_pages = self.host_pages = 0
        self.evictable_device_pages = self.evictable_host_pages = 0
        self.kept_host_pages = 0
        """Of the evictable ones, those that somebody keeps."""

    def peek(self, namespace: bytes, raw: bytes) -> tuple[int, int]:
        """`(device, all)` pages of the longest stored prefix of `raw` (whole pages of int32 ids); changes nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return 0, 0
        node, pages, child, common = walk(root, raw, self._page_bytes)
        missing = 0
        step: Node | None = node
        while step is not None and step.num_device < step.length:
            missing += step.length - step.num_device
            step = step.parent
        if child is None:
            return pages - missing, pages
        return pages - missing + (0 if missing else min(child.num_device, common)), pages + common

    def host_run(self, namespace: bytes, raw: bytes, start: int = 0) -> I32:
        """The host's pages of `raw` from page `start` on, up to a gap: int32 [groups, n]; changes nothing."""
        path, pages = self._path(namespace, raw)
        return np.concatenate([self._none, *host_parts(path, start)], axis=1)[:, : max(0, pages - start)]

    def places_of(self, namespace: bytes, raw: bytes) -> I32:
        """Places of the longest stored prefix of `raw`, int32 [n]; changes nothing."""
        path, pages = self._path(namespace, raw)
        return np.concatenate([self._none[0], *(node.places for node in path)])[:pages]

    def acquire(self, namespace: bytes, raw: bytes) -> Match:
        """Lease the longest stored prefix of `raw`."""
        return self._match(*self._ending(self._root(namespace), raw))

    def lease_again(self, lease: Lease) -> Lease:
        """A second lease on the same path, for a copy that may outlive the first; no use of its pages."""
        self._hold_path(lease.node)
        return Lease(lease.node, lease.num_pages)

    def keep(self, namespace: bytes, raw: bytes) -> Kept:
        """Evict the longest stored prefix of `raw` after all that nobody keeps, until `unkeep`. No lease: where nothing
        else is left it goes all the same, and nobody waits for whoever keeps it."""
        root = self._roots.get(namespace)
        if root is None:
            return Kept(None)
        node, _ = self._ending(root, raw)
        for step in path_to(node):
            if not step.kept and not step.leases:
                self.kept_host_pages += step.num_host
            step.kept += 1
            self._offer(step)
        return Kept(node)

    def unkeep(self, kept: Kept) -> None:
        """Its pages go when their turn comes, again."""
        node, kept.node = kept.node, None
        while node is not None:
            above = node.went_to or node.parent
            if node.went_to is None:
                node.kept -= 1
                if not node.kept and not node.leases:
                    self.kept_host_pages -= node.num_host
                self._offer(node)
            node = above

    def extend(self, lease: Lease, raw: bytes, pages: I32, step: int) -> list[Had]:
        """Store device pages (int32 [groups, n]) that follow the lease's end, filled by `step`; the lease moves behind
        them. All of the lease's own path must be on the device.

        Returns runs that the index does not take, since it had device pages for these tokens already.
        """
        count = pages.shape[1]
        node, at, had = lease.node, 0, list[Had]()
        while at < count:
            start = at * self._page_bytes
            child = node.children.get(raw[start : start + self._page_bytes])
            if child is None:
                node, at = self._append(node, raw[start:], pages[:, at:], step), count
            elif have := child.num_device:
                common = min(common_pages(child.key, raw, start, self._page_bytes), have)
                node = child if common == child.length else self._split(child, common)
                self._hold(node)
                had.append(Had(at, node.device))
                at += common
            else:
                # Only the host had them: these bytes are the same, and nobody need load them any more.
                common = common_pages(child.key, raw, start, self._page_bytes)
                node = child if common == child.length else self._split(child, common)
                self._hold(node)
                self._set_device(node, pages[:, at : at + common], step)
                at += common
        lease.node = node
        lease.num_pages += count
        return had

    def load(self, lease: Lease, pages: I32, step: int) -> None:
        """The pages of the lease's path that only the host has are brought to these device pages by `step`."""
        at = 0
        for node in path_to(lease.node):
            missing = node.length - node.num_device
            if missing:
                self._set_device(node, pages[:, at : at + missing], step)
                at += missing
        assert at == pages.shape[1]

    def insert_host(self, namespace: bytes, raw: bytes, first: int, pages: I32) -> NDArray[np.bool_]:
        """Index host pages (int32 [groups, m]) for the pages from `first` on of the prefix `raw`.

        Returns bool [m]: which were taken. None are where the prefix before them has gone meanwhile, those not that
        the index has already.
        """
        taken = np.zeros(pages.shape[1], np.bool_)
        if first and namespace not in self._roots:
            return taken
        node, have = self._ending(self._root(namespace), raw)
        if have >= first and have < first + len(taken):
            taken[have - first :] = True
            fresh = pages[:, have - first :].copy()
            key = raw[have * self._page_bytes :]
            new = Node(node, key, fresh.shape[1], self._none, fresh)
            if self._places is not None:
                new.places = self._places.take(new.length)
            self._tick += 1
            new.used = self._tick
            node.children[key[: self._page_bytes]] = new
            node.host_children += 1
            self.num_nodes += 1
            self.host_pages += new.length
            self.evictable_host_pages += new.length
            self._offer(new)
            self._tell(_HOST_STORED, new, 0, new.length)
        elif node.parent is None:
            self._offer(node)
        return taken

    def release(self, lease: Lease, last_step: int, touch: bool = True) -> None:
        """Give a lease back; its pages must outlive `last_step`. With `touch` they count as just used."""
        self._tick += 1
        node: Node | None = lease.node
        while node is not None:
            assert node.leases > 0, "a lease was released twice"
            node.leases -= 1
            if touch:
                node.used = self._tick
            if last_step > node.last_step:
                node.last_step = last_step
            if not node.leases:
                self.evictable_device_pages += node.num_device
                self.evictable_host_pages += node.num_host
                if node.kept:
                    self.kept_host_pages += node.num_host
            node = node.parent
        # The deepest node with pages in a tier may be any on the path; above one that is leased, all are.
        node = lease.node
        while node is not None and not node.leases:
            above = node.parent
            self._offer(node)
            node = above

    # ------------------------------------------------------------------------------------------------------------
    # Backups: device → host

    def begin_backup(self, lease: Lease, completed_step: int, most: int, min_hits: int) -> tuple[list[Span], I32]:
        """Mark up to `most` device pages of the lease's path that the host lacks as being copied there.

        Only pages filled by completed steps, and of nodes with `min_hits`. Returns their spans and numbers, int32
        [groups, k], in the order of the path.
        """
        spans, pages = begin_copies(path_to(lease.node), completed_step, most, min_hits)
        return spans, np.concatenate([self._none, *pages], axis=1)

    def end_backup(self, lease: Lease, spans: list[Span], pages: I32 | None) -> None:
        """The host has the pages of these spans in `pages` (int32 [groups, k]), or the copy was given up (None)."""
        at = 0
        for node, start, count in places_of(path_to(lease.node), spans):
            assert pages is None or start == node.num_host, "copies end in the order they began"
            if pages is not None:
                node.set_host(np.concatenate((node.host, pages[:, at : at + count]), axis=1))
                self.host_pages += count
                self._tell(_HOST_STORED, node, start, start + count)
            else:
                give_up_copies(node, count)
            at += count

    # ------------------------------------------------------------------------------------------------------------
    # Evictions

    def evict_device(self, count: int) -> list[Dropped]:
        """Take up to `count` pages that nobody leases from the device, the longest unused first and from the ends of
        prefixes. What the host has stays indexed; what it has not is forgotten, and what follows it."""
        dropped: list[Dropped] = []
        while count > 0 and (node := self._device_lru.pop()) is not None:
            keep = max(0, node.num_device - count)
            count -= node.num_device - keep
            dropped.extend(self._drop_device(node, keep))
        return dropped

    def evict_host(self, count: int) -> list[Dropped]:
        """The same for host pages; those that the device has too stay indexed."""
        dropped: list[Dropped] = []
        while count > 0 and (node := self._host_lru.pop()) is not None:
            keep = max(0, node.num_host - count)
            count -= node.num_host - keep
            dropped.append(self._drop_host(node, keep))
        return dropped

    def drop(self, namespace: bytes, raw: bytes, device: bool, host: bool) -> list[Dropped]:
        """Take from these tiers what nobody leases of the prefix `raw` and of all that continues it, and the prefix's
        own pages back to where another one branches off. An empty `raw` is the whole namespace."""
        root = self._roots.get(namespace)
        if root is None:
            return []
        node, pages = self._ending(root, raw)
        if pages * self._page_bytes < len(raw):
            return []
        # The ends first; then the prefix itself, from its end to the root.
        order = [*subtree(node)[:0:-1], *path_to(node)[::-1]]
        dropped: list[Dropped] = []
        for step in order:
            if device and is_device_leaf(step):
                if self._places is not None:
                    self._places.drop(step.places, True, False)
                dropped.extend(self._drop_device(step, 0))
        for step in order:
            if host and is_host_leaf(step):
                if self._places is not None:
                    self._places.drop(step.places, False, True)
                dropped.append(self._drop_host(step, 0))
        return dropped

    def coldest(self, count: int) -> tuple[int, list[Lease]]:
        """What eviction would take first, about `count` device pages: how many of them the host has too, and leases on
        the paths of the others, which a write-back copies before it evicts."""
        ready = 0
        leases: list[Lease] = []
        seen: dict[Node, None] = {}
        while count > 0 and (node := self._device_lru.pop()) is not None:
            # The heap may have a node more than once.
            if node in seen:
                continue
            seen[node] = None
            pages = min(count, node.num_device)
            count -= pages
            if node.num_host < node.num_device:
                leases.append(Lease(node, sum(step.length for step in path_to(node))))
            else:
                ready += pages
        for node in seen:
            self._device_lru.push(node)
        for lease in leases:
            self._hold_path(lease.node)
        return ready, leases

    def forget_device(self, most_nodes: int) -> list[Dropped]:
        """The device is gone: take all of its pages from up to so many nodes that nobody leases, as `evict_device`
        does; 10 µs each. Empty when only leased nodes have any."""
        dropped: list[Dropped] = []
        while len(dropped) < most_nodes and (node := self._device_lru.pop()) is not None:
            dropped.extend(self._drop_device(node, 0))
        return dropped

    def clear(self) -> None:
        """Forget everything in every tier; no lease may be out."""
        assert not any(root.leases for root in self._roots.values()), "leases are out"
        if self.listener is not None:
            for node in self.nodes():
                self._tell(_DEVICE_REMOVED, node, 0, node.num_device)
                self._tell(_HOST_REMOVED, node, 0, node.num_host)
        if self._places is not None:
            for node in self.nodes():
                self._places.give_back(node.places)
        self._roots.clear()
        self._device_lru.clear()
        self._host_lru.clear()
        self.num_nodes = self.device_pages = self.host_pages = 0
        self.evictable_device_pages = self.evictable_host_pages = self.kept_host_pages = 0

    def nodes(self) -> Iterator[Node]:
        """All nodes, roots included, parents first."""
        for root in self._roots.values():
            yield from subtree(root)

    @property
    def changes(self) -> int:
        """Grows with every lease that is taken or given back."""
        return self._tick

    def checking(self, leases: list[Lease]) -> Iterator[list[Node]]:
        """All nodes, run by run, once they are known to be well formed and to have the counts of `leases`. Nothing may
        change before the last. Raises AssertionError."""
        return check_tree(
            self._roots.values(),
            leases,
            self._page_bytes,
            lambda node: self._roots.get(node.key) is node,
            lambda: [
                *(self.num_nodes, self.device_pages, self.host_pages),
                *(self.evictable_device_pages, self.evictable_host_pages, self.kept_host_pages),
            ],
        )

    def check(self, leases: list[Lease]) -> None:
        """The same at once."""
        for _ in self.checking(leases):
            pass

    # ------------------------------------------------------------------------------------------------------------
    # The tree

    def _root(self, namespace: bytes) -> Node:
        if (root := self._roots.get(namespace)) is None:
            root = self._roots[namespace] = Node(None, namespace, 0, self._none, self._none)
        return root

    def _path(self, namespace: bytes, raw: bytes) -> tuple[list[Node], int]:
        """The nodes of the longest stored prefix of `raw`, and its pages, which may end in the last of them."""
        if (root := self._roots.get(namespace)) is None:
            return [], 0
        node, pages, child, common = walk(root, raw, self._page_bytes)
        return path_to(node)[1:] + ([child] if child is not None and common else []), pages + common

    def _ending(self, root: Node, raw: bytes) -> tuple[Node, int]:
        """The node with which the longest stored prefix of `raw` ends, cut so that it does, and the prefix's pages."""
        node, pages, child, common = walk(root, raw, self._page_bytes)
        if child is None or not common:
            return node, pages
        return self._split(child, common), pages + common

    def _match(self, node: Node, pages: int) -> Match:
        self._tick += 1
        tick = self._tick
        device: list[I32] = []
        host: list[I32] = []
        step: Node | None = node
        while step is not None:
            have = step.num_device
            if not step.leases:
                self.evictable_device_pages -= have
                self.evictable_host_pages -= step.num_host
                if step.kept:
                    self.kept_host_pages -= step.num_host
            step.leases += 1
            step.hits += 1
            step.used = tick
            if have:
                device.append(step.device)
            if have < step.length:
                host.append(step.host[:, have:])
            step = step.parent
        return Match(Lease(node, pages), self._joined(device), self._joined(host))

    def _joined(self, runs: list[I32]) -> I32:
        """Runs, the last first, as one."""
        return np.concatenate(runs[::-1], axis=1) if runs else self._none

    def _hold_path(self, node: Node) -> None:
        self._tick += 1
        for step in path_to(node):
            self._hold(step)

    def _hold(self, node: Node) -> None:
        if not node.leases:
            self.evictable_device_pages -= node.num_device
            self.evictable_host_pages -= node.num_host
            if node.kept:
                self.kept_host_pages -= node.num_host
        node.leases += 1

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` pages. The head is new; the node keeps its tail, its children and its leases' ends."""
        parent = node.parent
        assert parent is not None and 0 < at < node.length
        # Who counts the nodes in slices must see that there is one more.
        self._tick += 1
        cut = at * self._page_bytes
        head = Node(parent, node.key[:cut], at, self._none, node.host[:, :at].copy())
        head.set_device(node.device[:, :at].copy(), node.filled_by[:at].copy())
        head.pending = min(node.pending, at)
        head.leases, head.used, head.hits, head.last_step = node.leases, node.used, node.hits, node.last_step
        head.kept = node.kept
        head.places, node.places = node.places[:at].copy(), node.places[at:].copy()
        parent.children[head.key[: self._page_bytes]] = head
        node.parent = head
        node.key, node.length = node.key[cut:], node.length - at
        node.set_device(node.device[:, at:].copy(), node.filled_by[at:].copy())
        node.set_host(node.host[:, at:].copy())
        node.pending = max(0, node.pending - at)
        head.children[node.key[: self._page_bytes]] = node
        head.device_children, head.host_children = int(node.num_device > 0), int(node.pending > 0)
        self.num_nodes += 1
        self._offer(head)
        self._offer(node)
        return head

    def _append(self, node: Node, raw: bytes, pages: I32, step: int) -> Node:
        """Put device pages behind `node`, which the caller has leased: into it where nobody else has and nothing
        follows (a request that grows page by page stays one node), else into a new child with the caller's lease."""
        count = pages.shape[1]
        if node.leases == 1 and not node.children and node.parent is not None:
            node.key += raw
            node.length += count
            if self._places is not None:
                node.places = np.concatenate((node.places, self._places.take(count)))
            self._set_device(node, pages, step)
            return node
        child = Node(node, raw, count, self._none, self._none)
        if self._places is not None:
            child.places = self._places.take(count)
        child.leases = 1
        child.used = self._tick
        node.children[raw[: self._page_bytes]] = child
        self.num_nodes += 1
        self._set_device(child, pages, step)
        return child

    def _set_device(self, node: Node, pages: I32, step: int) -> None:
        """Device pages behind those that the node has, matchable from now on."""
        count = pages.shape[1]
        if not node.num_device and node.parent is not None:
            node.parent.device_children += 1
        node.append_device(pages, step)
        node.last_step = max(node.last_step, step)
        self.device_pages += count
        if not node.leases:
            self.evictable_device_pages += count
        self._tell(_DEVICE_STORED, node, node.num_device - count, node.num_device)

    def _tell(self, change: Change, node: Node, start: int, end: int) -> None:
        if self.listener is not None and end > start:
            self.listener(change, node, start, end)

    def _drop_device(self, node: Node, keep: int) -> list[Dropped]:
        """Take all but the first `keep` device pages of a leaf; and what continues them, where the host lacks them."""
        pages = node.device[:, keep:]
        lost = self._prune(node) if node.children and node.num_host < node.length else []
        self._cut_device(node, keep)
        self._settle(node)
        return [Dropped(pages, self._none, node.last_step), *lost]

    def _drop_host(self, node: Node, keep: int) -> Dropped:
        """Take all but the first `keep` host pages of a leaf."""
        pages = node.host[:, keep:]
        self._cut_host(node, keep)
        self._settle(node)
        return Dropped(self._none, pages, node.last_step)

    def _cut_device(self, node: Node, keep: int) -> None:
        self._tell(_DEVICE_REMOVED, node, keep, node.num_device)
        gone = node.num_device - keep
        self.device_pages -= gone
        if not node.leases:
            self.evictable_device_pages -= gone
        node.cut_device(keep)
        if gone and not keep and node.parent is not None:
            node.parent.device_children -= 1

    def _cut_host(self, node: Node, keep: int) -> None:
        self._tell(_HOST_REMOVED, node, keep, node.num_host)
        gone = node.num_host - keep
        self.host_pages -= gone
        if not node.leases:
            self.evictable_host_pages -= gone
            if node.kept:
                self.kept_host_pages -= gone
        node.cut_host(keep)
        node.pending = keep
        if gone and not keep and node.parent is not None:
            node.parent.host_children -= 1

    def _prune(self, node: Node) -> list[Dropped]:
        """Drop everything below a node, all of it on the host: what it continues is about to go."""
        dropped: list[Dropped] = []
        gone = subtree(node)[1:]
        for below in gone:
            # While the paths still stand.
            self._tell(_HOST_REMOVED, below, 0, below.num_host)
        for below in gone:
            assert not below.leases and not below.num_device
            dropped.append(Dropped(self._none, below.host, below.last_step))
            self.host_pages -= below.num_host
            self.evictable_host_pages -= below.num_host
            if below.kept:
                self.kept_host_pages -= below.num_host
            self.num_nodes -= 1
            below.parent, below.went_to = None, node
            below.cut_host(0)
            if self._places is not None:
                self._places.give_back(below.places)
        node.children.clear()
        node.host_children = 0
        return dropped

    def _settle(self, node: Node) -> None:
        """After a cut: shorten the node to what a tier still has, or remove it; and offer what may go next."""
        parent = node.parent
        assert parent is not None
        length = max(node.num_device, node.num_host)
        if length < node.length:
            assert not node.children, "what follows a lost page is indexed"
            if self._places is not None:
                self._places.give_back(node.places[length:])
                node.places = node.places[:length].copy()
        if length:
            node.key, node.length = node.key[: length * self._page_bytes], length
            self._offer(node)
        else:
            del parent.children[node.key[: self._page_bytes]]
            node.parent, node.went_to, node.key, node.length = None, parent, b"", 0
            self.num_nodes -= 1
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Remember a node for eviction where it is a leaf of a tier; forget a root that is empty."""
        if node.parent is None:
            if not node.leases and not node.children and not node.length and self._roots.get(node.key) is node:
                del self._roots[node.key]
            return
        if is_device_leaf(node):
            self._device_lru.push(node, self.num_nodes)
        if is_host_leaf(node):
            self._host_lru.push(node, self.num_nodes)

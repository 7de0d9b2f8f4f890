"""Copies from the device to the host as the index's nodes know them: which pages a path lacks, which are under way.

A node's first `h` pages are on the host, and copies of those up to `pending` are under way; a node with any counts
as a child with host pages, so that nobody takes what it continues from the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.kvcache.radix_nodes import Node, Span
from headrace.ops.wire import I32


def begin_copies(path: Sequence[Node], completed_step: int, most: int, min_hits: int) -> tuple[list[Span], list[I32]]:
    """Mark up to `most` device pages that the host lacks as being copied there: their spans, and each one's numbers
    (int32 [groups, k]). Only pages filled by completed steps, and of nodes with `min_hits`."""
    spans: list[Span] = []
    pages: list[I32] = []
    depth = 0
    for node in path:
        count = min(node.num_device - node.pending, most)
        if count > 0 and node.hits >= min_hits:
            # Only here, since most of a path has been copied before: asking the array takes 3 µs.
            early = node.filled_by > completed_step
            count = min(int(early.argmax()) - node.pending, most) if early.any() else count
        if count > 0 and node.hits >= min_hits:
            spans.append(Span(depth + node.pending, depth + node.pending + count))
            pages.append(node.device[:, node.pending : node.pending + count])
            node.pending += count
            most -= count
            if node.parent is not None and node.pending == count:
                node.parent.host_children += 1
        depth += node.length
    return spans, pages


def places_of(path: Sequence[Node], spans: Sequence[Span]) -> Iterator[tuple[Node, int, int]]:
    """`(node, start, count)` of each node that has pages of the spans, `start` counted from the node's first page; the
    nodes may have been split since the copies began."""
    depth, queue = 0, list(spans)
    for node in path:
        while queue and queue[0].start < depth + node.length:
            span = queue[0]
            count = min(span.end, depth + node.length) - span.start
            yield node, span.start - depth, count
            queue[0] = Span(span.start + count, span.end)
            if queue[0].start == span.end:
                queue.pop(0)
        depth += node.length
    assert not queue


def give_up_copies(node: Node, count: int) -> None:
    """The copies of the last `count` pending pages of a node will not come."""
    node.pending -= count
    if not node.pending and node.parent is not None:
        node.parent.host_children -= 1


def host_parts(path: Sequence[Node], start: int) -> Iterator[I32]:
    """The host's pages of a path from its page `start` on, up to a gap: int32 [groups, k] each."""
    at, depth = start, 0
    for node in path:
        if at < depth + node.length:
            pages = node.host[:, at - depth :]
            yield pages
            at += pages.shape[1]
            if at < depth + node.length:
                return
        depth += node.length

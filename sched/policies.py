"""In which order waiting requests start: one number a request, the smallest first.

The names and meanings are SGLang's; `hrrn` and `least-work` are not among its. Nothing here keeps state: `queue` holds
the requests, and says when a number is worked out anew.

    fcfs        as they came
    lpm         the longest cached prefix first
    dfs-weight  depth first through the cached branches, the branch with most waiting requests first
    lof         the largest `max_tokens` first
    random      a draw
    hrrn        the highest (waited + work) / work first, work being the prefill that the cache does not save
    least-work  by arrival + what the work is worth, at most `OVERTAKING_MS`: see `least_work_key`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

SchedulePolicy: TypeAlias = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "hrrn", "least-work"]

OVERTAKING_MS: Final = 10_000.0
"""`least-work`: a request is never overtaken by one that came more than this after it."""
PATIENCE: Final = 64.0
"""`least-work`: ms that a request lets others go first, per ms of prefill that it needs itself. Of 16, 32, 64 and 128
this has the shortest tail (`scripts/bench/policies.py`; 48, 72 and 96 clients, four seeds): p99 of the first token 0.9
to 1.2 times that of fcfs, with a third to three quarters of its mean."""
LEAST_WORK_MS: Final = 0.1
"""Of any request: one token is computed always."""
MATCHING: Final[tuple[SchedulePolicy, ...]] = ("lpm", "dfs-weight", "hrrn", "least-work")
"""Policies that look at the cache: their numbers change when it does."""
CHANGING: Final[tuple[SchedulePolicy, ...]] = ("random", "hrrn")
"""Policies whose numbers change though the cache does not."""


def least_work_key(arrival_s: float, work_ms: float) -> float:
    """A request with little to compute goes before those that came up to `PATIENCE` times *their* work earlier.

    The number lies within `OVERTAKING_MS` of the arrival, whatever the cache does meanwhile. So who came more than that
    later never goes first: this is the bound on starvation. Waiting counts by itself, because arrivals do.
    """
    return arrival_s * 1e3 + min(PATIENCE * work_ms, OVERTAKING_MS)


def hrrn_key(waited_ms: float, work_ms: float) -> float:
    """Highest response ratio next: short work goes first, long work catches up as it waits."""
    return -waited_ms / max(work_ms, LEAST_WORK_MS)


def dfs_weight_order(paths: Sequence[Sequence[bytes]]) -> list[int]:
    """Indices of `paths`, depth first through the tree that they span.

    A path is the chain hashes of the cached pages of one request: equal hashes are equal prefixes. At a fork the branch
    with most requests goes first (the one whose first request stands first, if as many), and what hangs below a node
    goes before the requests that end in it, as in SGLang.
    """
    order: list[int] = []
    # Parts yet to be put out, the last first: requests that share a path of `depth` pages, or that end here (-1).
    parts: list[tuple[int, list[int]]] = [(0, list(range(len(paths))))]
    while parts:
        depth, members = parts.pop()
        if depth < 0 or len(members) <= 1:
            order.extend(members)
            continue
        depth = _common(paths, members, depth)
        branches: dict[bytes, list[int]] = {}
        here: list[int] = []
        for member in members:
            path = paths[member]
            if len(path) == depth:
                here.append(member)
            else:
                branches.setdefault(path[depth], []).append(member)
        if here:
            parts.append((-1, here))
        # Sorted is stable: of two as heavy, the first stays first; popped from the end, so reversed.
        heaviest = sorted(branches.values(), key=len, reverse=True)
        parts.extend((depth + 1, branch) for branch in reversed(heaviest))
    return order


def _common(paths: Sequence[Sequence[bytes]], members: Sequence[int], depth: int) -> int:
    """Pages that all members share, `depth` at least: by bisection, as equal hashes mean equal prefixes."""
    first = paths[members[0]]
    low, high = depth, min(len(paths[member]) for member in members)
    while low < high:
        middle = (low + high + 1) // 2
        if all(paths[member][middle - 1] == first[middle - 1] for member in members):
            low = middle
        else:
            high = middle - 1
    return low

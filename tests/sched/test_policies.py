"""The order in which waiting requests start, policy by policy, and what it costs to know it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.scenarios import in_world

from headrace.kvcache.cache import KvCache
from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.sched.messages import SamplingParams, Submit
from headrace.sched.policies import OVERTAKING_MS, PATIENCE, SchedulePolicy, dfs_weight_order
from headrace.sched.queue import DFS_MOST, LOOKS, WaitingQueue
from headrace.sched.request import Request
from headrace.server.sim.judge import Watched
from headrace.server.sim.virtual_loop import run
from headrace.server.sim.world import World, WorldShape

POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)
PAGE_TOKENS = 4
LONG, SHORT = list(range(100, 120)), list(range(200, 208))
"""Two prefixes that the cache has: five pages, and two."""


def starts(world: World) -> list[int]:
    """Handles in the order in which their requests began."""
    return [started.request for deltas in world.deltas for started in deltas.started]


def order_of(policy: SchedulePolicy, prompts: list[tuple[list[int], int]], seed: int = 0) -> list[int]:
    """Indices of prompts (and outputs), that wait for one slot, in the order in which they start."""

    async def scenario(world: World) -> None:
        for prefix in (LONG, SHORT):
            await world.submit([*prefix, 1], 1).ended.wait()
        blocker = world.submit([1, 2, 3], 12)
        await world.until(lambda: bool(blocker.ids))
        for prompt, outputs in prompts:
            world.submit(prompt, outputs)

    world = in_world(WorldShape(slots=1, pages=64, schedule_policy=policy), scenario, seed)
    return [handle - 4 for handle in starts(world)[3:]]


UNCACHED = list(range(300, 324))
PROMPTS = [(UNCACHED, 3), ([*SHORT, *range(10)], 2), ([*LONG, *range(20, 32)], 4), ([7, 8], 1)]
"""24 tokens to compute; 8 cached and 10; 20 cached and 12; 2."""


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [0, 1, 2, 3]),
        ("lpm", [2, 1, 0, 3]),
        ("lof", [2, 0, 1, 3]),
        ("least-work", [3, 1, 2, 0]),
        ("hrrn", [3, 1, 2, 0]),
    ],
)
def test_a_policy_is_what_its_name_says(policy: SchedulePolicy, order: list[int]) -> None:
    assert order_of(policy, PROMPTS) == order


def test_dfs_weight_takes_the_branch_with_most_waiting_requests_first_and_all_of_it() -> None:
    prompts = [([*SHORT, 1], 1), ([*LONG, 1], 1), ([*SHORT, 2], 1), ([*LONG, 2], 1), ([*LONG, 3], 1), ([5], 1)]
    assert order_of("dfs-weight", prompts) == [1, 3, 4, 0, 2, 5]


def test_random_is_an_order_of_the_seed() -> None:
    prompts = [([i], 1) for i in range(6)]
    orders = [order_of("random", prompts, seed) for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) > 1
    assert all(sorted(order) == list(range(6)) for order in orders)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_higher_priority_starts_first_under_every_policy(policy: SchedulePolicy) -> None:
    async def scenario(world: World) -> None:
        blocker = world.submit([1, 2, 3], 12)
        await world.until(lambda: bool(blocker.ids))
        for priority in (0, 5, -1, 5):
            world.submit([9, 9, priority + 1], 2, priority=priority)

    world = in_world(WorldShape(slots=1, schedule_policy=policy), scenario)
    assert set(starts(world)[1:3]) == {3, 5} and starts(world)[3:] == [2, 4]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_uncached_prefix_of_several_requests_is_computed_once_under_every_policy(policy: SchedulePolicy) -> None:
    prefix = list(range(40))

    async def scenario(world: World) -> None:
        for i in range(6):
            world.submit([*prefix, 500 + i, 2, 3], 4)

    world = in_world(WorldShape(slots=6, pages=96, prefill_tokens=8, schedule_policy=policy), scenario)
    assert world.engine.status().computed_tokens == 40 + 6 * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_waits_for_anothers_prefix_lets_others_by(policy: SchedulePolicy) -> None:
    """And is not forgotten: what it waited for is told."""

    async def scenario(world: World) -> None:
        prefix = list(range(40))
        world.submit(prefix, 4)
        twin = world.submit([*prefix, 1], 4)
        other = world.submit([700], 1)
        await other.ended.wait()
        assert not twin.ids
        await twin.ended.wait()
        assert twin.started is not None and twin.started.waited_for == "prefix"
        assert twin.started.cached_tokens == 40

    in_world(WorldShape(prefill_tokens=9, schedule_policy=policy), scenario)


# --------------------------------------------------------------------------------------------------------------------
# Starvation


class ChangingCache(KvCache):
    """What it has of a prompt is what the test says, and another thing each time it changes."""

    def __init__(self) -> None:
        super().__init__(KvLayout(PAGE_TOKENS, (LayerGroup("full", 0, (0,), 1, 8, 1),)), [8])
        self.cached: Callable[[PrefixKey], int] = lambda key: 0
        self.looks = 0

    def peek(self, key: PrefixKey) -> int:
        self.looks += 1
        return min(self.cached(key), key.length - 1) // PAGE_TOKENS * PAGE_TOKENS


def waiting(order: int, tokens: int, arrival_s: float, priority: int = 0) -> Request:
    prompt = np.full(tokens, order, np.int32)
    submit = Submit(order, prompt, SamplingParams(max_tokens=1), priority=priority)
    return Request(submit, PrefixKey(namespace(b"", "", ""), PAGE_TOKENS, prompt, tokens), order, arrival_s)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 3000), st.integers(1, 4000)),
        st.tuples(st.just("start"), st.integers(0, 3000), st.just(0)),
        st.tuples(st.just("change"), st.just(0), st.integers(0, 4000)),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_b34_least_work_never_lets_anyone_by_who_came_later_by_more_than_its_bound(
    events: list[tuple[str, int, int]],
) -> None:
    cache, now_s = ChangingCache(), 100.0
    queue = WaitingQueue("least-work", cache, lambda tokens, context: tokens * 3.0, np.random.default_rng(0))
    for order, (kind, wait_ms, size) in enumerate(events):
        now_s += wait_ms / 1e3
        if kind == "arrive":
            queue.add(waiting(order, size, now_s), now_s)
        elif kind == "change":
            # Another part of the prompts is cached: some of those that wait have gained, others have lost.
            cache.cached = lambda key, size=size: (int(key.tokens[0]) * 37 + size) % 4000  # type: ignore[misc]
            cache.version += 1
        elif len(queue):
            queue.begin_step(now_s)
            queue.check()
            first = queue.candidate(0)
            assert first is not None
            queue.remove(first)
            for other in queue:
                assert first.arrival_s - other.arrival_s <= OVERTAKING_MS / 1e3 + 1e-9
                assert first.arrival_s - other.arrival_s <= PATIENCE * 3.0 * len(other.ids) / 1e3 + 1e-9


def start_of_an_uncached_request_amid_cached_ones(policy: SchedulePolicy) -> tuple[float, float]:
    """Seconds until it starts, and that the stream of cached newcomers lasts."""

    async def main() -> tuple[float, float]:
        shape = WorldShape(slots=1, pages=512, context_tokens=1600, forward_us=20_000, schedule_policy=policy)
        async with World(0, msgspec.structs.replace(shape, prefill_tokens=1600)) as world:
            loop = asyncio.get_running_loop()
            shared = list(range(64))
            await world.submit([*shared, 1], 1).ended.wait()
            began_s = loop.time()
            newcomers: list[Watched] = [world.submit([*shared, 2], 3)]
            lone = world.submit([500] * 1500, 1)
            while loop.time() < began_s + 14:
                # Always two of them wait: the queue never runs dry.
                while sum(not watched.ended.is_set() for watched in newcomers) < 3:
                    newcomers.append(world.submit([*shared, len(newcomers)], 3))
                await world.until(newcomers[-3].ended.is_set if len(newcomers) > 2 else newcomers[0].ended.is_set)
            lasted_s = loop.time() - began_s
            await lone.ended.wait()
            assert lone.started is not None
            start_s = lone.started.queue_ms / 1e3
            await world.finish()
            return start_s, lasted_s

    return run(main())


def test_b34_old_requests_are_not_starved_by_cache_friendly_newer_ones() -> None:
    start_s, _ = start_of_an_uncached_request_amid_cached_ones("least-work")
    # Its turn comes after the bound; then it waits for who runs.
    assert OVERTAKING_MS / 1e3 - 0.5 < start_s < OVERTAKING_MS / 1e3 + 0.5
    start_s, lasted_s = start_of_an_uncached_request_amid_cached_ones("lpm")
    assert start_s > lasted_s, "lpm has no such bound: the test would show it"


# --------------------------------------------------------------------------------------------------------------------
# Cost, and the tree's order


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_looks_up_a_bounded_number_of_waiting_requests(policy: SchedulePolicy) -> None:
    cache = ChangingCache()
    queue = WaitingQueue(policy, cache, lambda tokens, context: float(tokens), np.random.default_rng(0))
    for order in range(1024):
        queue.add(waiting(order, 8, 0.0), 0.0)
    for step in range(20):
        cache.version += 1
        before = cache.looks
        queue.begin_step(step * 0.02)
        for at in range(64):
            if (request := queue.candidate(at)) is not None:
                queue.look(request)
        assert cache.looks - before <= LOOKS
    queue.check()


@pytest.mark.parametrize("policy", ["lpm", "least-work", "hrrn"])
def test_what_becomes_cached_moves_a_waiting_request_forward_within_the_rota(policy: SchedulePolicy) -> None:
    cache = ChangingCache()
    queue = WaitingQueue(policy, cache, lambda tokens, context: float(tokens), np.random.default_rng(0))
    for order in range(100):
        queue.add(waiting(order, 400, 0.0), 0.0)
    queue.begin_step(1.0)
    assert (first := queue.candidate(0)) is not None and first.order == 0
    cache.cached = lambda key: 396 if key.tokens[0] == 77 else 0
    cache.version += 1
    for _ in range(100 // 8 + 1):
        queue.begin_step(1.0)
    assert (first := queue.candidate(0)) is not None and first.order == 77


def test_dfs_weight_orders_a_queue_longer_than_it_looks_at_by_who_came_first() -> None:
    cache = ChangingCache()
    queue = WaitingQueue("dfs-weight", cache, lambda tokens, context: float(tokens), np.random.default_rng(0))
    for order in range(DFS_MOST + 5):
        queue.add(waiting(order, 8, 0.0), 0.0)
    for _ in range(DFS_MOST):
        queue.begin_step(0.0)
    assert [request.order for request in queue][-5:] == list(range(DFS_MOST, DFS_MOST + 5))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=24))
def test_dfs_weight_keeps_branches_together_the_heavier_first_and_deeper_ones_before_their_node(
    paths: list[list[int]],
) -> None:
    hashes = [[bytes(path[: i + 1]) for i in range(len(path))] for path in paths]
    order = dfs_weight_order(hashes)
    assert sorted(order) == list(range(len(paths)))
    in_order = [paths[at] for at in order]
    for depth in range(5):
        for stem in {tuple(path[:depth]) for path in paths if len(path) >= depth}:
            below = [at for at, path in enumerate(in_order) if tuple(path[:depth]) == stem]
            assert below == list(range(below[0], below[0] + len(below))), "a branch is torn apart"
            firsts = [tuple(in_order[at][depth : depth + 1]) for at in below]
            runs = [firsts[0]] + [now for last, now in pairwise(firsts) if now != last]
            weights = [firsts.count(run) for run in runs if run]
            assert weights == sorted(weights, reverse=True)
            assert () not in runs[:-1], "who ends here comes last"

"""A page that a request has computed a second time is given back, and the index's read in its place: when, and to whom
the page-table edits go."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest
from sim.tiered_world import HOST, PROMPT, play

from headrace.kvcache.cache import KvCache
from headrace.kvcache.holding import Holding, Repointed
from headrace.kvcache.pool import Fence
from headrace.sched.batch import ScheduleBatch
from headrace.sched.request import Request
from headrace.sched.scheduler import Scheduler
from headrace.server.sim.virtual_loop import running_loop
from headrace.server.sim.world import World

SHAPE = msgspec.structs.replace(HOST, pages=40)


def on_duplicates(patch: pytest.MonkeyPatch, act: Callable[[Scheduler, Request], None]) -> None:
    """Call `act` when a request is first seen to have computed pages that the index has, before the next step is
    prepared."""
    publish, seen = Scheduler.publish, list[Request]()

    def published(scheduler: Scheduler, all_filled: Sequence[tuple[Request, int]]) -> None:
        publish(scheduler, all_filled)
        for request, _ in all_filled:
            if not seen and request.holding is not None and request.holding.duplicates:
                seen.append(request)
                running_loop().call_soon(act, scheduler, request)

    patch.setattr(Scheduler, "publish", published)


async def twins(world: World) -> None:
    """Two that compute the same, since the logprobs of their prompts are wanted."""
    asked = [world.submit(PROMPT, 12, prompt_logprobs=0) for _ in range(2)]
    await asyncio.gather(*(twin.ended.wait() for twin in asked))


def test_what_is_given_back_outlives_the_last_step_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fenced: list[tuple[int, int, int]] = []
    repoint = KvCache.repoint

    def repointed(cache: KvCache, holding: Holding, fence: Fence) -> Repointed:
        before = cache.stats()
        places = repoint(cache, holding, fence)
        after = cache.stats()
        fenced.append((len(places.indices), after.fenced - before.fenced, after.free - before.free))
        return places

    monkeypatch.setattr(KvCache, "repoint", repointed)
    play(SHAPE, twins)
    assert fenced and all(pages == behind and not freed for pages, behind, freed in fenced)


def test_a_request_that_ends_with_duplicates_is_not_repointed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        def end(scheduler: Scheduler, request: Request) -> None:
            world.abort(world.requests[request.submit.request])

        on_duplicates(monkeypatch, end)
        await twins(world)
        assert Counter(watched.finished.reason for watched in world.requests.values() if watched.finished) == {
            "abort": 1,
            "length": 1,
        }

    play(SHAPE, scenario)


def test_a_request_that_publishes_twice_between_steps_is_repointed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        def again(scheduler: Scheduler, request: Request) -> None:
            scheduler.publish([(request, int(scheduler.table.computed[request.slot]))])
            assert scheduler._with_duplicates.count(request) == 2

        on_duplicates(monkeypatch, again)
        await twins(world)

    play(SHAPE, scenario)


def test_edits_that_no_batch_has_carried_end_with_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot may be another's in the next batch."""
    left: list[int] = []

    async def scenario(world: World) -> None:
        def nothing_runs_and_it_ends(scheduler: Scheduler, request: Request) -> None:
            scheduler._repoint()
            left.append(len(scheduler._moved))
            world.abort(world.requests[request.submit.request])
            scheduler._repoint()
            left.append(len(scheduler._moved))

        on_duplicates(monkeypatch, nothing_runs_and_it_ends)
        await twins(world)

    play(SHAPE, scenario)
    assert left == [1, 0]


def test_a_batch_carries_the_edits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    carried: list[int] = []
    launched = Scheduler.launched

    def counted(scheduler: Scheduler, batch: ScheduleBatch, step: int) -> None:
        carried.append(sum(len(moved.places.indices) for moved in batch.moved))
        launched(scheduler, batch, step)

    monkeypatch.setattr(Scheduler, "launched", counted)
    play(SHAPE, twins)
    # Twelve whole pages of the longer of them: each is shared once.
    assert 0 < sum(carried) <= 12

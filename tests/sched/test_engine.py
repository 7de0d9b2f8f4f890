"""The engine over the oracle in virtual time: one behaviour each, and each condition is shown to have happened."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from headrace.sched.device import EngineFailed
from headrace.sched.messages import NeverFits, Overloaded, SamplingParams, Submit
from headrace.server.sim.virtual_loop import run
from headrace.server.sim.world import Watched, World, WorldShape

PROMPT = list(range(1, 14))


def in_world(
    shape: WorldShape, scenario: Callable[[World], Coroutine[Any, Any, None]], seed: int = 0, finish: bool = True
) -> World:
    """Run a scenario in a world, then let everything end and judge it."""

    async def main() -> World:
        async with World(seed, shape) as world:
            await scenario(world)
            if finish:
                await world.finish()
            return world

    return run(main())


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_gets_the_ids_it_would_get_alone(overlap: bool) -> None:
    async def scenario(world: World) -> None:
        world.submit(PROMPT, 20)

    world = in_world(WorldShape(overlap=overlap), scenario)
    assert len(world.requests[1].ids) == 20
    assert world.deepest == (2 if overlap else 1)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    async def scenario(world: World) -> None:
        world.submit(list(range(50)), 4)

    world = in_world(WorldShape(prefill_tokens=8), scenario)
    assert world.engine.status().steps >= 7 + 3


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    async def scenario(world: World) -> None:
        first = world.submit([5, 6], 30)
        await world.until(lambda: len(first.ids) >= 5)
        long = world.submit(list(range(60)), 1)
        before = len(first.ids)
        await long.ended.wait()
        assert len(first.ids) - before >= 60 // 8 - 1

    in_world(WorldShape(prefill_tokens=8), scenario)


def test_requests_are_batched() -> None:
    async def scenario(world: World) -> None:
        for i in range(4):
            world.submit([i, i, i], 10)

    world = in_world(WorldShape(), scenario)
    assert max(len(deltas.ids) for deltas in world.deltas) == 4


def test_a_second_turn_reuses_the_first() -> None:
    async def scenario(world: World) -> None:
        first = world.submit(PROMPT, 16)
        await first.ended.wait()
        second = world.submit([*PROMPT, *first.ids, 7], 4)
        await second.ended.wait()
        assert second.started is not None
        # All but the last output has its KV; whole pages of it are found.
        assert second.started.cached_tokens == (len(PROMPT) + 16 - 1) // 4 * 4

    in_world(WorldShape(), scenario)


def test_an_answer_that_fills_the_pool_can_be_asked_for_again() -> None:
    async def scenario(world: World) -> None:
        for _ in range(3):
            watched = world.submit([1, 2, 3, 4, 5], 59)
            await watched.ended.wait()
            assert watched.finished is not None and watched.finished.reason == "length"

    in_world(WorldShape(pages=16), scenario)


def test_the_radix_cache_can_be_off() -> None:
    async def scenario(world: World) -> None:
        for _ in range(2):
            watched = world.submit(PROMPT, 4)
            await watched.ended.wait()
            assert watched.started is not None and watched.started.cached_tokens == 0

    in_world(WorldShape(reuse=False), scenario)


def test_the_same_prompt_many_times_at_once_is_computed_once() -> None:
    prompt = list(range(40))

    async def scenario(world: World) -> None:
        for seed in range(4):
            world.submit(prompt, 4, seed=seed, temperature=1.0)

    world = in_world(WorldShape(prefill_tokens=8), scenario)
    assert world.engine.status().computed_tokens == 40 + 3 * 4, "the others compute their last page only"
    assert len({tuple(watched.ids) for watched in world.requests.values()}) == 4


def test_other_salts_share_nothing() -> None:
    async def scenario(world: World) -> None:
        for salt in ("a", "b"):
            watched = world.submit(PROMPT, 4, salt=salt)
            await watched.ended.wait()
            assert watched.started is not None and watched.started.cached_tokens == 0

    in_world(WorldShape(), scenario)


def test_a_stop_id_ends_a_request_and_its_overrun_is_dropped() -> None:
    async def scenario(world: World) -> None:
        probe = world.submit(PROMPT, 12)
        await probe.ended.wait()
        watched = world.submit(PROMPT, 12, stop_ids=[probe.ids[5]])
        await watched.ended.wait()
        assert watched.finished is not None and watched.finished.reason == "stop"
        assert watched.ids == probe.ids[:6]

    world = in_world(WorldShape(), scenario)
    assert world.engine.status().overrun_tokens == 1


def test_a_stop_id_at_the_limit_is_a_stop_not_a_length() -> None:
    async def scenario(world: World) -> None:
        probe = world.submit(PROMPT, 6)
        await probe.ended.wait()
        watched = world.submit(PROMPT, 6, stop_ids=[probe.ids[5]])
        await watched.ended.wait()
        assert watched.finished is not None and watched.finished.reason == "stop"

    in_world(WorldShape(), scenario)


def test_no_stop_id_is_drawn_below_min_tokens() -> None:
    async def scenario(world: World) -> None:
        probe = world.submit(PROMPT, 6)
        await probe.ended.wait()
        watched = world.submit(PROMPT, 12, stop_ids=[probe.ids[2]], min_tokens=5)
        await watched.ended.wait()
        assert len(watched.ids) > 5 and probe.ids[2] not in watched.ids[:5]

    in_world(WorldShape(), scenario)


def test_prompt_logprobs_come_for_every_position_in_chunks_and_with_a_warm_cache() -> None:
    async def scenario(world: World) -> None:
        for _ in range(2):
            await world.submit(list(range(30)), 2, prompt_logprobs=0).ended.wait()

    world = in_world(WorldShape(prefill_tokens=8), scenario)
    assert len(world.requests[1].prompt_logprobs) >= 4


def test_prompt_logprobs_survive_a_retraction_and_the_loss_of_the_device() -> None:
    async def scenario(world: World) -> None:
        for i in range(3):
            world.submit([i, *range(1, 28)], 30, prompt_logprobs=0)
        await world.until(lambda: world.engine.status().retractions > 0)
        world.kill_device()
        again = world.submit(list(range(28)), 30, prompt_logprobs=0)
        await again.ended.wait()

    world = in_world(WorldShape(pages=22, prefill_tokens=5, conservativeness=0.0), scenario)
    survivors = [
        watched for watched in world.requests.values() if watched.finished and watched.finished.reason == "length"
    ]
    assert survivors and world.lives == 2


def test_a_stop_string_concludes_a_request_after_the_tokens_that_count() -> None:
    async def scenario(world: World) -> None:
        watched = world.submit(PROMPT, 40)
        await world.until(lambda: len(watched.ids) >= 7)
        world.conclude(1, 5)
        await watched.ended.wait()
        assert watched.finished is not None
        assert (watched.finished.reason, watched.finished.n_tokens) == ("stop", 5)

    in_world(WorldShape(), scenario)


def pressed(world: World) -> list[Watched]:
    """Three requests that together need twice the pages there are."""
    return [world.submit([i, *PROMPT[:7]], 48) for i in range(3)]


def test_a_retracted_request_comes_back_with_the_same_ids() -> None:
    async def scenario(world: World) -> None:
        pressed(world)

    world = in_world(WorldShape(pages=22, context_tokens=64), scenario)
    assert world.engine.status().retractions > 0
    assert any(watched.finished and watched.finished.retractions for watched in world.requests.values())


def test_the_first_submitted_is_never_retracted() -> None:
    async def scenario(world: World) -> None:
        pressed(world)

    world = in_world(WorldShape(pages=22, context_tokens=64), scenario)
    assert world.requests[1].finished is not None and world.requests[1].finished.retractions == 0


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(NeverFits, match="70 together; at most 64"):
            world.submit(list(range(60)), 10)

    in_world(WorldShape(), scenario, finish=False)


def test_a_pool_smaller_than_the_context_bounds_it() -> None:
    async def scenario(world: World) -> None:
        assert world.engine.status().max_context_tokens == 32
        world.submit(list(range(24)), 8)
        with pytest.raises(NeverFits):
            world.submit(list(range(24)), 9)

    in_world(WorldShape(pages=8), scenario)


def test_the_queue_is_bounded_in_requests_and_in_tokens() -> None:
    async def by_requests(world: World) -> None:
        for _ in range(3):
            world.submit(PROMPT, 4)
        with pytest.raises(Overloaded) as error:
            world.submit(PROMPT, 4)
        assert error.value.retry_after_s >= 1

    async def by_tokens(world: World) -> None:
        world.submit(list(range(40)), 4)
        with pytest.raises(Overloaded):
            world.submit(PROMPT, 4)

    in_world(WorldShape(max_queued_requests=3), by_requests)
    in_world(WorldShape(max_queued_tokens=50), by_tokens)


def test_an_alone_prompt_over_the_token_bound_is_still_taken() -> None:
    async def scenario(world: World) -> None:
        world.submit(list(range(40)), 4)

    in_world(WorldShape(max_queued_tokens=10), scenario)


@pytest.mark.parametrize("after_ids", [0, 1, 5])
def test_an_aborted_request_gives_everything_back_within_two_steps(after_ids: int) -> None:
    async def scenario(world: World) -> None:
        other = world.submit([9, 9], 40)
        watched = world.submit(list(range(30)), 30)
        await world.until(lambda: len(watched.ids) >= after_ids)
        world.engine.abort(2)
        await watched.ended.wait()
        assert watched.finished is not None and watched.finished.reason == "abort"
        steps = world.engine.status().steps
        await world.until(lambda: world.engine.status().steps >= steps + 2 or other.ended.is_set())
        status = world.engine.status()
        held_by_other = -(-(2 + len(other.ids) + 2) // 4)
        assert status.running == 1
        assert status.pages_free + status.pages_cached >= status.pages_total - held_by_other

    in_world(WorldShape(prefill_tokens=8), scenario)


def test_aborting_the_unknown_the_waiting_and_the_ended_is_harmless() -> None:
    async def scenario(world: World) -> None:
        world.engine.abort(77)
        watched = world.submit(PROMPT, 4)
        world.engine.abort(1)
        await watched.ended.wait()
        world.engine.abort(1)
        world.conclude(1, 0)

    world = in_world(WorldShape(), scenario)
    assert world.requests[1].ids == []


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    async def scenario(world: World) -> None:
        sampling = SamplingParams(max_tokens=40)
        watched = world.submit_message(Submit(1, np.array(PROMPT, np.int32), sampling, deadline_ms=130.0))
        await watched.ended.wait()
        assert watched.finished is not None and watched.finished.reason == "timeout"
        assert 0 < len(watched.ids) < 40

    in_world(WorldShape(), scenario)


def test_when_the_device_dies_the_running_fail_clearly_and_the_waiting_go_on() -> None:
    async def scenario(world: World) -> None:
        running = [world.submit([i, i], 60) for i in range(4)]
        waiting = world.submit(PROMPT, 4)
        await world.until(lambda: len(running[0].ids) >= 5)
        world.kill_device()
        await waiting.ended.wait()
        assert {watched.finished.reason for watched in running if watched.finished} == {"error"}
        assert running[0].finished is not None and "SIGKILL" in running[0].finished.message
        assert waiting.finished is not None and waiting.finished.reason == "length"

    world = in_world(WorldShape(), scenario)
    assert world.lives == 2
    assert world.engine.status().device_restarts == 1


def test_a_device_that_is_back_is_said_with_the_time_it_took(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        await world.submit(PROMPT, 4).ended.wait()
        world.kill_device()
        await asyncio.sleep(5)
        assert world.engine.phase == "ready"

    with caplog.at_level("INFO", "headrace.sched.device"):
        in_world(WorldShape(start_ms=1500), scenario)
    lost, back = (record.getMessage() for record in caplog.records)
    assert lost.endswith("it is started again")
    assert re.fullmatch(r"the device is ready again after [1-9]\.\d s", back)


def test_nothing_of_a_dead_device_is_matched_on_the_next_one() -> None:
    async def scenario(world: World) -> None:
        await world.submit(PROMPT, 4).ended.wait()
        world.kill_device()
        watched = world.submit(PROMPT, 4)
        await watched.ended.wait()
        if watched.finished is not None and watched.finished.reason == "error":
            watched = world.submit(PROMPT, 4)
            await watched.ended.wait()
        assert watched.started is not None and watched.started.cached_tokens == 0

    in_world(WorldShape(), scenario)


def test_a_device_that_hangs_is_noticed_and_replaced() -> None:
    async def scenario(world: World) -> None:
        watched = world.submit(PROMPT, 40)
        await world.until(lambda: len(watched.ids) >= 5)
        world.hang_device(60.0)
        await watched.ended.wait()
        assert watched.finished is not None and "has not completed step" in watched.finished.message
        await world.submit(PROMPT, 4).ended.wait()

    world = in_world(WorldShape(step_timeout_s=5.0), scenario)
    assert world.lives == 2


def test_an_engine_whose_device_keeps_dying_gives_up_and_says_so() -> None:
    async def main() -> None:
        async with World(0) as world:
            world.submit(PROMPT, 4)
            for _ in range(8):
                await asyncio.sleep(0.05)
                world.kill_device()
                await asyncio.sleep(0.05)
            assert world.engine.status().phase == "failed"
            assert world.requests[1].finished is not None and world.requests[1].finished.reason == "error"
            with pytest.raises(EngineFailed, match="lost 6 times"):
                world.submit(PROMPT, 4)

    with pytest.raises(EngineFailed, match="lost 6 times"):
        run(main())


def test_a_fault_in_handling_a_reply_fails_the_engine_and_tells_the_clients() -> None:
    async def main() -> None:
        async with World(0) as world:
            watched = world.submit(PROMPT, 30)
            await world.until(lambda: len(watched.ids) >= 5)
            world.engine._in_flight.clear()  # as a bug would
            await watched.ended.wait()
            assert watched.finished is not None and "engine has failed" in watched.finished.message

    with pytest.raises(EngineFailed, match="a stage of the engine died: IndexError"):
        run(main())


def test_a_flush_while_requests_run_keeps_what_they_use() -> None:
    async def scenario(world: World) -> None:
        await world.submit(list(range(20)), 4).ended.wait()
        running = world.submit(PROMPT, 30)
        await world.until(lambda: len(running.ids) >= 10)
        flushed = world.engine.flush_cache()
        assert flushed.dropped_pages > 0 and flushed.pinned_pages > 0

    in_world(WorldShape(), scenario)


def test_one_seed_gives_one_trace() -> None:
    async def scenario(world: World) -> None:
        pressed(world)

    digests = {in_world(WorldShape(pages=22), scenario, seed=5).trace.digest() for _ in range(2)}
    assert len(digests) == 1
    assert in_world(WorldShape(pages=22), scenario, seed=6).trace.digest() not in digests

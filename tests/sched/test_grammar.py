"""Requests with a grammar, over the oracle and toy matchers in virtual time. The world judges every id: what is drawn
is what a request alone, with a matcher of its own, would draw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace.sched.grammar import BadGrammar, Grammar
from headrace.sched.masks import MASK_GRACE_S
from headrace.sched.matching import ANSWER_S, MAX_COMPILES, GrammarWorkerFailed
from headrace.sched.messages import Overloaded
from headrace.server.grammar_service import SHORT_BYTES
from headrace.server.sim.grammar import END_ID
from headrace.server.sim.judge import Watched
from headrace.server.sim.virtual_loop import run, running_loop
from headrace.server.sim.world import World, WorldShape

PROMPT = list(range(1, 14))
STEP_S = 0.0016
"""The longest step of a world: a `Forward` of 1.35 ms, a `Sample` of 0.02, and four messages of 0.05."""


def toy(seed: int, length: int = 1000) -> dict[str, str]:
    """A grammar of so many ids."""
    return {"kind": "toy", "text": f"{seed} {length}"}


def slow(number: int, compile_ms: int = 4000) -> Grammar:
    """A long grammar, as those are that take long to compile."""
    return Grammar("toy", f"{number} 5 {compile_ms}".ljust(SHORT_BYTES + 1))


def in_world(shape: WorldShape, scenario: Callable[[World], Coroutine[Any, Any, None]], seed: int = 0) -> World:
    async def main() -> World:
        async with World(seed, shape) as world:
            await scenario(world)
            await world.finish()
            return world

    return run(main())


def reason_of(watched: Watched) -> str:
    assert watched.finished is not None
    return watched.finished.reason


@pytest.mark.parametrize("overlap", [True, False])
def test_b32_a_grammar_acts_on_the_committed_output(overlap: bool) -> None:
    async def scenario(world: World) -> None:
        for seed in range(4):
            world.submit(PROMPT, 20, grammar=toy(seed))

    world = in_world(WorldShape(overlap=overlap), scenario)
    assert all(len(watched.ids) == 20 for watched in world.requests.values())
    assert len({tuple(watched.ids) for watched in world.requests.values()}) == 4
    assert world.deepest == (2 if overlap else 1)


def test_an_output_that_is_complete_ends_without_another_id() -> None:
    async def scenario(world: World) -> None:
        world.submit(PROMPT, 20, grammar=toy(3, 7))

    world = in_world(WorldShape(), scenario)
    end = world.requests[1].finished
    assert end is not None and (end.reason, end.n_tokens, end.matched_stop_id) == ("stop", 7, -1)


def test_an_output_that_is_complete_at_its_limit_is_a_stop_and_one_that_is_not_is_cut() -> None:
    async def scenario(world: World) -> None:
        world.submit(PROMPT, 7, grammar=toy(3, 7))
        world.submit(PROMPT, 6, grammar=toy(3, 7))

    world = in_world(WorldShape(), scenario)
    assert [reason_of(watched) for watched in world.requests.values()] == ["stop", "length"]


def test_the_end_of_a_grammar_wins_over_min_tokens() -> None:
    async def scenario(world: World) -> None:
        world.submit(PROMPT, 20, grammar=toy(3, 4), min_tokens=15, stop_ids=[END_ID])

    world = in_world(WorldShape(), scenario)
    assert len(world.requests[1].ids) == 4 and reason_of(world.requests[1]) == "stop"


def test_an_end_of_text_is_drawn_only_where_grammar_request_and_min_tokens_allow_it() -> None:
    async def scenario(world: World) -> None:
        for seed in range(12):
            world.submit(PROMPT, 40, grammar=toy(seed), stop_ids=[END_ID])
            world.submit(PROMPT, 40, grammar=toy(seed))

    world = in_world(WorldShape(slots=24, pages=400), scenario)
    ends = [watched for watched in world.requests.values() if watched.ids[-1] == END_ID]
    assert ends and all(watched.submit.sampling.stop_ids for watched in ends)
    assert all(reason_of(watched) == "stop" for watched in ends)


def test_batch_mates_of_a_slow_grammar_wait_for_nothing() -> None:
    steps: list[int] = []
    for with_grammar in (False, True):

        async def scenario(world: World, with_grammar: bool = with_grammar) -> None:
            mate = world.submit([5, 6], 200)
            if with_grammar:
                world.submit([7, 8], 100, grammar=toy(1))
            await mate.ended.wait()
            steps.append(world.engine.status().steps)

        # A mask takes 5 ms, and now and then 50 ms; a step 1 ms.
        world = in_world(WorldShape(mask_us=10_000, context_tokens=256, pages=128), scenario)
    assert steps[1] <= steps[0] + 2
    assert world.engine.status().late_masks > 5


def test_a_mask_that_comes_while_the_device_computes_is_not_late() -> None:
    async def scenario(world: World) -> None:
        world.submit([5, 6], 40)
        world.submit([7, 8], 40, grammar=toy(1))

    world = in_world(WorldShape(mask_us=20, delay_us=1, forward_us=20_000, token_us=1.0), scenario)
    status = world.engine.status()
    assert status.late_masks == 0 and status.steps <= 42


def test_alone_a_row_waits_for_its_mask_and_is_computed_once() -> None:
    async def scenario(world: World) -> None:
        world.submit([7, 8], 10, grammar=toy(1))

    world = in_world(WorldShape(mask_us=30_000), scenario)
    assert world.engine.status().late_masks == 0


async def longest_gap_s(world: World, watched: Watched) -> float:
    """Between two ids of a request, from now to its end."""
    longest_s, moved_s = 0.0, watched.moved_s

    def is_over() -> bool:
        nonlocal longest_s, moved_s
        longest_s, moved_s = max(longest_s, watched.moved_s - moved_s), watched.moved_s
        return watched.finished is not None

    await world.until(is_over)
    return longest_s


@pytest.mark.parametrize("overlap", [True, False])
def test_a_mask_that_never_comes_costs_the_others_one_grace(overlap: bool) -> None:
    async def scenario(world: World) -> None:
        mate, watched = world.submit([5, 6], 200), world.submit([7, 8], 100, grammar=toy(1))
        await world.until(lambda: len(watched.ids) >= 5)
        late_masks, had = world.engine.status().late_masks, len(watched.ids)
        world.hang_grammar_worker(1000.0)
        assert await longest_gap_s(world, mate) <= STEP_S + MASK_GRACE_S
        assert len(watched.ids) <= had + 2 and world.engine.status().late_masks == late_masks + 1

    world = in_world(WorldShape(context_tokens=256, pages=128, overlap=overlap), scenario)
    assert [reason_of(watched) for watched in world.requests.values()] == ["length", "error"]


def test_an_alarm_that_rings_too_early_does_not_leave_a_late_mask_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        loop = running_loop()
        exactly = loop.call_at

        def in_whole_milliseconds(when_s: float, *rest: Any, **context: Any) -> asyncio.TimerHandle:
            # As uvloop does.
            return exactly(loop.time() + round((when_s - loop.time()) * 1e3) / 1e3, *rest, **context)

        mate, watched = world.submit([5, 6], 40), world.submit([7, 8], 40, grammar=toy(1))
        await world.until(lambda: len(watched.ids) >= 5)
        world.hang_grammar_worker(1000.0)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_at", in_whole_milliseconds)
            assert await longest_gap_s(world, mate) <= 2 * 0.0045

    for seed in range(8):
        # Forwards of 1.5 to 4.5 ms, whose ends are predicted.
        in_world(WorldShape(forward_us=3000, token_us=1.0), scenario, seed)


def test_a_request_that_comes_while_the_only_row_lacks_its_mask_begins_at_once() -> None:
    async def scenario(world: World) -> None:
        watched = world.submit(PROMPT, 50, grammar=toy(1))
        await world.until(lambda: len(watched.ids) >= 5)
        world.hang_grammar_worker(5.0)
        for _ in range(3):
            await asyncio.sleep(0.1)
            other = world.submit([5, 6], 20)
            await other.ended.wait()
            request = other.submit.request
            assert world.first_ids_s[request] - world.submitted_s[request] <= STEP_S
        assert not watched.ended.is_set()

    world = in_world(WorldShape(), scenario)
    assert [reason_of(watched) for watched in world.requests.values()] == ["length"] * 4
    assert world.engine.status().late_masks == 1, "the row was repeated before its mask had come"


def test_requests_that_could_not_run_either_make_nobody_compute_a_row_twice() -> None:
    async def scenario(world: World) -> None:
        watched = world.submit(PROMPT, 50, grammar=toy(1))
        await world.until(lambda: len(watched.ids) >= 5)
        world.hang_grammar_worker(5.0)
        await asyncio.sleep(0.1)
        # One lacks a slot, and before it one its first mask.
        world.submit([5, 6], 20, grammar=toy(2))
        if world.shape.slots == 1:
            world.submit([5, 6], 20)
        await asyncio.sleep(0.1)

    for slots in (1, 2):
        assert in_world(WorldShape(slots=slots), scenario).engine.status().late_masks == 0


@pytest.mark.parametrize("fate", ["abort", "retract", "lose the device"])
def test_a_row_that_sits_out_steps_can_end_as_any_other(fate: str) -> None:
    async def scenario(world: World) -> None:
        mate, watched = world.submit([5, 6], 60), world.submit(PROMPT, 40, grammar=toy(1))
        await world.until(lambda: len(watched.ids) >= 2)
        late_masks = world.engine.status().late_masks
        world.hang_grammar_worker(5.0)
        await world.until(lambda: world.engine.status().late_masks > late_masks)
        if fate == "abort":
            world.abort(watched)
        elif fate == "retract":
            await world.until(lambda: world.engine.status().retractions > 0)
        else:
            world.kill_device()
        await mate.ended.wait()

    world = in_world(WorldShape(pages=18 if fate == "retract" else 64, conservativeness=0.0), scenario)
    reasons = [reason_of(watched) for watched in world.requests.values()]
    assert reasons == {"abort": ["length", "abort"], "retract": ["length"] * 2}.get(fate, ["error"] * 2)


def test_a_request_waits_for_its_first_mask_and_is_passed_by_others() -> None:
    async def scenario(world: World) -> None:
        first = world.submit(PROMPT, 4, grammar=toy(1))
        second = world.submit([3, 4], 4)
        await second.ended.wait()
        assert first.started is None

    in_world(WorldShape(mask_us=1_000_000), scenario, seed=1)


def test_a_retracted_request_goes_on_where_its_grammar_was() -> None:
    async def scenario(world: World) -> None:
        for seed in range(4):
            world.submit([seed, *range(1, 9)], 40, grammar=toy(seed))

    world = in_world(WorldShape(pages=20, conservativeness=0.0), scenario)
    assert world.engine.status().retractions > 0


def test_penalties_bias_and_minimum_go_together_with_a_grammar() -> None:
    async def scenario(world: World) -> None:
        world.submit(PROMPT, 30, grammar=toy(1), repetition_penalty=1.2, logit_bias=[(3, 2.0)], min_tokens=5)
        world.submit(PROMPT, 30, grammar=toy(1), logprobs=3, prompt_logprobs=0)

    in_world(WorldShape(), scenario)


@pytest.mark.parametrize("after_ids", [0, 1, 5])
def test_an_aborted_request_gives_everything_back(after_ids: int) -> None:
    async def scenario(world: World) -> None:
        mate = world.submit([5, 6], 60)
        watched = world.submit(PROMPT, 50, grammar=toy(1))
        await world.until(lambda: len(watched.ids) >= after_ids)
        world.engine.abort(2)
        await watched.ended.wait()
        await mate.ended.wait()

    in_world(WorldShape(), scenario)


def test_a_late_mask_of_an_aborted_request_is_not_waited_for() -> None:
    async def scenario(world: World) -> None:
        watched = world.submit(PROMPT, 50, grammar=toy(1))
        await world.until(lambda: len(watched.ids) >= 2)
        world.hang_grammar_worker(5.0)
        await asyncio.sleep(0.1)
        world.engine.abort(1)
        after = world.submit([5, 6], 4)
        async with asyncio.timeout(0.5):
            await after.ended.wait()

    in_world(WorldShape(), scenario)


def test_when_the_grammar_worker_dies_its_requests_go_on_with_the_next_one() -> None:
    async def scenario(world: World) -> None:
        for seed in range(3):
            world.submit(PROMPT, 40, grammar=toy(seed))
        await world.until(lambda: len(world.requests[1].ids) >= 10)
        world.kill_grammar_worker()

    world = in_world(WorldShape(), scenario)
    assert world.grammar_lives == 2 and world.engine.status().grammar_worker_restarts == 1
    assert [reason_of(watched) for watched in world.requests.values()] == ["length"] * 3


def test_a_grammar_that_twice_ends_the_worker_fails_alone() -> None:
    async def scenario(world: World) -> None:
        mate = world.submit([5, 6], 60)
        watched = world.submit(PROMPT, 50, grammar=toy(1))
        for life in (1, 2):
            await world.until(lambda life=life: world.grammar_lives == life)  # type: ignore[misc]
            # It is there 10 ms later, and its first mask would be a second later.
            await asyncio.sleep(0.015)
            world.kill_grammar_worker()
        await watched.ended.wait()
        await mate.ended.wait()

    world = in_world(WorldShape(mask_us=1_000_000), scenario, seed=2)
    assert [reason_of(watched) for watched in world.requests.values()] == ["length", "error"]
    assert "grammar worker" in (world.requests[2].finished.message if world.requests[2].finished else "")


def test_a_worker_that_hangs_is_replaced_and_the_device_is_not_blamed() -> None:
    async def scenario(world: World) -> None:
        watched = world.submit(PROMPT, 50, grammar=toy(1))
        await world.until(lambda: len(watched.ids) >= 5)
        world.hang_grammar_worker(1000.0)
        await watched.ended.wait()
        assert "did not answer" in (watched.finished.message if watched.finished else "")
        await world.submit(PROMPT, 50, grammar=toy(1)).ended.wait()

    world = in_world(WorldShape(step_timeout_s=ANSWER_S / 5), scenario)
    assert world.lives == 1 and reason_of(world.requests[2]) == "length"


def test_when_the_device_dies_a_waiting_request_goes_on_with_its_grammar() -> None:
    async def scenario(world: World) -> None:
        running = world.submit(PROMPT, 50, grammar=toy(1))
        waiting = world.submit(PROMPT, 20, grammar=toy(2))
        await world.until(lambda: len(running.ids) >= 5)
        world.kill_device()
        await waiting.ended.wait()

    world = in_world(WorldShape(slots=1), scenario)
    assert [reason_of(watched) for watched in world.requests.values()] == ["error", "length"]


def test_b33_a_bad_grammar_is_refused_before_it_is_submitted() -> None:
    async def scenario(world: World) -> None:
        await world.engine.check_grammar(Grammar("toy", "1 5"))
        for text in ("nonsense", "1 0"):
            with pytest.raises(BadGrammar):
                await world.engine.check_grammar(Grammar("toy", text))
        world.submit(PROMPT, 5, grammar=toy(1))

    in_world(WorldShape(), scenario)


def test_b33_grammars_that_wait_to_be_compiled_are_bounded() -> None:
    async def scenario(world: World) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(MAX_COMPILES):
                tasks.create_task(world.engine.check_grammar(Grammar("toy", f"{number} 5")))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await world.engine.check_grammar(Grammar("toy", "1 5"))
        await world.engine.check_grammar(Grammar("toy", "1 5"))

    in_world(WorldShape(), scenario)


def test_b33_a_compilation_that_never_ends_is_a_bad_grammar() -> None:
    async def scenario(world: World) -> None:
        await world.engine.check_grammar(Grammar("toy", "1 5"))
        for _ in range(2):
            with pytest.raises(BadGrammar, match="longer than 10 s"):
                await world.engine.check_grammar(slow(2, 1_000_000))
            assert world.grammar_lives <= 2
        await world.engine.check_grammar(Grammar("toy", "3 5"))

    in_world(WorldShape(), scenario)


def test_b33_a_worker_that_hangs_before_it_looks_at_a_grammar_is_not_the_grammars_fault() -> None:
    async def scenario(world: World) -> None:
        await world.engine.check_grammar(Grammar("toy", "1 5"))
        world.hang_grammar_worker(1000.0)
        with pytest.raises(GrammarWorkerFailed, match="did not answer"):
            await world.engine.check_grammar(Grammar("toy", "2 5"))
        await world.engine.check_grammar(Grammar("toy", "2 5"))

    in_world(WorldShape(), scenario)


def test_a_deadline_that_rings_a_nanosecond_early_does_not_ring_for_ever() -> None:
    async def scenario(world: World) -> None:
        await world.engine.check_grammar(Grammar("toy", "1 5"))
        for turn in range(40):
            # Of so many odd times some are rounded down: the deadline rings before it has come.
            await asyncio.sleep(0.1234567 + turn * 0.0071113)
            world.hang_grammar_worker(1000.0)
            began_s = running_loop().time()
            with pytest.raises(GrammarWorkerFailed, match="did not answer"):
                await world.engine.check_grammar(Grammar("toy", f"{turn} 6"))
            assert running_loop().time() - began_s == pytest.approx(ANSWER_S, abs=1e-6)
            await world.engine.check_grammar(Grammar("toy", f"{turn} 6"))

    in_world(WorldShape(mask_us=10), scenario)


def test_b33_a_grammar_that_ends_the_worker_is_refused_and_nobody_else_notices() -> None:
    async def scenario(world: World) -> None:
        for seed in range(3):
            world.submit(PROMPT, 40, grammar=toy(seed))
        await world.until(lambda: len(world.requests[1].ids) >= 5)
        world.hang_device(0.5)
        async with asyncio.TaskGroup() as tasks:
            killer = tasks.create_task(_refusal(world, "9 5 5000"))
            await asyncio.sleep(0.1)
            tasks.create_task(world.engine.check_grammar(Grammar("toy", "4 5")))
            for life in (1, 2):
                await world.until(lambda life=life: world.grammar_lives == life)  # type: ignore[misc]
                await asyncio.sleep(0.1)
                world.kill_grammar_worker()
            assert "ended the grammar worker" in await killer
        lives = world.grammar_lives
        assert "ended the grammar worker" in await _refusal(world, "9 5 5000")
        assert world.grammar_lives == lives

    world = in_world(WorldShape(), scenario)
    assert [reason_of(watched) for watched in world.requests.values()] == ["length"] * 3


def test_b33_a_grammar_compiled_beside_one_that_ends_the_worker_is_not_blamed() -> None:
    async def scenario(world: World) -> None:
        await world.engine.check_grammar(Grammar("toy", "1 5"))
        async with asyncio.TaskGroup() as tasks:
            killer = tasks.create_task(_refusal(world, slow(1, 5000).text))
            innocent = tasks.create_task(world.engine.check_grammar(Grammar("toy", "2 5 2000")))
            # They are compiled side by side the first time, and one after the other then.
            for life in (1, 2):
                await asyncio.sleep(0.2)
                assert world.grammar_lives == life
                world.kill_grammar_worker()
            assert "ended the grammar worker" in await killer
            await innocent
        assert world.grammar_lives == 3

    in_world(WorldShape(), scenario)


async def _refusal(world: World, text: str) -> str:
    with pytest.raises(BadGrammar) as error:
        await world.engine.check_grammar(Grammar("toy", text))
    return str(error.value)


def test_requests_that_run_are_looked_at_before_new_grammars_when_the_worker_was_lost() -> None:
    async def scenario(world: World) -> None:
        running = world.submit(PROMPT, 20, grammar=toy(1))
        await world.until(lambda: len(running.ids) >= 5)
        async with asyncio.TaskGroup() as tasks:
            for number in range(2):
                tasks.create_task(world.engine.check_grammar(Grammar("toy", f"{number} 5 2500")))
            await asyncio.sleep(0.001)
            world.kill_grammar_worker()
            async with asyncio.timeout(1):
                await running.ended.wait()

    in_world(WorldShape(), scenario)


def test_who_waits_for_a_compilation_is_told_when_the_engine_ends() -> None:
    async def main() -> None:
        world = World(0, WorldShape(mask_us=10))
        async with world, asyncio.TaskGroup() as tasks:
            await world.engine.check_grammar(Grammar("toy", "1 5"))
            world.hang_grammar_worker(1000.0)
            waiting = tasks.create_task(_failure(world))
            await asyncio.sleep(0.1)
            await world.__aexit__(None, None, None)
            assert await waiting == "the engine has ended"
            assert await _failure(world) == "the engine has ended"

    run(main())


async def _failure(world: World) -> str:
    with pytest.raises(GrammarWorkerFailed) as error:
        await world.engine.check_grammar(Grammar("toy", "2 5"))
    return str(error.value)


def test_prompt_logprobs_use_the_cached_prefix_before_their_start() -> None:
    async def scenario(world: World) -> None:
        prompt = list(range(30))
        await world.submit(prompt, 2).ended.wait()
        for start in (1, 12, 30):
            await world.submit(prompt, 2, prompt_logprobs=0, prompt_logprobs_from=start).ended.wait()
        # The one that began at 1 computed all of it, and what it computed is shared again.
        await world.submit(prompt, 2).ended.wait()

    world = in_world(WorldShape(), scenario)
    cached = [watched.started.cached_tokens for watched in world.requests.values() if watched.started]
    assert cached == [0, 0, 8, 28, 28]

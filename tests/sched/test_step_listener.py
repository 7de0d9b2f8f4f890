"""What the engine tells of its steps: what was in each, and when it ended after the one before."""

from __future__ import annotations

from headrace.sched.collect import LaunchedStep
from headrace.server.sim.virtual_loop import run
from headrace.server.sim.world import World, WorldShape


def told() -> list[tuple[LaunchedStep, float, float]]:
    """The steps of one request of 20 prompt tokens and 6 outputs, in chunks of 8."""
    steps: list[tuple[LaunchedStep, float, float]] = []

    async def main() -> None:
        async with World(0, WorldShape(prefill_tokens=8)) as world:
            world.engine.step_listener = lambda *step: steps.append(step)
            world.submit(list(range(20)), 6)
            await world.finish()

    run(main())
    return steps


def test_every_step_is_told_with_what_was_in_it() -> None:
    chunks = [step for step, _, _ in told() if step.prefill_tokens]
    decodes = [step for step, _, _ in told() if step.decode_rows]
    assert [(step.prefill_tokens, step.prefill_pairs) for step in chunks] == [(8, 32), (8, 96), (4, 72)]
    assert [step.kv_tokens for step in decodes[:5]] == [21, 22, 23, 24, 25]


def test_only_a_step_that_was_launched_before_the_last_one_ended_is_timed_from_there() -> None:
    # The first of all waited for nothing; with overlap every later one was launched while its predecessor ran.
    waits = [since_last_ms for _, _, since_last_ms in told()]
    assert waits[0] == -1.0
    assert all(wait > 0 for wait in waits[1:6])

"""A request's time limits count from its arrival, whatever it waits for. In virtual time."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from api.scripted import TOKENIZER

from headrace.sched.grammar import Grammar
from headrace.sched.messages import SamplingParams, Submit
from headrace.server.emit import Emitter
from headrace.server.engine_api import EngineApi
from headrace.server.errors import ApiError
from headrace.server.generation import Generation, PromptJob, Running, Terms
from headrace.server.metrics import Metrics
from headrace.server.output_text import OutputOptions
from headrace.server.sim.virtual_loop import run, running_loop
from headrace.server.sim.world import World, WorldShape

PROMPT = np.arange(1, 10, dtype=np.int32)
LIMIT_MS = 250.0


class _Judged:
    """The engine of a world, which watches what is submitted."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.status = world.engine.status

    def submit(self, submit: Submit) -> None:
        self._world.submit_message(submit)

    def abort(self, request: int) -> None:
        self._world.engine.abort(request)


async def ended_ms(world: World, terms: Terms, compile_ms: int) -> tuple[str, float]:
    """How a request with a grammar ends, and how long after its arrival: it asks for more than it has time for."""
    engine = cast(EngineApi, _Judged(world))
    clock = running_loop().time
    running = Running(engine, Emitter(engine, Metrics(world.engine.status), clock), 100, 10_000)
    for _ in world.requests:
        running.next_handle()
    arrived_s = clock()
    grammar = Grammar("toy", f"1 1000 {compile_ms}")
    with running.claim(None, "", arrived_s) as generation:
        try:
            await _compiled_and_submitted(world, generation, terms, grammar)
            watched = world.requests[len(world.requests)]
            await watched.ended.wait()
            assert watched.finished is not None
            reason = f"{watched.finished.reason}, {'some' if watched.ids else 'no'} ids"
        except ApiError as error:
            reason = str(error.status)
        return reason, (clock() - arrived_s) * 1e3


async def _compiled_and_submitted(world: World, generation: Generation, terms: Terms, grammar: Grammar) -> None:
    async with generation.waiting(terms):
        await world.engine.check_grammar(grammar)
    sampling = SamplingParams(max_tokens=900, grammar=grammar)
    generation.submit([PromptJob(PROMPT, sampling, 1, OutputOptions())], TOKENIZER, terms, eager=True)


def in_world(terms: Terms, compile_ms: int, is_busy: bool = False) -> tuple[str, float]:
    """The same in a world of its own, which is ready; where it is busy, the request waits for a slot."""

    async def main() -> tuple[str, float]:
        async with World(0, WorldShape(slots=1, pages=600, context_tokens=1000, mask_us=10)) as world:
            await world.engine.check_grammar(Grammar("toy", "2 5"))
            await world.submit([1, 2], 1).ended.wait()
            mate = world.submit([1, 2], 900) if is_busy else None
            result = await ended_ms(world, terms, compile_ms)
            if mate is not None:
                world.abort(mate)
            await world.finish()
            return result

    return run(main())


@pytest.mark.parametrize("compile_ms", [1, 100, 200])
def test_the_wait_for_a_grammar_is_part_of_a_requests_time(compile_ms: int) -> None:
    reason, took_ms = in_world(Terms(deadline_ms=LIMIT_MS), compile_ms)
    assert reason == "timeout, some ids" and took_ms == pytest.approx(LIMIT_MS)


@pytest.mark.parametrize("compile_ms", [1, 100, 200])
def test_the_wait_for_a_grammar_is_part_of_the_time_until_it_begins(compile_ms: int) -> None:
    reason, took_ms = in_world(Terms(queue_deadline_ms=LIMIT_MS), compile_ms, is_busy=True)
    assert reason == "queue_timeout, no ids" and took_ms == pytest.approx(LIMIT_MS)


@pytest.mark.parametrize(
    ("terms", "status"), [(Terms(deadline_ms=LIMIT_MS), "504"), (Terms(queue_deadline_ms=LIMIT_MS), "503")]
)
def test_a_limit_that_passes_before_the_submission_ends_the_request_then(terms: Terms, status: str) -> None:
    reason, took_ms = in_world(terms, 400)
    assert reason == status and took_ms == pytest.approx(LIMIT_MS)

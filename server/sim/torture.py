"""A seeded schedule of everything that can happen to an engine, run against the oracle.

One seed gives one schedule and one trace. Arrivals come in bursts, prompts share prefixes and repeat earlier
conversations, clients abort at any moment, stop strings are found late, the cache is flushed, the device dies or hangs,
pools are a few pages. After every step the engine's integrity is checked and each id is the oracle's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import get_args

import msgspec

from headrace.kvcache.prefetch import PrefetchOptions, PrefetchPolicy
from headrace.sched.cache_control import PinRefused
from headrace.sched.messages import NeverFits, Overloaded
from headrace.sched.policies import SchedulePolicy
from headrace.server.sim.grammar import END_ID
from headrace.server.sim.storage import StorageTimes
from headrace.server.sim.virtual_loop import run
from headrace.server.sim.world import VOCAB, Watched, World, WorldShape


class Report(msgspec.Struct, frozen=True):
    """What a run did, to show that each condition happened."""

    seed: int
    requests: int
    refused: int
    ends: dict[str, int]
    steps: int
    retractions: int
    cached_tokens: int
    host_tokens: int
    storage_tokens: int
    agent_restarts: int
    grammar_requests: int
    late_masks: int
    grammar_worker_restarts: int
    overrun_tokens: int
    device_restarts: int
    pinned: int
    digest: str


def torture(seed: int, requests: int, check_every_step: bool = True) -> Report:
    """Run `requests` requests under the faults of `seed`. Raises AssertionError where an invariant fails."""
    return run(_torture(seed, requests, check_every_step), max_virtual_s=86_400, max_turns=1 << 40)


def random_shape(rng: random.Random) -> WorldShape:
    """Sizes from comfortable down to a few pages."""
    page_tokens = rng.choice((1, 2, 4, 4, 16))
    context_tokens = page_tokens * rng.randint(6, 24)
    slots = rng.randint(1, 8)
    least = context_tokens // page_tokens
    host_pages = rng.choice((0, 3, least, least, 2 * least, 10 * least))
    policies: tuple[PrefetchPolicy, ...] = ("best_effort", "wait_complete", "timeout", "adaptive")
    policy = rng.choice(policies)
    return WorldShape(
        slots=slots,
        pages=rng.choice((rng.randint(least // 2 + 1, least), rng.randint(least, 2 * least), least * slots)),
        page_tokens=page_tokens,
        context_tokens=context_tokens,
        prefill_tokens=rng.choice((1, 3, 8, 16, 64)),
        overlap=rng.random() < 0.8,
        reuse=rng.random() < 0.9,
        delay_us=rng.choice((1, 50, 2000)),
        max_queued_requests=rng.choice((8, 64, 1024)),
        max_queued_tokens=rng.choice((20 * context_tokens, 1 << 16)),
        conservativeness=rng.choice((0.0, 0.3, 1.0)),
        host_pages=host_pages,
        storage_pages=rng.choice((0, 4, 10 * least, 200 * least)) if host_pages else 0,
        storage=StorageTimes(rng.choice((20, 500)), rng.choice((1, 100, 2000)), rng.randint(1, 4)),
        prefetch=PrefetchOptions(policy, rng.choice((1, 16)), timeout_base_ms=5.0, piece_bytes=rng.choice((1, 256))),
        token_us=rng.choice((0.0, 50.0)),
        write_policy=rng.choice(("write_through", "write_through_selective", "write_back")),
        step_timeout_s=2.0,
    )


async def _torture(seed: int, requests: int, check_every_step: bool) -> Report:
    rng = random.Random(seed)
    shape, policies = random_shape(rng), random.Random(seed)
    shape = msgspec.structs.replace(
        shape,
        schedule_policy=policies.choice(get_args(SchedulePolicy)),
        preempt_above=policies.choice((None, 0, 2)),
        mask_us=policies.choice((10, 500, 3000)),
    )
    async with World(seed, shape, check_every_step) as world:
        schedule = _Schedule(world, rng, seed)
        faults = rng.choice((0.0, 0.0, 0.03))
        await asyncio.sleep(world.shape.start_ms / 1e3 + 0.1)
        while len(world.requests) + schedule.refused < requests:
            for _ in range(rng.choice((1, 1, 1, 2, 8))):
                schedule.submit()
            schedule.disturb(faults)
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.004, 0.02)))
        await world.finish()
        status = world.engine.status()
        ends: dict[str, int] = {}
        for watched in world.requests.values():
            assert watched.finished is not None
            ends[watched.finished.reason] = ends.get(watched.finished.reason, 0) + 1
        return Report(
            seed=seed,
            requests=len(world.requests),
            refused=schedule.refused,
            ends=dict(sorted(ends.items())),
            steps=status.steps,
            retractions=status.retractions,
            cached_tokens=status.cached_tokens,
            host_tokens=sum(w.started.cached_host_tokens for w in world.requests.values() if w.started),
            storage_tokens=sum(w.started.cached_storage_tokens for w in world.requests.values() if w.started),
            agent_restarts=max(0, world.agents - 1),
            grammar_requests=sum(w.submit.sampling.grammar is not None for w in world.requests.values()),
            late_masks=status.late_masks,
            grammar_worker_restarts=status.grammar_worker_restarts,
            overrun_tokens=status.overrun_tokens,
            device_restarts=status.device_restarts,
            pinned=schedule.pinned,
            digest=world.trace.digest(),
        )


class _Schedule:
    """Draws what happens next."""

    def __init__(self, world: World, rng: random.Random, seed: int) -> None:
        self.refused = 0
        self.pinned = 0
        self._pins: list[str] = []
        self._grammars = random.Random(seed ^ 1)
        self._controls = random.Random(seed)
        """Of their own: with a seed, requests and faults come as they would without pins and grammars."""
        self._priorities = random.Random(seed)
        self._world = world
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._prefixes = [[rng.randrange(VOCAB) for _ in range(world.shape.context_tokens)] for _ in range(3)]

    def submit(self) -> None:
        """A new request, now; perhaps with an abort or a found stop string to come."""
        rng, world = self._rng, self._world
        prompt, outputs = self._prompt()
        sampling: dict[str, object] = {"seed": rng.randrange(-5, 1 << 63)}
        if rng.random() < 0.3:
            sampling["stop_ids"] = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 100)))]
            sampling["min_tokens"] = rng.randint(0, outputs)
        if self._grammars.random() < 0.25:
            # Some end by their grammar, some by an end of text, some by their length.
            text = f"{self._grammars.getrandbits(60)} {self._grammars.randint(1, 40)}"
            sampling["grammar"] = {"kind": "toy", "text": text}
            if self._grammars.random() < 0.7:
                sampling.setdefault("stop_ids", [END_ID])
        if rng.random() < 0.1:
            sampling["prompt_logprobs"] = 0
            sampling["prompt_logprobs_from"] = self._grammars.randint(1, len(prompt))
        if rng.random() < 0.2:
            sampling |= {"repetition_penalty": 1.1, "logit_bias": [(1, 0.5)]}
        priority = self._priorities.choice((0, 0, 0, 1, 3))
        try:
            watched = world.submit(prompt, outputs, salt=rng.choice(("", "", "s")), priority=priority, **sampling)
        except (Overloaded, NeverFits):
            self.refused += 1
            return
        if rng.random() < 0.15:
            self._loop.call_later(rng.random() * 0.05, world.engine.abort, watched.submit.request)
        if rng.random() < 0.1:
            self._loop.call_later(rng.random() * 0.02, self._conclude, watched)

    def disturb(self, faults: float) -> None:
        """Perhaps a flush, a pin, a clearing, or a fault of the device."""
        rng, world = self._rng, self._world
        if rng.random() < 0.06:
            world.engine.flush_cache()
        if self._controls.random() < 0.2:
            self._control()
        if rng.random() < faults:
            rng.choice((world.kill_device, world.kill_device, world.kill_agent))()
        if rng.random() < faults / 2:
            rng.choice((world.hang_device, world.hang_agent))(rng.choice((0.01, 0.5, 5.0)))
        if self._grammars.random() < faults:
            world.kill_grammar_worker()
        if self._grammars.random() < faults / 2:
            world.hang_grammar_worker(self._grammars.choice((0.01, 0.5, 30.0)))

    def _control(self) -> None:
        """Pin what a request had, let a pin go, or clear a prompt or a salt."""
        rng, control, requests = self._controls, self._world.engine.control, self._world.requests
        if not requests:
            return
        submit = requests[rng.randint(max(1, len(requests) - 4), len(requests))].submit
        salt, prompt = submit.cache_salt, submit.prompt_ids[: rng.choice((self._world.shape.page_tokens * 2, 1 << 20))]
        kind = rng.random()
        if kind < 0.6:
            # In a pool of a few pages most are.
            with contextlib.suppress(PinRefused):
                self._pins.append(control.pin(prompt, salt, rng.choice((0.001, 0.1, 2.0))).id)
                self.pinned += 1
        elif kind < 0.8 and self._pins:
            control.unpin(rng.choice(self._pins))
        else:
            control.clear(prompt[: rng.choice((0, len(prompt)))], salt, rng.random() < 0.7, rng.random() < 0.7)

    def _prompt(self) -> tuple[list[int], int]:
        """A prompt and its number of outputs: an own one, a shared prefix, or an earlier request with its answer."""
        rng, world, limit = self._rng, self._world, self._world.shape.context_tokens
        kind = rng.random()
        if kind < 0.3 and world.requests:
            earlier = world.requests[rng.randint(1, len(world.requests))]
            prompt = [*earlier.submit.prompt_ids.tolist(), *earlier.ids, rng.randrange(VOCAB)]
        elif kind < 0.8:
            prompt = [*rng.choice(self._prefixes)[: rng.randrange(limit)], rng.randrange(VOCAB)]
        else:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, limit - 1))]
        prompt = prompt[: limit - 1]
        return prompt, rng.randint(1, min(rng.choice((16, 64)), limit - len(prompt)))

    def _conclude(self, watched: Watched) -> None:
        if watched.ids:
            self._world.conclude(watched.submit.request, self._rng.randint(1, len(watched.ids)))

"""A seeded schedule of everything that can happen to an engine, run against the oracle.

One seed gives one schedule and one trace. Arrivals come in bursts, prompts share prefixes and repeat earlier
conversations, clients leave at any moment and in any stage, stop strings are found late, deadlines pass, the cache is
flushed, pinned, warmed and cleared, the device and the storage agent die or hang, the store fails and its pages are
damaged, pools are a few pages, tasks are cancelled at whatever await they are. After every step the engine's integrity
is checked and each id is the oracle's; a watchdog in virtual time names a request that does not get on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import TypeAlias

import msgspec
import numpy as np

from headrace.sched.cache_control import PinRefused
from headrace.sched.messages import NeverFits, Overloaded, SamplingParams, Submit
from headrace.sched.stages import first_of
from headrace.server.sim.grammar import END_ID
from headrace.server.sim.judge import Watched
from headrace.server.sim.torture_shapes import hybrid_shape, random_shape
from headrace.server.sim.virtual_loop import run
from headrace.server.sim.world import VOCAB, World, WorldShape

MAX_DEVICE_FAULTS = 4
"""A device that is lost six times within five minutes ends the engine, on purpose."""


class Report(msgspec.Struct, frozen=True):
    """What a run did, to show that each condition happened."""

    seed: int
    requests: int
    happened: dict[str, int]
    digest: str


def torture(
    seed: int, requests: int, shape: WorldShape | None = None, check_every_step: bool = True, hybrid: bool = False
) -> Report:
    """Run `requests` requests under the faults of `seed`, in a world of a shape that the seed draws, or of this one;
    `hybrid`: with a window group, which the seed draws too. Raises AssertionError where an invariant fails, or
    EngineFailed where one failed inside the engine."""
    if hybrid:
        rng = random.Random(seed)
        shape = hybrid_shape(rng, shape or random_shape(rng))
    try:
        return run(_torture(seed, requests, shape, check_every_step), max_virtual_s=86_400, max_turns=1 << 40)
    except ExceptionGroup as group:
        raise first_of(group) from group


async def _torture(seed: int, requests: int, shape: WorldShape | None, check_every_step: bool) -> Report:
    rng = random.Random(seed)
    async with World(seed, shape or random_shape(rng), check_every_step) as world:
        ending = rng.choice(
            ("", "", "", "", "", "", "engine", rng.choice(("device", "execute", "watch", "storage", "grammars")))
        )
        if ending == "storage" and not world.shape.storage_pages:
            ending = ""
        async with asyncio.TaskGroup() as clients:
            schedule = _Schedule(world, rng, lambda work: clients.create_task(work))
            await asyncio.sleep(world.shape.start_ms / 1e3 + 0.1)
            # In a crowd somebody always holds the shared prefixes; where few ask at a time, a flush takes them, and
            # what is asked next comes from storage.
            few = rng.random() < 0.3
            pressure = 2 if few else 4 + world.shape.slots * rng.choice((1, 2, 4))
            bursts = (1, 1, 2) if few else (1, 2, 4, 16, 64)
            while len(world.requests) + schedule.refused < requests:
                # Mostly as many as keep the slots busy; now and then more than the queue may hold.
                room = len(world.unfinished) < pressure or rng.random() < 0.01
                if room:
                    for _ in range(rng.choice(bursts)):
                        if not schedule.submit():
                            break
                schedule.disturb()
                world.check_progress()
                await asyncio.sleep(rng.choice((0.0, 0.001, 0.004, 0.02)) if room else 0.01)
            if ending:
                await asyncio.sleep(rng.random() * 0.02)
                schedule.leave()
                await world.cancel_engine("" if ending == "engine" else ending)
                schedule.happened[f"cancelled: {ending}"] += 1
            else:
                await world.finish()
                schedule.leave()
        return Report(seed, len(world.requests), _happened(world, schedule), world.trace.digest())


def _happened(world: World, schedule: _Schedule) -> dict[str, int]:
    status, watched = world.engine.status(), list(world.requests.values())
    happened = schedule.happened
    for one in watched:
        happened[f"ended: {one.finished.reason if one.finished else 'with the engine'}"] += 1
    starts = [one.started for one in watched if one.started is not None]
    happened.update(
        {
            "refused": schedule.refused,
            "output tokens": sum(len(one.ids) for one in watched),
            "prompt tokens": sum(len(one.submit.prompt_ids) for one in watched),
            "steps": status.steps,
            "retractions": status.retractions,
            "tokens from the device's cache": sum(start.cached_device_tokens for start in starts),
            "tokens from the host": sum(start.cached_host_tokens for start in starts),
            "tokens from storage": sum(start.cached_storage_tokens for start in starts),
            "overrun tokens": status.overrun_tokens,
            "prompts whose logprobs were asked": sum(one.submit.sampling.prompt_logprobs >= 0 for one in watched),
            "device losses": status.device_restarts,
            "requests with a grammar": sum(one.submit.sampling.grammar is not None for one in watched),
            "late masks": status.late_masks,
            "grammar worker losses": status.grammar_worker_restarts,
            "agent losses": max(0, world.agents - 1),
            "storage deadlines missed": status.storage_deadlines_missed,
            "pages copied to the host": status.copied_pages,
            "copies skipped": status.skipped_pages,
            "pages written to storage": status.stored_pages,
            "pages storage did not take": status.unstored_pages + status.put_off_pages,
            "damaged pages": world.store.damaged,
            "errors of the store": world.store.failed + world.store.raised,
            "prefetched bytes: useful": status.prefetch_useful_bytes,
            "prefetched bytes: late": status.prefetch_late_bytes,
            "prefetched bytes: wasted": status.prefetch_wasted_bytes,
            "prefetched bytes: cancelled": status.prefetch_cancelled_bytes,
            "prefetched bytes: declined": status.prefetch_declined_bytes,
            "matches cut short for want of a window": sum(group.short_matches for group in status.window_groups),
            "window pages copied to the host": sum(group.copied_pages for group in status.window_groups),
            "seeds without overlap": int(not world.shape.overlap),
            "seeds without storage": int(not world.shape.storage_pages),
        }
    )
    return {name: happened[name] for name in sorted(happened)}


Begin: TypeAlias = Callable[[Coroutine[object, object, None]], asyncio.Task[None]]


class _Schedule:
    """Draws what happens next."""

    def __init__(self, world: World, rng: random.Random, begin: Begin) -> None:
        """`begin` makes a task of the run's own group."""
        self.refused = 0
        self.happened: Counter[str] = Counter()
        self._begin = begin
        self._tasks: list[asyncio.Task[None]] = []
        self._pins: list[str] = []
        self._device_faults = 0
        self._world = world
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._faults = rng.choice((0.0, 0.0, 0.03))
        self._flushes = rng.choice((0.02, 0.1, 0.4))
        self._salts = rng.choice((("",), ("", "", "s"), ("", "s", "t")))
        self._prefixes = [[rng.randrange(VOCAB) for _ in range(world.shape.context_tokens)] for _ in range(3)]
        self._timers: list[asyncio.TimerHandle] = []

    def submit(self) -> bool:
        """A new request, now, perhaps with an abort, a found stop string or a leaving client to come; False if it is
        refused."""
        rng, world = self._rng, self._world
        prompt, outputs = self._prompt()
        kind = rng.random()
        submit = Submit(
            len(world.requests) + 1,
            np.array(prompt, np.int32),
            self._sampling(outputs, len(prompt)),
            cache_salt=rng.choice(self._salts),
            priority=rng.choice((0, 0, 0, 0, 1, -1, 3)),
            prefetch_policy=rng.choice(("", "", "best_effort", "wait_complete", "timeout", "adaptive")),
            deadline_ms=rng.choice((2.0, 20.0, 200.0)) if rng.random() < 0.05 else 0.0,
            queue_deadline_ms=rng.choice((2.0, 20.0)) if rng.random() < 0.03 else 0.0,
        )
        try:
            watched = world.submit_message(submit)
        except (Overloaded, NeverFits):
            self.refused += 1
            return False
        if kind < 0.12:
            # Many at about the time of their first step.
            self._later(rng.random() * rng.choice((0.002, 0.05)), lambda: self._abort(watched))
        elif kind < 0.2:
            self._later(rng.random() * 0.05, lambda: self._conclude(watched))
        elif kind < 0.35:
            self._spawn(self._client(watched), leaves=rng.random() < 0.5)
        return True

    def disturb(self) -> None:
        """Perhaps a flush, a pin, a clearing, or a fault of the device."""
        rng, world = self._rng, self._world
        if rng.random() < self._flushes:
            # What both tiers have lost comes back from storage.
            world.engine.flush_cache(rng.random() < 0.8, rng.random() < 0.8)
            self.happened["flushes"] += 1
        if rng.random() < 0.2:
            self._control()
        if rng.random() < 0.05:
            self._spawn(self._wait_for_control(), leaves=rng.random() < 0.5)
        if rng.random() < self._faults:
            rng.choice((self._kill_device, self._kill_device, world.kill_agent))()
        if rng.random() < self._faults:
            world.kill_grammar_worker()
        if rng.random() < self._faults / 2:
            world.hang_grammar_worker(rng.choice((0.01, 0.5, 30.0)))
        if rng.random() < self._faults / 2:
            rng.choice((self._hang_device, world.hang_agent))(rng.choice((0.01, 0.5, 5.0)))

    def leave(self) -> None:
        """The schedule is over: nothing more happens, and who still waits goes away."""
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _sampling(self, outputs: int, prompt_tokens: int) -> SamplingParams:
        rng = self._rng
        sampling: dict[str, object] = {"max_tokens": outputs, "seed": rng.randrange(-5, 1 << 63)}
        if rng.random() < 0.3:
            sampling["stop_ids"] = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 100)))]
            sampling["min_tokens"] = rng.randint(0, outputs)
        if rng.random() < 0.2:
            # Some end by their grammar, some by an end of text, some by their length.
            sampling["grammar"] = {"kind": "toy", "text": f"{rng.getrandbits(60)} {rng.randint(1, 40)}"}
            if rng.random() < 0.7:
                sampling.setdefault("stop_ids", [END_ID])
        if rng.random() < 0.1:
            sampling["prompt_logprobs"] = 0
            sampling["prompt_logprobs_from"] = rng.randint(1, prompt_tokens)
        if rng.random() < 0.1:
            sampling["logprobs"] = 2
        if rng.random() < 0.2:
            sampling |= {"repetition_penalty": 1.1, "logit_bias": [(1, 0.5)]}
        return msgspec.convert(sampling, SamplingParams)

    def _prompt(self) -> tuple[list[int], int]:
        """A prompt and its number of outputs: an own one, a shared prefix, or an earlier request with its answer."""
        rng, world, shape = self._rng, self._world, self._world.shape
        fits, kind = min(shape.context_tokens, shape.pages * shape.page_tokens), rng.random()
        limit = fits if rng.random() < 0.99 else shape.context_tokens
        if kind < 0.3 and world.requests:
            last = len(world.requests)
            earlier = world.requests[rng.randint(rng.choice((1, max(1, last - 20))), last)]
            prompt = [*earlier.submit.prompt_ids.tolist(), *earlier.ids, rng.randrange(VOCAB)]
        elif kind < 0.8:
            prompt = [
                *rng.choice(self._prefixes)[: rng.randrange(rng.choice((limit // 2, limit)))],
                rng.randrange(VOCAB),
            ]
        else:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, rng.choice((limit // 2, limit - 1))))]
        prompt = prompt[: limit - 1]
        return prompt, min(rng.randint(1, rng.choice((16, 32, 48))), limit - len(prompt))

    # ------------------------------------------------------------------------------------------------------------
    # Clients

    async def _client(self, watched: Watched) -> None:
        """As the server's handlers do: whatever ends the wait, the request is aborted."""
        try:
            await watched.ended.wait()
        finally:
            if not watched.ended.is_set():
                self._abort(watched, "clients that left")

    def _abort(self, watched: Watched, who: str = "aborts") -> None:
        """End a request, whatever it is doing: the table says in which stages this was."""
        stage = self._world.engine.stage_of(watched.submit.request).split(",")[0]
        if watched.finished is None:
            self.happened[who] += 1
            self.happened[f"left while {stage}"] += 1
        self._world.abort(watched)

    def _conclude(self, watched: Watched) -> None:
        if watched.ids and watched.finished is None:
            self.happened["stop strings found"] += 1
            self._world.conclude(watched.submit.request, self._rng.randint(1, len(watched.ids)))

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(delay_s, act))

    def _spawn(self, work: Coroutine[object, object, None], leaves: bool) -> None:
        task = self._begin(work)
        self._tasks.append(task)
        if leaves:
            self._later(self._rng.random() * 0.05, lambda: self._cancel(task))

    def _cancel(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            self.happened["cancelled: a client's task"] += 1
            task.cancel()

    # ------------------------------------------------------------------------------------------------------------
    # Control

    def _control(self) -> None:
        """Pin what a request had, let a pin go, or clear a prompt or a salt."""
        rng, control, requests = self._rng, self._world.engine.control, self._world.requests
        if not requests:
            return
        submit = requests[rng.randint(max(1, len(requests) - 4), len(requests))].submit
        salt, prompt = submit.cache_salt, submit.prompt_ids[: rng.choice((self._world.shape.page_tokens * 2, 1 << 20))]
        kind = rng.random()
        if kind < 0.6:
            # In a pool of a few pages most are.
            with contextlib.suppress(PinRefused):
                self._pins.append(control.pin(prompt, salt, rng.choice((0.001, 0.1, 2.0))).id)
                self.happened["pins"] += 1
        elif kind < 0.8 and self._pins:
            control.unpin(rng.choice(self._pins))
        else:
            control.clear(prompt[: rng.choice((0, len(prompt)))], salt, rng.random() < 0.7, rng.random() < 0.7)
            self.happened["clearings"] += 1

    async def _wait_for_control(self) -> None:
        """An operation on the cache that waits."""
        rng, control, requests = self._rng, self._world.engine.control, self._world.requests
        if not requests:
            return
        submit = requests[rng.randint(1, len(requests))].submit
        kind = rng.choice(("lookup", "warm", "settle", "warm", "lookup", "delete"))
        self.happened[f"cache operations: {kind}"] += 1
        with contextlib.suppress(Overloaded):
            if kind == "lookup":
                await control.lookup(submit.prompt_ids, submit.cache_salt)
            elif kind == "warm":
                await control.warm(submit.prompt_ids, submit.cache_salt, rng.choice((0.001, 1.0)))
            elif kind == "settle":
                await control.settle(rng.choice((0.001, 1.0)))
            else:
                await control.delete_stored(rng.choice((None, "s", "t")))

    # ------------------------------------------------------------------------------------------------------------
    # Faults

    def _kill_device(self) -> None:
        if self._device_faults < MAX_DEVICE_FAULTS:
            self._device_faults += 1
            self._world.kill_device()

    def _hang_device(self, duration_s: float) -> None:
        if self._device_faults < MAX_DEVICE_FAULTS:
            self._device_faults += 1
            self._world.hang_device(duration_s)

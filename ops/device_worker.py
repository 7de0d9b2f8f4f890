"""What a device worker does with each command; a state machine without a process, a thread or a socket.

in     commands, in order
out    replies, when what they answer is done: steps in their order, backups in theirs
state  the model and the step runner, what is not answered yet, and the phase: new → loaded → ready, → failed after the
       first step that raised
owner  whoever calls `handle` and `poll`, from one thread
ready  `Loaded`, `Ready`, `StepDone`, `BackupDone` say what is
end    `finished` is true after `Stop` or `Refused`; the process ends
"""

from __future__ import annotations

import logging
import mmap
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Literal, TypeAlias

import torch

from headrace.ops import accesses
from headrace.ops.backend import Backend, CannotServe, Promised
from headrace.ops.cpu_backend import CpuBackend
from headrace.ops.models.config import ModelConfig
from headrace.ops.runner import BackedUp, Sampled
from headrace.ops.streams import Streams
from headrace.ops.warm_up import measure_steps
from headrace.ops.wire import (
    Backup,
    BackupDone,
    BatchRing,
    Command,
    Forward,
    GroupShape,
    Loaded,
    MakePools,
    Ready,
    Refused,
    Reply,
    Sample,
    Start,
    StepDone,
    StepFailed,
    Stop,
)

Phase: TypeAlias = Literal["new", "loaded", "ready", "failed"]

TOUCH_MS: Final = 100.0
"""For making pool memory real before `Ready`: 1 GiB where memory is at hand. The rest comes when the worker idles."""
IDLE_SLICE_MS: Final = 1.0

SKIPPED: Final = "skipped: an earlier step failed"

_log: Final = logging.getLogger("headrace.worker")


class DeviceWorker:
    """One worker: `handle` gives a command to the streams; `reply` is called with what has come of it."""

    def __init__(
        self,
        reply: Callable[[Reply], None],
        ring: mmap.mmap | bytearray,
        host_pool: mmap.mmap | bytearray | None = None,
        streams: Streams | None = None,
    ) -> None:
        """`streams`: None for the device's own."""
        self._reply = reply
        self._ring_buffer = ring
        self._host_buffer = host_pool
        self._given_streams = streams
        self._phase: Phase = "new"
        self._forwarded: int | None = None
        """A step that waits for its `Sample`."""
        self._steps: deque[Sampled] = deque()
        self._backups: deque[BackedUp] = deque()
        self.finished = False

    def handle(self, command: Command) -> None:
        """Execute one command, or give it to the streams, and `poll`. Raises RuntimeError for one that does not belong
        here, and whatever a backup raises: there is no answer to either, the process ends with it."""
        with torch.inference_mode():
            match command:
                case Start():
                    self._expect(command, "new")
                    self._start(command)
                case MakePools():
                    self._expect(command, "loaded")
                    self._make_pools(command)
                case Forward():
                    self._expect(command, "ready", "failed")
                    self._forward(command)
                case Sample():
                    self._expect(command, "ready", "failed")
                    self._sample(command)
                case Backup():
                    self._expect(command, "ready", "failed")
                    self._backups.append(self._runner.back_up(command))
                case Stop():
                    while self.poll():
                        time.sleep(self._streams.look_s)
                    self.finished = True
            self.poll()

    def poll(self) -> bool:
        """Answer what is done; → whether something is not."""
        self._answer_steps()
        while self._backups and self._backups[0].done.query():
            backup = self._backups.popleft()
            self._reply(BackupDone(backup.transfer))
        return bool(self._steps or self._backups)

    def idle(self) -> bool:
        """Do a little of what can wait, while there is no command; → whether something is left."""
        with torch.inference_mode():
            return self._phase == "ready" and not all(memory.touch(IDLE_SLICE_MS) for memory in self._promised)

    @property
    def look_s(self) -> float:
        """How often to `poll` while something is not answered and no command comes."""
        return self._streams.look_s

    def close(self) -> None:
        """End the streams. Copies that wait are given up: the server forgets them with this worker."""
        if self._phase != "new":
            self._streams.close()

    def _expect(self, command: Command, *phases: Phase) -> None:
        if self._phase not in phases:
            raise RuntimeError(f"{type(command).__name__} was sent to a worker that is {self._phase}")

    # -----------------------------------------------------------------------------------------------------------
    # Loading

    def _start(self, start: Start) -> None:
        try:
            self._backend = open_backend(start, self._reply, self._given_streams)
            self._streams = self._backend.streams
            self._model = self._backend.load(start)
            check_start(start, self._model.config)
            self._ring = BatchRing(self._ring_buffer, start.ring)
        except (CannotServe, ValueError, OSError) as problem:
            self._refuse(str(problem))
            return
        except (MemoryError, RuntimeError) as problem:
            self._refuse(f"the weights could not be loaded: {problem}. If memory is short: --dtype bfloat16")
            return
        self._start_command = start
        self._phase = "loaded"
        self._reply(Loaded(weights_bytes=self._model.size_bytes, free_bytes=self._backend.free_bytes))

    def _make_pools(self, command: MakePools) -> None:
        start = self._start_command
        try:
            made = self._backend.make_runner(start, command.num_pages, self._ring_buffer, self._host_buffer)
            for pool in made.pools:
                pool.touch(TOUCH_MS)
        except CannotServe as problem:
            self._refuse(str(problem))
            return
        except (MemoryError, OSError, torch.OutOfMemoryError) as problem:
            self._refuse(f"the KV pool could not be allocated: {problem}. Lower --max-total-tokens")
            return
        self._pools, self._runner = made.pools, made.runner
        # The device's first: every request uses it.
        self._promised: list[Promised] = [*made.pools, *([made.host] if made.host is not None else [])]
        costs = []
        if command.warm_up_tokens:
            costs = measure_steps(self._runner, self._pools, start.ring.vocab, command.warm_up_tokens)
        self._phase = "ready"
        self._reply(Ready(costs, self._backend.name(start), self._backend.numerics(start)))

    def _refuse(self, message: str) -> None:
        self._reply(Refused(message))
        self.finished = True

    # -----------------------------------------------------------------------------------------------------------
    # Steps: each is answered once, by the `Forward` that fails or is skipped, or else after its `Sample`

    def _forward(self, command: Forward) -> None:
        if self._phase == "failed":
            self._reply(StepFailed(command.step, SKIPPED))
            return
        try:
            batch = self._ring.read(command.ring_slot)
            if batch.step != command.step:
                raise ValueError(f"ring slot {command.ring_slot} holds step {batch.step}, not {command.step}")
            self._streams.compute.uses(partial(accesses.forward, command.step, command.ring_slot))
            self._runner.forward(batch, self._ring.results(command.ring_slot))
        except Exception as problem:
            self._fail(command.step, problem)
        else:
            self._forwarded = command.step

    def _sample(self, command: Sample) -> None:
        forwarded, self._forwarded = self._forwarded, None
        if self._phase == "failed":
            # A step before it has failed since, in its stream; or its own `Forward` has given the answer.
            if forwarded == command.step:
                self._reply(StepFailed(command.step, SKIPPED))
            return
        try:
            mask_rows, mask_bits = self._ring.masks(command.ring_slot)
            masks = slice(0, command.masks)
            results = self._ring.results(command.ring_slot)
            self._streams.compute.uses(partial(accesses.sample, command.step, command.ring_slot))
            self._steps.append(
                self._runner.sample(command.step, mask_rows[masks], mask_bits[masks], results, command.skips)
            )
        except Exception as problem:
            self._fail(command.step, problem)

    def _fail(self, step: int, problem: Exception) -> None:
        """The step can't be launched; those before it are answered first."""
        while self._steps:
            self._answer_steps()
        self._answer_failure(step, problem)

    def _answer_steps(self) -> None:
        while self._steps:
            sampled = self._steps[0]
            try:
                if not sampled.done.query():
                    return
            except Exception as problem:
                self._answer_failure(sampled.step, problem)
            else:
                self._reply(StepDone(sampled.step, sampled.step_ms, sampled.load.spent_ms))
            self._steps.popleft()

    def _answer_failure(self, step: int, problem: Exception) -> None:
        _log.error("step %d failed; the server must restart this worker", step, exc_info=problem)
        self._phase = "failed"
        self._reply(StepFailed(step, f"{type(problem).__name__}: {problem}"))


def open_backend(start: Start, reply: Callable[[Reply], None], streams: Streams | None) -> Backend:
    """Whoever computes as the server wants it. Raises CannotServe where that can't be here."""
    if start.kernels != "triton":
        return CpuBackend(reply, streams)
    try:
        from headrace.ops.cuda.backend import CudaBackend
    except ImportError as problem:
        raise CannotServe(
            f"--device cuda needs triton, which can't be imported ({problem}). Install headrace[cuda], or give "
            "--device cpu"
        ) from problem
    return CudaBackend(start, reply, streams)


def check_start(start: Start, config: ModelConfig) -> None:
    """The server planned with the file's header; its plan and the loaded model must agree. Raises CannotServe."""
    if start.max_context_tokens > config.context_tokens:
        raise CannotServe(
            f"--context-length {start.max_context_tokens} is longer than the {config.context_tokens} tokens that the"
            " model was trained for; lower it"
        )
    served = served_groups(config)
    if start.groups not in served:
        raise CannotServe(f"this worker serves the groups {' or '.join(map(str, served))}; it was given {start.groups}")
    if start.ring.vocab != config.vocab_size:
        raise CannotServe(f"the ring is sized for {start.ring.vocab} ids, the model has {config.vocab_size}")
    if start.ring.max_samples > start.max_slots:
        raise CannotServe(f"the ring holds {start.ring.max_samples} samples, but there are {start.max_slots} slots")


def served_groups(config: ModelConfig) -> list[list[GroupShape]]:
    """The groups of layers that a worker serves: one full group of all; or, where some layers have a window and others
    have none, a full and a window group."""

    def group(kind: str, window_tokens: int, layers: list[int]) -> GroupShape:
        return GroupShape(kind, window_tokens, layers, config.kv_heads, config.head_dim)

    every = list(range(config.layers))
    full = [layer for layer in every if layer not in config.window_layers]
    one = [group("full", 0, every)]
    if not config.window_layers or not full:
        return [one]
    return [one, [group("full", 0, full), group("window", config.window_span, list(config.window_layers))]]

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
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Literal, TypeAlias

import torch

from headrace.ops import accesses
from headrace.ops.device import device_name, prepare_cpu
from headrace.ops.kv_copy import HostPages
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.model import Model
from headrace.ops.models.registry import load_compiled, load_model
from headrace.ops.sampler import Sampler
from headrace.ops.step import BackedUp, Sampled, StepRunner
from headrace.ops.streams import Streams, cpu_streams
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
    Progress,
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

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUANTIZATIONS: Final = ("none", "q8")
PROGRESS_STEPS: Final = 50
"""Messages that a load sends at most."""

TOUCH_MS: Final = 100.0
"""For making pool memory real before `Ready`: 1 GiB where memory is at hand. The rest comes when the worker idles."""
IDLE_SLICE_MS: Final = 1.0

SKIPPED: Final = "skipped: an earlier step failed"

_log: Final = logging.getLogger("headrace.worker")


class CannotServe(Exception):
    """The settings do not fit the model or this machine; the message says what to change."""


class DeviceWorker:
    """One worker: `handle` gives a command to the streams; `reply` is called with what has come of it."""

    def __init__(
        self,
        reply: Callable[[Reply], None],
        ring: mmap.mmap | bytearray,
        host_pool: mmap.mmap | bytearray | None = None,
        streams: Streams | None = None,
    ) -> None:
        """`streams`: None for a CPU's."""
        self._reply = reply
        self._ring_buffer = ring
        self._host_buffer = host_pool
        self._streams = streams or cpu_streams()
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
                        pass
                    self.finished = True
            self.poll()

    def poll(self) -> bool:
        """Answer what is done; → whether something is not."""
        self._answer_steps()
        while self._backups and self._backups[0].done.query():
            backup = self._backups.popleft()
            self._reply(BackupDone(backup.transfer, backup.copy.spent_ms))
        return bool(self._steps or self._backups)

    def idle(self) -> bool:
        """Do a little of what can wait, while there is no command; → whether something is left."""
        with torch.inference_mode():
            return self._phase == "ready" and not all(pool.memory.touch(IDLE_SLICE_MS) for pool in self._pools)

    def _expect(self, command: Command, *phases: Phase) -> None:
        if self._phase not in phases:
            raise RuntimeError(f"{type(command).__name__} was sent to a worker that is {self._phase}")

    # -----------------------------------------------------------------------------------------------------------
    # Loading

    def _start(self, start: Start) -> None:
        try:
            self._model = self._load(start)
            check_start(start, self._model)
            self._ring = BatchRing(self._ring_buffer, start.ring)
        except (CannotServe, ValueError, OSError) as problem:
            self._refuse(str(problem))
            return
        except (MemoryError, RuntimeError) as problem:
            self._refuse(f"the weights could not be loaded: {problem}. If memory is short: --dtype bfloat16")
            return
        self._start_command = start
        self._phase = "loaded"
        self._reply(Loaded(weights_bytes=self._model.size_bytes, free_bytes=0))

    def _load(self, start: Start) -> Model:
        if start.dtype not in DTYPES:
            raise CannotServe(f"--dtype {start.dtype} is not supported: use {' or '.join(DTYPES)}")
        if start.quantization not in QUANTIZATIONS or (start.quantization != "none" and start.kernels != "compiled"):
            raise CannotServe(
                f"--quantization {start.quantization} is not supported with --cpu-kernels {start.kernels}: use none"
            )
        reported = 0

        def progress(done: int, total: int) -> None:
            nonlocal reported
            if done == total or (done - reported) * PROGRESS_STEPS >= total:
                reported = done
                self._reply(Progress("weights", done, total))

        dtype, quantized = DTYPES[start.dtype], start.quantization == "q8"
        if start.kernels == "torch":
            prepare_cpu(start.threads)
            return load_model(start.model_path, dtype, start.max_context_tokens, progress)
        # torch only draws ids: its threads would wait for work by spinning, on the cores of the kernels' threads.
        prepare_cpu(1)
        self._compile(start)
        threads = start.threads
        return load_compiled(start.model_path, dtype, quantized, start.max_context_tokens, threads, progress)

    def _compile(self, start: Start) -> None:
        try:
            from headrace.ops.simd.compiler import prepare
        except ImportError as problem:
            raise CannotServe(
                f"the compiled kernels need numba, which can't be imported ({problem}). Install it, or give "
                "--cpu-kernels torch"
            ) from problem
        kv: Final = "float32" if start.dtype == "float32" else "bfloat16"
        prepare(
            "q8" if start.quantization == "q8" else kv,
            kv,
            start.kernel_cache,
            self._tell_compiling,
        )

    def _tell_compiling(self, done: int, total: int) -> None:
        """A line for each tenth: it takes 10 to 20 s, once."""
        if done * 10 // total > (done - 1) * 10 // total:
            share = done * 100 // total // 10 * 10
            self._reply(Progress(f"compiling kernels for this CPU, once: {share} %", done, total))

    def _make_pools(self, command: MakePools) -> None:
        start = self._start_command
        try:
            pools = [
                KvPool(shape, pages, start.page_tokens, start.max_slots, start.max_context_tokens, DTYPES[start.dtype])
                for shape, pages in zip(start.groups, command.num_pages, strict=True)
            ]
            host = self._host_pages(start, pools)
            sampler = Sampler(start.max_slots, start.ring.vocab)
            for pool in pools:
                pool.memory.touch(TOUCH_MS)
        except CannotServe as problem:
            self._refuse(str(problem))
            return
        except (MemoryError, OSError) as problem:
            self._refuse(f"the KV pool could not be allocated: {problem}. Lower --max-total-tokens")
            return
        self._pools = pools
        self._runner = StepRunner(self._model, pools, sampler, host, self._streams)
        costs = []
        if command.warm_up_tokens:
            costs = measure_steps(self._runner, pools, start.ring.vocab, command.warm_up_tokens)
        self._phase = "ready"
        numerics = "row-exact" if start.kernels == "compiled" else start.dtype
        self._reply(Ready(costs, device_name(start.threads), numerics))

    def _host_pages(self, start: Start, pools: list[KvPool]) -> HostPages | None:
        if self._host_buffer is None or not start.host_slot_bytes:
            return None
        for pool in pools:
            page_bytes = len(pool.shape.layers) * pool.layer_elements * pool.pages.element_size()
            if page_bytes > start.host_slot_bytes:
                raise CannotServe(f"a page takes {page_bytes} bytes, a slot of the host pool {start.host_slot_bytes}")
        return HostPages(self._host_buffer, start.host_slot_bytes, DTYPES[start.dtype], self._model.copy_pages)

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


def check_start(start: Start, model: Model) -> None:
    """The server planned with the file's header; its plan and the loaded model must agree. Raises CannotServe."""
    config = model.config
    if start.max_context_tokens > config.context_tokens:
        raise CannotServe(
            f"--context-length {start.max_context_tokens} is longer than the {config.context_tokens} tokens that the"
            " model was trained for; lower it"
        )
    expected = GroupShape("full", 0, list(range(config.layers)), config.kv_heads, config.head_dim)
    if start.groups != [expected]:
        raise CannotServe(f"this worker serves one group of full attention, {expected}; it was given {start.groups}")
    if start.ring.vocab != config.vocab_size:
        raise CannotServe(f"the ring is sized for {start.ring.vocab} ids, the model has {config.vocab_size}")
    if start.ring.max_samples > start.max_slots:
        raise CannotServe(f"the ring holds {start.ring.max_samples} samples, but there are {start.max_slots} slots")

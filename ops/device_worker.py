"""What a device worker does with each command; a state machine without a process, a thread or a socket.

in     commands, in order
out    replies, in the order of the commands
state  the model and the step runner, and the phase: new → loaded → ready, → failed after the first step that raised
owner  whoever calls `handle`, from one thread
ready  `Loaded`, `Ready`, `StepDone`, `BackupDone` say what is
end    `finished` is true after `Stop` or `Refused`; the process ends
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import torch

from headrace.ops.device import device_name, prepare_cpu
from headrace.ops.kv_copy import HostPages
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.model import Model
from headrace.ops.models.registry import load_model
from headrace.ops.sampler import Sampler
from headrace.ops.step import StepRunner
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
PROGRESS_STEPS: Final = 50
"""Messages that a load sends at most."""

TOUCH_MS: Final = 100.0
"""For making pool memory real before `Ready`: 1 GiB where memory is at hand. The rest comes when the worker idles."""
IDLE_SLICE_MS: Final = 1.0

_log: Final = logging.getLogger("headrace.worker")


class CannotServe(Exception):
    """The settings do not fit the model or this machine; the message says what to change."""


class DeviceWorker:
    """One worker: `handle` executes a command and calls `reply` with what comes of it."""

    def __init__(
        self,
        reply: Callable[[Reply], None],
        ring: mmap.mmap | bytearray,
        host_pool: mmap.mmap | bytearray | None = None,
    ) -> None:
        self._reply = reply
        self._ring_buffer = ring
        self._host_buffer = host_pool
        self._phase: Phase = "new"
        self.finished = False

    def handle(self, command: Command) -> None:
        """Execute one command. Raises RuntimeError for one that does not belong here, and whatever a backup raises:
        there is no answer to either, the process ends with it."""
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
                    copy_ms = self._runner.back_up(command)
                    self._reply(BackupDone(command.transfer, copy_ms))
                case Stop():
                    self.finished = True

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
        if start.quantization != "none":
            raise CannotServe(f"--quantization {start.quantization} is not supported on this device: use none")
        prepare_cpu(start.threads)
        reported = 0

        def progress(done: int, total: int) -> None:
            nonlocal reported
            if done == total or (done - reported) * PROGRESS_STEPS >= total:
                reported = done
                self._reply(Progress("weights", done, total))

        return load_model(start.model_path, DTYPES[start.dtype], start.max_context_tokens, progress)

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
        self._runner = StepRunner(self._model, pools, sampler, host)
        costs = []
        if command.warm_up_tokens:
            costs = measure_steps(self._runner, pools, start.ring.vocab, command.warm_up_tokens)
        self._phase = "ready"
        self._reply(Ready(costs, device_name(), start.dtype))

    def _host_pages(self, start: Start, pools: list[KvPool]) -> HostPages | None:
        if self._host_buffer is None or not start.host_slot_bytes:
            return None
        for pool in pools:
            page_bytes = len(pool.shape.layers) * pool.layer_elements * pool.pages.element_size()
            if page_bytes > start.host_slot_bytes:
                raise CannotServe(f"a page takes {page_bytes} bytes, a slot of the host pool {start.host_slot_bytes}")
        return HostPages(self._host_buffer, start.host_slot_bytes, DTYPES[start.dtype])

    def _refuse(self, message: str) -> None:
        self._reply(Refused(message))
        self.finished = True

    # -----------------------------------------------------------------------------------------------------------
    # Steps: each is answered once, by the `Forward` that fails or is skipped, or else by its `Sample`

    def _forward(self, command: Forward) -> None:
        if self._phase == "failed":
            self._reply(StepFailed(command.step, "skipped: an earlier step failed"))
            return
        try:
            batch = self._ring.read(command.ring_slot)
            if batch.step != command.step:
                raise ValueError(f"ring slot {command.ring_slot} holds step {batch.step}, not {command.step}")
            self._runner.forward(batch, self._ring.results(command.ring_slot))
        except Exception as problem:
            self._fail(command.step, problem)

    def _sample(self, command: Sample) -> None:
        if self._phase == "failed":
            return
        try:
            mask_rows, mask_bits = self._ring.masks(command.ring_slot)
            masks = slice(0, command.masks)
            results = self._ring.results(command.ring_slot)
            step_ms, load_ms = self._runner.sample(command.step, mask_rows[masks], mask_bits[masks], results)
        except Exception as problem:
            self._fail(command.step, problem)
        else:
            self._reply(StepDone(command.step, step_ms, load_ms))

    def _fail(self, step: int, problem: Exception) -> None:
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
    if config.window_tokens or start.groups != [expected]:
        raise CannotServe(f"this worker serves one group of full attention, {expected}; it was given {start.groups}")
    if start.ring.vocab != config.vocab_size:
        raise CannotServe(f"the ring is sized for {start.ring.vocab} ids, the model has {config.vocab_size}")
    if start.ring.max_samples > start.max_slots:
        raise CannotServe(f"the ring holds {start.ring.max_samples} samples, but there are {start.max_slots} slots")

"""A worker behind its pipe, as a server has it: how long a message takes, and what of a step the card waits.

The `decode` part launches the same steps in its own process; what is more here is the pipe's.
"""

from __future__ import annotations

import argparse
import mmap
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gpu.decode import AIM, CONTEXT, STEPS, begin_decoding, empty_step_us, model_of
from gpu.random_model import RING_SLOTS, start_of
from gpu.report import Report
from gpu.requests import Requests
from gpu.timing import Device

from headrace.ops.runner import BackedUp, CopyTime, Sampled
from headrace.ops.streams import Event
from headrace.ops.wire import (
    I32,
    U32,
    Backup,
    BatchRing,
    Command,
    Forward,
    ForwardBatch,
    Loaded,
    MakePools,
    Ready,
    Refused,
    Reply,
    Sample,
    Start,
    StepDone,
    StepFailed,
    StepResults,
    Stop,
    encoder,
    reply_decoder,
)

ROWS: Final = 64
WORKER: Final = Path(__file__).with_name("piped_worker.py")
LARGEST_REPLY_BYTES: Final = 1 << 20


def run(report: Report, options: argparse.Namespace) -> None:
    device = Device(options.dry)
    rows, context = device.size(ROWS, 2), device.size(CONTEXT, 32)
    longest = context + device.size(256, 32)
    config = model_of(device, longest)
    start = start_of(config, device.dry, "bfloat16", rows, longest, device.size(8192, 64) + rows)
    pages = rows * longest // 16
    with piped(start, pages, device.dry) as (runner, ring):
        requests = Requests(runner, ring, pages)
        report.figure("a step of nothing, through the pipe and back", empty_step_us(device, requests), "µs")
        whole_ms = _decode(requests, rows, context, device.size(STEPS, 3))
        busy_ms = statistics.median(list(runner.took_ms.values())[-device.size(STEPS, 3) :])
    name = f"{rows} rows through the pipe, overlapped"
    report.figure(f"{name}: step", whole_ms, "ms", note="from one answer to the next")
    report.figure(f"{name}: gap", (whole_ms - busy_ms) * 1e3, "µs")
    report.figure(f"{name}: the card at work", 100 * busy_ms / whole_ms, "%", busy_ms / whole_ms, "the time", AIM)


def _decode(requests: Requests, rows: int, context: int, steps: int) -> float:
    """ms a step, two under way."""
    feeds = begin_decoding(requests, rows, context)
    began = time.perf_counter()
    for _ in range(steps):
        requests.launch(feeds)
    requests.finish()
    return (time.perf_counter() - began) * 1e3 / steps


class PipedRunner:
    """A `Runner` whose steps are a worker's."""

    def __init__(self, pipe: socket.socket) -> None:
        self.took_ms: dict[int, float] = {}
        """By the card's clock, of steps that have been answered."""
        self._pipe = pipe

    def forward(self, batch: ForwardBatch, results: StepResults) -> None:
        self._send(Forward(batch.step, batch.step % RING_SLOTS))

    def sample(
        self, step: int, mask_rows: I32, mask_bits: U32, results: StepResults, skips: Sequence[int] = ()
    ) -> Sampled:
        self._send(Sample(step, step % RING_SLOTS, len(mask_rows), tuple(skips)))
        return Sampled(step, Answer(self, step), (), CopyTime())

    def back_up(self, command: Backup) -> BackedUp:
        raise NotImplementedError("this worker has no host pool")

    def begin(self, start: Start, pages: int) -> None:
        """Raises RuntimeError where the worker refuses."""
        for command, answer in ((start, Loaded), (MakePools([pages], 0), Ready)):
            self._send(command)
            while not isinstance(reply := self.receive(), answer):
                if isinstance(reply, Refused):
                    raise RuntimeError(reply.message)

    def end(self) -> None:
        self._send(Stop())

    def receive(self) -> Reply:
        """The next reply. Raises RuntimeError where the worker has ended."""
        packet = self._pipe.recv(LARGEST_REPLY_BYTES)
        if not packet:
            raise RuntimeError("the worker has ended")
        return reply_decoder.decode(packet)

    def look(self) -> None:
        """Note what has come. Raises RuntimeError for a step that failed."""
        while select.select([self._pipe], [], [], 0)[0]:
            reply = self.receive()
            if isinstance(reply, StepFailed):
                raise RuntimeError(f"step {reply.step} failed: {reply.message}")
            if isinstance(reply, StepDone):
                self.took_ms[reply.step] = reply.step_ms

    def _send(self, command: Command) -> None:
        self._pipe.send(encoder.encode(command))


class Answer:
    """An `Event`: a step's answer."""

    def __init__(self, runner: PipedRunner, step: int) -> None:
        self._runner = runner
        self._step = step

    def query(self) -> bool:
        self._runner.look()
        return self._step in self._runner.took_ms

    def ms_until(self, later: Event) -> float:
        raise NotImplementedError("an answer has no place on the card's clock")


@contextmanager
def piped(start: Start, pages: int, dry: bool) -> Iterator[tuple[PipedRunner, BatchRing]]:
    """A worker that is ready, and the ring that it reads; it ends with the block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = os.memfd_create("ring")
    os.ftruncate(descriptor, start.ring.size_bytes)
    command = [sys.executable, str(WORKER), "--parent", str(os.getpid()), "--context", str(start.max_context_tokens)]
    command += ["--socket", str(theirs.fileno()), "--ring", str(descriptor), *(["--dry"] if dry else [])]
    process = subprocess.Popen(command, pass_fds=(theirs.fileno(), descriptor))
    try:
        theirs.close()
        memory = mmap.mmap(descriptor, start.ring.size_bytes)
        os.close(descriptor)
        runner = PipedRunner(ours)
        runner.begin(start, pages)
        yield runner, BatchRing(memory, start.ring)
        runner.end()
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        ours.close()

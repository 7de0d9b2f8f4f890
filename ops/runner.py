"""What a worker gives the commands of steps to, whatever device computes them, and what it gets back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from headrace.ops.streams import Event
from headrace.ops.wire import I32, U32, Backup, ForwardBatch, StepResults


class CopyTime(msgspec.Struct):
    """What loads have taken of this thread's time: next to nothing where they are only given to a stream."""

    spent_ms: float = 0.0

    def of(self, work: Callable[[], None]) -> None:
        """Do it, and count."""
        began = time.perf_counter()
        work()
        self.spent_ms += (time.perf_counter() - began) * 1e3


class Sampled(NamedTuple):
    """A step that was given to the streams."""

    step: int
    done: Event
    """Its results are in the ring slot, its KV in the pages; nothing of it reads or writes any more."""
    spans: tuple[tuple[Event, Event], ...]
    load: CopyTime

    @property
    def step_ms(self) -> float:
        """What its commands took, when it is done."""
        return sum(began.ms_until(ended) for began, ended in self.spans)


class BackedUp(NamedTuple):
    """A backup that was given to its stream."""

    transfer: int
    done: Event


class Runner(Protocol):
    """Gives the commands of steps to the streams, in the order of the calls."""

    def forward(self, batch: ForwardBatch, results: StepResults) -> None:
        """Everything up to the logits, prompt logprobs included. Raises BadBatch, IndexError or ValueError for what the
        server got wrong, RuntimeError for what torch can't do."""

    def sample(
        self, step: int, mask_rows: I32, mask_bits: U32, results: StepResults, skips: Sequence[int] = ()
    ) -> Sampled:
        """Draw the step's ids, not those in `skips`. Raises BadBatch if `forward` of another step came last."""

    def back_up(self, command: Backup) -> BackedUp:
        """Copy device pages to host pages, behind all that was computed before. Raises ValueError without a host pool;
        it, or the stream, raises IndexError for pages that do not exist."""

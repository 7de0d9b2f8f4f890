"""What the server asks of a scheduler: plain functions on the loop, and one call back a step.

There are two engines behind it: the one in `headrace.sched`, and the scripted one in the tests of the API, which says
exactly which ids come in which step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.sched.messages import EngineStatus, Flushed, StepDeltas, Submit


class EngineApi(Protocol):
    """All calls are made on the event loop; none of them waits, but for `run`."""

    sink: Callable[[StepDeltas], None]
    """Called after each step that gave something. It only takes note: the engine collects and launches first."""

    def submit(self, submit: Submit) -> None:
        """Queue a request. Raises Overloaded or NeverFits."""

    def abort(self, request: int) -> None:
        """End a request now; no effect if it is unknown or finished."""

    def conclude(self, request: int, n_tokens: int) -> None:
        """End a request after `n_tokens` outputs, since a stop string was found; no effect if it is finished."""

    def flush_cache(self) -> Flushed:
        """Drop every cached page that no request uses."""

    def status(self) -> EngineStatus:
        """A snapshot; can be asked at any time, also while loading and after a failure."""

    async def run(self) -> None:
        """Load, warm up, then serve until cancelled; every child has been reaped when it returns or raises."""

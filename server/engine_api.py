"""What the server asks of a scheduler: plain functions on the loop, and one call back a step.

There are two engines behind it: the one in `headrace.sched`, and the scripted one in the tests of the API, which says
exactly which ids come in which step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.sched.cache_control import CacheControl
from headrace.sched.grammar import Grammar
from headrace.sched.messages import EngineStatus, Flushed, StepDeltas, Submit


class EngineApi(Protocol):
    """All calls are made on the event loop; none of them waits, but for what is a coroutine, and what
    `control` has that says so."""

    sink: Callable[[StepDeltas], None]
    """Called after each step that gave something. It only takes note: the engine collects and launches first."""

    @property
    def writing(self) -> bool:
        """Whether cached pages are on their way to the host or to storage: at the end they are worth a wait."""

    async def check_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar before a request with it is submitted, off the loop. Raises BadGrammar, which is the
        client's fault, GrammarWorkerFailed and Overloaded."""

    def submit(self, submit: Submit) -> None:
        """Queue a request. Raises Overloaded or NeverFits."""

    def abort(self, request: int) -> None:
        """End a request now; no effect if it is unknown or finished."""

    def conclude(self, request: int, n_tokens: int) -> None:
        """End a request after `n_tokens` outputs, since a stop string was found; no effect if it is finished."""

    @property
    def control(self) -> CacheControl:
        """The cache, for those who look into it and change it."""

    def flush_cache(self, device: bool = True, host: bool = True) -> Flushed:
        """Drop every page of these tiers that nothing holds."""

    def status(self) -> EngineStatus:
        """A snapshot; can be asked at any time, also while loading and after a failure."""

    async def run(self) -> None:
        """Load, warm up, then serve until cancelled; every child has been reaped when it returns or raises."""

"""Whether requests can be served now, and if not, why and when to come back.

in     the engine's status; that the text side is there; that the server is leaving
out    a `Report` for health and readiness; ApiError 503 for requests
state  three facts of the server's own: text loaded, draining, failed
owner  the lifecycle sets them, each once
ready  at once
end    with the process
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec

from headrace.sched.messages import EngineStatus, Phase
from headrace.server.errors import DRAINING_RETRY_AFTER_S, ApiError, not_ready

HANG_S: Final = 60.0
"""The engine is taken for dead when the device has not finished a step for this long. A prefill chunk on a slow CPU
takes a fraction of a second, and the engine has its own, earlier deadline for a worker that hangs."""
_RETRY_AFTER_S: Final[dict[Phase, int]] = {"restarting": 5, "draining": DRAINING_RETRY_AFTER_S}


class Report(msgspec.Struct, frozen=True):
    """What `/health` and `/readyz` answer."""

    status: str
    """"ok" or "unavailable"."""
    phase: Phase
    message: str
    progress: float
    """Of the phase, 0..1."""


class Readiness:
    """The one place that decides between 200 and 503."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status
        self.text_loaded = False
        self.draining = False
        self.failed: str | None = None
        """Why the engine ended, once it has."""

    def report(self) -> Report:
        status = self._status()
        phase, message = status.phase, status.message
        if self.failed is not None:
            phase, message = "failed", self.failed
        elif self.draining:
            phase, message = "draining", "the server is shutting down; running requests finish"
        elif phase == "ready" and not self.text_loaded:
            phase, message = "loading", "loading the tokenizer"
        elif phase == "ready" and status.last_step_age_ms > HANG_S * 1000:
            phase = "failed"
            message = f"the device has not finished a step for {status.last_step_age_ms / 1000:.0f} s"
        return Report("ok" if phase == "ready" else "unavailable", phase, message, round(status.progress, 3))

    def refusal(self) -> ApiError | None:
        """Why a request can't be served now; None if it can."""
        report = self.report()
        if report.phase == "ready":
            return None
        return not_ready(sentence(report), f"server_{report.phase}", retry_after_s(report))


def sentence(report: Report) -> str:
    """The report, for people."""
    about = f": {report.message}" if report.message else ""
    done = f" ({math.floor(report.progress * 100)} % of it done)" if 0 < report.progress < 1 else ""
    return f"The server is not ready, it is {report.phase}{about}{done}."


def retry_after_s(report: Report) -> int:
    """Loading a model from a warm file takes seconds."""
    return _RETRY_AFTER_S.get(report.phase, 2)

"""`--record-steps`: a line for each step, what was in it and what it took, for `headrace simulate --calibration`.

in     collected steps
out    JSON lines
state  the file, and how many lines it has
owner  the engine's collect, through `Engine.step_listener`
ready  the file is whole when `close` returns
end    `close`; past `MAX_STEPS` nothing is written any more
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from headrace.sched.collect import LaunchedStep
from headrace.server.config import BadSetting

MAX_STEPS: Final = 1_000_000
"""100 MB, and more than any fit needs."""

_encode: Final = msgspec.json.Encoder().encode


class RecordedStep(msgspec.Struct, frozen=True):
    """One step of a real server."""

    decode_rows: int
    kv_tokens: int
    """Sum of the decode rows' contexts."""
    prefill_tokens: int
    prefill_pairs: int
    """Sum over chunks of tokens x context in their middle."""
    ms: float
    """Of the device."""
    since_last_ms: float = -1.0
    """From the last step's end to this one's as the server saw them, if it was launched before that; else -1."""


class StepLog:
    """An open file of steps."""

    def __init__(self, path: Path) -> None:
        """Raises BadSetting."""
        try:
            self._file = path.open("wb", buffering=1 << 16)
        except OSError as error:
            raise BadSetting(f"--record-steps {path} can't be written: {error.strerror}.") from None
        self._steps = 0

    def record(self, launched: LaunchedStep, step_ms: float, since_last_ms: float) -> None:
        """One step was collected."""
        if self._steps == MAX_STEPS:
            return
        self._steps += 1
        step = RecordedStep(
            decode_rows=launched.decode_rows,
            kv_tokens=launched.kv_tokens,
            prefill_tokens=launched.prefill_tokens,
            prefill_pairs=launched.prefill_pairs,
            ms=round(step_ms, 3),
            since_last_ms=round(since_last_ms, 3),
        )
        self._file.write(_encode(step) + b"\n")

    def close(self) -> None:
        self._file.close()

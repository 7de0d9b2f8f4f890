"""How far it is, for what takes over two seconds: a line that changes on a terminal, else a line in ten seconds."""

from __future__ import annotations

import time
from typing import Final, TextIO

_QUIET_S: Final = 2.0


class Progress:
    """Call it with words, what is done and how much there is ("records checked", 5, 10); as often as is convenient."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._next_s = time.monotonic() + _QUIET_S
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown and self._terminal:
            print(file=self._stream)

    def __call__(self, what: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._shown = True
        self._next_s = now_s + (0.2 if self._terminal else 10.0)
        start, end = ("\r", "") if self._terminal else ("", "\n")
        # On a terminal over the line before, which may be longer: ESC [K clears what is left of it.
        clear = "\x1b[K" if self._terminal else ""
        text = f"{start}{what}: {done} of {total} ({100 * done // max(total, 1)} %){clear}"
        print(text, end=end, file=self._stream, flush=True)

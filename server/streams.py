"""Streams: bounded mailboxes between the emit stage and the coroutine that answers one HTTP request.

A request has one `StreamGroup` with a `ChoiceStream` per choice. What emit puts in while the reader waits for its
client's socket is kept as one growing delta, so a slow client gets fewer, larger events and never holds up anyone.

in     text, ids, scores and the end of each choice, from emit, in order
out    `take`: what has come since the last take; one `Finish` per choice, last
state  one pending delta per choice, counted in bytes; which choices have something; the reader that waits
owner  emit puts, the one reader takes; both on the loop
ready  `wait` returns when a choice has something to take
end    with the HTTP request; nothing outside memory is held
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal, TypeAlias

import msgspec

from headrace.sched.messages import FinishReason, PromptLogprobs, Started

ID_BYTES: Final = 36
"""An int in a list."""
SCORE_BYTES: Final = 200
"""A `TokenScore` without alternatives."""
ALTERNATIVE_BYTES: Final = 72


EndReason: TypeAlias = FinishReason | Literal["draining"]
"""The engine's, and the server's own: it stops."""


class TokenScore(msgspec.Struct, frozen=True):
    """One output id and its logprobs; `top_*` are the alternatives that were asked for, best first."""

    id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    text_offset: int
    """Characters of the output's text that stand before this token."""


class Finish(msgspec.Struct, frozen=True):
    """The end of a choice. `matched`: the stop string or stop id that ended it."""

    reason: EndReason
    n_tokens: int
    message: str = ""
    matched: str | int | None = None
    retractions: int = 0


class Delta(msgspec.Struct):
    """What one choice has got since the last take."""

    index: int
    text: str
    ids: list[int]
    """Only where the stream was asked to keep them."""
    scores: list[TokenScore]
    n_tokens: int
    """Outputs so far, all of them."""
    finish: Finish | None


class ChoiceStream:
    """One choice's pending delta."""

    __slots__ = (
        *("finish", "index", "keep_ids", "n_tokens", "prompt_logprobs", "started"),
        *("_group", "_ids", "_pending_bytes", "_scores", "_texts"),
    )

    def __init__(self, group: StreamGroup, index: int, keep_ids: bool) -> None:
        self.index = index
        self.keep_ids = keep_ids
        self.n_tokens = 0
        self.started: Started | None = None
        self.finish: Finish | None = None
        self.prompt_logprobs: list[PromptLogprobs] = []
        self._group = group
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._scores: list[TokenScore] = []
        self._pending_bytes = 0

    def put(self, text: str, ids: list[int], scores: list[TokenScore], n_tokens: int) -> bool:
        """Add to the pending delta; False if that took the stream over its bound, and its reader is too slow."""
        assert self.finish is None, "a choice has ended once"
        self.n_tokens = n_tokens
        if text:
            self._texts.append(text)
            self._pending_bytes += len(text) * 4
        if self.keep_ids:
            self._ids += ids
            self._pending_bytes += len(ids) * ID_BYTES
        for score in scores:
            self._scores.append(score)
            self._pending_bytes += SCORE_BYTES + ALTERNATIVE_BYTES * len(score.top_ids)
        self._group.changed(self.index, ended=False)
        return self._pending_bytes <= self._group.max_pending_bytes

    def end(self, finish: Finish) -> None:
        """The choice has ended; what is pending still reaches the reader."""
        assert self.finish is None, "one finish per choice"
        self.finish = finish
        self.n_tokens = finish.n_tokens
        self._group.failed |= finish.reason not in ("stop", "length")
        self._group.changed(self.index, ended=True)

    def take(self) -> Delta:
        text = self._texts[0] if len(self._texts) == 1 else "".join(self._texts)
        delta = Delta(self.index, text, self._ids, self._scores, self.n_tokens, self.finish)
        self._texts, self._ids, self._scores, self._pending_bytes = [], [], [], 0
        return delta


class StreamGroup:
    """The choices of one HTTP request, and the reader that waits for any of them."""

    def __init__(self, choices: int, *, eager: bool, max_pending_bytes: int, keep_ids: bool = False) -> None:
        """`eager`: wake the reader at every delta; else once, when all choices have ended (and no byte bound: such a
        reader has no client that could be slow, and its size is bounded by the context)."""
        self.max_pending_bytes = max_pending_bytes if eager else 1 << 62
        self.streams = [ChoiceStream(self, index, keep_ids) for index in range(choices)]
        self.failed = False
        """A choice has ended with an error: there is no use in waiting for the others."""
        self._eager = eager
        self._unfinished = choices
        self._changed: set[int] = set()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Every choice has ended; there may be something left to take."""
        return self._unfinished == 0

    def changed(self, index: int, ended: bool) -> None:
        self._changed.add(index)
        self._unfinished -= ended
        if self._waiter is not None and self._ready():
            _resolve(self._waiter)

    async def wait(self, silence_s: float) -> bool:
        """Wait for something to take; False after `silence_s` without."""
        if self._ready():
            return True
        assert self._waiter is None, "one reader per group"
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = loop.call_later(silence_s, _resolve, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None
        return self._ready()

    def take(self) -> list[Delta]:
        """The changed choices' deltas, by index; empty if there is nothing new."""
        changed = sorted(self._changed)
        self._changed.clear()
        return [self.streams[index].take() for index in changed]

    def _ready(self) -> bool:
        if self._eager:
            return bool(self._changed)
        return self._unfinished == 0 or self.failed


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

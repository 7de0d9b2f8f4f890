"""A grammar worker in virtual time: the real service over toy matchers, behind a seeded link.

A toy grammar's text is "SEED LENGTH", or "SEED LENGTH MS" for one that takes so long to compile. Which ids may come
next is a hash of the seed and of all ids so far, so a matcher that missed an id, got one twice or got another request's
says something else at once. After LENGTH ids the output is complete; now and then before, an end of text is allowed
too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import xxhash

from headrace.ops.transport import Transport, TransportClosed
from headrace.ops.wire import U32
from headrace.sched.grammar import BadGrammar, Cancel, Compile, End, Grammar, Matcher, Ready, command_decoder, encoder
from headrace.server.grammar_service import GrammarService
from headrace.server.sim.transport import SimLink, SimServer

T = TypeVar("T")

END_ID = 0
"""The toy model's end of text."""
_SHARE = 5
"""One in so many ids is allowed; where an end of text is too, one in 97."""


class ToyMatcher:
    """A `Matcher`."""

    def __init__(self, seed: int, length: int, vocab: int) -> None:
        self._state = seed
        self._left = length
        self._vocab = vocab

    def copy(self) -> ToyMatcher:
        return ToyMatcher(self._state, self._left, self._vocab)

    def accept(self, token: int) -> bool:
        if not self._left or not self._allowed(frozenset())[token]:
            return False
        self._state = xxhash.xxh3_64_intdigest(token.to_bytes(4, "little"), seed=self._state)
        self._left -= 1
        return True

    def fill(self, bits: U32, stop_ids: frozenset[int]) -> bool:
        if not self._left:
            return True
        allowed = np.packbits(self._allowed(stop_ids), bitorder="little")
        bits.view(np.uint8)[:] = 0
        bits.view(np.uint8)[: len(allowed)] = allowed
        return False

    def _allowed(self, stop_ids: frozenset[int]) -> np.typing.NDArray[np.bool_]:
        low, may_end = self._state & 0x7FFFFFFF, self._state % 7 == 0
        share = 1 if may_end else 97 // _SHARE
        allowed = (np.arange(self._vocab) * (low % 96 + 1) + (low >> 8)) % 97 < share
        allowed[END_ID] = may_end and END_ID in stop_ids
        return np.asarray(allowed)


def compile_toy(grammar: Grammar, vocab: int) -> Matcher:
    """Raises BadGrammar for a text that is not two or three numbers."""
    parts = grammar.text.split()
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
        raise BadGrammar(f"{grammar.text!r} is not a seed and a length")
    return ToyMatcher(int(parts[0]), int(parts[1]), vocab)


class SimLane:
    """A `Lane` in virtual time: a job runs at once, and is done `compile_ns` later, which it sets; meanwhile it has
    a core of its own."""

    def __init__(self, server: SimServer, link: SimLink) -> None:
        self._server = server
        self._link = link
        self.compile_ns = 0

    def submit(
        self, job: Callable[[], T], done: Callable[[T], None], limit_s: float | None, spent: Callable[[], None]
    ) -> None:
        self.compile_ns = 0
        result = job()
        if limit_s is not None and self.compile_ns > limit_s * 1e9:
            self._link.loop.call_later_ns(int(limit_s * 1e9), lambda: self._deliver(None, lambda _: spent()))
        self._link.loop.call_later_ns(self.compile_ns, lambda: self._deliver(result, done))

    def _deliver(self, result: T, done: Callable[[T], None]) -> None:
        hung_until_ns = self._link.far.hung_until_ns
        if self._server.stopped:
            return
        if hung_until_ns > self._link.loop.time_ns():
            self._link.loop.call_at_ns(hung_until_ns, lambda: self._deliver(result, done))
            return
        try:
            done(result)
        except TransportClosed:
            self._server.stop()


class SimGrammarWorker:
    """One life of the worker: a `GrammarConnection`."""

    def __init__(self, link: SimLink, vocab: int, mask_us: int) -> None:
        self._link = link
        self._mask_us = mask_us
        self._server = SimServer(link.loop, link.far, self._cost_ns)
        lane = SimLane(self._server, link)

        def compile_grammar(grammar: Grammar) -> Matcher:
            parts = grammar.text.split()
            lane.compile_ns = int(parts[2]) * 1_000_000 if len(parts) == 3 else 1_000_000
            return compile_toy(grammar, vocab)

        service = GrammarService(
            lambda reply: self._server.reply(encoder.encode(reply)), compile_grammar, lane, (vocab + 31) // 32
        )
        self._server.serve(lambda message: service.handle(command_decoder.decode(message)))
        self._server.reply(encoder.encode(Ready()))

    @property
    def transport(self) -> Transport:
        return self._link.near

    def kill(self) -> None:
        self._link.far.kill("the grammar worker ended with SIGKILL")

    def hang(self, duration_ns: int) -> None:
        self._link.far.hang(duration_ns)

    def close(self) -> None:
        self._link.near.close()
        self._server.stop()

    def _cost_ns(self, message: bytes) -> int:
        """Most masks are quick; one in eight takes ten times as long."""
        if isinstance(command_decoder.decode(message), Compile | Cancel | End):
            return 0
        rng = self._link.rng
        return int(self._mask_us * 1000 * rng.random() * (10 if rng.random() < 0.125 else 1))

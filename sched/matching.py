"""The scheduler's side of the grammar worker: which mask each request has, and what happens when none comes.

in     requests with a grammar, their ids as they are committed; the worker's masks
out    `on_mask` when a mask has come; `on_complete` and `on_broken` for a request that needs no id or can't get one
state  one `Matching` a request; what has been asked and not answered; the connection of this life of the worker
owner  the engine; `serve` is one of its stages
ready  a mask, for the output position that it names
end    `end` forgets a request's; a lost worker is started again and brought up to the ids that were committed

The worker is started when the first grammar comes. It can hang or die of a grammar. It says which ones it compiles, so
one of those is to blame if it ends meanwhile. Each is tried once more, alone, and refused from then on if the worker
dies again; one that takes too long, or too much of a core for its length, is refused at once. Where nothing is
compiled, whoever waits for a mask at two ends of it, fails. The others never notice more than a late mask.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from headrace.ops.transport import Transport, TransportClosed
from headrace.ops.wire import U32
from headrace.sched.grammar import (
    MAX_REPLAYED_IDS,
    Advance,
    BadGrammar,
    Begin,
    Broken,
    Cancel,
    Command,
    Compile,
    Compiled,
    Compiling,
    Complete,
    End,
    Grammar,
    Masks,
    Queued,
    Ready,
    Spent,
    Suspect,
    encoder,
    reply_decoder,
)
from headrace.sched.messages import Overloaded

log = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""A worker that owes an answer, or compiles a grammar, for so long is killed: what its library allows itself takes less
than a second."""
TIMER_SLACK_S: Final = 1e-3
"""uvloop's timers count whole milliseconds."""
QUEUE_S: Final = 15.0
"""A grammar whose compilation has not begun by then is refused as one too many: those before it are slow."""
MAX_COMPILES: Final = 64
"""Grammars that wait to be compiled; one more is refused."""
MAX_SUSPECTS: Final = 64
"""Grammars of which it is remembered that a worker ended while it compiled them; 128 KiB each, at most."""
_MAX_TRIES: Final = 2
"""Lives of the worker that may end while it owes the same answer, or compiles the same grammar."""

BrokenReason: TypeAlias = Literal["error", "invalid_grammar"]


class GrammarWorkerFailed(Exception):
    """The grammar could not be looked at, through no fault of its own; the message says why."""


class GrammarConnection(Protocol):
    """One life of the worker."""

    @property
    def transport(self) -> Transport:
        """Its command pipe."""

    def close(self) -> None:
        """End it and wait until it has ended. Harmless twice."""


ConnectGrammar: TypeAlias = Callable[[], Awaitable[GrammarConnection]]
"""Start a worker. Raises OSError."""


class Matching:
    """One request's grammar, and the mask for its next output if that has come."""

    __slots__ = ("_mask", "grammar", "ids", "stop_ids")

    def __init__(self, grammar: Grammar, stop_ids: tuple[int, ...]) -> None:
        self.grammar = grammar
        self.stop_ids = stop_ids
        self.ids = array("i")
        """Outputs that the matcher has been told."""
        self._mask: U32 | None = None

    @property
    def position(self) -> int:
        """Of the output that the next mask is for."""
        return len(self.ids)

    def mask(self, position: int) -> U32 | None:
        """The mask for an output, if it has come."""
        return self._mask if position == len(self.ids) else None

    def advance(self, token: int) -> None:
        self.ids.append(token)
        self._mask = None

    def take(self, mask: U32) -> None:
        """The mask for the next output."""
        self._mask = mask


class _Suspect(NamedTuple):
    """A grammar that workers ended of."""

    lives: int
    reason: str

    @property
    def is_guilty(self) -> bool:
        return self.lives >= _MAX_TRIES


class _Asked:
    """An answer that the worker owes at once: to a request (its handle), or to who asked for a compilation (-job).

    Who waits for a compilation is owed nothing meanwhile.
    """

    __slots__ = ("since_s", "tries")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.tries = 0


class Matchers:
    """All requests' grammars."""

    def __init__(
        self,
        connect: ConnectGrammar | None,
        on_mask: Callable[[int], None],
        on_complete: Callable[[int], None],
        on_broken: Callable[[int, BrokenReason, str], None],
    ) -> None:
        """Without `connect` every grammar is refused."""
        self.restarts = 0
        self._connect = connect
        self._on_mask, self._on_complete, self._on_broken = on_mask, on_complete, on_broken
        self._loop = asyncio.get_running_loop()
        self._matchings: dict[int, Matching] = {}
        self._compiles: dict[int, tuple[Grammar, asyncio.Future[str]]] = {}
        self._asked: dict[int, _Asked] = {}
        """In the order of asking, so that the first has waited longest."""
        self._compiling: dict[int, tuple[Grammar, float]] = {}
        """What the worker compiles, lane by lane, and since when."""
        self._suspects: OrderedDict[Grammar, _Suspect] = OrderedDict()
        self._jobs = 0
        self._wanted = asyncio.Event()
        self._transport: Transport | None = None
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._ready = self._ended = False
        self._deadline: asyncio.TimerHandle | None = None

    async def compile(self, grammar: Grammar) -> None:
        """Look at a grammar before a request with it is submitted. Raises BadGrammar, GrammarWorkerFailed, Overloaded.

        Takes 0.3 to 15 ms for schemas of 100 bytes to 90 kB, and a second for the first grammar of the server's life.
        """
        if self._ended:
            raise GrammarWorkerFailed("the engine has ended")
        if (suspect := self._suspects.get(grammar)) is not None and suspect.is_guilty:
            raise BadGrammar(suspect.reason)
        if len(self._compiles) >= MAX_COMPILES:
            raise Overloaded(f"{len(self._compiles)} grammars are waiting to be compiled; try again later", 1)
        self._jobs += 1
        job = self._jobs
        future: asyncio.Future[str] = self._loop.create_future()
        self._compiles[job] = grammar, future
        self._ask(-job, Compile(job, grammar))
        try:
            while not (await asyncio.wait([future], timeout=QUEUE_S))[0]:
                # Once it is compiled, `_overdue` says how long that may take.
                if all(compiled != grammar for compiled, _ in self._compiling.values()):
                    raise Overloaded(
                        f"the grammar's turn to be compiled did not come within {QUEUE_S:.0f} s; try again later", 5
                    )
            if error := future.result():
                raise BadGrammar(error)
        finally:
            del self._compiles[job]
            self._answered(-job)
            if not future.done():
                self._send(Cancel(job))

    def begin(self, request: int, grammar: Grammar, stop_ids: tuple[int, ...]) -> Matching:
        """A matcher for a new request; its first mask is asked for."""
        matching = self._matchings[request] = Matching(grammar, stop_ids)
        self._ask(request, Begin(request, grammar, stop_ids, b""))
        return matching

    def advance(self, requests: Sequence[int], ids: Sequence[int]) -> None:
        """These requests got an id each, and go on."""
        for request, token in zip(requests, ids):
            self._matchings[request].advance(token)
            self._note(request)
        self._send(Advance(list(requests), list(ids)))

    def end(self, request: int) -> None:
        """The request has ended; no effect if it had no grammar."""
        if self._matchings.pop(request, None) is not None:
            self._answered(request)
            self._send(End(request))

    async def serve(self) -> None:
        """One life of the worker after the other, from the first grammar on."""
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                reason, was_ready = await self._live()
                log.error("%s", reason)
                if not was_ready:
                    self._fail_all(reason)
                elif self._compiling:
                    self._suspect_all([grammar for grammar, _ in self._compiling.values()], reason)
                else:
                    self._blame(reason)
                self._compiling.clear()
                for asked in self._asked.values():
                    asked.since_s = self._loop.time()
                self.restarts += 1
                if self._matchings or any(not future.done() for _, future in self._compiles.values()):
                    self._wanted.set()
        finally:
            self._ended = True
            if self._deadline is not None:
                self._deadline.cancel()
            for _, future in self._compiles.values():
                if not future.done():
                    future.set_exception(GrammarWorkerFailed("the engine has ended"))

    # ------------------------------------------------------------------------------------------------------------

    async def _live(self) -> tuple[str, bool]:
        """Connect, serve until the worker is lost; why, and whether it had been ready. It has ended then."""
        self._lost = self._loop.create_future()
        if self._connect is None:
            return "this engine has no grammar worker", False
        try:
            connection = await self._connect()
        except OSError as error:
            return f"the grammar worker can't be started: {error}", False
        try:
            self._transport = connection.transport
            self._transport.open(self._reply, self._lose)
            self._begin_all()
            self._wanted.clear()
            reason = await self._lost
            return reason, self._ready
        finally:
            self._transport, self._ready = None, False
            connection.close()

    def _begin_all(self) -> None:
        """Tell a new worker what the last one knew: requests that run first, grammars that may end it last."""
        compiles = [(job, grammar) for job, (grammar, future) in self._compiles.items() if not future.done()]
        wanted = {grammar for _, grammar in compiles}.union(matching.grammar for matching in self._matchings.values())
        for grammar in self._suspects:
            if grammar in wanted:
                self._send(Suspect(grammar))
        for request, matching in list(self._matchings.items()):
            if len(matching.ids) > MAX_REPLAYED_IDS:
                message = f"the grammar worker was lost after {len(matching.ids)} outputs, too many to redo"
                self._break(request, "error", message)
            else:
                ids = matching.ids.tobytes()
                self._ask(request, Begin(request, matching.grammar, matching.stop_ids, ids))
        for job, grammar in sorted(compiles, key=lambda compile: compile[1] in self._suspects):
            self._ask(-job, Compile(job, grammar))

    def _fail_all(self, reason: str) -> None:
        """The worker can't even start."""
        for job in self._compiles:
            self._fail(-job, reason)
        for request in list(self._matchings):
            self._fail(request, reason)

    def _suspect_all(self, grammars: list[Grammar], reason: str) -> None:
        """The worker ended while it compiled these. Each has another try, alone; who was alone then is guilty."""
        for grammar in grammars:
            known = self._suspects.pop(grammar, _Suspect(0, ""))
            lives = known.lives + 1 if len(grammars) == 1 else max(known.lives, 1)
            suspect = _Suspect(lives, known.reason or f"compiling it ended the grammar worker: {reason}")
            self._suspects[grammar] = suspect
            if len(self._suspects) > MAX_SUSPECTS:
                self._suspects.popitem(last=False)
            if suspect.is_guilty:
                self._refuse(grammar, suspect)

    def _refuse(self, grammar: Grammar, suspect: _Suspect) -> None:
        """Nobody who waits for this grammar, or runs with it, gets it."""
        for job, (waiting, future) in self._compiles.items():
            if waiting == grammar and not future.done():
                self._answered(-job)
                future.set_result(suspect.reason)
        for request, matching in list(self._matchings.items()):
            if matching.grammar == grammar:
                self._break(request, "invalid_grammar", suspect.reason)

    def _blame(self, reason: str) -> None:
        """Fail who has waited for the worker too often when it ended."""
        for name, asked in list(self._asked.items()):
            asked.tries += 1
            if asked.tries >= _MAX_TRIES:
                self._fail(name, reason)

    def _fail(self, name: int, reason: str) -> None:
        self._answered(name)
        if name > 0:
            self._break(name, "error", reason)
        elif not (future := self._compiles[-name][1]).done():
            future.set_exception(GrammarWorkerFailed(reason))

    def _ask(self, name: int, command: Command) -> None:
        self._note(name)
        self._send(command)

    def _note(self, name: int) -> None:
        """An answer is owed from now on."""
        self._asked.setdefault(name, _Asked(self._loop.time()))
        self._set_deadline()
        if self._transport is None:
            self._wanted.set()

    def _answered(self, name: int) -> None:
        self._asked.pop(name, None)

    def _due_s(self) -> float:
        """When the oldest answer will have had its time; infinity if nothing is owed."""
        first = next(iter(self._asked.values()), None)
        begun_s = [since_s for _, since_s in self._compiling.values()]
        return min(math.inf if first is None else first.since_s, *begun_s, math.inf) + ANSWER_S

    def _set_deadline(self) -> None:
        if self._deadline is None and (due_s := self._due_s()) < math.inf:
            self._deadline = self._loop.call_at(due_s, self._overdue)

    def _overdue(self) -> None:
        """The oldest answer has had its time, or had when the timer was set."""
        self._deadline = None
        # A timer may ring a little early: set again for the rest, it would ring at once, and so on for as long as the
        # clock stands still.
        now_s = self._loop.time() + TIMER_SLACK_S
        if self._due_s() > now_s:
            self._set_deadline()
            return
        slow = {lane: begun for lane, begun in self._compiling.items() if begun[1] + ANSWER_S <= now_s}
        if slow:
            self._convict(next(iter(slow)), f"took longer than {ANSWER_S:.0f} s to compile")
        else:
            next(iter(self._asked.values())).tries = _MAX_TRIES
            self._compiling.clear()  # they are not to blame
            self._lose(f"the grammar worker did not answer within {ANSWER_S:.0f} s: the grammar may be too costly")
        self._deadline = self._loop.call_later(ANSWER_S, self._overdue)

    def _convict(self, lane: int, how: str) -> None:
        """The grammar that a lane compiles must be stopped, and with it the worker: it is refused from now on."""
        grammar, since_s = self._compiling[lane]
        self._suspects[grammar] = _Suspect(_MAX_TRIES - 1, f"it {how}")
        self._compiling = {lane: (grammar, since_s)}  # the others are not to blame
        self._lose(f"the grammar worker is ended: a grammar {how}")

    def _reply(self, message: bytes) -> None:
        """One reply. A fault in handling it is the stage's, not only this callback's."""
        if self._lost.done():
            return  # who is to blame has been decided
        try:
            match reply_decoder.decode(message):
                case Ready():
                    self._ready = True
                case Queued(name=name):
                    self._answered(name)
                case Compiling(lane=lane, grammar=grammar):
                    if (before := self._compiling.pop(lane, None)) is not None:
                        self._suspects.pop(before[0], None)
                    if grammar is not None:
                        self._compiling[lane] = grammar, self._loop.time()
                    self._set_deadline()
                case Spent(lane=lane, spent_s=spent_s) if lane in self._compiling:
                    self._convict(lane, f"took more than {spent_s:g} s of a core to compile, too much for its length")
                case Compiled() as compiled:
                    if (entry := self._compiles.get(compiled.job)) is not None and not entry[1].done():
                        entry[1].set_result(compiled.error)
                case Masks() as masks:
                    self._take(masks)
                case Complete() as complete:
                    if self._is_next(complete.request, complete.position):
                        self._answered(complete.request)
                        self._on_complete(complete.request)
                case Broken() as broken:
                    if broken.request in self._matchings:
                        reason: BrokenReason = "invalid_grammar" if broken.by_grammar else "error"
                        self._break(broken.request, reason, broken.message)
        except Exception as error:
            if not self._lost.done():
                self._lost.set_exception(error)

    def _take(self, masks: Masks) -> None:
        bits = np.frombuffer(masks.bits, np.uint32).reshape(len(masks.requests), -1)
        for row, (request, position) in enumerate(zip(masks.requests, masks.positions)):
            if self._is_next(request, position):
                self._answered(request)
                self._matchings[request].take(bits[row])
                self._on_mask(request)

    def _is_next(self, request: int, position: int) -> bool:
        """Whether a request waits for this output's mask: a worker that was brought up again may repeat what the first
        one had said."""
        matching = self._matchings.get(request)
        return matching is not None and matching.position == position

    def _break(self, request: int, reason: BrokenReason, message: str) -> None:
        self._answered(request)
        self._on_broken(request, reason, message)

    def _send(self, command: Command) -> None:
        """To a worker that is not there nothing is said: the next one is told everything."""
        if self._transport is not None:
            try:
                self._transport.send(encoder.encode(command))
            except TransportClosed:
                self._lose("the grammar worker closed its command pipe")

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)

"""The grammar worker as a state machine: grammars compiled once, a matcher per request, a mask per id.

in     commands of `sched.grammar`, in order; the results of compilations
out    replies
state  compiled grammars (bounded, least recently used), matchers of requests, compilations that wait
owner  whoever calls `handle`, from one thread; a lane runs compilations and nothing else
ready  `Compiled` and `Masks` say what is
end    with the process
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar

import numpy as np

from headrace.ops.wire import U32
from headrace.sched.grammar import (
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
    Matcher,
    Queued,
    Reply,
    Spent,
    Suspect,
)

T = TypeVar("T")

MAX_COMPILED: Final = 128
"""Grammars kept: 0.1 to 20 MB each, by what their lexers have met."""
SHORT_BYTES: Final = 1 << 14
"""Of a grammar's text: one of so many that means no harm takes a second at most, one of 128 KiB may take 35."""
SHORT_S: Final = 3.0
"""Of a core, for a short grammar. Some take for ever, whatever the library's limits: `allOf` of twenty patterns, or of
multiples of eight primes."""
LANES: Final = 2
"""Compilations side by side."""
_SHORT_LANE: Final = 1
"""It takes short grammars only, so that they never wait for a long one."""
MASKS_BYTES: Final = 1 << 17
"""Of masks in one message. A message takes the scheduler 7 µs, whatever is in it, and a mask of 6 kB 1 µs."""


class Lane(Protocol):
    """Where compilations run, `LANES` at a time."""

    def submit(
        self, job: Callable[[], T], done: Callable[[T], None], limit_s: float | None, spent: Callable[[], None]
    ) -> None:
        """Run the job; call `done` with its result. If it takes more of a core than `limit_s`, call `spent`; that does
        not stop it."""


class _Live:
    """One request's matcher, None while its grammar is compiled, and the ids that it must take then."""

    __slots__ = ("matcher", "position", "stop_ids", "untold")

    def __init__(self, stop_ids: frozenset[int], untold: list[int]) -> None:
        self.stop_ids = stop_ids
        self.untold = untold
        self.position = 0
        self.matcher: Matcher | None = None


class GrammarService:
    """All grammars and matchers of one worker."""

    def __init__(
        self, reply: Callable[[Reply], None], compile_grammar: Callable[[Grammar], Matcher], lane: Lane, mask_words: int
    ) -> None:
        """`compile_grammar` raises BadGrammar."""
        self._reply = reply
        self._compile_grammar = compile_grammar
        self._lane = lane
        self._bits = np.zeros((max(1, MASKS_BYTES // (4 * mask_words)), mask_words), np.uint32)
        self._compiled: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._waiting: dict[Grammar, dict[int, Callable[[Matcher | BadGrammar], None]]] = {}
        """Who waits for which grammar: requests, and −job for jobs."""
        self._compiling: dict[int, Grammar] = {}
        """What each lane has; nobody need wait for it any more."""
        self._suspects: set[Grammar] = set()
        """To be compiled beside no other."""
        self._live: dict[int, _Live] = {}

    def handle(self, command: Command) -> None:
        """Act on one command."""
        match command:
            case Compile(job=job):
                self._with(
                    command.grammar,
                    -job,
                    lambda result: self._reply(Compiled(job, str(result) if isinstance(result, BadGrammar) else "")),
                )
            case Begin(request=request):
                ids = np.frombuffer(command.ids, np.int32).tolist()
                begun = self._live[request] = _Live(frozenset(command.stop_ids), ids)
                self._with(command.grammar, request, lambda result: self._begin(request, begun, result))
            case Advance():
                live_of = {request: self._live[request] for request in command.requests if request in self._live}
                for request, token in zip(command.requests, command.ids):
                    if request in live_of:
                        live_of[request].untold.append(token)
                self._advance(live_of)
            case Suspect():
                self._suspects.add(command.grammar)
            case Cancel():
                self._withdraw(-command.job)
            case End():
                self._live.pop(command.request, None)
                self._withdraw(command.request)

    def _with(self, grammar: Grammar, name: int, use: Callable[[Matcher | BadGrammar], None]) -> None:
        """Call `use` with the compiled grammar, now or when it is there."""
        if (compiled := self._compiled.get(grammar)) is not None:
            self._compiled.move_to_end(grammar)
            use(compiled)
        else:
            self._waiting.setdefault(grammar, {})[name] = use
            self._reply(Queued(name))
            self._compile_next()

    def _withdraw(self, name: int) -> None:
        """Its answer is not wanted any more; a grammar that nobody waits for is not compiled."""
        for grammar, waiting in list(self._waiting.items()):
            if waiting.pop(name, None) is not None and not waiting and grammar not in self._compiling.values():
                del self._waiting[grammar]

    def _compile_next(self) -> None:
        """Give every lane that is free what it may take."""
        for lane in range(LANES):
            if lane not in self._compiling and (grammar := self._next_for(lane)) is not None:
                self._compile(lane, grammar)

    def _next_for(self, lane: int) -> Grammar | None:
        """Requests first: theirs were compiled once before, and are known to do no harm. Then short ones, but for the
        lane that long ones have to themselves; long ones by their length, short ones as they came: whoever sends many
        that take their three seconds is not let by others."""
        busy = self._compiling.values()
        if any(grammar in self._suspects for grammar in busy):
            return None
        waiting = [grammar for grammar in self._waiting if grammar not in busy and grammar not in self._suspects]
        if lane == _SHORT_LANE:
            waiting = [grammar for grammar in waiting if len(grammar.text) <= SHORT_BYTES]
        elif not waiting and not busy:
            waiting = [grammar for grammar in self._waiting if grammar in self._suspects]
        return min(waiting, key=lambda grammar: self._turn(lane, grammar), default=None)

    def _turn(self, lane: int, grammar: Grammar) -> tuple[bool, bool, int]:
        is_short = len(grammar.text) <= SHORT_BYTES
        length = 0 if is_short else len(grammar.text)
        return max(self._waiting[grammar]) < 0, is_short and lane != _SHORT_LANE, length

    def _compile(self, lane: int, grammar: Grammar) -> None:
        self._compiling[lane] = grammar
        self._reply(Compiling(lane, grammar))

        def compiled() -> Matcher | BadGrammar:
            try:
                return self._checked(grammar)
            except BadGrammar as error:
                return error

        limit_s = SHORT_S if len(grammar.text) <= SHORT_BYTES else None
        self._lane.submit(
            compiled,
            lambda result: self._done(lane, grammar, result),
            limit_s,
            lambda: self._reply(Spent(lane, SHORT_S)),
        )

    def _checked(self, grammar: Grammar) -> Matcher:
        """Compiled, and its first mask made, which builds most of what a lexer needs (70 ms). Raises BadGrammar.

        Some grammars compile and are too much at their first id, such as `((a{1000}){1000}){1000}`, so one is taken.
        """
        matcher = self._compile_grammar(grammar)
        trial, bits = matcher.copy(), np.zeros_like(self._bits[0])
        if trial.fill(bits, frozenset()):
            raise BadGrammar("nothing but an empty text matches it")
        word = int(np.flatnonzero(bits)[0])
        token = 32 * word + (int(bits[word]) & -int(bits[word])).bit_length() - 1
        if not trial.accept(token):
            raise BadGrammar("it does not take what it allows")
        trial.fill(bits, frozenset())
        return matcher

    def _done(self, lane: int, grammar: Grammar, result: Matcher | BadGrammar) -> None:
        if not isinstance(result, BadGrammar):
            self._compiled[grammar] = result
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        for use in self._waiting.pop(grammar).values():
            use(result)
        del self._compiling[lane]
        self._suspects.discard(grammar)
        self._compile_next()
        if lane not in self._compiling:
            self._reply(Compiling(lane, None))

    def _begin(self, request: int, live: _Live, result: Matcher | BadGrammar) -> None:
        if self._live.get(request) is not live:
            return  # it has ended meanwhile
        if isinstance(result, BadGrammar):
            self._break(request, str(result), by_grammar=True)
        else:
            live.matcher = result.copy()
            self._advance({request: live})

    def _advance(self, live_of: Mapping[int, _Live]) -> None:
        """Let requests take the ids that have come, and say what may come next, in as few messages as may be."""
        requests: list[int] = []
        positions: list[int] = []
        for request, live in live_of.items():
            if not self._fill(request, live, self._bits[len(requests)]):
                continue
            requests.append(request)
            positions.append(live.position)
            if len(requests) == len(self._bits):
                self._tell(requests, positions)
        if requests:
            self._tell(requests, positions)

    def _tell(self, requests: list[int], positions: list[int]) -> None:
        self._reply(Masks(requests[:], positions[:], self._bits[: len(requests)].tobytes()))
        requests.clear()
        positions.clear()

    def _fill(self, request: int, live: _Live, bits: U32) -> bool:
        """One request's next mask; False where it has none, which is told."""
        if live.matcher is None:
            self._reply(Queued(request))
            return False
        try:
            for token in live.untold:
                if not live.matcher.accept(token):
                    message = f"the grammar does not allow the id {token} as output {live.position}"
                    self._break(request, message, by_grammar=False)
                    return False
                live.position += 1
            live.untold.clear()
            is_complete = live.matcher.fill(bits, live.stop_ids)
        except BadGrammar as error:
            self._break(request, f"at output {live.position}: {error}", by_grammar=True)
            return False
        if is_complete:
            self._reply(Complete(request, live.position))
        return not is_complete

    def _break(self, request: int, message: str, by_grammar: bool) -> None:
        del self._live[request]
        self._reply(Broken(request, message, by_grammar))

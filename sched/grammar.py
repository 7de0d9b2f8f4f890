"""Grammars as the scheduler sees them: a text that somebody else can read, and a matcher that says which ids may come.

The scheduler knows no grammar library. Matchers live in a process of their own (`server/grammar_worker.py`), because
one mask may take 70 ms where a grammar is unkind, and a step must not wait for that; in simulation they are toys. Both
sit behind a `Transport` and speak the messages below, in msgpack.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeAlias

import msgspec

from headrace.ops.wire import U32

MAX_GRAMMAR_BYTES: Final = 1 << 17
"""Of a grammar's text in UTF-8."""
MAX_REPLAYED_IDS: Final = 1 << 17
"""Outputs that a matcher can be brought up to again when its process was lost; with more of them the request fails."""
MAX_MESSAGE_BYTES: Final = 1 << 20


class Grammar(msgspec.Struct, frozen=True):
    """What an output must match. The kinds are the worker's: "json_object", "json_schema", "regex", "ebnf"."""

    kind: str
    text: str = ""


class BadGrammar(ValueError):
    """The grammar can't be used; the message says why."""


class Matcher(Protocol):
    """How far one output has come in its grammar."""

    def copy(self) -> Matcher:
        """Another one at the same place."""

    def accept(self, token: int) -> bool:
        """Go on by one id; False if the grammar does not allow it, and then the matcher is of no more use. Raises
        BadGrammar where going on is more work than is allowed."""

    def fill(self, bits: U32, stop_ids: frozenset[int]) -> bool:
        """Say in `bits` (uint32 [mask words], bit i of word w is id 32·w + i) which ids may come next; True, and
        `bits` means nothing, if none but an end of text may: the output is complete.

        Of the ids that end a text only those in `stop_ids` are allowed. Raises BadGrammar where nothing is allowed.
        """


# ---------------------------------------------------------------------------------------------------------------
# Commands: scheduler → grammar worker. A matcher is named by its request's handle.


class Compile(msgspec.Struct, tag="compile", frozen=True):
    """Is this a grammar? Answered by `Compiled`; it is kept for the `Begin`s that follow."""

    job: int
    grammar: Grammar


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """A matcher for a request, after these outputs (int32); answered as an `Advance` is."""

    request: int
    grammar: Grammar
    stop_ids: tuple[int, ...]
    ids: bytes


class Advance(msgspec.Struct, tag="advance", frozen=True):
    """These requests got one id each; answered for each by a place in `Masks`, by `Complete` or `Broken`."""

    requests: list[int]
    ids: list[int]


class Suspect(msgspec.Struct, tag="suspect", frozen=True):
    """A worker has ended while it compiled this grammar, and maybe another: compile it beside no other."""

    grammar: Grammar


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Nobody waits for this compilation any more; it is left out if it has not begun."""

    job: int


class End(msgspec.Struct, tag="end", frozen=True):
    """Forget a matcher."""

    request: int


Command: TypeAlias = Compile | Begin | Advance | Suspect | Cancel | End

# ---------------------------------------------------------------------------------------------------------------
# Replies


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The vocabulary has been read. Commands may be sent before."""


class Queued(msgspec.Struct, tag="queued", frozen=True):
    """A `Begin` or `Compile` was read, and its answer comes when its grammar has been compiled."""

    name: int
    """A request, or −job."""


class Compiling(msgspec.Struct, tag="compiling", frozen=True):
    """What a lane compiles from now on. All who waited for the one before have their answers. If the worker ends before
    the lane says the next, this grammar may be the one that ended it."""

    lane: int
    grammar: Grammar | None
    """None: nothing."""


class Spent(msgspec.Struct, tag="spent", frozen=True):
    """A lane's grammar has taken `spent_s` of a core, all that one of its length may: only the end of this worker ends
    it."""

    lane: int
    spent_s: float


class Compiled(msgspec.Struct, tag="compiled", frozen=True):
    job: int
    error: str
    """"" where it is a grammar."""


class Masks(msgspec.Struct, tag="masks", frozen=True):
    """What requests may draw as their outputs `positions`."""

    requests: list[int]
    positions: list[int]
    bits: bytes
    """uint32 [requests, mask words]"""


class Complete(msgspec.Struct, tag="complete", frozen=True):
    """Nothing: a request's output is complete without another id."""

    request: int
    position: int


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """This request can't go on."""

    request: int
    message: str
    by_grammar: bool
    """Its grammar can't be used, or asks for more work than is allowed; otherwise the fault is not the client's."""


Reply: TypeAlias = Ready | Queued | Compiling | Compiled | Masks | Complete | Broken | Spent

command_decoder: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
reply_decoder: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)
encoder: Final = msgspec.msgpack.Encoder()

"""One choice's ids on their way to text: detokenized, searched for stop strings, scored where logprobs were asked for.

in     the ids of a step, with their logprobs; the reason why the engine ended the choice
out    a `Piece`: text that can be sent, the scores of its tokens, and the stop string that was found
state  the detokenizer's and the matcher's; characters so far
owner  the emit stage
ready  at once
end    with its choice
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from headrace.server.detokenizer import Detokenizer
from headrace.server.stop_strings import StopMatch, StopMatcher, StopStrings
from headrace.server.streams import TokenScore
from headrace.server.tokenizer import Tokenizer

LOWEST_LOGPROB: Final = -9999.0
"""JSON has no -inf."""


class OutputOptions(msgspec.Struct, frozen=True):
    """How the ids of a choice become text."""

    stops: StopStrings | None = None
    """Compiled once for all choices of a request; None without stop strings."""
    keep_stop: bool = False
    """The stop string, or the stop id's text, stays in the output."""
    skip_special_tokens: bool = True
    min_tokens: int = 0
    logprobs: int = -1
    """-1: none; k: each id's and its k best alternatives'."""
    discard: bool = False
    """The engine draws at least one id; a request for none (it scores its prompt) drops it."""


class Scores(NamedTuple):
    """Logprob arrays of a step as lists, along the ids of one choice."""

    logprobs: Sequence[float]
    top_ids: Sequence[Sequence[int]]
    top_logprobs: Sequence[Sequence[float]]


class Piece(NamedTuple):
    text: str
    n_ids: int
    """Ids that count: fewer than were pushed when a stop string was complete before the last of them."""
    scores: list[TokenScore]
    match: StopMatch | None


class OutputText:
    """A choice's text in the making."""

    __slots__ = ("_chars", "_detokenizer", "_matcher", "_options")

    def __init__(self, tokenizer: Tokenizer, options: OutputOptions) -> None:
        self._options = options
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens)
        self._matcher = None if options.stops is None else StopMatcher(options.stops, options.min_tokens)
        self._chars = 0

    def push(self, ids: list[int], scores: Scores | None, stop_id_last: bool) -> Piece:
        """Take a step's ids. `stop_id_last`: the last one ended the request, and is no text unless stops are kept."""
        options, matcher = self._options, self._matcher
        hidden = len(ids) - 1 if stop_id_last and not options.keep_stop else len(ids)
        if matcher is None and options.logprobs < 0:
            return Piece(self._detokenizer.push(ids[:hidden]), len(ids), [], None)
        texts: list[str] = []
        scored: list[TokenScore] = []
        for index, id in enumerate(ids):
            if options.logprobs >= 0:
                assert scores is not None, "a step carries logprobs when one of its requests asked for them"
                scored.append(self._score(id, scores, index))
            text = self._detokenizer.push((id,)) if index < hidden else ""
            self._chars += len(text)
            if matcher is None:
                texts.append(text)
                continue
            texts.append(matcher.push(text))
            if matcher.matched is not None:
                return Piece("".join(texts), index + 1, scored, matcher.matched)
        return Piece("".join(texts), len(ids), scored, None)

    def finish(self) -> Piece:
        """No more ids come: what was held back. It may still complete a stop string."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return Piece(rest, 0, [], None)
        return Piece(self._matcher.finish(rest), 0, [], self._matcher.matched)

    def _score(self, id: int, scores: Scores, index: int) -> TokenScore:
        k = self._options.logprobs
        return TokenScore(
            id,
            finite(scores.logprobs[index]),
            list(scores.top_ids[index][:k]) if k else [],
            [finite(value) for value in scores.top_logprobs[index][:k]] if k else [],
            self._chars,
        )


def finite(logprob: float) -> float:
    """The number that JSON can hold."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB

"""What a request must get, compared with what it gets, id by id.

in     a submission; the ids, logprobs and end that the engine gave
out    AssertionError with the first difference
state  per request: what it received, and the oracle's contents so far
owner  the world that submitted it
ready  an id is judged when it comes
end    with the world
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from headrace.ops.wire import U32
from headrace.sched.executors.oracle import Context, draw, prompt_logprob_at
from headrace.sched.messages import Finished, PromptLogprobs, Started, Submit
from headrace.server.sim.grammar import compile_toy


class Watched:
    """One request, as its client sees it."""

    def __init__(self, submit: Submit, vocab: int, began_s: float, windows: Sequence[int] = ()) -> None:
        """`windows`: of the device's window groups."""
        self.submit = submit
        self.ids: list[int] = []
        self.began_s = self.moved_s = began_s
        """When it was submitted, and when it last got something."""
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.ended = asyncio.Event()
        self.concluded = False
        """A stop string was found in it."""
        self._vocab = vocab
        self._seed = submit.sampling.seed & 0xFFFFFFFFFFFFFFFF
        self._windows = windows
        self._context = Context(windows)
        self._context.extend(submit.prompt_ids.tolist())
        grammar = submit.sampling.grammar
        self._matcher = None if grammar is None else compile_toy(grammar, vocab)
        self._mask: U32 = np.zeros((vocab + 31) // 32, np.uint32)

    def take(self, ids: Sequence[int]) -> None:
        """Ids have come: each must be the one that a request alone in the world would have got."""
        sampling, got = self.submit.sampling, self.ids
        assert self.finished is None, f"request {self.submit.request} got ids after its end"
        for token in ids:
            position = len(got)
            banned = sampling.stop_ids if position < sampling.min_tokens else ()
            seen = self._context.seen(len(self._context))
            want = draw(seen, self._seed, position, self._vocab, banned, self._next_mask())
            assert token == want, (
                f"request {self.submit.request} got {token} at output {position}, alone it gets {want}: it has read "
                f"other KV than its own {len(self._context)} tokens'"
            )
            assert position < sampling.max_tokens, f"request {self.submit.request} got more than its max_tokens"
            assert not got or got[-1] not in sampling.stop_ids or position - 1 < sampling.min_tokens, "ids after a stop"
            got.append(token)
            self._context.extend((token,))
            if self._matcher is not None and token not in sampling.stop_ids:
                assert self._matcher.accept(token), "the matcher does not take what its mask allows"

    def end(self, finished: Finished) -> None:
        """It has ended: once, for a reason that its ids bear out."""
        assert self.finished is None, f"request {self.submit.request} ended twice"
        self.finished = finished
        sampling, got = self.submit.sampling, self.ids
        assert 0 <= finished.n_tokens <= len(got)
        if finished.reason == "length":
            assert len(got) == sampling.max_tokens == finished.n_tokens
        elif finished.matched_stop_id >= 0:
            assert got[-1] == finished.matched_stop_id and finished.matched_stop_id in sampling.stop_ids
        elif finished.reason == "stop" and not self.concluded:
            complete = self._matcher is not None and self._matcher.fill(self._mask, frozenset(sampling.stop_ids))
            assert complete and finished.n_tokens == len(got), "it stopped, and nothing said so"
        if sampling.prompt_logprobs >= 0 and finished.reason in ("length", "stop"):
            self._judge_prompt_logprobs()
        self.ended.set()

    def _next_mask(self) -> U32 | None:
        """Ids that the grammar allows next; None without one."""
        if self._matcher is None:
            return None
        complete = self._matcher.fill(self._mask, frozenset(self.submit.sampling.stop_ids))
        assert not complete, f"request {self.submit.request} got ids after its grammar was complete"
        return self._mask

    def _judge_prompt_logprobs(self) -> None:
        prompt, first = self.submit.prompt_ids.tolist(), self.submit.sampling.prompt_logprobs_from
        got = {part.start + i: float(value) for part in self.prompt_logprobs for i, value in enumerate(part.logprobs)}
        wanted = range(first, len(prompt))
        assert got == {position: prompt_logprob_at(prompt, position, self._windows) for position in wanted}

"""The emit stage: one `StepDeltas` a step becomes text in each request's stream.

The engine calls `sink` after a step and goes on to collect and launch; the work happens later, in slices of at most a
millisecond, so that replies of the device and new requests are never kept waiting by text.

in     `StepDeltas`, in order; the choices to emit for
out    deltas and ends in `ChoiceStream`s; `conclude` at a stop string, `abort` for a reader that is too slow
state  steps not yet emitted; the output text of every running choice
owner  itself; `open`, `forget` and `fail_all` are called by the request's handler, on the loop
ready  a step's text is in its streams some slices after the step
end    a choice is forgotten when it has ended, or when its handler leaves
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from headrace.sched.messages import Finished, FinishReason, StepDeltas
from headrace.server.engine_api import EngineApi
from headrace.server.metrics import Metrics
from headrace.server.output_text import OutputOptions, OutputText, Piece, Scores
from headrace.server.streams import ChoiceStream, EndReason, Finish
from headrace.server.tokenizer import Tokenizer

SLICE_S: Final = 0.001
CHOICES_PER_SLICE: Final = 32
"""Each may wake a reader, which takes some 25 µs in the loop's next turn: with the slice itself about 2 ms."""
MAX_BACKLOG_STEPS: Final = 64
"""Beyond this the oldest step is emitted within `sink`: text may hold the loop then, but memory stays bounded."""


class _Output:
    """One running choice."""

    __slots__ = ("arrived_s", "discard", "last_s", "logprobs", "n_tokens", "stream", "text")

    def __init__(self, stream: ChoiceStream, text: OutputText, options: OutputOptions, arrived_s: float) -> None:
        self.stream = stream
        self.text = text
        self.logprobs = options.logprobs >= 0
        self.discard = options.discard
        self.n_tokens = 0
        self.arrived_s = arrived_s
        self.last_s: float | None = None


class _Step:
    """A step that is being emitted: its arrays as lists, and how far it is."""

    __slots__ = ("at", "begun", "deltas", "finished", "ids", "offsets", "requests")

    def __init__(self, deltas: StepDeltas) -> None:
        self.deltas = deltas
        self.requests: list[int] = deltas.requests.tolist()
        self.offsets: list[int] = deltas.offsets.tolist()
        self.ids: list[int] = deltas.ids.tolist()
        self.finished = {finished.request: finished for finished in deltas.finished}
        self.begun = False
        self.at = 0

    def scores(self, low: int, high: int) -> Scores:
        deltas = self.deltas
        assert deltas.logprobs is not None and deltas.top_ids is not None and deltas.top_logprobs is not None
        return Scores(
            deltas.logprobs[low:high].tolist(),
            deltas.top_ids[low:high].tolist(),
            deltas.top_logprobs[low:high].tolist(),
        )


class Emitter:
    """Turns steps into text; one for the server."""

    def __init__(self, engine: EngineApi, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._outputs: dict[int, _Output] = {}
        self._steps: deque[_Step] = deque()
        self._scheduled = False

    @property
    def open_choices(self) -> int:
        return len(self._outputs)

    def now(self) -> float:
        """The clock of `arrived_s`."""
        return self._clock()

    def open(
        self, request: int, stream: ChoiceStream, tokenizer: Tokenizer, options: OutputOptions, arrived_s: float
    ) -> None:
        """Emit for a request from now on; before it is submitted."""
        assert request not in self._outputs, "handles are used once"
        self._outputs[request] = _Output(stream, OutputText(tokenizer, options), options, arrived_s)

    def is_open(self, request: int) -> bool:
        return request in self._outputs

    def forget(self, request: int) -> None:
        """What comes for this request is dropped."""
        self._outputs.pop(request, None)

    def fail(self, request: int, reason: EndReason, message: str) -> None:
        """End a choice from the server's side; what it has got so far still reaches its reader."""
        output = self._outputs.pop(request, None)
        if output is not None:
            self._end(output, Finish(reason, output.n_tokens, message))

    def fail_all(self, reason: FinishReason, message: str) -> None:
        """The engine is gone, or the server: every choice ends."""
        for request in list(self._outputs):
            self.fail(request, reason, message)

    def sink(self, deltas: StepDeltas) -> None:
        """Take note of a step; called by the engine."""
        self._steps.append(_Step(deltas))
        if len(self._steps) > MAX_BACKLOG_STEPS:
            self._emit_first(float("inf"), 1 << 30)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._slice)

    def _slice(self) -> None:
        deadline_s, choices = self._clock() + SLICE_S, CHOICES_PER_SLICE
        while self._steps:
            choices = self._emit_first(deadline_s, choices)
            if choices == 0:
                asyncio.get_running_loop().call_soon(self._slice)
                return
        self._scheduled = False

    def _emit_first(self, deadline_s: float, choices: int) -> int:
        """Emit from the oldest step; the choices that may still be taken in this slice, 0 if it is over."""
        step = self._steps[0]
        if not step.begun:
            step.begun = True
            self._take_starts(step.deltas)
        while step.at < len(step.requests):
            if choices == 0 or self._clock() >= deadline_s:
                return 0
            request, low, high = step.requests[step.at], step.offsets[step.at], step.offsets[step.at + 1]
            step.at += 1
            output = self._outputs.get(request)
            if output is not None:
                choices -= 1
                self._emit(request, output, step, low, high)
        for request, finished in step.finished.items():
            # Ends that came without ids; those with ids were popped on the way.
            output = self._outputs.get(request)
            if output is not None:
                self._finish(request, output, finished)
        self._steps.popleft()
        return choices

    def _take_starts(self, deltas: StepDeltas) -> None:
        for started in deltas.started:
            output = self._outputs.get(started.request)
            if output is not None:
                output.stream.started = started
                self._metrics.queued(started.queue_ms / 1000)
        for prompt in deltas.prompt_logprobs:
            output = self._outputs.get(prompt.request)
            if output is not None:
                output.stream.prompt_logprobs.append(prompt)

    def _emit(self, request: int, output: _Output, step: _Step, low: int, high: int) -> None:
        finished = step.finished.get(request)
        if high > low and not output.discard:
            self._observe(output, high - low)
            scores = step.scores(low, high) if output.logprobs else None
            ended_by_id = finished is not None and finished.matched_stop_id >= 0
            ids = step.ids[low:high]
            piece = output.text.push(ids, scores, ended_by_id)
            output.n_tokens += piece.n_ids
            if not self._put(request, output, piece, ids[: piece.n_ids]):
                return
            if piece.match is not None:
                self._conclude(request, output, piece, finished)
                return
        if finished is not None:
            self._finish(request, output, finished)

    def _put(self, request: int, output: _Output, piece: Piece, ids: list[int]) -> bool:
        if output.stream.put(piece.text, ids, piece.scores, output.n_tokens):
            return True
        self._metrics.slow_reader()
        self._engine.abort(request)
        self.fail(request, "error", "The client read too slowly: more output was waiting than the server keeps.")
        return False

    def _conclude(self, request: int, output: _Output, piece: Piece, finished: Finished | None) -> None:
        assert piece.match is not None
        del self._outputs[request]
        if finished is None:
            self._engine.conclude(request, output.n_tokens)
        retractions = 0 if finished is None else finished.retractions
        self._end(output, Finish("stop", output.n_tokens, matched=piece.match.stop, retractions=retractions))

    def _finish(self, request: int, output: _Output, finished: Finished) -> None:
        """The engine ended the request: the last text, then the reason."""
        rest = output.text.finish()
        if rest.text and not self._put(request, output, rest, []):
            return
        del self._outputs[request]
        if rest.match is not None:
            # A stop string that only the last, incomplete character completed.
            self._end(output, Finish("stop", output.n_tokens, matched=rest.match.stop))
            return
        n_tokens = 0 if output.discard else finished.n_tokens
        reason = "length" if output.discard and finished.reason == "stop" else finished.reason
        matched = finished.matched_stop_id if finished.matched_stop_id >= 0 else None
        self._end(output, Finish(reason, n_tokens, finished.message, matched, finished.retractions))

    def _end(self, output: _Output, finish: Finish) -> None:
        output.stream.end(finish)
        self._metrics.finished(finish.reason, self._clock() - output.arrived_s)

    def _observe(self, output: _Output, n_ids: int) -> None:
        now_s = self._clock()
        if output.last_s is None:
            self._metrics.first_token(now_s - output.arrived_s)
        else:
            self._metrics.next_tokens((now_s - output.last_s) / n_ids)
        output.last_s = now_s

"""What a step costs, how many prefill tokens fit into it, when to launch the next one.

in     costs measured by the worker's warm-up; steps launched and done
out    predicted ms; a budget for a step's prefill; a time to launch
state  five coefficients and two running corrections; the predicted end of the last launched step
owner  the engine
ready  from the start: without measurements the budget is the fixed one and launches are immediate
end    with the engine
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from headrace.ops.wire import StepCost

TARGET_STEP_MS: Final = 200.0
"""A mixed step's bound where `--target-itl-ms` says nothing else: the longest gap between two decode steps."""
ALONE_STEP_MS: Final = 500.0
"""The same while nothing decodes: only a newcomer waits, and a larger chunk reads the weights less often."""
FIXED_BUDGET_TOKENS: Final = 2048
"""Prefill tokens a step where nothing was measured."""
GUESSED_TOKEN_MS: Final = 1.0
"""Of a prefill token, where nothing was measured."""
LONG_STEP_MS: Final = 20.0
"""Past this a step is launched shortly before its predecessor ends, so that arrivals need not wait a whole one more."""
LAUNCH_LEAD_MS: Final = 3.0
ALARM_S: Final = 0.5e-3
"""What is due so soon is due now: uvloop's timers count whole milliseconds, may ring so much too early, and one that
rounds to nothing rings at once, again and again, until the time has come."""
CAUTION_STEP: Final = 0.2
"""Five retractions in a row, and admission reserves all that the running may still produce."""
CAUTION_KEPT: Final = 0.9
"""Of it, from one ended request to the next: after seven it is half."""
SLOW_SHARE: Final = 0.02
"""Of the mixed steps, one in so many may take longer than a target that was asked for."""
_SMOOTHING: Final = 0.1
_SLOW_SMOOTHING: Final = 0.05


class StepWork(NamedTuple):
    """What is in a step, as far as its cost depends on it."""

    decode_rows: int = 0
    kv_tokens: int = 0
    """Whose KV is read for them: the sum of their contexts, or fewer where they share pages."""
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    """The sum over chunks of tokens x context in their middle: what their attention looks at."""


class CostModel:
    """Predicted ms of a step: `base + row x decode rows + read x KV tokens + token x prefill tokens + pair x pairs`.

    The last term is attention of chunks, the third that of decode rows. Factors follow what is observed: the mean for
    plain decode and for mixed steps, and for mixed steps also what only `SLOW_SHARE` of them exceed. That one climbs by
    a twentieth with every step that does and sinks by a thousandth with every other (Robbins and Monro, "A stochastic
    approximation method", 1951), so that it rests where the two cancel.
    """

    def __init__(self, costs: Sequence[StepCost]) -> None:
        self.measured = bool(costs)
        decode = [cost for cost in costs if not cost.prefill_tokens]
        near_tokens = min((cost.context_tokens for cost in decode), default=0)
        near = sorted((cost.decode_rows, cost.step_ms) for cost in decode if cost.context_tokens == near_tokens)
        first, last = (near[0], near[-1]) if near else ((0, 0.0), (0, 0.0))
        far = max(decode, key=lambda cost: cost.context_tokens, default=None)
        self.read_ms = 0.0
        if far is not None and far.context_tokens > near_tokens:
            same = next((ms for rows, ms in near if rows == far.decode_rows), far.step_ms)
            read_tokens = far.decode_rows * (far.context_tokens - near_tokens)
            self.read_ms = max(0.0, (far.step_ms - same) / read_tokens)
        spread = last[0] - first[0]
        per_row_ms = max(0.0, (last[1] - first[1]) / spread) if spread else 0.0
        self.base_ms = max(0.0, first[1] - first[0] * per_row_ms)
        self.row_ms = max(0.0, per_row_ms - self.read_ms * near_tokens)
        prefill = [cost for cost in costs if cost.prefill_tokens]
        fresh = [cost for cost in prefill if cost.context_tokens <= cost.prefill_tokens]
        self.token_ms = max((self._rest(cost) / cost.prefill_tokens for cost in fresh[-1:]), default=0.0)
        if not self.measured:
            self.token_ms = GUESSED_TOKEN_MS
        # Few tokens share what reading a context costs: the largest chunk is nearest to those of a busy server.
        deep = [cost for cost in prefill if cost.context_tokens > cost.prefill_tokens]
        far_chunk = max(deep, key=lambda cost: cost.prefill_tokens, default=None)
        self.pair_ms = 0.0
        if far_chunk is not None:
            tokens, far_tokens = far_chunk.prefill_tokens, far_chunk.context_tokens
            # Beside as large a chunk: in a far larger one each token has as many before it as in this, on average.
            beside = next((cost for cost in fresh if cost.prefill_tokens == tokens), None)
            if beside is not None:
                attention_ms, pairs = far_chunk.step_ms - beside.step_ms, tokens * (far_tokens - beside.context_tokens)
            else:
                attention_ms = self._rest(far_chunk) - self.token_ms * tokens
                pairs = tokens * (2 * far_tokens + tokens) // 2
            self.pair_ms = max(0.0, attention_ms / pairs)
        for cost in fresh[-1:]:
            # Its tokens look at half of it, on average.
            self.token_ms = max(0.0, self.token_ms - self.pair_ms * cost.prefill_tokens / 2)
        self._decode_factor = self._mixed_factor = self._slow_factor = 1.0

    def predict_ms(self, work: StepWork) -> float:
        """0 where nothing was measured."""
        if not self.measured:
            return 0.0
        return (self._mixed_factor if work.prefill_tokens else self._decode_factor) * self._raw_ms(work)

    def prefill_ms(self, tokens: int, context_tokens: int) -> float:
        """Computing so many tokens behind a context, beyond what a step costs anyway."""
        pairs = tokens * (context_tokens + tokens // 2)
        return self._mixed_factor * (self.token_ms * tokens + self.pair_ms * pairs)

    @property
    def prefill_formula(self) -> str:
        """How `prefill_ms` estimates, with its numbers now: pairs are tokens x the context they begin at and half of
        themselves."""
        return f"{self._mixed_factor:.2f} x (tokens x {self.token_ms:.4f} ms + pairs x {self.pair_ms * 1e6:.1f} ns)"

    def observe(self, work: StepWork, step_ms: float) -> None:
        """A step took `step_ms` on the device."""
        if not self.measured:
            return
        raw_ms = self._raw_ms(work)
        if raw_ms <= 0.0:
            return
        # One stall of the machine must not halve the budget: a single step counts as at most four times the model.
        factor = self._mixed_factor if work.prefill_tokens else self._decode_factor
        ratio = min(4.0 * factor, max(0.25 * factor, step_ms / raw_ms))
        if work.prefill_tokens:
            self._mixed_factor += _SMOOTHING * (ratio - self._mixed_factor)
            exceeded = ratio > self._slow_factor
            self._slow_factor *= 1 + _SLOW_SMOOTHING * ((1 - SLOW_SHARE) if exceeded else -SLOW_SHARE)
        else:
            self._decode_factor += _SMOOTHING * (ratio - self._decode_factor)

    def budget(
        self, decode: StepWork, target_ms: float, most_tokens: int, least_tokens: int, promised: bool = False
    ) -> StepBudget:
        """What a step beside these decode rows may hold so that it takes `target_ms`, or `ALONE_STEP_MS` without any.

        On the mean; of `promised` steps all but `SLOW_SHARE` take no longer. `least_tokens` may be computed whatever
        they take, so that prompts go on however long a decode step is.
        """
        if not self.measured:
            return StepBudget(min(most_tokens, FIXED_BUDGET_TOKENS))
        step_ms = target_ms if decode.decode_rows else max(target_ms, ALONE_STEP_MS)
        factor = self._mixed_factor
        if promised and decode.decode_rows:
            factor = max(factor, self._slow_factor)
        room_ms = step_ms / factor - self._raw_ms(decode)
        return StepBudget(most_tokens, room_ms, self.token_ms, self.pair_ms, least_tokens)

    def _raw_ms(self, work: StepWork) -> float:
        decode_ms = self.base_ms + self.row_ms * work.decode_rows + self.read_ms * work.kv_tokens
        return decode_ms + self.token_ms * work.prefill_tokens + self.pair_ms * work.prefill_pairs

    def _rest(self, chunk: StepCost) -> float:
        return max(0.0, chunk.step_ms - self.base_ms)


class StepBudget:
    """What is left of one step for prefill, in tokens and in ms: a token behind a long context takes longer."""

    def __init__(
        self,
        tokens: int,
        room_ms: float = math.inf,
        token_ms: float = 0.0,
        pair_ms: float = 0.0,
        least_tokens: int = 0,
    ) -> None:
        self._tokens = tokens
        self._room_ms = room_ms
        self._token_ms = token_ms
        self._pair_ms = pair_ms
        self._least = least_tokens

    def tokens(self, context_tokens: int) -> int:
        """Tokens that a chunk which begins at this context may have; 0 when nothing is left."""
        return max(0, min(self._tokens, max(self._least, self._fitting(context_tokens))))

    def spend(self, tokens: int, context_tokens: int) -> None:
        """A chunk of the step has so many tokens behind such a context."""
        self._tokens -= tokens
        self._least -= tokens
        self._room_ms -= tokens * (self._token_ms + self._pair_ms * (context_tokens + tokens / 2))

    def _fitting(self, context_tokens: int) -> int:
        """The largest n with `n x token + n x (context + n / 2) x pair` within what is left."""
        if self._room_ms <= 0.0:
            return 0
        linear_ms = self._token_ms + self._pair_ms * context_tokens
        if linear_ms <= 0.0 or math.isinf(self._room_ms):
            return self._tokens
        # The root of the quadratic, in the form that needs no division by `pair`.
        return int(2 * self._room_ms / (linear_ms + math.sqrt(linear_ms**2 + 2 * self._pair_ms * self._room_ms)))


class OutputForecast:
    """How much of `max_tokens` requests really use, so that admission need not reserve all of it.

    A running request is expected to grow by `ratio x` what is left to it: what ended requests have used, times the
    factor of conservativeness. A retraction says that this was too little, whatever the factor: caution grows with each
    and wears off as requests end, and a request that was retracted itself comes back only with half of the rest
    reserved, three quarters the next time, and so on. So a pool that is too small is filled too full once, not again
    and again.
    """

    def __init__(self, conservativeness: float) -> None:
        self._conservativeness = conservativeness
        self._used = 0.7
        self._caution = 0.0

    def ratio(self, retractions: int) -> float:
        """Of the outputs that are left to the running, when one that was retracted so often asks to begin."""
        return max(min(1.0, self._used * self._conservativeness), self._caution, 1.0 - 0.5**retractions)

    def ended(self, outputs: int, max_tokens: int) -> None:
        self._used += 0.05 * (outputs / max_tokens - self._used)
        self._caution *= CAUTION_KEPT

    def retracted(self) -> None:
        self._caution = min(1.0, self._caution + CAUTION_STEP)


class LaunchClock:
    """When the next step should be launched, in seconds of the engine's clock."""

    def __init__(self) -> None:
        self._end_s = 0.0
        self._predicted_ms = 0.0
        self._done_s = self._step_ms = 0.0

    def launched(self, now_s: float, predicted_ms: float) -> None:
        """A step was launched behind those in flight."""
        self._end_s = max(self._end_s, now_s) + predicted_ms / 1e3
        self._predicted_ms = predicted_ms

    def done(self, now_s: float, in_flight: int, step_ms: float) -> None:
        """A step was collected, which took so long on the device; with one left, that one began now."""
        self._done_s, self._step_ms = now_s, step_ms
        self._end_s = now_s + self._predicted_ms / 1e3 if in_flight else now_s

    @property
    def busy_until_s(self) -> float:
        """Until then at least the device has something to do, if it has been given a step: its predicted end, or where
        nothing was measured half of what the last one took."""
        return max(self._end_s, self._done_s + (0.0 if self._predicted_ms else self._step_ms / 2e3))

    def launch_at_s(self) -> float:
        """The earliest useful time to launch behind the step in flight: now (0) for short steps."""
        if self._predicted_ms <= LONG_STEP_MS:
            return 0.0
        return self._end_s - max(LAUNCH_LEAD_MS, 0.05 * self._predicted_ms) / 1e3

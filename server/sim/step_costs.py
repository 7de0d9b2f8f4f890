"""What a step costs on a device: from a roofline, or fitted to steps that a real server has recorded.

    roofline     linear   = max(FLOPs / (flops x 0.6), weights' bytes / (memory x 0.8))
                 attention = max(FLOPs / (flops x 0.5), KV's bytes / (memory x 0.8))
                 step     = linear + attention + all-reduces + 300 µs + 5 µs a layer
    calibration  step     = base + a x decode rows + b x prefill tokens + c x pairs + d x KV tokens

The factors are `shapes.Efficiency`'s. A calibration has its coefficients twice, for plain decode and for steps with
prefill, none of them negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.ops.wire import ForwardBatch, StepCost
from headrace.server.config import BadSetting
from headrace.server.sim.shapes import EFFICIENCY, VALUE_BYTES, DeviceFigures, Efficiency, ModelShape
from headrace.server.step_log import RecordedStep

FAR_TOKENS: Final = 1792
"""The longer of the two contexts at which a decode step is measured."""
LEAST_STEPS: Final = 20
"""Of each kind that a calibration needs: fewer would fit anything."""


class StepWork(NamedTuple):
    """What is in a step, as far as its cost depends on it."""

    decode_rows: int
    kv_tokens: int
    """Sum of the decode rows' contexts."""
    prefill_tokens: int
    prefill_pairs: int
    """Sum over chunks of tokens x context at their end: twice what attention computes of a fresh prompt."""
    attended: int
    """Pairs of a token and one that it attends to, over all rows."""
    context_tokens: int
    """Sum over all rows of the context whose KV is read."""
    samples: int


def work_of(batch: ForwardBatch) -> StepWork:
    """Read a batch's work off its flat arrays."""
    rows, contexts = batch.counts.decode_rows, batch.row_kv_len.astype(np.int64)
    tokens = np.diff(batch.row_start).astype(np.int64)
    attended = int((tokens * contexts - tokens * (tokens - 1) // 2).sum())
    return StepWork(
        decode_rows=rows,
        kv_tokens=int(contexts[:rows].sum()),
        prefill_tokens=batch.counts.tokens - rows,
        prefill_pairs=int((tokens[rows:] * contexts[rows:] - tokens[rows:] ** 2 // 2).sum()),
        attended=attended,
        context_tokens=int(contexts.sum()),
        samples=batch.counts.samples,
    )


def decode_work(rows: int, context: int) -> StepWork:
    """`rows` rows of one token, each behind `context` tokens."""
    return StepWork(rows, rows * (context + 1), 0, 0, rows * (context + 1), rows * (context + 1), rows)


def prefill_work(tokens: int, context: int) -> StepWork:
    """One chunk behind `context` tokens."""
    end = context + tokens
    attended = tokens * end - tokens * (tokens - 1) // 2
    return StepWork(0, 0, tokens, tokens * end, attended, end, 1)


class StepCosts(Protocol):
    """A model on a device."""

    def step_ms(self, work: StepWork) -> float:
        """What the device takes for a step."""


def warm_up_costs(costs: StepCosts, slots: int, largest_chunk: int) -> list[StepCost]:
    """What a worker's warm-up would measure, as the engine is told when the device is ready."""
    rows = sorted({1, min(8, slots), min(32, slots)})
    shapes = [*((count, 192) for count in rows), (1, FAR_TOKENS)]
    measured = [StepCost(count, 0, context, costs.step_ms(decode_work(count, context))) for count, context in shapes]
    for tokens, context in ((largest_chunk, 8 * largest_chunk), (largest_chunk, 0)):
        measured.append(StepCost(0, tokens, context, costs.step_ms(prefill_work(tokens, context))))
    return measured


# ---------------------------------------------------------------------------------------------------------------
# Roofline


class Roofline:
    """Costs from FLOPs and bytes, `tp` devices as one."""

    def __init__(
        self, model: ModelShape, device: DeviceFigures, tp: int = 1, efficiency: Efficiency = EFFICIENCY
    ) -> None:
        self._model = model
        self._flops = device.flops * tp
        self._memory = device.memory_bytes_per_s * tp * efficiency.memory
        self._link = device.link_bytes_per_s
        self._tp = tp
        self._efficiency = efficiency
        self._token_bytes = model.layout(1).page_bytes(0)

    def step_ms(self, work: StepWork) -> float:
        efficiency, model = self._efficiency, self._model
        linear_s = max(self.linear_flops(work) / (self._flops * efficiency.flops), self.linear_bytes() / self._memory)
        attention_s = max(
            self.attention_flops(work) / (self._flops * efficiency.attention_flops),
            work.context_tokens * self._token_bytes / self._memory,
        )
        overhead_us = efficiency.step_us + efficiency.layer_us * model.layers
        return (linear_s + attention_s + self._reduce_s(work)) * 1e3 + overhead_us / 1e3

    def linear_flops(self, work: StepWork) -> float:
        """Two a parameter and token; the output projection only for rows that sample."""
        tokens = work.decode_rows + work.prefill_tokens
        return 2.0 * (self._model.layer_parameters * tokens + self._model.head_parameters * work.samples)

    def linear_bytes(self) -> float:
        """All weights, once; of the embedding a few rows."""
        return float((self._model.layer_parameters + self._model.head_parameters) * VALUE_BYTES)

    def attention_flops(self, work: StepWork) -> float:
        """Scores and values: four a layer, head dimension and pair."""
        return 4.0 * self._model.layers * self._model.heads * self._model.head_dim * work.attended

    def _reduce_s(self, work: StepWork) -> float:
        if self._tp == 1:
            return 0.0
        tokens = work.decode_rows + work.prefill_tokens
        size_bytes = tokens * self._model.hidden * VALUE_BYTES * 2 * (self._tp - 1) / self._tp
        each_s = self._efficiency.reduce_us / 1e6 + size_bytes / (self._link * self._efficiency.copy)
        return 2 * self._model.layers * each_s


# ---------------------------------------------------------------------------------------------------------------
# Calibration


class Calibration:
    """Costs fitted to recorded steps; `overhead_ms` is what the server's loop adds between two of them."""

    def __init__(self, steps: Sequence[RecordedStep]) -> None:
        """Raises ValueError where the steps say too little."""
        kinds: dict[Literal["decode", "prefill"], list[RecordedStep]] = {
            "decode": [step for step in steps if not step.prefill_tokens],
            "prefill": [step for step in steps if step.prefill_tokens],
        }
        for kind, some in kinds.items():
            if len(some) < LEAST_STEPS:
                raise ValueError(f"it has {len(some)} {kind} steps, and {LEAST_STEPS} are needed")
        self.decode = _fit(kinds["decode"], 3)
        self.prefill = _fit(kinds["prefill"], 5)
        gaps = [step.since_last_ms - step.ms for step in steps if step.since_last_ms >= 0]
        self.overhead_ms = max(0.0, float(np.median(gaps))) if gaps else 0.0

    def step_ms(self, work: StepWork) -> float:
        coefficients = self.prefill if work.prefill_tokens else self.decode
        features = (1, work.decode_rows, work.kv_tokens, work.prefill_tokens, work.prefill_pairs)
        return sum(a * b for a, b in zip(coefficients, features)) + self.overhead_ms


def read_steps(path: Path) -> Iterator[RecordedStep]:
    """Steps of a file of `--record-steps`. Raises BadSetting, naming the line."""
    decoder = msgspec.json.Decoder(RecordedStep)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise BadSetting(
                        f"--calibration {path}, line {number}: {error}. Record the file anew with "
                        "`headrace serve --record-steps FILE`."
                    ) from None
    except OSError as error:
        raise BadSetting(f"--calibration {path} can't be read: {error.strerror}.") from None


def read_calibration(path: Path) -> Calibration:
    """Raises BadSetting."""
    try:
        return Calibration(list(read_steps(path)))
    except ValueError as error:
        if isinstance(error, BadSetting):
            raise
        raise BadSetting(
            f"--calibration {path}: {error}. Record a server under short and long prompts, alone and together."
        ) from None


def _fit(steps: Sequence[RecordedStep], features: int) -> list[float]:
    """Least squares of the relative error with no negative coefficient: of all subsets of the features whose own fit
    has none, the best. With five features there are 31, and the answer is exact."""
    rows: NDArray[np.float64] = np.array(
        [(1, step.decode_rows, step.kv_tokens, step.prefill_tokens, step.prefill_pairs) for step in steps], np.float64
    )[:, :features]
    ms: NDArray[np.float64] = np.array([step.ms for step in steps], np.float64)
    weights = 1.0 / np.maximum(ms, 1e-3)
    scales = np.maximum(np.abs(rows).max(axis=0), 1e-9)
    weighted = rows / scales * weights[:, None]
    # A stall of the machine is not the model's cost: what is far off the first fit does not count in the second.
    kept = np.ones(len(ms), np.bool_)
    for _ in range(2):
        best, least = np.zeros(features), np.inf
        for count in range(1, features + 1):
            for columns in itertools.combinations(range(features), count):
                found, *_ = np.linalg.lstsq(weighted[kept][:, columns], np.ones(int(kept.sum())), rcond=None)
                error = float(((weighted[kept][:, columns] @ found - 1.0) ** 2).sum())
                if (found >= 0).all() and error < least - 1e-12:
                    least, best = error, np.zeros(features)
                    best[list(columns)] = found
        off = np.abs(weighted @ best - 1.0)
        kept = off <= max(3.0 * float(np.median(off)), 0.05)
    return [float(value) for value in best / scales]

"""From logits to ids: pure functions over whole batches, torch reference.
On a GPU: `ops.triton.argmax`, `penalties`, `draw` and `logprobs`; `choose` on a CPU: `ops.simd.draws`.

What applies in which order: penalties on the model's logits, then the request's biases, then what must not be drawn
(masks, stop ids below `min_tokens`), then temperature, top-k, top-p over what top-k left, min-p. Filters are thresholds
on values, so that ids of equal logits stay or go together and no sort order matters; the id is then drawn by inverse
cumulative distribution in the order of ids. A draw is a pure function of the request's seed, the output position and
the row of logits; no row sees another.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

BLOCK: Final = 64
"""Ids per block in two-level searches: one vectorized pass over the logits instead of a scan (6 µs against 42)."""
UNIFORM, TEMPERATURE, TOP_K, TOP_P, MIN_P = range(5)
"""Columns of a row's parameters: those of `draw`, but that a temperature of 0 is greedy."""
PARAMETERS: Final = 5
LEAST: Final = -87.0
"""Of scaled values, of which the largest is 0: what is below is never drawn. It weighs 1.6e-38 or less, and beyond
1.2e-38 float32 is subnormal, which some count as zero."""
_BUCKETS: Final = 512
_ALMOST_ONE: Final = 1 - 2**-40


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.integer], draw: int = 0) -> Tensor:
    """float64 [rows] in [0, 1): a hash (three rounds of SplitMix64's finalizer) of seed, output position, draw number.

    Several draws for one position are for methods that reject (speculation).
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds ^ np.uint64(0x6A09E667F3BCC909))
        state = _mix(state + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95))
        state = _mix(state + np.uint64(draw + 1) * np.uint64(0xAEF17502108EF2D9))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Choose(Protocol):
    """The choice of a step's ids."""

    def __call__(self, logits: Tensor, parameters: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """`logits` float32 `[rows, vocab]`, may be overwritten; `parameters` float64 `[rows, 5]` → which rows are
        usable, and an id of each, 0 where it is not."""


def choose(logits: Tensor, parameters: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """A `Choose`."""
    values, ids = best(logits)
    usable = torch.isfinite(values)
    ids.masked_fill_(~usable, 0)
    rows = np.flatnonzero((parameters[:, TEMPERATURE] > 0) & usable.numpy())
    if len(rows):
        at, of = torch.from_numpy(rows), torch.from_numpy(parameters[rows])
        filters = of[:, TOP_K].long(), of[:, TOP_P].float(), of[:, MIN_P].float()
        drawing = logits if len(rows) == len(logits) else logits[at]
        ids[at] = draw(drawing, of[:, UNIFORM], of[:, TEMPERATURE].float(), *filters)
    return usable.numpy(), ids.numpy()


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row and its id, the lowest id of equals: float32 `[rows]`, int64 `[rows]`.

    A value that is not finite says that the row can't be drawn from: something in it is NaN or infinite, or nothing is
    left.
    """
    blocks = _blocks(logits, -math.inf)
    values, at = blocks.amax(-1).max(-1)
    inside = blocks[torch.arange(len(logits)), at].argmax(-1)
    return values, at * BLOCK + inside


def penalize_(
    logits: Tensor, prompt: Tensor, outputs: Tensor, repetition: float, frequency: float, presence: float
) -> None:
    """Lower the logits of ids that were there before, in place; all tensors `[vocab]`.

    `prompt` says which ids are in the prompt, `outputs` counts them in the output. Repetition (CTRL, arXiv:1909.05858)
    divides positive and multiplies negative logits of both; frequency and presence (OpenAI) are subtracted for outputs,
    per occurrence and once.
    """
    penalize_at_(logits, (prompt | (outputs > 0)).nonzero().squeeze(1), outputs, repetition, frequency, presence)


def penalize_at_(
    logits: Tensor, ids: Tensor, outputs: Tensor, repetition: float, frequency: float, presence: float
) -> None:
    """`penalize_`, of which the ids are known: int64, each once."""
    values, counts = logits[ids], outputs[ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[ids] = values - counts * frequency - (counts > 0) * presence


def draw(logits: Tensor, uniforms: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Draw one id for each row → int64 `[rows]`. Overwrites `logits` (float32 `[rows, vocab]`, each maximum finite).

    `uniforms`, `temperature` (> 0), `top_k` (0: off), `top_p` (≥ 1: off), `min_p` (0: off): `[rows]`.
    """
    highest = _blocks(logits, -math.inf).amax(-1).amax(-1, keepdim=True)
    # From here on the best id of a row has 0, and no temperature overflows.
    scaled = logits.sub_(highest).div_(temperature[:, None])
    floor = _floor(scaled, top_k, top_p, min_p)
    weights = scaled.exp().mul_(scaled >= (LEAST if floor is None else floor.clamp(min=LEAST)[:, None]))
    blocks = _blocks(weights, 0.0)
    in_blocks = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms * in_blocks[:, -1]
    at = _first_above(in_blocks, target)
    before = F.pad(in_blocks, (1, 0)).gather(1, at[:, None]).squeeze(1)
    inside = blocks[torch.arange(len(logits)), at].cumsum(-1, dtype=torch.float64)
    return at * BLOCK + _first_above(inside, target - before)


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-softmax of `[rows, vocab]` at one id of each row → float32 `[rows]`."""
    return logits.gather(1, ids[:, None]).squeeze(1) - logits.logsumexp(-1)


def best_log_probabilities(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row, best first → int64 and float32 `[rows, count]`."""
    values, ids = top(logits, count)
    return ids, values - logits.logsumexp(-1, keepdim=True)


def top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, largest first, and where they are: like `topk`, in a third of its time.

    They lie in the `count` blocks with the largest maxima, so that only those are searched.
    """
    blocks = _blocks(values, -math.inf)
    if blocks.shape[1] <= count:
        return values.topk(count, dim=-1)
    at = blocks.amax(-1).topk(count, dim=-1).indices
    few = blocks.gather(1, at.unsqueeze(2).expand(-1, -1, BLOCK)).flatten(1)
    found, inside = few.topk(count, dim=-1)
    return found, at.gather(1, inside // BLOCK) * BLOCK + inside % BLOCK


# ---------------------------------------------------------------------------------------------------------------


def _floor(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor | None:
    """The smallest value in each row of `scaled` (maximum 0) that may be drawn, or None where no row filters.

    Row by row, so that a row stays in the cache: 0.2 ms each for a vocabulary of 49k, whatever top-k and top-p are.
    """
    vocab = scaled.shape[1]
    cutting = ((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0)
    if not bool(cutting.any()):
        return None
    # log 0 is -inf: no floor.
    floor = min_p.log()
    for row in cutting.nonzero().squeeze(1).tolist():
        values = scaled[row].numpy()
        lowest = -math.inf
        if 0 < top_k[row] < vocab:
            lowest = _value_reaching(values, np.ones_like(values), float(top_k[row]))
        if top_p[row] < 1:
            # Nucleus sampling (arXiv:1904.09751) among what top-k left.
            kept = np.exp(values) * (values >= lowest)
            wanted = float(top_p[row]) * float(kept.sum(dtype=np.float64))
            lowest = max(lowest, _value_reaching(values, kept, wanted))
        floor[row] = max(float(floor[row]), lowest)
    return floor


def _value_reaching(values: NDArray[np.float32], weights: NDArray[np.float32], wanted: float) -> float:
    """The largest of `values` (at most 0, one of them 0) such that it and all larger ones weigh `wanted` or more.

    Sums over buckets of 1/8 find the bucket; only what lies in it is sorted. Where rounding keeps the sum of everything
    a hair below `wanted`, the answer is -inf.
    """
    bucket = np.minimum(values * -8, _BUCKETS - 1).astype(np.int32)
    sums = np.bincount(bucket, weights, _BUCKETS).cumsum()
    at = int(np.searchsorted(sums, wanted))
    if at == _BUCKETS:
        return -math.inf
    inside = np.flatnonzero(bucket == at)
    inside = inside[np.argsort(-values[inside])]
    reached = (sums[at - 1] if at else 0.0) + weights[inside].cumsum(dtype=np.float64)
    return float(values[inside[min(int(np.searchsorted(reached, wanted)), len(inside) - 1)]])


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """First index of each row of ascending `sums` whose value is above `target`, which rounding may have brought up to
    the last sum: then it is the last index at which the sums grow, never one without weight."""
    bound = torch.minimum(target, sums[:, -1] * _ALMOST_ONE)
    return (sums <= bound[:, None]).sum(-1)


def _blocks(values: Tensor, fill: float) -> Tensor:
    """`[rows, n]` → `[rows, blocks, BLOCK]`; a view where BLOCK divides n."""
    short = -values.shape[1] % BLOCK
    return (F.pad(values, (0, short), value=fill) if short else values).view(len(values), -1, BLOCK)

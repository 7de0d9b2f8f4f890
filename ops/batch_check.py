"""Whether a batch can be what the server meant: checked before anything changes."""

from __future__ import annotations

import numpy as np

from headrace.ops.kv_pool import KvPool
from headrace.ops.wire import I32, ForwardBatch


class BadBatch(ValueError):
    """The server sent a batch that contradicts itself or this worker's sizes."""


def check_batch(batch: ForwardBatch, pools: list[KvPool], vocab: int) -> None:
    """A wrong index would read or write another request's KV without a sound (30 µs a step). Raises BadBatch."""
    counts = batch.counts
    slots, pages = pools[0].table.shape
    context_tokens = pages * pools[0].page_tokens
    lengths = batch.row_start[1:] - batch.row_start[:-1]
    problems = (
        ("rows", counts.rows and (batch.row_start[0] != 0 or np.minimum.reduce(lengths) < 1)),
        ("tokens", (batch.row_start[-1] if counts.rows else 0) != counts.tokens),
        ("single-token rows", np.count_nonzero(lengths[: counts.decode_rows] != 1)),
        ("row slots", _outside(batch.row_slot, 0, slots) or len(set(batch.row_slot.tolist())) != counts.rows),
        (
            "context lengths",
            _outside(batch.row_kv_len, 1, context_tokens + 1) or np.count_nonzero(batch.row_kv_len < lengths),
        ),
        ("positions", counts.tokens and not _positions_agree(batch, lengths)),
        ("input ids", _outside(batch.input_ids, -slots, vocab)),
        ("sampled rows", _outside(batch.sample_row, 0, counts.rows)),
        ("wanted tokens", _outside(batch.want_token, 0, counts.tokens)),
        ("wanted ids", _outside(batch.want_target, 0, vocab)),
        ("edited groups", _outside(batch.edit_group, 0, len(pools))),
        ("loaded groups", _outside(batch.load_group, 0, len(pools))),
    )
    wrong = [name for name, is_wrong in problems if is_wrong]
    if wrong:
        raise BadBatch(f"the batch of step {batch.step} has impossible {', '.join(wrong)}")


def _positions_agree(batch: ForwardBatch, lengths: I32) -> bool:
    first = np.repeat(batch.row_kv_len - batch.row_start[1:], lengths)
    return len(first) == len(batch.positions) and not np.count_nonzero(batch.positions - first - np.arange(len(first)))


def _outside(values: I32, least: int, end: int) -> bool:
    # As numbers without a sign, what is too small is too large.
    return bool(len(values)) and int(np.maximum.reduce((values - least).view(np.uint32))) >= end - least

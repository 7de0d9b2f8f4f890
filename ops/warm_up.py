"""Measures what steps cost before the server is ready, so that it can plan the first real one.

The steps are ordinary batches over the real pools; what they leave there (page tables, KV, sampler state) is void, and
the tables are emptied afterwards. They also make oneDNN prepare its kernels for the common batch sizes.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import numpy as np

from headrace.ops.kv_pool import KvPool
from headrace.ops.runner import Runner
from headrace.ops.wire import (
    INIT_FLOATS,
    INIT_INTS,
    BatchRing,
    Counts,
    ForwardBatch,
    RingGeometry,
    StepCost,
    batch_bytes,
)

INIT_OFF: Final = {**dict.fromkeys(INIT_FLOATS, 0.0), "top_p": 1.0, "repetition": 1.0}
"""Sampling parameters that do nothing."""
ESSENTIAL: Final = 5
"""Decode steps of two sizes and at two contexts, a prefill chunk near and one far: less would leave a cost unknown."""
FAR_TOKENS: Final = 1792
"""A longer context. With it and the largest chunk behind it, `PAGES` of 16 tokens are used once each."""
PAGES: Final = 128
"""That the warm-up's steps use, again and again: the first of the pool, whose memory is real, and with all layers still
more than the cache holds."""
BUDGET_MS: Final = 550.0
"""A step that would probably end later than this is not measured: readiness is worth more than another point."""


class StepShape(NamedTuple):
    """A step to measure: rows of one token each, or one prefill chunk; every row has `context_tokens` before it."""

    decode_rows: int
    prefill_tokens: int
    context_tokens: int

    @property
    def rows(self) -> int:
        return self.decode_rows or 1

    @property
    def tokens(self) -> int:
        return self.decode_rows or self.prefill_tokens


class StepProbe:
    """Runs steps of given shapes, sampling included, in slots and pages that no request has yet."""

    def __init__(self, runner: Runner, pools: list[KvPool], vocab: int, shapes: list[StepShape], pages: int) -> None:
        """`shapes`: all that will be run; `pages`: how many they may use."""
        self._runner = runner
        self._pools = pools
        self._pages = min(pages, *(pool.num_pages for pool in pools))
        for pool in pools:
            # Memory that is touched for the first time would be measured with the steps.
            pool.touch_first(self._pages)
        geometry = RingGeometry(
            slots=1,
            max_batch_bytes=max(batch_bytes(_counts(shape, pools)) for shape in shapes),
            max_samples=max(shape.rows for shape in shapes),
            max_wants=0,
            vocab=vocab,
        )
        self._ring = BatchRing(bytearray(geometry.size_bytes), geometry)

    def run(self, shape: StepShape) -> float:
        """→ ms that the step took."""
        batch = _write(self._ring, shape, self._pools, self._pages)
        results = self._ring.results(0)
        self._runner.forward(batch, results)
        mask_rows, mask_bits = self._ring.masks(0)
        sampled = self._runner.sample(batch.step, mask_rows[:0], mask_bits[:0], results)
        while not sampled.done.query():
            pass
        return sampled.step_ms

    def close(self) -> None:
        """Forget whose the pages were."""
        for pool in self._pools:
            pool.table.fill(-1)


def measure_steps(
    runner: Runner, pools: list[KvPool], vocab: int, largest_chunk_tokens: int, budget_ms: float = BUDGET_MS
) -> list[StepCost]:
    """Run a few steps → what each took; of the first `ESSENTIAL` none is left out."""
    began = time.perf_counter()
    shapes = _shapes(pools[0], largest_chunk_tokens)
    probe = StepProbe(runner, pools, vocab, shapes, PAGES)
    # The very first step also pays for what torch and oneDNN set up once.
    probe.run(shapes[0])
    costs: list[StepCost] = []
    for shape in shapes:
        spent_ms = (time.perf_counter() - began) * 1e3
        if len(costs) < ESSENTIAL or spent_ms + _at_most_ms(shape, costs) <= budget_ms:
            costs.append(StepCost(*shape, probe.run(shape)))
    probe.close()
    return costs


def _shapes(pool: KvPool, largest_chunk_tokens: int) -> list[StepShape]:
    slots, pages = pool.table.shape
    room_tokens = pages * pool.page_tokens
    largest = min(largest_chunk_tokens, room_tokens)
    small, medium = min(64, largest), min(256, largest)
    shapes = [
        *(StepShape(1, 0, 192), StepShape(min(8, slots), 0, 192), StepShape(1, 0, FAR_TOKENS)),
        *(StepShape(0, small, 0), StepShape(0, min(32, small), FAR_TOKENS)),
        *(StepShape(0, medium, 0), StepShape(0, medium, FAR_TOKENS)),
        *(StepShape(min(32, slots), 0, 192), StepShape(0, largest, 0)),
    ]
    fitting = [
        shape._replace(context_tokens=min(shape.context_tokens, room_tokens - shape.tokens // shape.rows))
        for shape in shapes
    ]
    return list(dict.fromkeys(fitting))


def _at_most_ms(shape: StepShape, costs: list[StepCost]) -> float:
    """A step of more tokens costs at most as many times more: it has a fixed part."""
    return min(cost.step_ms * max(1.0, shape.tokens / (cost.decode_rows + cost.prefill_tokens)) for cost in costs)


def _counts(shape: StepShape, pools: list[KvPool]) -> Counts:
    rows = shape.rows
    pages_per_row = -(-(shape.context_tokens + shape.tokens // rows) // pools[0].page_tokens)
    return Counts(
        tokens=shape.tokens,
        rows=rows,
        decode_rows=shape.decode_rows,
        samples=rows,
        table_edits=len(pools) * rows * pages_per_row,
        slot_inits=rows,
        **dict.fromkeys(("init_ids", "init_biases", "wants", "loads"), 0),
    )


def _write(ring: BatchRing, shape: StepShape, pools: list[KvPool], pages: int) -> ForwardBatch:
    """Greedy rows over pages 0, 1, 2 …, and from 0 again."""
    counts = _counts(shape, pools)
    batch = ring.write(0, 0, counts)
    tokens_per_row = shape.tokens // counts.rows
    rows = np.arange(counts.rows)
    batch.input_ids[:] = np.arange(counts.tokens) % ring.geometry.vocab
    batch.positions[:] = np.tile(shape.context_tokens + np.arange(tokens_per_row), counts.rows)
    batch.row_slot[:] = batch.sample_row[:] = batch.init_slot[:] = rows
    batch.row_start[:] = np.arange(counts.rows + 1) * tokens_per_row
    batch.row_kv_len[:] = shape.context_tokens + tokens_per_row
    batch.sample_position[:] = 0
    batch.init_ints[:] = 0
    batch.init_ints[:, INIT_INTS.index("logprobs")] = -1
    batch.init_floats[:] = [INIT_OFF[name] for name in INIT_FLOATS]
    edits = np.arange(counts.table_edits)
    per_pool = counts.table_edits // len(pools)
    pages_per_row = per_pool // counts.rows
    batch.edit_group[:] = edits // per_pool
    batch.edit_slot[:] = edits % per_pool // pages_per_row
    batch.edit_index[:] = edits % pages_per_row
    batch.edit_page[:] = edits % per_pool % pages
    return batch

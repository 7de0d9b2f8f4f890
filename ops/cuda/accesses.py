"""What CUDA's part of a step touches beside what any device's does (`ops.accesses`).

The memory "staging" has a layer for each part of a step: 0 for `Forward`, 1 for `Sample`.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.ops import accesses
from headrace.ops.kv_pool import KvPool
from headrace.ops.streams import Operation, Region
from headrace.ops.wire import I32, ForwardBatch

_PARTS = (0, 1)


def staging(step: int, slot: int) -> Operation:
    """The host writes both parts."""
    return Operation(f"staging of step {step}", [], [Region("staging", part, [slot]) for part in _PARTS])


def staged(slot: int, part: int) -> Operation:
    """The compute stream copies one."""
    return Operation(f"copy of staging slot {slot}", [Region("staging", part, [slot])], [])


def decode(batch: ForwardBatch, pools: Sequence[KvPool], tables: Sequence[I32]) -> Operation:
    """A graph: the attention of all layers."""
    layers = [
        accesses.attention(batch, group, pool, table, layer)
        for group, (pool, table) in enumerate(zip(pools, tables))
        for layer in range(len(pool.shape.layers))
    ]
    return Operation(
        f"attention of step {batch.step}, all layers",
        [region for layer in layers for region in layer.reads],
        [region for layer in layers for region in layer.writes],
    )

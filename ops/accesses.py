"""What the operations of a step touch, as they declare it to their streams.

Only a stream that checks asks, so what is here may take its time. The memories: "batches", "masks" and "results" by
ring slot, "future tokens" by request slot, "device pages" and "host pages" of a group by page and the group's layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.ops.kv_pool import KvPool
from headrace.ops.streams import Operation, Region
from headrace.ops.wire import I32, ForwardBatch


def forward(step: int, ring_slot: int) -> Operation:
    """What `Forward` touches in the ring; prompt logprobs are results already."""
    return Operation(
        f"forward of step {step}", [Region("batches", 0, [ring_slot])], [Region("results", 0, [ring_slot])]
    )


def sample(step: int, ring_slot: int) -> Operation:
    """What `Sample` touches in the ring."""
    reads = [Region("batches", 0, [ring_slot]), Region("masks", 0, [ring_slot])]
    return Operation(f"sample of step {step}", reads, [Region("results", 0, [ring_slot])])


def inputs(batch: ForwardBatch) -> Operation:
    """Input ids that only the device knows."""
    slots = -batch.input_ids[batch.input_ids < 0] - 1
    return Operation(f"inputs of step {batch.step}", [Region("future tokens", 0, slots)], [])


def draws(step: int, slots: I32) -> Operation:
    """The drawing of ids."""
    return Operation(f"draws of step {step}", [], [Region("future tokens", 0, slots)])


def clearing(step: int, group: int, pool: KvPool, pages: I32) -> Operation:
    """Zeroing of pages that a request begins to fill."""
    return Operation(f"clearing in step {step}", [], _all_layers("device pages", group, pool, pages))


def attention(batch: ForwardBatch, group: int, pool: KvPool, table: I32, layer: int) -> Operation:
    """Writes the KV of the batch's tokens in one layer, and reads what its rows look at. `table`: as the device has
    it when it gets there."""
    lengths = np.diff(batch.row_start)
    firsts = pool.first_pages(batch.row_kv_len - lengths)
    read = [
        table[slot, first : -(-kv_len // pool.page_tokens)]
        for slot, first, kv_len in zip(batch.row_slot.tolist(), firsts.tolist(), batch.row_kv_len.tolist())
    ]
    written = table[np.repeat(batch.row_slot, lengths), batch.positions // pool.page_tokens]
    return Operation(
        f"attention of step {batch.step}, layer {layer}",
        [_pages("device pages", group, layer, np.concatenate(read))],
        [_pages("device pages", group, layer, written)],
    )


def pass_of(batch: ForwardBatch, pools: Sequence[KvPool], places: Mapping[int, tuple[int, int]]) -> Operation:
    """The attention of all layers, each of which has its place: a pool, and its index there."""
    parts = [attention(batch, group, pools[group], pools[group].table, index) for group, index in places.values()]
    reads, writes = ([region for part in parts for region in of] for of in zip(*(part[1:] for part in parts)))
    return Operation(f"attention of step {batch.step}, all layers", reads, writes)


def load(step: int, group: int, layer: int, host_pages: I32, device_pages: I32) -> Operation:
    """One layer of pages comes from the host."""
    return Operation(
        f"load of step {step}, layer {layer}",
        [_pages("host pages", group, layer, host_pages)],
        [_pages("device pages", group, layer, device_pages)],
    )


def backup(
    transfer: int, group: int, pool: KvPool, device_pages: Sequence[int], host_pages: Sequence[int]
) -> Operation:
    """Pages go to the host, all layers."""
    return Operation(
        f"backup {transfer}",
        _all_layers("device pages", group, pool, device_pages),
        _all_layers("host pages", group, pool, host_pages),
    )


def _all_layers(memory: str, group: int, pool: KvPool, pages: Sequence[int] | I32) -> list[Region]:
    return [_pages(memory, group, layer, pages) for layer in range(len(pool.shape.layers))]


def _pages(memory: str, group: int, layer: int, pages: Sequence[int] | I32) -> Region:
    return Region(f"{memory} of group {group}", layer, pages)

"""The KV of one step, as a model sees it: pages brought from the host, pages begun, attention.

in     the step's batch, the pools, for each layer the event behind its loads
out    for each layer, its pool, ready to be read and written by what comes next in the compute stream
state  the plans of torch's attention, once asked for
owner  the compute stream's step
ready  a layer's pages when `bring` has returned
end    with the step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from headrace.ops import accesses
from headrace.ops.attention import AttentionPlan, Scores, attend, plan_attention
from headrace.ops.kv_pool import KvPool
from headrace.ops.streams import Event, Stream
from headrace.ops.wire import ForwardBatch


class StepKv:
    """What layers read and write in one step."""

    def __init__(
        self,
        batch: ForwardBatch,
        pools: Sequence[KvPool],
        places: Mapping[int, tuple[int, int]],
        arrivals: Mapping[int, Event],
        compute: Stream,
    ) -> None:
        """`places`: layer of the model → its pool, and its index there. Raises ValueError where the page table lacks a
        page that the batch uses."""
        self.batch = batch
        self.pools = pools
        self._places = places
        self._arrivals = arrivals
        self._compute = compute
        self._plans: dict[tuple[int, int], AttentionPlan] = {}
        """By group and window."""
        before = batch.row_kv_len - (batch.row_start[1:] - batch.row_start[:-1])
        for group, pool in enumerate(pools):
            begun = pool.begun_pages(batch.row_slot, before, batch.row_kv_len)
            compute.uses(partial(accesses.clearing, batch.step, group, pool, begun))
            pool.clear(begun)

    def place(self, layer: int) -> tuple[KvPool, int]:
        """The layer's pool, and its index there."""
        group, index = self._places[layer]
        return self.pools[group], index

    def runs(self) -> Iterator[tuple[int, int]]:
        """Layers that may be computed at once, from one to before another, in their order, each time when their pages
        are there: all of them, or one by one in a step that loads."""
        layers = len(self._places)
        if not self._arrivals:
            self._compute.uses(partial(accesses.pass_of, self.batch, self.pools, self._places))
            yield 0, layers
            return
        for layer in range(layers):
            self.bring(layer)
            yield layer, layer + 1

    def bring(self, layer: int) -> tuple[KvPool, int]:
        """Wait for what the layer's pages get from the host → its pool, and its index there."""
        pool, index = self.place(layer)
        if layer in self._arrivals:
            self._compute.wait(self._arrivals[layer])
        group = self._places[layer][0]
        self._compute.uses(partial(accesses.attention, self.batch, group, pool, pool.table, index))
        return pool, index

    def attend(self, layer: int, qkv: Tensor, scores: Scores) -> Tensor:
        """torch's attention: `qkv` `[tokens, (heads + 2 · kv_heads) · head_dim]` → `[tokens, heads · head_dim]`."""
        pool, index = self.bring(layer)
        kind = self._places[layer][0], scores.window_tokens
        if kind not in self._plans:
            self._plans[kind] = plan_attention(self.batch, pool, scores.window_tokens)
        return attend(pool, index, qkv, self._plans[kind], scores)

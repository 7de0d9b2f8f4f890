"""The KV of one step on the card: page tables there, pages brought from the host, attention.

in     the step's rows, staged; the pools; for each layer the event behind its loads
out    for each layer, the mixtures that attention gives
state  the page tables (the compute stream's; the host's are the pools'), scratch memory for the spans of long contexts
owner  the compute stream
ready  in stream order
end    tables and scratch: with the process; the rest: with the step
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.ops.attention import Scores
from headrace.ops.cuda.staging import Slot
from headrace.ops.kv_pool import KvPool
from headrace.ops.triton.decode_attention import attend_decode
from headrace.ops.triton.extend_attention import attend_extend, plan_extend, tile_tokens
from headrace.ops.triton.kv_write import write_kv
from headrace.ops.triton.spans import max_spans
from headrace.ops.wire import ForwardBatch

PADDING: Final = (0, 0, -1, -1, 0)
"""Of `StepRows`' tensors, in a row that is not there: it writes nothing, and sees nothing."""


class DevicePools:
    """The pools, their tables on the card, and what attention needs of the model and of the card."""

    def __init__(
        self,
        pools: list[KvPool],
        heads: int,
        device: torch.device,
        multiprocessors: int,
        windows: Sequence[Collection[int]],
    ) -> None:
        """`windows`: those of each pool's layers, 0 for one that sees everything."""
        self.pools = pools
        self.windows = windows
        self.heads = heads
        self.multiprocessors = multiprocessors
        self.tables = [torch.from_numpy(pool.table).to(device, copy=True) for pool in pools]
        """int32 `[slots, pages]` of each group."""
        slots, pages = pools[0].table.shape
        every = {window for each in windows for window in each}
        spans = max(max_spans(pages * pools[0].page_tokens, window=window) for window in every)
        head_dim = pools[0].shape.head_dim
        self.span_parts = torch.empty((slots, spans, heads, head_dim), device=device)
        self.span_sums = torch.empty((slots, spans, heads), device=device)

    def edit(self, batch: ForwardBatch, slot: Slot) -> Callable[[], None] | None:
        """Edit the host's tables and stage the same → what edits the card's, in the compute stream. Raises ValueError
        for an edit outside its table or pool."""
        edits = []
        for group, (pool, table) in enumerate(zip(self.pools, self.tables)):
            pool.forget(batch.init_slot)
            here = batch.edit_group == group
            slots, indices, pages = batch.edit_slot[here], batch.edit_index[here], batch.edit_page[here]
            pool.edit(slots, indices, pages)
            if len(slots):
                # The last edit of a place counts; a scatter has no order.
                places, last = np.unique(
                    (slots.astype(np.int64) * pool.table.shape[1] + indices)[::-1], return_index=True
                )
                edits.append(partial(table.view(-1).index_copy_, 0, slot.put(places), slot.put(pages[::-1][last])))
        if not edits:
            return None
        return partial(_all, edits)


def _all(works: list[partial[Tensor]]) -> None:
    for work in works:
        work()


class ExtendRows(NamedTuple):
    """Rows with several tokens, and how their attention is cut up (`plan_extend`)."""

    start: Tensor
    """int32 `[rows + 1]`, into the step's tokens."""
    slot: Tensor
    kv_len: Tensor
    pieces: Tensor
    merges: Tensor
    parts: int


class StepRows(NamedTuple):
    """A step's tokens and rows on the card; int32."""

    ids: Tensor
    """`[tokens]`, as in `ForwardBatch.input_ids`."""
    positions: Tensor
    token_slot: Tensor
    """`[tokens]`, -1 for a token that pads the step."""
    decode_slot: Tensor
    """`[decode rows]`: the first tokens are theirs, one each; padded with -1."""
    decode_kv_len: Tensor
    """Padded with 0."""
    extend: dict[tuple[int, int], ExtendRows]
    """By group and window; empty where no row has several tokens."""


def stage_rows(batch: ForwardBatch, pools: DevicePools, slot: Slot) -> StepRows:
    """Stage a batch of rows of any length."""
    lengths = np.diff(batch.row_start)
    singles = batch.counts.decode_rows
    return StepRows(
        ids=slot.put(batch.input_ids),
        positions=slot.put(batch.positions),
        token_slot=slot.put(np.repeat(batch.row_slot, lengths)),
        decode_slot=slot.put(batch.row_slot[:singles]),
        decode_kv_len=slot.put(batch.row_kv_len[:singles]),
        extend=_stage_extend(batch, pools, slot) if singles < batch.counts.rows else {},
    )


def _stage_extend(batch: ForwardBatch, pools: DevicePools, slot: Slot) -> dict[tuple[int, int], ExtendRows]:
    singles = batch.counts.decode_rows
    start, kv_len = batch.row_start[singles:], batch.row_kv_len[singles:]
    rows = slot.put(start), slot.put(batch.row_slot[singles:]), slot.put(kv_len)
    staged = {}
    for group, (pool, windows) in enumerate(zip(pools.pools, pools.windows)):
        shape = pool.shape
        tile = tile_tokens(pools.heads, shape.kv_heads, shape.head_dim, pool.pages.dtype)
        for window in windows:
            sizes = (start, kv_len, tile, shape.kv_heads)
            plan = plan_extend(*sizes, window=window, programs=2 * pools.multiprocessors)
            staged[group, window] = ExtendRows(*rows, slot.put(plan.pieces), slot.put(plan.merges), plan.parts)
    return staged


def padded_rows(slot: Slot, rows: int, batch: ForwardBatch | None = None) -> StepRows:
    """Stage a batch of rows of one token each, padded to so many; None: nothing but padding. At the same addresses for
    the same number."""
    names = ("input_ids", "positions", "row_slot", "row_slot", "row_kv_len")
    staged = []
    for name, padding in zip(names, PADDING):
        array, tensor = slot.room((rows,), np.dtype(np.int32), padding)
        if batch is not None:
            array[: batch.counts.rows] = getattr(batch, name)
        staged.append(tensor)
    ids, positions, token_slot, decode_slot, decode_kv_len = staged
    return StepRows(ids, positions, token_slot, decode_slot, decode_kv_len, {})


class DeviceKv:
    """What layers read and write in one step."""

    def __init__(
        self, rows: StepRows, pools: DevicePools, places: dict[int, tuple[int, int]], arrive: Callable[[int], None]
    ) -> None:
        """`places`: layer of the model → its pool, and its index there. `arrive` is called for each layer before its
        pages are touched."""
        self.rows = rows
        self._pools = pools
        self._places = places
        self._arrive = arrive

    def attend(self, layer: int, qkv: Tensor, scores: Scores) -> Tensor:
        """Write a layer's keys and values, then attend: `qkv` `[tokens, (heads + 2 · kv_heads) · head_dim]`, queries
        and keys rotated → `[tokens, heads · head_dim]`."""
        self._arrive(layer)
        group, index = self._places[layer]
        pool, table, rows = self._pools.pools[group], self._pools.tables[group], self.rows
        heads, head_dim = self._pools.heads, pool.shape.head_dim
        planes = qkv.view(len(qkv), -1, head_dim)
        pages, q = pool.layer(index), planes[:, :heads]
        write_kv(planes[:, heads:], pages, table, rows.token_slot, rows.positions)
        out = torch.empty((len(qkv), heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        if singles := len(rows.decode_slot):
            attend_decode(
                q[:singles],
                pages,
                table,
                rows.decode_slot,
                rows.decode_kv_len,
                out[:singles],
                self._pools.span_parts[:singles],
                self._pools.span_sums[:singles],
                scale=scores.scale,
                window=scores.window_tokens,
                soft_cap=scores.cap,
                programs=4 * self._pools.multiprocessors,
            )
        several = rows.extend.get((group, scores.window_tokens))
        if several is not None:
            self._extend(q, pages, table, several, out, scores)
        return out.view(len(qkv), -1)

    def _extend(self, q: Tensor, pages: Tensor, table: Tensor, rows: ExtendRows, out: Tensor, scores: Scores) -> None:
        kv_heads, head_dim = pages.shape[2], pages.shape[4]
        tile = tile_tokens(self._pools.heads, kv_heads, head_dim, pages.dtype)
        parts = torch.empty((rows.parts, self._pools.heads, tile, head_dim), device=q.device)
        sums = torch.empty((rows.parts, self._pools.heads, tile), device=q.device)
        cut = (rows.start, rows.slot, rows.kv_len, out, rows.pieces, rows.merges, parts, sums)
        window, soft_cap = scores.window_tokens, scores.cap
        attend_extend(q, pages, table, *cut, scale=scores.scale, window=window, soft_cap=soft_cap)

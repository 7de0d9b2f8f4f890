"""The copies of steps between the tiers: loads ahead of a batch's layers, backups behind all that was sent.

in     the loads of a batch; backups
out    for each layer the event behind its pages; the event behind a backup
state  none but the pools'
owner  the worker's main thread gives them to the streams
ready  when the event says so
end    `Copier` keeps what a copy needs until its stream has done it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from headrace.ops import accesses
from headrace.ops.batch_check import BadBatch
from headrace.ops.kv_pool import KvPool
from headrace.ops.runner import BackedUp, CopyTime
from headrace.ops.streams import Event, Streams
from headrace.ops.wire import I32, Backup, ForwardBatch


class Load(Protocol):
    """The host pages that one batch brings to device pages of one group."""

    pages: tuple[I32, I32]
    """Host pages, device pages."""

    def bring(self, layer: int) -> None:
        """In the load stream: copy the pages' part of the group's `layer`-th layer."""


class Copier(Protocol):
    """The host pool, and how pages come from it and go there."""

    def load(self, pool: KvPool, host_pages: I32, device_pages: I32) -> Load:
        """May raise IndexError for a page that does not exist, or else `bring` does."""

    def back_up(self, pool: KvPool, device_pages: list[int], host_pages: list[int]) -> Callable[[], None]:
        """→ what copies all layers, in the backup stream. Raises IndexError for a page that does not exist."""


class StepCopies:
    """Gives copies to their streams."""

    def __init__(
        self, pools: list[KvPool], places: Mapping[int, tuple[int, int]], copiers: Sequence[Copier], streams: Streams
    ) -> None:
        """`places`: layer of the model → its pool, and its index there. `copiers`: of each pool; none without a host
        pool."""
        self._pools = pools
        self._places = places
        self._copiers = copiers
        self._streams = streams

    def load(self, batch: ForwardBatch, spent: CopyTime) -> dict[int, Event]:
        """Bring the batch's host pages → for each layer of the model, the event behind its part. Raises BadBatch where
        there is no host pool."""
        if not batch.counts.loads:
            return {}
        loads = {}
        for group in np.unique(batch.load_group).tolist():
            if not self._copiers:
                raise BadBatch("the batch loads host pages, but this worker has no host pool")
            here = batch.load_group == group
            loads[group] = self._copiers[group].load(self._pools[group], batch.load_host[here], batch.load_device[here])
        arrivals = {}
        stream = self._streams.load
        for layer, (group, index) in sorted(self._places.items()):
            if group in loads:
                stream.uses(partial(accesses.load, batch.step, group, index, *loads[group].pages))
                stream.run(partial(spent.of, partial(loads[group].bring, index)))
                arrivals[layer] = stream.record()
        return arrivals

    def back_up(self, command: Backup) -> BackedUp:
        """Copy device pages to host pages. Raises ValueError without a host pool, IndexError as the copier does."""
        if not self._copiers:
            raise ValueError("a backup was asked for, but this worker has no host pool")
        pool, pages = self._pools[command.group], (command.device_pages, command.host_pages)
        work = self._copiers[command.group].back_up(pool, *pages)
        backup = self._streams.backup
        backup.wait(self._streams.compute.record())
        backup.uses(partial(accesses.backup, command.transfer, command.group, pool, *pages))
        backup.run(work)
        return BackedUp(command.transfer, backup.record())


def layer_places(pools: list[KvPool]) -> dict[int, tuple[int, int]]:
    """Layer of the model → its pool's index in the list, its index in the pool."""
    return {layer: (group, index) for group, pool in enumerate(pools) for index, layer in enumerate(pool.shape.layers)}

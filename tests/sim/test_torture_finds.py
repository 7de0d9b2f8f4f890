"""What the torture run is good for: bugs that are put in by hand, and in how many requests it finds each."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from headrace.kvcache.cache import KvCache
from headrace.kvcache.holding import Holding
from headrace.kvcache.host_pool import HostPool
from headrace.kvcache.pool import Fence, PagePool
from headrace.kvcache.prefetch import PrefetchOptions
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.radix_nodes import Lease
from headrace.kvcache.read_ahead import Prefetcher
from headrace.sched import collect as collecting
from headrace.sched import engine as engines
from headrace.sched.device import EngineFailed
from headrace.sched.engine import Engine
from headrace.sched.request import Request, SlotTable
from headrace.server.sim.storage import FaultyStore, StorageTimes, StoreFaults
from headrace.server.sim.torture import torture
from headrace.server.sim.world import WorldShape

Patch = pytest.MonkeyPatch
# A run that ends in the middle leaves its coroutines behind, and some of them can't be closed any more.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SEED_REQUESTS: Final = 100


def wrap(patch: Patch, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def skip_fences(patch: Patch) -> None:
    """Pages are free as soon as they are given back."""
    wrap(patch, PagePool, "give_back", lambda real: lambda self, pages, giver, fence: real(self, pages, giver, Fence()))


def drop_a_load(patch: Patch) -> None:
    """The last page that only the host has is not brought to the device."""

    def encode(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(views: Any, *others: Any) -> None:
            real(views, *others)
            if len(views.load_device) > 1:
                views.load_device[-1], views.load_host[-1] = views.load_device[0], views.load_host[0]

        return wrong

    wrap(patch, engines, "encode", encode)


def swap_two_pages(patch: Patch) -> None:
    """Two entries of a step's page-table deltas change places."""

    def encode(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(views: Any, *others: Any) -> None:
            real(views, *others)
            if len(views.edit_page) > 1:
                views.edit_page[:2] = views.edit_page[1::-1].copy()

        return wrong

    wrap(patch, engines, "encode", encode)


def forget_a_lease(patch: Patch) -> None:
    """A copy to the host does not hold its path."""
    patch.setattr(RadixIndex, "lease_again", lambda self, lease: Lease(lease.node, lease.num_pages))


def lose_aborts(patch: Patch) -> None:
    """Every third request goes on when its client has left."""
    wrap(patch, Engine, "abort", lambda real: lambda self, request: None if request % 3 == 0 else real(self, request))


def free_twice(patch: Patch) -> None:
    """A request's own pages are given back once more with the next one's."""
    last: list[Any] = []

    def close(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: KvCache, holdings: Sequence[Holding], fence: Fence) -> None:
            own = np.concatenate([run[0] for holding in holdings for run in holding.own_runs])
            real(self, holdings, fence)
            if len(last) == 3 and len(last[0]):
                self._pools[0].owner[last[0]] = 1
                self._pools[0].give_back(last[0], 1, fence)
            last.append(own)
            del last[:-3]

        return wrong

    wrap(patch, KvCache, "close", close)


def believe_the_store(patch: Patch) -> None:
    """Pages from storage are not verified."""
    patch.setattr(FaultyStore, "verifies", lambda self, key, view: True)


def collect_for_the_wrong_request(patch: Patch) -> None:
    """A slot's next request gets what a step in flight drew for the one before."""

    def leave(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: SlotTable, request: Request) -> None:
            slot = request.slot
            real(self, request)
            self.generation[slot] -= 1

        return wrong

    wrap(patch, SlotTable, "leave", leave)


def accept_the_overrun(patch: Patch) -> None:
    """A request whose end is its length goes on for the token that the next step draws."""

    def end_of(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda request, token, known, failed: real(request, token, known - 1, failed)

    wrap(patch, collecting, "_end_of", end_of)


def overwrite_what_storage_reads(patch: Patch) -> None:
    """A host page is reused while its write is under way."""
    patch.setattr(HostPool, "begin_write", lambda self, pages, transfer: None)


def use_a_damaged_piece(patch: Patch) -> None:
    """All pages of a read count as good."""

    def advance(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Prefetcher, prefetch: Any) -> None:
            for piece in prefetch.pieces:
                if piece.good >= 0:
                    piece.good = piece.end - piece.start
            real(self, prefetch)

        return wrong

    wrap(patch, Prefetcher, "_advance", advance)


def evict_the_leased(patch: Patch) -> None:
    """A flush drops what requests read."""

    def flush(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: KvCache, *arguments: Any) -> Any:
            for root in self._index._roots.values():
                for node in root.children.values():
                    node.leases = max(0, node.leases - 1)
            return real(self, *arguments)

        return wrong

    wrap(patch, KvCache, "flush", flush)


LIVES_ON_STORAGE: Final = WorldShape(
    slots=6,
    pages=40,
    page_tokens=2,
    context_tokens=40,
    prefill_tokens=64,
    delay_us=1,
    host_pages=64,
    storage_pages=4000,
    storage=StorageTimes(latency_us=20, page_us=100, lanes=2),
    store_faults=StoreFaults(damages=0.3),
    prefetch=PrefetchOptions("wait_complete", 1, piece_bytes=256),
    step_timeout_s=2.0,
)
SLOW_WRITES: Final = msgspec.structs.replace(LIVES_ON_STORAGE, host_pages=14, storage=StorageTimes(20, 3000, 4))
"""A host page is wanted again while storage still reads it."""
BUGS: Final = (
    (skip_fences, None),
    (drop_a_load, None),
    (swap_two_pages, None),
    (forget_a_lease, None),
    (lose_aborts, None),
    (free_twice, None),
    (believe_the_store, LIVES_ON_STORAGE),
    (collect_for_the_wrong_request, None),
    (accept_the_overrun, None),
    (overwrite_what_storage_reads, SLOW_WRITES),
    (use_a_damaged_piece, LIVES_ON_STORAGE),
    (evict_the_leased, None),
)
"""Each, and the world in which it shows soon; in those that seeds draw, some take thousands of requests."""
SEEDS: Final = 12


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.collect()


@pytest.mark.parametrize(("bug", "shape"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_the_torture_finds(bug: Callable[[Patch], None], shape: WorldShape | None, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    for seed in range(SEEDS):
        try:
            torture(seed, SEED_REQUESTS, shape)
        except (AssertionError, EngineFailed) as found:
            print(f"{bug.__name__}: found in seed {seed}: {found!r}")
            return
    pytest.fail(f"{SEEDS} seeds of {SEED_REQUESTS} requests have not found it: {bug.__doc__}")

"""The check of a whole cache: every page of every pool has one owner, every lease is counted (invariant 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.kvcache.holding import Holding
from headrace.kvcache.host import HostTier
from headrace.kvcache.integrity import Claims, joined
from headrace.kvcache.pool import Owner, PagePool
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.radix_nodes import Lease
from headrace.kvcache.windows import Windows
from headrace.ops.wire import I32


def check_cache(
    index: RadixIndex,
    pools: Sequence[PagePool],
    host: HostTier | None,
    windows: Windows | None,
    holdings: Sequence[Holding],
    others: Sequence[Lease],
    reads: Sequence[I32],
) -> Iterator[None]:
    """In steps of about 0.2 ms, for a loop that has other things to do; nothing may change before the last. `pools`: of
    the full groups; `others`: leases that are no request's; `reads`: host pages that storage writes to. Raises
    AssertionError."""
    places: list[I32] = []
    claims = [Claims(pool) for pool in pools]
    host_claims = Claims(host.pool) if host is not None else None
    for nodes in index.checking([*(holding.lease for holding in holdings), *others]):
        if nodes:
            places += [node.places for node in nodes]
            device = np.concatenate([node.device for node in nodes], axis=1)
            for group, claim in enumerate(claims):
                claim.claim(Owner.INDEX, device[group])
            if host_claims is not None:
                host_claims.claim(Owner.INDEX, np.concatenate([node.host for node in nodes], axis=1).ravel())
        yield
    for group, (pool, claim) in enumerate(zip(pools, claims)):
        pool.check()
        claim.claim(Owner.REQUEST, joined([run[group] for holding in holdings for run in holding.own_runs]))
        claim.finish(Owner.INDEX, Owner.REQUEST, Owner.TRANSFER)
        yield
    if host is not None and host_claims is not None:
        host.pool.check()
        host_claims.claim(Owner.TRANSFER, joined([*host.transferring, *reads]))
        host_claims.finish(Owner.INDEX, Owner.REQUEST, Owner.TRANSFER)
    if windows is not None:
        yield from windows.checking(holdings, places)
    else:
        assert not any(map(len, places)), "pages have places, and no window group"

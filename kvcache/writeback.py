"""Writes from the host to storage: what copies have brought goes on, at once or when storage can be used again.

in     pages that the host got; answers of storage; `resume`, when storage may be usable again
out    writes to the storage client; events of what is stored; `on_end` when a write gives its host pages back
state  writes under way, with their numbers (`host`); what was put off, by the prefix that it belongs to
owner  `KvCache`; nothing else calls it
ready  a page is stored when its write is acknowledged
end    host pages that storage reads are not used again before their write has ended (`HostPool.begin_write`)

What storage did not take, since it was detached, silent or too slow, is put off: it is written when storage is usable
and nothing else is being written, a few pages at a time, from where the host has it then. Nothing holds it there: what
is evicted before its turn is given up, and so is what fails once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec
import numpy as np

from headrace.kvcache.events import KvEvents
from headrace.kvcache.host import NOTHING_PENDING, HostTier
from headrace.kvcache.host_pool import HostPool
from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.radix_nodes import Span
from headrace.kvcache.storage.client import StorageClient
from headrace.kvcache.storage.keys import span_of
from headrace.kvcache.storage.protocol import Written, pages_per_message
from headrace.kvcache.windows import Windows
from headrace.ops.wire import I32

BATCH_BYTES: Final = 4 << 20
"""Of one write of what was put off: a write that comes meanwhile waits for so much at most."""
PREFIXES_PER_HOST: Final = 4
"""Pages of all prefixes of which something is put off, in host pools: 120 bytes each, where a page of the host has
4096 at least."""
LOOKS: Final = 8
"""Runs that are looked up in one turn of the loop: 0.1 ms each."""


class Run(NamedTuple):
    """Pages [start, end) of a prefix in one layer group, and where the host has them: int32 [end - start]."""

    group: int
    start: int
    end: int
    host: I32


def runs_of(spans: Sequence[Span], host: I32) -> list[Run]:
    """Of pages of a prefix that the host has in `host`, int32 [groups, k]."""
    runs, at = list[Run](), 0
    for start, end in spans:
        runs += [Run(group, start, end, pages[at : at + end - start]) for group, pages in enumerate(host)]
        at += end - start
    return runs


def window_runs(group: int, at: I32, host: I32) -> list[Run]:
    """Of pages `at` (int32 [k], in order) of a prefix that the host has in `host`."""
    edges = [0, *(np.flatnonzero(np.diff(at) > 1) + 1).tolist(), len(at)]
    return [Run(group, int(at[a]), int(at[b - 1]) + 1, host[a:b]) for a, b in pairwise(edges)]


class _UnderWay(msgspec.Struct):
    number: int
    runs_left: int


class _PutOff(NamedTuple):
    """Of one prefix: `(group, start, end)` each."""

    key: PrefixKey
    prefix_pages: int
    runs: list[tuple[int, int, int]]

    @property
    def pages(self) -> int:
        return sum(end - start for _, start, end in self.runs)


class WriteBack:
    """All writes of one cache."""

    def __init__(
        self,
        index: RadixIndex,
        host: HostTier,
        client: StorageClient,
        events: KvEvents,
        page_bytes: int,
        page_tokens: int,
        on_end: Callable[[], None],
        windows: Windows | None = None,
    ) -> None:
        self.stored_pages = 0
        """Acknowledged."""
        self.unstored_pages = 0
        """Given up."""
        self._index = index
        self._host = host
        self._windows = windows
        self._client = client
        self._events = events
        self._on_end = on_end
        self._batch_pages = min(max(1, BATCH_BYTES // page_bytes), pages_per_message(page_tokens))
        self._most_pages = pages_per_message(page_tokens)
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[int, _UnderWay] = {}
        self._writes = 0
        self._put_off: dict[int, _PutOff] = {}
        """By the identity of the key, which a request's copies share: the oldest first."""
        self._prefix_pages = 0
        self._looks_again = False

    @property
    def busy(self) -> bool:
        """Whether writes are under way."""
        return bool(self._under_way)

    @property
    def oldest_number(self) -> int:
        """Of the writes under way; `NOTHING_PENDING` if there are none. What is put off is not on its way."""
        return min((write.number for write in self._under_way.values()), default=NOTHING_PENDING)

    @property
    def put_off_pages(self) -> int:
        """Pages that wait until storage is usable and has nothing else to write."""
        return sum(one.pages for one in self._put_off.values())

    def write(self, key: PrefixKey, runs: Sequence[Run], number: int) -> None:
        """The host has these pages, all of them in one pool; `number` is that of the copy which brought them."""
        if self._client.usable:
            self._begin(key, runs, number, again=False)
        else:
            for run in runs:
                self._put_off_run(key, run.group, run.start, run.end)

    def resume(self) -> None:
        """Write some of what was put off, if storage is usable and nothing else is being written."""
        for _ in range(LOOKS):
            if not self._put_off or self._under_way or not self._client.usable:
                return
            self._write_oldest()
        if self._put_off and not self._under_way and not self._looks_again:
            self._looks_again = True
            self._loop.call_soon(self._look_again)

    def forget(self, namespace: bytes | None) -> None:
        """What is put off of a namespace, or all of it (None), is not to be stored."""
        for name, one in list(self._put_off.items()):
            if namespace in (None, one.key.namespace):
                self._give_up(name)

    def _look_again(self) -> None:
        self._looks_again = False
        self.resume()

    def _begin(self, key: PrefixKey, runs: Sequence[Run], number: int, again: bool) -> None:
        self._writes += 1
        pool = self._pool_of(runs[0].group)
        write, pages = self._writes, np.concatenate([run.host for run in runs])
        under_way = self._under_way[write] = _UnderWay(number, len(runs))
        pool.begin_write(pages, write)

        def written(run: Run, reply: Written) -> None:
            under_way.runs_left -= 1
            self.stored_pages += reply.stored
            self._not_taken(key, run, reply.dropped, again)
            if not run.group:
                self._events.stored_in_storage(key, run.start, run.end, reply.dropped)
            if not under_way.runs_left:
                del self._under_way[write]
                pool.end_write(pages, write)
                self._on_end()
                self.resume()

        for run in runs:
            assert run.end - run.start <= self._most_pages, "a copy is cut smaller than a message"
            self._client.write(run.group, span_of(key, run.start, run.end, run.group), run.host, partial(written, run))

    def _not_taken(self, key: PrefixKey, run: Run, dropped: Sequence[int], again: bool) -> None:
        if again:
            self.unstored_pages += len(dropped)
            return
        taken = sorted({-1, *range(run.end - run.start), run.end - run.start}.difference(dropped))
        for before, after in pairwise(taken):
            if after - before > 1:
                self._put_off_run(key, run.group, run.start + before + 1, run.start + after)

    # ------------------------------------------------------------------------------------------------------------
    # What was put off

    def _put_off_run(self, key: PrefixKey, group: int, start: int, end: int) -> None:
        one = self._put_off.get(id(key))
        if one is None:
            one = self._put_off[id(key)] = _PutOff(key, key.length // key.page_tokens, [])
            self._prefix_pages += one.prefix_pages
        one.runs.append((group, start, end))
        while self._prefix_pages > PREFIXES_PER_HOST * self._host.pool.num_pages:
            self._give_up(next(iter(self._put_off)))

    def _give_up(self, name: int) -> None:
        one = self._put_off.pop(name)
        self._prefix_pages -= one.prefix_pages
        self.unstored_pages += one.pages

    def _write_oldest(self) -> None:
        """Begin to write the first run that was put off, or as much of it as one write may; what the host has no more
        is given up."""
        name, one = next(iter(self._put_off.items()))
        key, runs = one.key, one.runs
        group, start, end = runs.pop(0)
        upto = min(end, start + self._batch_pages)
        host = self._host_run(key, group, start, upto)
        if len(host):
            if start + len(host) < end:
                runs.insert(0, (group, start + len(host), end))
            self._begin(key, [Run(group, start, start + len(host), host)], self._host.next_number(), again=True)
        else:
            self.unstored_pages += end - start
        if not runs:
            self._give_up(name)

    def _is_window(self, group: int) -> bool:
        return self._windows is not None and group >= self._windows.groups[0].number

    def _pool_of(self, group: int) -> HostPool:
        if self._windows is not None and self._is_window(group):
            return self._windows.host_pool(group)
        return self._host.pool

    def _host_run(self, key: PrefixKey, group: int, start: int, end: int) -> I32:
        """Where the host has pages of a prefix from `start` on, up to a gap."""
        raw = key.raw(0, end)
        if self._windows is not None and self._is_window(group):
            return self._windows.host_run(group, self._index.places_of(key.namespace, raw)[start:])
        run: I32 = self._index.host_run(key.namespace, raw, start)[group]
        return run

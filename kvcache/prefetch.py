"""Prefetch: storage → host, ahead of the requests that need the pages, and how long those wait for it.

in     waiting requests; what storage found and read; the time that computing would take
out    host pages in the index; for each request, whether it should wait longer
state  a `Prefetch` per request that storage may help, reads under way, a running estimate of storage's speed
owner  `KvCache`; the scheduler asks `waits`, nothing here waits itself
ready  pages as their read is acknowledged and all before them are there
end    `release`: what has not begun is cancelled; pages come back with each read's acknowledgement

A request's missing pages are looked up in one call, then read in pieces. Pieces are indexed in the order of the prefix,
so whenever the request stops waiting, what has arrived is a contiguous part. How long it waits is the policy's choice:

    best_effort    not at all: what is there when its turn comes is used
    wait_complete  until everything found has arrived
    timeout        the same, but at most base + per_ki_token x n / 1024 after submission
    adaptive       while computing the pages that are still to come would take longer than waiting for them
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np

from headrace.kvcache.host import HostTier
from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.pool import Fence, Owner
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.radix_nodes import Kept
from headrace.kvcache.storage.client import PageSpan, StorageClient
from headrace.kvcache.storage.protocol import ReadDone
from headrace.ops.wire import I32

PrefetchPolicy: TypeAlias = Literal["best_effort", "wait_complete", "timeout", "adaptive"]
PrefillMs: TypeAlias = Callable[[int, int], float]
"""(tokens, context they begin at) → ms that computing them would take now."""

Decision: TypeAlias = Literal["", "nothing_found", "complete", "cut_short", "no_room", "gave_up", "did_not_wait"]
""""" where storage was not asked. `complete`: all that was found had come; `cut_short`: up to a page that was gone or
damaged; `no_room`: but for what the host had no room for; `gave_up`: it waited, and went on without the rest;
`did_not_wait`: it went on with what was there."""

_SMOOTHING: Final = 0.4
_LEAST_WAIT_MS: Final = 0.1
"""Less is not worth a timer."""
_PATIENCE: Final = 3.0
"""A piece that takes so many times what was expected is taken for stuck by `adaptive`."""


class PrefetchOptions(msgspec.Struct, frozen=True):
    """Per server."""

    policy: PrefetchPolicy = "adaptive"
    threshold_tokens: int = 64
    """Fewer missing tokens are not worth a lookup."""
    timeout_base_ms: float = 1000.0
    timeout_per_ki_token_ms: float = 250.0
    piece_bytes: int = 4 << 20
    host_share: float = 0.75
    """Of the host pool, for reads under way and for what has come and waits for its request's turn."""
    room_timeout_ms: float = 500.0
    """From its turn on, what a request waits for host room: what others held comes back with their next steps and
    writes. Before its turn that costs it nothing."""


class PrefetchCounts(msgspec.Struct):
    """Pages, since the start."""

    lookups: int = 0
    found: int = 0
    useful: int = 0
    """Arrived before their request went on, and were used by it; or were warmed."""
    late: int = 0
    """Arrived after it; still indexed."""
    wasted: int = 0
    """Read, and not used: computed meanwhile, what came before is gone, or their request ended first."""
    cancelled: int = 0
    """Found, and not read: nobody waited for them any more."""
    declined: int = 0
    """Found, and not read: the host stayed short of room."""


class Prefetch:
    """One request's prefetch."""

    __slots__ = (
        *(
            "arrived",
            "asked",
            "asked_again",
            "asked_s",
            "due_s",
            "begun",
            "cut",
            "done",
            "first",
            "found",
            "hashes",
            "kept",
            "key",
            "leader",
            "pieces",
            "policy",
        ),
        *("reason", "released", "room_timer", "short", "timer", "waited", "waiters", "wanted"),
    )

    def __init__(self, key: PrefixKey, policy: PrefetchPolicy, asked_s: float) -> None:
        self.key = key
        self.policy = policy
        self.asked_s = asked_s
        self.due_s = math.inf
        """When somebody first waited for it: the turn of its request, or of one that needs the same pages."""
        self.wanted = 0
        """Pages of the prefix that are of use."""
        self.first = 0
        """The first page that neither device nor host had."""
        self.found = -1
        """Pages that storage has, from `first` on; -1 until it has said."""
        self.begun = 0
        """Of those, being read or read: they got host room."""
        self.arrived = 0
        """Of those, indexed."""
        self.short = False
        """The host had no room for what else was found."""
        self.room_timer: asyncio.TimerHandle | None = None
        self.pieces: list[_Piece] = []
        self.hashes: list[bytes] = []
        """Of the pages that it asked for."""
        self.done = False
        """Nothing more will come of it."""
        self.released = False
        """Its request has gone on or ended."""
        self.leader: Prefetch | None = None
        self.waiters: list[Prefetch] = []
        """Others that wait for the same pages."""
        self.kept: Kept | None = None
        """The part of its prefix that is evicted last while it waits: it grows with every piece."""
        self.timer: asyncio.TimerHandle | None = None
        self.waited = False
        """Its request's turn had come, and it waited."""
        self.cut = False
        """A page was gone or damaged: what follows it is of no use."""
        self.asked = self.asked_again = False
        """Storage was asked; and once more, at its request's turn."""
        self.reason = ""
        """Why its request waited or went on, when it was last asked."""

    @property
    def decision(self) -> Decision:
        """What came of it, if its request goes on now."""
        if self.done and self.cut:
            return "cut_short"
        if self.done and self.short:
            return "no_room"
        if self.done:
            return "complete" if self.found else "nothing_found"
        return "gave_up" if self.waited else "did_not_wait"


class _Piece:
    __slots__ = ("end", "good", "host", "operations", "start")

    def __init__(self, start: int, end: int, host: I32) -> None:
        self.start, self.end = start, end
        """Pages of the prefix."""
        self.host = host
        """int32 [groups, end - start]"""
        self.operations: list[int] = []
        self.good = -1
        """Pages that hold what they should, once all groups have answered."""


class Prefetcher:
    """All prefetches of one cache."""

    def __init__(
        self,
        index: RadixIndex,
        host: HostTier,
        client: StorageClient,
        options: PrefetchOptions,
        page_bytes: int,
        groups: int,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when a waiting request may be able to go on."""
        self.counts = PrefetchCounts()
        self._index = index
        self._host = host
        self._client = client
        self._options = options
        self._groups = groups
        self._piece_pages = max(1, options.piece_bytes // page_bytes)
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._reading: dict[bytes, Prefetch] = {}
        self._roomless: deque[Prefetch] = deque()
        """Those that wait for host room: each gets a piece in its turn, so that a large one does not starve a small."""
        self._held_pages = 0
        self._pages_read = 0
        self._kept_pages = 0
        self._lookup_ms = 1.0
        self._page_ms = page_bytes / 1e6
        """Running estimates; until something was measured, 1 GB/s."""

    @property
    def _share_pages(self) -> int:
        return int(self._host.pool.num_pages // self._groups * self._options.host_share)

    @property
    def transferring(self) -> list[I32]:
        """Host pages that reads write to, or that wait for an earlier piece."""
        prefetches = {id(prefetch): prefetch for prefetch in self._reading.values()}
        return [piece.host.ravel() for prefetch in prefetches.values() for piece in prefetch.pieces]

    def begin(
        self, key: PrefixKey, matchable_pages: int, policy: PrefetchPolicy | None, queued: bool = True
    ) -> Prefetch | None:
        """Ask storage for what the device and the host lack of a prefix; None if that is not worth it, now or at its
        turn. `queued`: it is for a request, whose turn is still to come."""
        prefetch = Prefetch(key, policy or self._options.policy, self._loop.time())
        prefetch.wanted = matchable_pages
        prefetch.done = not self._ask(prefetch)
        if prefetch.done and not (queued and self._helps(matchable_pages * key.page_tokens)):
            return None
        if not queued:
            prefetch.due_s = prefetch.asked_s
        # Without what it continues, nothing that comes is of use.
        self._keep(prefetch)
        if prefetch.policy == "timeout":
            tokens = (matchable_pages - prefetch.first) * key.page_tokens
            limit_ms = self._options.timeout_base_ms + self._options.timeout_per_ki_token_ms * tokens / 1024
            prefetch.timer = self._loop.call_later(limit_ms / 1e3, self._on_change)
        return prefetch

    def waits(self, prefetch: Prefetch, prefill_ms: PrefillMs) -> bool:
        """Whether the request, whose turn it is, should wait for more."""
        if prefetch.done and self._has_shrunk(prefetch):
            self._ask_again(prefetch)
        wait = not prefetch.done and self._should_wait(prefetch, self._loop.time(), prefill_ms)
        prefetch.waited |= wait
        if wait:
            self._is_due(prefetch.leader or prefetch)
        return wait

    def storage_pages(self, prefetch: Prefetch, matched_pages: int) -> int:
        """Of a request's matched prefix, the pages that this prefetch brought."""
        return max(0, min(matched_pages, prefetch.first + prefetch.arrived) - prefetch.first)

    def release(self, prefetch: Prefetch, used_pages: int) -> None:
        """The request goes on with so many of its pages, or has ended: nothing more is begun for it alone."""
        if prefetch.released:
            return
        prefetch.released = True
        if prefetch.timer is not None:
            prefetch.timer.cancel()
        self.counts.useful += used_pages
        self.counts.wasted += prefetch.arrived - used_pages
        self._unkeep(prefetch)
        if prefetch.leader is not None and prefetch in prefetch.leader.waiters:
            prefetch.leader.waiters.remove(prefetch)
        if not prefetch.done and not any(not waiter.released for waiter in prefetch.waiters):
            for piece in prefetch.pieces:
                for operation in piece.operations:
                    self._client.cancel(operation)
            if prefetch in self._roomless:
                self._roomless.remove(prefetch)
                self._decline(prefetch)
        self.room_came()

    # ------------------------------------------------------------------------------------------------------------
    # Policies

    def _should_wait(self, prefetch: Prefetch, now_s: float, prefill_ms: PrefillMs) -> bool:
        match prefetch.policy:
            case "best_effort":
                prefetch.reason = "best_effort never waits"
                return False
            case "wait_complete":
                prefetch.reason = "everything that was found is awaited"
                return True
            case "timeout":
                assert prefetch.timer is not None
                prefetch.reason = "within its time limit" if prefetch.timer.when() > now_s else "out of time"
                return prefetch.timer.when() > now_s
            case "adaptive":
                return self._pays(prefetch, now_s, prefill_ms)

    def _pays(self, prefetch: Prefetch, now_s: float, prefill_ms: PrefillMs) -> bool:
        """Whether the pages to come save more time than waiting for them is expected to cost."""
        page_tokens = prefetch.key.page_tokens
        spent_ms = (now_s - prefetch.asked_s) * 1e3
        if prefetch.found < 0:
            begin, end = prefetch.first, prefetch.wanted
            expected_ms = self._lookup_ms + (end - begin) * self._page_ms
            wait_ms = max(0.0, expected_ms - spent_ms)
        else:
            begin, end = prefetch.first + prefetch.arrived, prefetch.first + prefetch.found
            # Reads of others share the device with this one's.
            wait_ms = (end - begin) * self._page_ms * max(1, self._held_pages / max(1, prefetch.found))
            expected_ms = self._lookup_ms + prefetch.found * self._page_ms
        saved_ms = prefill_ms((end - begin) * page_tokens, begin * page_tokens)
        # What was expected may be wrong: the wait ends when it has cost what it could save.
        left_ms = max(saved_ms, _PATIENCE * expected_ms) - spent_ms
        pays = saved_ms > wait_ms and left_ms > _LEAST_WAIT_MS
        prefetch.reason = f"{end - begin} pages: computing {saved_ms:.1f} ms, waiting {wait_ms:.1f} ms"
        if prefetch.timer is not None:
            prefetch.timer.cancel()
        prefetch.timer = self._loop.call_later(left_ms / 1e3, self._on_change) if pays else None
        return pays

    # ------------------------------------------------------------------------------------------------------------
    # Reading

    def _has_shrunk(self, prefetch: Prefetch) -> bool:
        """Whether pages that device and host had when it ended are gone, and storage can still be asked."""
        if prefetch.asked_again or prefetch.policy == "best_effort":
            return False
        had = prefetch.first + prefetch.arrived
        return self._indexed_pages(prefetch) < had and self._helps(had * prefetch.key.page_tokens)

    def _ask_again(self, prefetch: Prefetch) -> None:
        """Under pressure what was there at its submission may be evicted before its turn. It is read once more, not
        twice: a request gets on."""
        self.counts.wasted += max(0, prefetch.first + prefetch.arrived - self._indexed_pages(prefetch))
        prefetch.asked_again = True
        prefetch.asked_s = prefetch.due_s = self._loop.time()
        prefetch.found, prefetch.begun, prefetch.arrived = -1, 0, 0
        prefetch.short = prefetch.cut = False
        prefetch.done = not self._ask(prefetch)
        self._keep(prefetch)

    def _indexed_pages(self, prefetch: Prefetch) -> int:
        key = prefetch.key
        return self._index.peek(key.namespace, key.raw(0, prefetch.wanted))[1]

    def _helps(self, missing_tokens: int) -> bool:
        return self._client.usable and missing_tokens >= max(1, self._options.threshold_tokens)

    def _ask(self, prefetch: Prefetch) -> bool:
        """Look up what is missing; False if that is not worth it."""
        key = prefetch.key
        prefetch.first = self._indexed_pages(prefetch)
        if not self._helps((prefetch.wanted - prefetch.first) * key.page_tokens):
            return False
        prefetch.asked = True
        hashes = key.page_hashes(prefetch.wanted)[prefetch.first :]
        leader = self._reading.get(hashes[0])
        if leader is not None:
            # Two that need the same pages share one read; what differs behind them is asked for afterwards.
            prefetch.leader = leader
            leader.waiters.append(prefetch)
            return True
        prefetch.hashes = hashes
        for page_hash in hashes:
            self._reading.setdefault(page_hash, prefetch)
        self.counts.lookups += 1
        asked_s = self._loop.time()
        answers: list[int] = []

        def found(pages: int) -> None:
            answers.append(pages)
            if len(answers) == self._groups:
                self._lookup_ms += _SMOOTHING * ((self._loop.time() - asked_s) * 1e3 - self._lookup_ms)
                self._found(prefetch, min(answers))

        for group in range(self._groups):
            self._client.lookup(group, group_keys(hashes, group), found)
        return True

    def _found(self, prefetch: Prefetch, pages: int) -> None:
        prefetch.found = pages
        self.counts.found += pages
        if prefetch.released and not prefetch.waiters:
            # Nobody waits for them. One piece is still read while nothing else is: how fast storage is now would not be
            # known otherwise, once it has been too slow to wait for.
            probed = 0 if self._held_pages else min(pages, self._piece_pages)
            self.counts.cancelled += pages - probed
            prefetch.found = probed
        self._roomless.append(prefetch)
        self.room_came()
        self._advance(prefetch)
        self._on_change()

    def room_came(self) -> None:
        """The host may have room again: begin what waits for it, one after the other. What came would be evicted before
        its turn if all of a crowd got a part of the room."""
        while self._roomless:
            prefetch = self._roomless[0]
            if prefetch.begun == prefetch.found:
                self._roomless.popleft()
                self._cancel_room_timer(prefetch)
            elif not self._begin_piece(prefetch):
                if self._may_wait_for_room(prefetch):
                    return
                self._roomless.popleft()
                self._decline(prefetch)

    def _begin_piece(self, prefetch: Prefetch) -> bool:
        """Read the next piece, as large as there is room for; False if there is none."""
        room = min(self._share_pages - self._held_pages - self._kept_pages, self._host.room_pages)
        count = min(room, self._piece_pages, prefetch.found - prefetch.begun)
        # Pages behind a fence are evicted, and not free yet.
        host = self._host.take(count) if count > 0 else None
        if host is None:
            return False
        start = prefetch.first + prefetch.begun
        prefetch.begun += count
        self._held_pages += count
        self._read(prefetch, _Piece(start, start + count, host))
        return True

    def _may_wait_for_room(self, prefetch: Prefetch) -> bool:
        if prefetch.released and not prefetch.waiters:
            return False
        if prefetch.due_s == math.inf:
            return True
        at_s = prefetch.due_s + self._options.room_timeout_ms / 1e3
        if prefetch.room_timer is None:
            prefetch.room_timer = self._loop.call_at(at_s, self._room_timed_out, prefetch)
        return at_s > self._loop.time()

    def _is_due(self, prefetch: Prefetch) -> None:
        """From now on somebody waits for it."""
        if prefetch.due_s == math.inf:
            prefetch.due_s = self._loop.time()
            if prefetch in self._roomless:
                self._roomless.remove(prefetch)
                self._roomless.insert(sum(other.due_s < math.inf for other in self._roomless), prefetch)
                self._may_wait_for_room(prefetch)
                self.room_came()

    def _room_timed_out(self, prefetch: Prefetch) -> None:
        if prefetch in self._roomless:
            self._roomless.remove(prefetch)
            self._decline(prefetch)

    def _decline(self, prefetch: Prefetch) -> None:
        """Read nothing more of it."""
        left = prefetch.found - prefetch.begun
        if prefetch.released and not prefetch.waiters:
            self.counts.cancelled += left
        else:
            self.counts.declined += left
            prefetch.short = True
        prefetch.found = prefetch.begun
        self._cancel_room_timer(prefetch)
        self._advance(prefetch)
        self._on_change()

    def _cancel_room_timer(self, prefetch: Prefetch) -> None:
        if prefetch.room_timer is not None:
            prefetch.room_timer.cancel()
            prefetch.room_timer = None

    def _read(self, prefetch: Prefetch, piece: _Piece) -> None:
        prefetch.pieces.append(piece)
        asked_s, read_before = self._loop.time(), self._pages_read
        answers: list[int] = []

        def read(done: ReadDone) -> None:
            answers.append(done.good)
            if len(answers) == self._groups:
                piece.good = min(answers)
                piece.operations.clear()
                self._pages_read += piece.good
                if piece.good:
                    self._measured((self._loop.time() - asked_s) * 1e3, self._pages_read - read_before, prefetch)
                self._advance(prefetch)
                self.room_came()
                self._on_change()

        for group in range(self._groups):
            span = span_of(prefetch.key, piece.start, piece.end, group)
            piece.operations.append(self._client.read(group, span, piece.host[group], read))

    def _measured(self, elapsed_ms: float, pages: int, prefetch: Prefetch) -> None:
        """While a piece was read, so many pages came, its own with them. Pieces take turns: those of the same prefetch
        that are still under way have nearly come too, and all of them together show how fast storage is."""
        pages += sum(piece.end - piece.start for piece in prefetch.pieces if piece.good < 0)
        self._page_ms += _SMOOTHING * (elapsed_ms / pages - self._page_ms)

    def _advance(self, prefetch: Prefetch) -> None:
        """Index the pieces that have come, in order; when no more will, end."""
        pool, key = self._host.pool, prefetch.key
        while prefetch.pieces and prefetch.pieces[0].good >= 0:
            piece = prefetch.pieces.pop(0)
            size = piece.end - piece.start
            self._held_pages -= size
            good = piece.host[:, : piece.good]
            whole = piece.start == prefetch.first + prefetch.arrived
            taken = np.zeros(piece.good, np.bool_)
            if whole and piece.good:
                taken = self._index.insert_host(key.namespace, key.raw(0, piece.start + piece.good), piece.start, good)
                prefetch.arrived += piece.good
            pool.hand_over(good[:, taken].ravel(), Owner.TRANSFER, Owner.INDEX)
            pool.give_back(good[:, ~taken].ravel(), Owner.TRANSFER, Fence())
            pool.give_back(piece.host[:, piece.good :].ravel(), Owner.TRANSFER, Fence())
            self.counts.wasted += piece.good - int(taken.sum())
            if piece.good < size:
                self._cut(prefetch)
            if prefetch.released:
                self.counts.late += int(taken.sum())
            else:
                self._keep(prefetch)
        if not prefetch.pieces and prefetch.begun == prefetch.found and not prefetch.done:
            self._end(prefetch)

    def _cut(self, prefetch: Prefetch) -> None:
        """Read nothing more: it would stand behind a gap."""
        prefetch.cut, prefetch.found = True, prefetch.begun
        for piece in prefetch.pieces:
            for operation in piece.operations:
                self._client.cancel(operation)

    def _end(self, prefetch: Prefetch) -> None:
        prefetch.done = True
        self._cancel_room_timer(prefetch)
        if prefetch in self._roomless:
            # Cut while it stood behind another: if it asks again, its old place would be taken for the new one.
            self._roomless.remove(prefetch)
        for page_hash in prefetch.hashes:
            if self._reading.get(page_hash) is prefetch:
                del self._reading[page_hash]
        waiters, prefetch.waiters = prefetch.waiters, []
        for waiter in waiters:
            waiter.leader = None
            if waiter.released or not self._ask(waiter):
                waiter.done = True
            if not waiter.released:
                self._keep(waiter)

    def _keep(self, prefetch: Prefetch) -> None:
        """What has come for a waiting request should be there when its turn comes: it is evicted after all that nobody
        waits for. That is bounded (`host_share`), so that a waiting crowd does not push out what others use."""
        self._unkeep(prefetch)
        kept = self._index.keep(prefetch.key.namespace, prefetch.key.raw(0, prefetch.wanted), prefetch.first)
        prefetch.kept = kept
        self._kept_pages += kept.num_pages
        if self._kept_pages > self._share_pages:
            self._unkeep(prefetch)

    def _unkeep(self, prefetch: Prefetch) -> None:
        kept, prefetch.kept = prefetch.kept, None
        if kept is not None:
            self._kept_pages -= kept.num_pages
            self._index.unkeep(kept)


def group_keys(hashes: list[bytes], group: int) -> bytes:
    """Keys of a group's pages: group 0's are the chain hashes; another's differ in their last byte."""
    if not group:
        return b"".join(hashes)
    return b"".join(page[:-1] + bytes([page[-1] ^ group]) for page in hashes)


def span_of(key: PrefixKey, start: int, end: int, group: int) -> PageSpan:
    """What the agent needs to know of pages [start, end) of a prefix."""
    hashes = key.page_hashes(end)
    parents = group_keys([hashes[start - 1] if start else key.namespace, *hashes[start : end - 1]], group)
    return PageSpan(key.namespace, parents, group_keys(hashes[start:end], group), key.raw(start, end))

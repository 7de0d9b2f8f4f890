"""Reading ahead: storage → host, in the order in which the waiting requests are expected to go on.

in     waiting requests, and their order; what storage found and read; host room
out    host pages in the index; for each request, whether it should wait longer
state  every `Prefetch`: those whose prefix is kept, reads under way, a running estimate of storage's speed
owner  `KvCache`; nothing here waits itself
ready  pages as their read is acknowledged and all before them are there
end    `release`: what has not begun is not read; pages come back with each read's acknowledgement

Storage is asked at once what it has: one call a request. It is read when the request is near its turn: reads begin for
the first of the queue, then for the next, as long as the host has room for all that those need, which is kept until
they go on. Whoever stands behind gets room when it comes; if others overtake him meanwhile, they get his. So a long
queue does not push out what the first of it need, and what is read is used.

Requests that need the same pages share their reads page by page: the second waits for what the first is reading, then
goes on with what only it needs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from headrace.kvcache.host import HostTier
from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.pool import Fence, Owner
from headrace.kvcache.prefetch import (
    Patience,
    Piece,
    Prefetch,
    PrefetchOptions,
    PrefetchPolicy,
    PrefillMs,
    StorageSpeed,
)
from headrace.kvcache.radix import RadixIndex
from headrace.kvcache.storage.client import StorageClient
from headrace.kvcache.storage.keys import group_keys, span_of
from headrace.kvcache.storage.protocol import ReadDone
from headrace.kvcache.window_reads import WindowReads
from headrace.ops.wire import I32


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
        on_room: Callable[[], None],
        windows: WindowReads | None = None,
        usable: Callable[[PrefixKey, int], int] | None = None,
    ) -> None:
        """`page_bytes`: of a page of each of so many (full) `groups`. `windows` reads for the other groups, if there
        are any, and `usable` says how much of a prefix a request could go on from. `on_change` is called when a waiting
        request may be able to go on, `on_room` when `read_ahead` should be."""
        self.counts = PrefetchCounts()
        self._index = index
        self._host = host
        self._client = client
        self._options = options
        self._groups = groups
        self._windows = windows
        self._usable = usable
        self._piece_pages = max(1, options.piece_bytes // page_bytes)
        self._on_change = on_change
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        self._speed = StorageSpeed(page_bytes)
        self._patience = Patience(options, self._speed, on_change)
        self._warming: dict[int, Prefetch] = {}
        """Those that no request waits for: they come before all requests."""
        self._near: dict[int, Prefetch] = {}
        """Those whose prefix is kept."""
        self._under_way: dict[int, Piece] = {}
        self._reading: dict[bytes, Piece] = {}
        """By the hash of each page that is being read, in group 0."""
        self._held_pages = 0
        self._pages_read = 0
        self._stale = False
        """Something has happened since the last `read_ahead`."""
        self._lacks_room, self._lacked_at = False, (0, 0)
        """The last `read_ahead` ended for want of room, and had so much."""

    @property
    def transferring(self) -> list[I32]:
        """Host pages that reads write to, or that wait for an earlier piece."""
        return [piece.host.ravel() for piece in self._under_way.values()]

    def begin(
        self, key: PrefixKey, matchable_pages: int, policy: PrefetchPolicy | None, queued: bool = True
    ) -> Prefetch | None:
        """Ask storage for what the device and the host lack of a prefix; None if that is not worth it, now or at its
        turn. `queued`: it is for a request, whose turn is still to come."""
        prefetch = Prefetch(key, matchable_pages, policy or self._options.policy, self._loop.time())
        prefetch.first = self._indexed_pages(prefetch)
        prefetch.done = not self._ask(prefetch)
        if prefetch.done and not (queued and self._helps(matchable_pages * key.page_tokens)):
            return None
        if not queued:
            prefetch.due_s = prefetch.asked_s
            self._warming[id(prefetch)] = prefetch
        self._stale = True
        return prefetch

    def read_ahead(self, order: Iterable[Prefetch]) -> None:
        """Begin what can be begun, for those who come first in `order` before all others. Cheap where nothing has
        happened since the last call."""
        if not self._stale:
            return
        self._stale = self._lacks_room = False
        ahead = [*self._warming.values(), *order]
        for place, prefetch in enumerate(ahead):
            while not self._bring(prefetch, is_first=not place):
                # What comes back by itself comes first.
                if self._host.pool.fenced_pages or not self._overtake(ahead, place):
                    self._lacks_room, self._lacked_at = True, self._room()
                    self._await_room(prefetch)
                    return

    def waits(self, prefetch: Prefetch, prefill_ms: PrefillMs) -> bool:
        """Whether the request, whose turn it is, should wait for more."""
        if prefetch.done and self._has_shrunk(prefetch):
            self._ask_again(prefetch)
        if not prefetch.is_due:
            prefetch.due_s = self._loop.time()
            if self._lacks_room:
                self._look_again()
        if prefetch.done:
            return False
        crowd = max(1.0, self._held_pages / max(1, prefetch.end - prefetch.first))
        wait = self._patience.lasts(prefetch, crowd, prefill_ms)
        prefetch.waited |= wait
        return wait

    def to_come(self, prefetch: Prefetch) -> tuple[int, float]:
        """Tokens of the prefix that will be there when its prefetch is done, and ms until then, at storage's speed."""
        pages = max(prefetch.reached, prefetch.end)
        return pages * prefetch.key.page_tokens, (pages - prefetch.reached) * self._speed.page_ms

    def storage_pages(self, prefetch: Prefetch, matched_pages: int) -> int:
        """Of a request's matched prefix, the pages that came from storage after it had."""
        return max(0, min(matched_pages, prefetch.end) - prefetch.first) if prefetch.asked else 0

    def release(self, prefetch: Prefetch, used_pages: int) -> None:
        """The request goes on with so many of its pages, or has ended: nothing more is begun for it alone."""
        if prefetch.released:
            return
        prefetch.released = True
        prefetch.cancel_timers()
        self._warming.pop(id(prefetch), None)
        useful = min(used_pages, prefetch.arrived)
        self.counts.useful += useful
        self.counts.wasted += prefetch.arrived - useful
        self._unkeep(prefetch)
        if not prefetch.done and prefetch.end >= 0:
            self.counts.cancelled += max(0, prefetch.end - prefetch.begun)
            for piece in prefetch.pieces:
                # Another that needs these pages reads what has not come.
                self._cancel(piece)
            if self._windows is not None:
                self._windows.cancel(prefetch)
        if self._lacks_room:
            # It may have been the first, whom the others stood behind.
            self._look_again()

    def room_came(self) -> None:
        """The host may have room again."""
        if self._lacks_room and any(now > then for now, then in zip(self._room(), self._lacked_at)):
            self._look_again()

    # ------------------------------------------------------------------------------------------------------------
    # Asking

    def _helps(self, missing_tokens: int) -> bool:
        return self._client.usable and missing_tokens >= max(1, self._options.threshold_tokens)

    def _indexed_pages(self, prefetch: Prefetch) -> int:
        key = prefetch.key
        prefetch.reached = self._index.peek(key.namespace, key.raw(0, prefetch.wanted))[1]
        prefetch.usable = prefetch.reached if self._usable is None else self._usable(key, prefetch.wanted)
        return prefetch.reached

    def _has_shrunk(self, prefetch: Prefetch) -> bool:
        """Whether pages that device and host had when it ended are gone, and storage can still be asked. Once: a
        request gets on."""
        if prefetch.asked_again or prefetch.policy == "best_effort":
            return False
        had = prefetch.reached
        return self._indexed_pages(prefetch) < had and self._helps(had * prefetch.key.page_tokens)

    def _ask_again(self, prefetch: Prefetch) -> None:
        """Under pressure what was there may be evicted before its request's turn."""
        prefetch.asked_again = True
        prefetch.due_s = self._loop.time()
        self._ask_anew(prefetch)

    def _ask_anew(self, prefetch: Prefetch) -> None:
        lost = max(0, prefetch.arrived - max(0, prefetch.reached - prefetch.first))
        self.counts.wasted += lost
        prefetch.arrived -= lost
        prefetch.first = min(prefetch.first, prefetch.reached)
        prefetch.short = prefetch.cut = prefetch.done = False
        if not self._ask(prefetch):
            prefetch.end_at(self._loop.time())

    def _ask(self, prefetch: Prefetch) -> bool:
        """Look up what is missing behind `reached`; False if that is not worth it."""
        key = prefetch.key
        if not self._helps((prefetch.wanted - prefetch.usable) * key.page_tokens):
            return False
        prefetch.asked = True
        prefetch.asked_s = asked_s = self._loop.time()
        prefetch.looked_from, prefetch.end, prefetch.had = prefetch.reached, -1, prefetch.usable
        prefetch.windows_read = False
        prefetch.hashes = key.page_hashes(prefetch.wanted)[prefetch.looked_from :]
        self.counts.lookups += 1
        answers: list[int] = []
        missing = self._groups + (self._windows.num_groups if self._windows is not None else 0)

        def answered() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                self._speed.looked_up((self._loop.time() - asked_s) * 1e3)
                self._found(prefetch, min(answers))

        def found(pages: int) -> None:
            answers.append(pages)
            answered()

        for group in range(self._groups):
            self._client.lookup(group, group_keys(prefetch.hashes, group), found)
        if self._windows is not None:
            self._windows.ask(prefetch, answered)
        return True

    def _found(self, prefetch: Prefetch, pages: int) -> None:
        prefetch.end = prefetch.looked_from + pages
        if self._windows is not None:
            prefetch.end = self._windows.usable_end(prefetch, prefetch.end)
            pages = max(0, prefetch.end - prefetch.looked_from)
        self.counts.found += pages
        self._stale = True
        if prefetch.released:
            # Nobody waits for them. One piece is still read while nothing else is: how fast storage is now would not be
            # known otherwise, once it has been too slow to wait for.
            probed = 0 if self._held_pages else min(pages, self._piece_pages)
            self.counts.cancelled += pages - probed
            prefetch.end = prefetch.looked_from + probed
            if self._indexed_pages(prefetch) == prefetch.looked_from and probed:
                self._begin_piece(prefetch, is_first=True)
        elif prefetch.end <= prefetch.had:
            prefetch.end_at(self._loop.time())
        self._on_change()

    # ------------------------------------------------------------------------------------------------------------
    # Room, and its order

    def _bring(self, prefetch: Prefetch, is_first: bool) -> bool:
        """Keep what a prefetch has, and read what it lacks; False if the host lacks the room."""
        if prefetch.asked and prefetch.end < 0:
            return True
        if prefetch.kept is None:
            had = prefetch.reached
            if prefetch.done and self._indexed_pages(prefetch) < had and not prefetch.is_due:
                # Others had overtaken it.
                self._ask_anew(prefetch)
                return True
            if not self._keep(prefetch, is_first):
                return False
        while not prefetch.done:
            if not prefetch.pieces:
                self._look(prefetch)
            if prefetch.end < 0 or prefetch.done or prefetch.begun >= prefetch.end:
                break
            if prefetch.hashes[prefetch.begun - prefetch.looked_from] in self._reading:
                break
            if not self._begin_piece(prefetch, is_first):
                return False
        return True

    def _look(self, prefetch: Prefetch) -> None:
        """Where it stands, while nothing is read for it."""
        had = prefetch.reached
        if self._indexed_pages(prefetch) != had:
            self._keep_on(prefetch)
        if prefetch.reached < had and prefetch.is_due:
            # Once it is awaited, what was lost is read once more, not twice: a request gets on.
            prefetch.short, prefetch.asked_again = prefetch.asked_again, True
        if prefetch.short:
            self._end(prefetch)
        elif prefetch.reached >= prefetch.end:
            self._finish(prefetch)
        elif prefetch.reached < prefetch.looked_from:
            self._ask_anew(prefetch)

    def _keep(self, prefetch: Prefetch, is_first: bool) -> bool:
        """What is there of the prefix should be there at its turn: it is evicted after all that nobody waits for. That
        is bounded, so that a waiting crowd does not push out what others use; False beyond."""
        self._keep_on(prefetch)
        if self._room_pages(is_first) >= 0:
            return True
        self._unkeep(prefetch)
        return False

    def _keep_on(self, prefetch: Prefetch) -> None:
        """The same as it grows."""
        before, key = prefetch.kept, prefetch.key
        prefetch.kept = self._index.keep(key.namespace, key.raw(0, prefetch.wanted))
        self._near[id(prefetch)] = prefetch
        if before is not None:
            self._index.unkeep(before)

    def _unkeep(self, prefetch: Prefetch) -> None:
        kept, prefetch.kept = prefetch.kept, None
        if kept is not None:
            del self._near[id(prefetch)]
            self._index.unkeep(kept)

    def _room_pages(self, is_first: bool) -> int:
        """Host pages per group that a read may have, without taking what is kept for others; below 0 where too much is
        kept."""
        index, total = self._index, self._host.pool.num_pages // self._groups
        share = total if is_first else int(total * self._options.host_share)
        in_use = index.host_pages - index.evictable_host_pages
        taken = self._held_pages + in_use + index.kept_host_pages
        return min(share - taken, self._host.room_pages - index.kept_host_pages)

    def _room(self) -> tuple[int, int]:
        """What grows with the room: pages that the first may have, and those that are free already."""
        return self._room_pages(is_first=True), self._host.pool.free_pages

    def _look_again(self) -> None:
        self._stale = True
        self._on_room()

    def _overtake(self, ahead: list[Prefetch], place: int) -> bool:
        """Let what is kept for the last in the order be evicted, in favour of who stands at `place`; False if nobody
        stands behind."""
        before = {id(prefetch) for prefetch in ahead[: place + 1]}
        places = {id(prefetch): at for at, prefetch in enumerate(ahead)}
        behind = [prefetch for name, prefetch in self._near.items() if name not in before and not prefetch.pieces]
        if not behind:
            return False
        self._unkeep(max(behind, key=lambda prefetch: places.get(id(prefetch), math.inf)))
        return True

    def _await_room(self, prefetch: Prefetch) -> None:
        """From its request's turn on it does not wait for ever; `adaptive` counts this with its other waits."""
        if prefetch.policy != "adaptive" and prefetch.room_timer is None and prefetch.is_due and not prefetch.done:
            at_s = prefetch.due_s + self._options.room_timeout_ms / 1e3
            prefetch.room_timer = self._loop.call_at(at_s, self._room_timed_out, prefetch)

    def _room_timed_out(self, prefetch: Prefetch) -> None:
        """Read nothing more of it."""
        prefetch.room_timer = None
        if prefetch.done or prefetch.end < 0 or prefetch.begun >= prefetch.end:
            return
        self.counts.declined += prefetch.end - prefetch.begun
        prefetch.short, prefetch.end = True, prefetch.begun
        if not prefetch.pieces:
            self._end(prefetch)
        self._stale = True
        self._on_change()

    # ------------------------------------------------------------------------------------------------------------
    # Reading

    def _begin_piece(self, prefetch: Prefetch, is_first: bool) -> bool:
        """Read the next piece, as large as there is room for; False if there is none."""
        start = prefetch.begun
        count = min(self._room_pages(is_first), self._piece_pages, prefetch.end - start)
        # Pages behind a fence are evicted, and not free yet.
        host = self._host.take(count) if count > 0 else None
        if host is None:
            return False
        self._held_pages += count
        self._read(prefetch, Piece(start, start + count, host))
        return True

    def _read(self, prefetch: Prefetch, piece: Piece) -> None:
        prefetch.pieces.append(piece)
        self._under_way[id(piece)] = piece
        hashes = prefetch.hashes[piece.start - prefetch.looked_from : piece.end - prefetch.looked_from]
        for page_hash in hashes:
            self._reading[page_hash] = piece
        asked_s, read_before = self._loop.time(), self._pages_read
        answers: list[int] = []

        def read(done: ReadDone) -> None:
            answers.append(done.good)
            if len(answers) == self._groups:
                piece.good = min(answers)
                piece.operations.clear()
                for page_hash in hashes:
                    if self._reading.get(page_hash) is piece:
                        del self._reading[page_hash]
                self._pages_read += piece.good
                if piece.good:
                    self._measured((self._loop.time() - asked_s) * 1e3, self._pages_read - read_before, prefetch)
                self._advance(prefetch)
                # Room, or pages that another request waits for too.
                self._stale = True
                self._on_change()

        for group in range(self._groups):
            span = span_of(prefetch.key, piece.start, piece.end, group)
            piece.operations.append(self._client.read(group, span, piece.host[group], read))

    def _measured(self, elapsed_ms: float, pages: int, prefetch: Prefetch) -> None:
        """While a piece was read, so many pages came, its own with them. Pieces take turns: those of the same prefetch
        that are still under way have nearly come too, and all of them together show how fast storage is."""
        pages += sum(piece.end - piece.start for piece in prefetch.pieces if piece.good < 0)
        self._speed.read(elapsed_ms, pages)

    def _advance(self, prefetch: Prefetch) -> None:
        """Index the pieces that have come, in order; when no more will, end."""
        pool, key = self._host.pool, prefetch.key
        while prefetch.pieces and prefetch.pieces[0].good >= 0:
            piece = prefetch.pieces.pop(0)
            del self._under_way[id(piece)]
            size = piece.end - piece.start
            self._held_pages -= size
            good = piece.host[:, : piece.good]
            taken = np.zeros(piece.good, np.bool_)
            if piece.good and not prefetch.cut:
                taken = self._index.insert_host(key.namespace, key.raw(0, piece.start + piece.good), piece.start, good)
                prefetch.arrived += int(taken.sum())
            pool.hand_over(good[:, taken].ravel(), Owner.TRANSFER, Owner.INDEX)
            pool.give_back(good[:, ~taken].ravel(), Owner.TRANSFER, Fence())
            pool.give_back(piece.host[:, piece.good :].ravel(), Owner.TRANSFER, Fence())
            self.counts.wasted += piece.good - int(taken.sum())
            if prefetch.released:
                self.counts.late += int(taken.sum())
            else:
                self._indexed_pages(prefetch)
                self._keep_on(prefetch)
            if piece.good < size:
                self._cut(prefetch)
        if not prefetch.pieces and prefetch.reached >= prefetch.end:
            self._finish(prefetch)

    def _finish(self, prefetch: Prefetch) -> None:
        """The full groups' pages are there; the windows come last."""
        if prefetch.done:
            return

        def ended() -> None:
            self._indexed_pages(prefetch)
            if not prefetch.window_pieces:
                prefetch.window_cost = 0.0
                self._end(prefetch)
            self._stale = True
            self._on_change()

        if self._windows is None or prefetch.released or not self._windows.begin(prefetch, ended):
            self._end(prefetch)

    def _cut(self, prefetch: Prefetch) -> None:
        """Read nothing more, and wait for nothing: it would stand behind a gap."""
        prefetch.cut, prefetch.end = True, prefetch.reached
        self._end(prefetch)
        for piece in prefetch.pieces:
            self._cancel(piece)

    def _cancel(self, piece: Piece) -> None:
        for operation in piece.operations:
            self._client.cancel(operation)

    def _end(self, prefetch: Prefetch) -> None:
        prefetch.end_at(self._loop.time())
        if prefetch.room_timer is not None:
            prefetch.room_timer.cancel()
            prefetch.room_timer = None

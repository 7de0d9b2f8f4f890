"""One request's prefetch from storage, and how long the request waits for it.

in     what storage found and read for it; the time that computing would take; how fast storage is
out    whether the request should wait longer, and why
state  of each `Prefetch`: the pages that are there, under way, and still to come
owner  `read_ahead.Prefetcher`, which alone changes it; the scheduler asks, through `KvCache`
ready  a page when the index has it: pieces are indexed in the order of the prefix, so what is there is contiguous
end    with its request's admission or end

    |== indexed, device or host ==|-- being read --|.. found in storage ..|   not found: computed   |
    0                          reached          begun                    end                     wanted

How long a request waits is the policy's choice. Only the time from its turn on counts: before that waiting is free.

    best_effort    not at all: what is there when its turn comes is used
    wait_complete  until everything found has arrived
    timeout        the same, but at most base + per_ki_token x n / 1024
    adaptive       while computing the pages that are still to come would take longer than waiting for them
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.identity import PrefixKey
from headrace.kvcache.radix_nodes import Kept
from headrace.ops.wire import I32

if TYPE_CHECKING:
    from headrace.kvcache.window_reads import WindowPiece

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
    """Of the host pool, for reads under way and for what waiting requests will need. Only the first of them may have
    more."""
    room_timeout_ms: float = 500.0
    """From its turn on, what a request waits for host room: what others held comes back with their next steps and
    writes. Before its turn that costs it nothing."""


class StorageSpeed:
    """Running estimates of how fast storage is now."""

    def __init__(self, page_bytes: int) -> None:
        self.lookup_ms = 1.0
        self.page_ms = page_bytes / 1e6
        """Until something was measured, 1 GB/s."""

    def looked_up(self, elapsed_ms: float) -> None:
        """A lookup took so long."""
        self.lookup_ms += _SMOOTHING * (elapsed_ms - self.lookup_ms)

    def read(self, elapsed_ms: float, pages: int) -> None:
        """While something was read, so many pages came in all."""
        self.page_ms += _SMOOTHING * (elapsed_ms / pages - self.page_ms)


class Piece:
    """Pages that one read brings."""

    __slots__ = ("end", "good", "host", "operations", "start")

    def __init__(self, start: int, end: int, host: I32) -> None:
        self.start, self.end = start, end
        """Pages of the prefix."""
        self.host = host
        """int32 [groups, end - start]"""
        self.operations: list[int] = []
        self.good = -1
        """Pages that hold what they should, once all groups have answered."""


class Prefetch:
    """One request's."""

    __slots__ = (
        *(
            "arrived",
            "asked",
            "asked_again",
            "asked_s",
            "cut",
            "done",
            "done_s",
            "due_s",
            "end",
            "first",
            "had",
            "hashes",
            "kept",
            "key",
        ),
        *("looked_from", "pieces", "policy", "reached", "reason", "released", "room_timer", "short", "timer", "waited"),
        "usable",
        "wanted",
        *("window_cost", "window_pieces", "window_stored", "windows_read"),
    )

    def __init__(self, key: PrefixKey, wanted: int, policy: PrefetchPolicy, asked_s: float) -> None:
        self.key = key
        self.wanted = wanted
        """Pages of the prefix that are of use."""
        self.policy = policy
        self.asked_s = asked_s
        """When storage was asked."""
        self.due_s = math.inf
        """The turn of its request."""
        self.first = 0
        """The first page that neither device nor host had when storage was asked first."""
        self.looked_from = 0
        """The first page that storage was asked for last."""
        self.hashes: list[bytes] = []
        """Of the pages from there on."""
        self.end = -1
        """Storage has the pages before this one, from `looked_from` on; -1 until it has said."""
        self.reached = 0
        """Pages that were indexed when it was last looked at ..."""
        self.usable = 0
        """... and of these, the longest prefix that a request could go on from, which is all without window groups."""
        self.had = 0
        """The same when storage was asked last."""
        self.window_stored: list[NDArray[np.bool_]] = []
        """Of each window group, which pages storage has: [wanted]."""
        self.window_pieces: list[WindowPiece] = []
        """Their reads under way."""
        self.windows_read = False
        """They have been begun since storage was asked."""
        self.window_cost = 0.0
        """Of what is to be read of them, in pages of the full groups."""
        self.arrived = 0
        """Pages that its own reads have brought."""
        self.pieces: list[Piece] = []
        """Under way, or waiting for an earlier one."""
        self.kept: Kept | None = None
        """Its prefix, which is evicted after what nobody waits for."""
        self.asked = self.asked_again = False
        """Storage was asked; and once more, at its request's turn."""
        self.done = False
        """Nothing more will come of it."""
        self.done_s = math.inf
        """Since when."""
        self.cut = False
        """A page was gone or damaged: what follows it is of no use."""
        self.short = False
        """The host had no room for what else was found."""
        self.released = False
        """Its request has gone on or ended."""
        self.waited = False
        """Its request's turn had come, and it waited."""
        self.timer: asyncio.TimerHandle | None = None
        self.room_timer: asyncio.TimerHandle | None = None
        self.reason = ""
        """Why its request waited or went on, when it was last asked."""

    def end_at(self, now_s: float) -> None:
        """Nothing more will come of it."""
        self.done, self.done_s = True, now_s

    @property
    def is_due(self) -> bool:
        """Its request's turn has come."""
        return self.due_s < math.inf

    @property
    def begun(self) -> int:
        """Pages that are indexed or being read."""
        return self.pieces[-1].end if self.pieces else self.reached

    @property
    def brought_pages(self) -> int:
        """Pages that storage has brought since it was asked, for this request or for another that needs the same."""
        return max(0, min(self.reached, self.end) - self.first) if self.asked else 0

    @property
    def decision(self) -> Decision:
        """What came of it, if its request goes on now."""
        if self.done and self.cut:
            return "cut_short"
        if self.done and self.short:
            return "no_room"
        if self.done:
            return "complete" if self.end > self.had else "nothing_found"
        return "gave_up" if self.waited else "did_not_wait"

    def cancel_timers(self) -> None:
        """Nobody waits for it any more."""
        for timer in (self.timer, self.room_timer):
            if timer is not None:
                timer.cancel()
        self.timer = self.room_timer = None


class Patience:
    """How long requests wait, by the policies."""

    def __init__(self, options: PrefetchOptions, speed: StorageSpeed, on_change: Callable[[], None]) -> None:
        """`on_change` is called when a waiting request should be asked again."""
        self._options = options
        self._speed = speed
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()

    def lasts(self, prefetch: Prefetch, crowd: float, prefill_ms: PrefillMs) -> bool:
        """Whether a request whose turn it is, and whose prefetch is not done, should wait. `crowd`: pages under way for
        everybody, per page under way for it, at least 1."""
        match prefetch.policy:
            case "best_effort":
                prefetch.reason = "best_effort never waits"
                return False
            case "wait_complete":
                prefetch.reason = "everything that was found is awaited"
                return True
            case "timeout":
                return self._in_time(prefetch)
            case "adaptive":
                return self._pays(prefetch, crowd, prefill_ms)

    def _in_time(self, prefetch: Prefetch) -> bool:
        if prefetch.timer is None:
            tokens = (prefetch.wanted - prefetch.first) * prefetch.key.page_tokens
            limit_ms = self._options.timeout_base_ms + self._options.timeout_per_ki_token_ms * tokens / 1024
            prefetch.timer = self._loop.call_at(prefetch.due_s + limit_ms / 1e3, self._on_change)
        in_time = prefetch.timer.when() > self._loop.time()
        prefetch.reason = "within its time limit" if in_time else "out of time"
        return in_time

    def _pays(self, prefetch: Prefetch, crowd: float, prefill_ms: PrefillMs) -> bool:
        """Whether the pages to come save more time than waiting for them is expected to cost."""
        speed, now_s, page_tokens = self._speed, self._loop.time(), prefetch.key.page_tokens
        begin, end = prefetch.usable, prefetch.end
        if end < 0:
            end = prefetch.wanted
            expected_ms = speed.lookup_ms + (end - prefetch.reached) * speed.page_ms
            wait_ms = max(0.0, expected_ms - (now_s - prefetch.asked_s) * 1e3)
        else:
            # Reads of others share the device with this one's.
            pages = max(0, end - prefetch.reached) + prefetch.window_cost
            wait_ms = pages * speed.page_ms * crowd
            expected_ms = speed.lookup_ms + (end - prefetch.first + prefetch.window_cost) * speed.page_ms
        saved_ms = prefill_ms((end - begin) * page_tokens, begin * page_tokens)
        # What was expected may be wrong: the wait ends when it has cost what it could save.
        left_ms = max(saved_ms, _PATIENCE * expected_ms) - (now_s - prefetch.due_s) * 1e3
        pays = saved_ms > wait_ms and left_ms > _LEAST_WAIT_MS
        prefetch.reason = f"{end - begin} pages: computing {saved_ms:.1f} ms, waiting {wait_ms:.1f} ms"
        if prefetch.timer is not None:
            prefetch.timer.cancel()
        prefetch.timer = self._loop.call_later(left_ms / 1e3, self._on_change) if pays else None
        return pays

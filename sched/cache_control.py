"""Control of the cache from outside: look, warm, pin, clear, and wait for writes. Requests never come through here.

in     token ids and salts; changes of the cache, told by the engine
out    counts; pins; the cache's events
state  pins with their ends, how many operations are waiting
owner  the engine; what waits here is a coroutine of the caller, and every change is a plain function of the cache
ready  an answer is what was true when it was given: nothing but a pin keeps pages
end    a pin ends by its time to live, `unpin`, or with the server
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.cache import KvCache
from headrace.kvcache.events import KvEvents
from headrace.kvcache.holding import Cleared
from headrace.kvcache.identity import PageHash, PrefixKey
from headrace.kvcache.storage.client import StorageClient
from headrace.kvcache.storage.keys import group_keys
from headrace.kvcache.storage.protocol import MAX_KEYS_PER_MESSAGE, Deleted
from headrace.ops.wire import I32
from headrace.sched.messages import Overloaded

MAX_WAITING: Final = 16
"""Lookups, warm-ups, flushes and clearings that wait for something at a time."""
MAX_PINS: Final = 256
DETACH_S: Final = 5.0
"""How long what is under way may take when storage is detached; then its agent is killed."""
ATTACH_S: Final = 30.0
"""How long the store may take to open."""
SETTLE_S: Final = 5.0
"""How long a flush waits for writes that read from what it is about to drop."""


class PinRefused(Exception):
    """A prefix can't be pinned; the message says why and what to change."""


class Lookup(NamedTuple):
    """Tokens of a prompt that each tier has, from the first on, and that a request could reuse from all together."""

    device: int
    host: int
    storage: int
    cached: int


class Warmed(NamedTuple):
    """What a warm-up did."""

    tokens: int
    """Brought from storage to the host."""
    complete: bool
    """Nothing more was to come when it ended."""


class Pin(msgspec.Struct, frozen=True):
    """A prefix that stays."""

    id: str
    tokens: int
    pages: int
    expires_in_s: float


class _Pinned(NamedTuple):
    number: int
    timer: asyncio.TimerHandle


class CacheControl:
    """One engine's."""

    def __init__(
        self,
        cache: KvCache,
        namespace_of: Callable[[str], bytes],
        page_hash: PageHash,
        longest_tokens: Callable[[], int],
        storage: StorageClient | None = None,
    ) -> None:
        """`namespace_of` a salt; `longest_tokens` of one request, which must be able to run beside all pins."""
        self._cache = cache
        self._namespace_of = namespace_of
        self._page_hash: PageHash = page_hash
        self._longest_tokens = longest_tokens
        self._storage = storage
        self._moved = asyncio.Event()
        self._waiting = 0
        self._switching = False
        self._pins: dict[str, _Pinned] = {}

    @property
    def events(self) -> KvEvents:
        """What comes into the tiers and leaves them."""
        return self._cache.events

    @property
    def storage_backend(self) -> str | None:
        return None if self._storage is None else self._storage.backend

    @property
    def storage_trouble(self) -> str:
        """Why storage can't be asked now; "" where it can, or is not there."""
        if self._storage is None or self._storage.usable:
            return ""
        return self._storage.message or "it was silent, and is not asked for a while"

    @property
    def storage_attached(self) -> bool:
        return self._storage is not None and self._storage.attached

    def changed(self) -> None:
        """The engine: a copy, a write or a read is over."""
        self._moved.set()

    # ------------------------------------------------------------------------------------------------------------
    # What waits. Each raises Overloaded when too many do.

    async def settle(self, limit_s: float = SETTLE_S) -> bool:
        """Wait for what is on its way to the host or to storage now, and not for what follows; False when some of it
        still was after `limit_s`."""
        last = self._cache.hold_nothing_back()
        with self._one_more():
            return await self._until(lambda: self._cache.oldest_write > last, limit_s)

    async def lookup(self, ids: I32, salt: str) -> Lookup:
        """Which of a prompt's whole pages are where; changes nothing."""
        key, page_tokens = self._key(ids, salt), self._cache.layout.page_tokens
        with self._one_more():
            hashes = key.page_hashes(key.length // page_tokens)
            stored = await self._stored(hashes)
            held = self._cache.held(key)
            follows = held.indexed
            if stored <= held.indexed:
                # What storage lacks at the beginning may be above: a prefetch asks from the first missing page on.
                follows += await self._stored(hashes[held.indexed :])
            cached = max(stored, follows)
            if self._cache.windows is not None:
                cached = self._cache.usable_with(key, await self._stored_windows(hashes), cached)
        return Lookup(*(pages * page_tokens for pages in (held.device, held.host, stored, cached)))

    async def warm(self, ids: I32, salt: str, limit_s: float) -> Warmed:
        """Bring what only storage has of a prompt to the host, within `limit_s`."""
        key = self._key(ids, salt)
        with self._one_more():
            prefetch = self._cache.warm(key)
            if prefetch is None:
                return Warmed(0, True)
            try:
                complete = await self._until(lambda: prefetch.done, limit_s)
            finally:
                self._cache.end_warm(prefetch)
        return Warmed(prefetch.brought_pages * key.page_tokens, complete)

    async def delete_stored(self, salt: str | None) -> Deleted:
        """Delete this model's pages from storage: under a salt, or all (None)."""
        if self._storage is None:
            return Deleted(0, 0, 0)
        namespace = None if salt is None else self._namespace_of(salt)
        with self._one_more():
            self._cache.forget_put_off(namespace)
            answer: asyncio.Future[Deleted] = asyncio.get_running_loop().create_future()
            self._storage.delete(namespace, lambda reply: None if answer.done() else answer.set_result(reply))
            deleted = await answer
        self.events.removed_from_storage(namespace, deleted.pages)
        return deleted

    async def detach_storage(self) -> bool:
        """Go on without the storage tier; whether what was under way was completed. Harmless twice."""
        with self._one_more(), self._alone() as storage:
            return await storage.detach(DETACH_S)

    async def attach_storage(self) -> str:
        """Use the storage tier again; "" when its store is open, or why it is not. Harmless twice."""
        with self._one_more(), self._alone() as storage:
            return await storage.attach(ATTACH_S)

    @contextmanager
    def _alone(self) -> Iterator[StorageClient]:
        assert self._storage is not None, "there is no storage tier"
        if self._switching:
            raise Overloaded("storage is just being attached or detached; try again when that is done", 5)
        self._switching = True
        try:
            yield self._storage
        finally:
            self._switching = False

    # ------------------------------------------------------------------------------------------------------------
    # What does not wait

    def clear(self, ids: I32, salt: str, device: bool, host: bool) -> Cleared:
        """Drop what nobody holds of a prompt and of what continues it; without ids, of all under the salt."""
        return self._cache.clear(self._key(ids, salt), device, host)

    def pin(self, ids: I32, salt: str, ttl_s: float) -> Pin:
        """Keep what device and host have of a prompt for `ttl_s`. Raises PinRefused."""
        key, cache = self._key(ids, salt), self._cache
        if len(self._pins) >= MAX_PINS:
            raise PinRefused(f"there are {MAX_PINS} pins, which is all that may be: unpin one, or let one expire")
        pages = cache.held(key).usable
        if not pages:
            raise PinRefused(
                "neither device nor host has a whole page of this prompt: send it as a request, or bring it from "
                "storage with /cache/warm, and pin it then"
            )
        limit = cache.pin_limit(cache.layout.pages(self._longest_tokens()))
        if cache.pins.num_pages + pages > limit:
            raise PinRefused(
                f"the prompt has {pages} cached pages and {cache.pins.num_pages} are pinned; at most {limit} may be, "
                "so that the longest request can still run: unpin others, pin a shorter prefix, or give the server a "
                "larger pool (--max-total-tokens, --hicache-size)"
            )
        if cache.windows is not None and not cache.windows.can_pin(pages):
            raise PinRefused(
                f"the prompt has {pages} cached pages, and the layers that look at a window have no room for one more "
                "pinned window beside those of running requests; unpin some, or give --max-total-tokens more"
            )
        number, pages = cache.pins.pin(key, pages)
        id = f"pin-{number}"
        timer = asyncio.get_running_loop().call_later(ttl_s, self.unpin, id)
        self._pins[id] = _Pinned(number, timer)
        return Pin(id, pages * key.page_tokens, pages, ttl_s)

    def unpin(self, id: str) -> bool:
        """Let a pin go; False if there is none of this name: it may have expired."""
        pinned = self._pins.pop(id, None)
        if pinned is None:
            return False
        pinned.timer.cancel()
        self._cache.unpin(pinned.number)
        return True

    def pins(self) -> list[Pin]:
        """All that hold, the oldest first."""
        page_tokens, found = self._cache.layout.page_tokens, []
        for id, (number, timer) in self._pins.items():
            pages = self._cache.pins.pages_of(number)
            left_s = max(0.0, timer.when() - asyncio.get_running_loop().time())
            found.append(Pin(id, pages * page_tokens, pages, round(left_s, 3)))
        return found

    # ------------------------------------------------------------------------------------------------------------

    def _key(self, ids: I32, salt: str) -> PrefixKey:
        tokens = np.asarray(ids, np.int32)
        page_tokens = self._cache.layout.page_tokens
        return PrefixKey(self._namespace_of(salt), page_tokens, tokens, len(tokens), self._page_hash)

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} operations on the cache are waiting, which is all that may", 1)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    async def _stored(self, hashes: list[bytes]) -> int:
        """How many of these pages storage has, in every full group, from the first on."""
        if self._storage is None or not hashes:
            return 0
        asked, groups = hashes[:MAX_KEYS_PER_MESSAGE], self._cache.layout.full_groups
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        found: list[int] = []

        def one(pages: int) -> None:
            found.append(pages)
            if len(found) == groups and not answer.done():
                answer.set_result(min(found))

        for group in range(groups):
            self._storage.lookup(group, group_keys(asked, group), one)
        return await answer

    async def _stored_windows(self, hashes: list[bytes]) -> list[NDArray[np.bool_]]:
        """Which of these pages storage has, of each window group: bool [pages]."""
        layout, loop = self._cache.layout, asyncio.get_running_loop()
        found: list[NDArray[np.bool_]] = []
        for group in range(layout.full_groups, len(layout.groups)):
            there = np.zeros(len(hashes), np.bool_)
            if self._storage is not None and hashes:
                answer: asyncio.Future[bytes] = loop.create_future()
                keys = group_keys(hashes[:MAX_KEYS_PER_MESSAGE], group)
                self._storage.lookup_each(group, keys, _sets(answer))
                told = await answer
                there[: len(told)] = np.frombuffer(told, np.bool_)
            found.append(there)
        return found


def _sets(answer: asyncio.Future[bytes]) -> Callable[[bytes], None]:
    """Who asked may have gone meanwhile."""

    def done(there: bytes) -> None:
        if not answer.done():
            answer.set_result(there)

    return done

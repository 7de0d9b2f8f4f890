"""The server's side of the storage agent: operations out, completions in, and what happens when neither comes.

in     lookups, reads and writes, with a function to call when each is over; replies of the agent
out    that call, exactly once an operation, at the latest when the agent has ended
state  operations under way, the breaker, the connection of this life of the agent
owner  the cache; `serve` is a stage of the engine
ready  host pages of a read, when its function is called with what is good
end    a lost agent has ended (killed, reaped) before its operations are: it touches no page any more

It can be detached: then nothing more is begun, the agent ends when what is under way is over, and none is started until
it is attached again.

Three things can go wrong, and each has one answer. An agent that *ends* is started again after a pause. One that is
*silent* costs a lookup its deadline, and then the breaker is open: for a while nothing is asked, so later requests do
not pay again. A read or write whose answer is overdue holds host pages that nobody may touch (limbo): past a bound the
agent is killed, because only then are they ours again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from headrace.kvcache.storage.protocol import (
    Cancel,
    Close,
    Command,
    Delete,
    Deleted,
    Found,
    Lookup,
    Opened,
    OpenStore,
    Read,
    ReadDone,
    ReadProgress,
    Refused,
    Reply,
    StoreFailed,
    Touch,
    Write,
    Written,
    encoder,
    reply_decoder,
)
from headrace.ops.transport import Transport, TransportClosed
from headrace.ops.wire import I32

log = logging.getLogger(__name__)

MAX_UNDER_WAY: Final = 512
"""Operations; one more is not begun."""
LONGEST_PAUSE_S: Final = 30.0
WRITE_SHARE: Final = 0.5
"""Of a transfer's bound, what all writes that wait may be expected to take."""
WRITE_SMOOTHING: Final = 0.3
FIRST_WRITE_BYTES_PER_S: Final = 25e6
"""Until a write was measured: low, since the first answer of a quick store comes before so much has been sent."""
DETACHED: Final = "detached"


class StorageRefused(Exception):
    """The store can't be opened; the message says what to change."""


class StorageConnection(Protocol):
    """One life of the agent."""

    @property
    def transport(self) -> Transport:
        """Its command pipe."""

    def close(self) -> None:
        """End the agent and wait until it has ended: from here on it touches no page. Harmless twice."""


ConnectStorage: TypeAlias = Callable[[], Awaitable[StorageConnection]]
"""Start an agent. Raises OSError."""


class StorageLimits(msgspec.Struct, frozen=True):
    """Deadlines."""

    lookup_s: float = 0.1
    """A lookup reads no disk: later than this, the agent is in trouble."""
    limbo_s: float = 10.0
    """How long a read or a write may hold host pages."""
    breaker_s: float = 10.0
    """How long nothing is asked after a deadline was missed."""


class PageSpan(NamedTuple):
    """Consecutive pages of one chain: what the agent checks and stores beside their bytes."""

    namespace: bytes
    parents: bytes
    """16 bytes a page: the chain hash before it."""
    keys: bytes
    """16 bytes a page."""
    tokens: bytes
    """Little-endian int32."""


Finished: TypeAlias = Found | ReadDone | Written | Deleted


class _Operation(NamedTuple):
    fail: Callable[[], None]
    finish: Callable[[Finished], None]
    deadline: asyncio.TimerHandle


class StorageClient:
    """One storage backend, behind its agent."""

    def __init__(
        self,
        connect: ConnectStorage,
        open_store: OpenStore,
        limits: StorageLimits,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when the store becomes usable: it is open, or the breaker closes."""
        self.backend = open_store.backend
        self.message = "opening"
        """Why the store is not usable; "" while it is."""
        self.restarts = self.deadlines_missed = 0
        self._connect = connect
        self._open_store = open_store
        self._limits = limits
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._transport: Transport | None = None
        self._writing_pages = 0
        self._write_page_s = max(open_store.slot_bytes) / FIRST_WRITE_BYTES_PER_S
        self._last_written_s = 0.0
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._operations: dict[int, _Operation] = {}
        self._next_id = 0
        self._open = self._was_open = False
        self._shut_until_s = 0.0
        self._shut: asyncio.TimerHandle | None = None
        self._attached, self._idle, self._ended, self._told = (asyncio.Event() for _ in range(4))
        """It should be there; no operation is under way; no agent is alive; the last one has opened or is lost."""
        self._gave_up = False
        """Operations ended with their agent."""
        self._attached.set()
        self._idle.set()
        self._ended.set()

    @property
    def usable(self) -> bool:
        """Attached and open, and the breaker is closed."""
        return self._open and self.attached and self._loop.time() >= self._shut_until_s

    @property
    def attached(self) -> bool:
        return self._attached.is_set()

    @property
    def under_way(self) -> int:
        return len(self._operations)

    async def serve(self) -> None:
        """One life of the agent after the other. Raises StorageRefused if the store can't be opened at the start."""
        pause_s = 0.5
        while True:
            await self._attached.wait()
            began_s = self._loop.time()
            self._ended.clear()
            reason = await self._live()
            self._fail_all()
            self._ended.set()
            if not self.attached:
                continue
            if not self._was_open:
                raise StorageRefused(reason)
            self.restarts += 1
            pause_s = 0.5 if self._loop.time() - began_s > LONGEST_PAUSE_S else min(2 * pause_s, LONGEST_PAUSE_S)
            log.error("%s; pages in storage can't be used for %.1f s", reason, pause_s)
            await asyncio.sleep(pause_s)

    async def detach(self, limit_s: float) -> bool:
        """Begin nothing more, and end the agent when what is under way is over, at the latest after `limit_s`; whether
        all of it was completed. When this returns no host page is the agent's any more."""
        self._attached.clear()
        self.message, self._gave_up = DETACHED, False
        self._on_change()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
                self._send(Close())
                await self._ended.wait()
        except TimeoutError:
            self._lose("it was detached, and did not end in time")
            await self._ended.wait()
        except asyncio.CancelledError:
            # Whoever asked is gone, and nobody would end the agent later.
            self._lose("it was detached, and nobody waits for its end")
            raise
        return not self._gave_up

    async def attach(self, limit_s: float) -> str:
        """Start an agent and open the store again; "" when it is open, or why it is not: then it is detached again.
        What was attached goes its own way."""
        if self.attached:
            return "" if self._open else self.message
        self.message = "opening"
        self._told.clear()
        self._attached.set()
        try:
            async with asyncio.timeout(limit_s):
                await self._told.wait()
        except TimeoutError:
            self._lose(f"the store was not open after {limit_s:g} s")
        if self._open:
            return ""
        trouble, self.message = self.message, DETACHED
        self._attached.clear()
        return trouble

    # ------------------------------------------------------------------------------------------------------------
    # Operations: each calls `done` once, later

    def lookup(self, group: int, keys: bytes, done: Callable[[int], None]) -> None:
        """How many of the keys are stored, from the first on; 0 when the store is not usable or too slow to say."""
        operation = self._next_id
        self._begin(
            Lookup(operation, group, keys),
            self._limits.lookup_s,
            lambda: self._lookup_missed(operation, done),
            lambda: done(0),
            lambda reply: done(reply.pages if isinstance(reply, Found) else 0),
        )

    def lookup_each(self, group: int, keys: bytes, done: Callable[[bytes], None]) -> None:
        """Which of the keys are stored: a byte each, 1 if it is; nothing when the store is not usable or too slow to
        say."""
        operation = self._next_id
        self._begin(
            Lookup(operation, group, keys, each=True),
            self._limits.lookup_s,
            lambda: self._lookup_missed(operation, lambda _: done(b"")),
            lambda: done(b""),
            lambda reply: done(reply.there if isinstance(reply, Found) else b""),
        )

    def read(self, group: int, span: PageSpan, host_pages: I32, done: Callable[[ReadDone], None]) -> int:
        """Read pages into host pages, which are the agent's until `done`; the operation's id."""
        operation = self._next_id
        read = Read(operation, group, span.namespace, span.parents[:16], span.keys, span.tokens, host_pages.tolist())
        nothing = ReadDone(operation, 0)
        self._begin(
            read,
            self._limits.limbo_s,
            self._in_limbo,
            lambda: done(nothing),
            lambda reply: done(reply if isinstance(reply, ReadDone) else nothing),
        )
        return operation

    def write(self, group: int, span: PageSpan, host_pages: I32, done: Callable[[Written], None]) -> None:
        """Store host pages, which the agent reads until `done`. Nothing is stored where so many pages wait already that
        a store which is only slow would be taken for one that hangs."""
        operation, count = self._next_id, len(host_pages)
        write = Write(operation, group, span.namespace, span.parents, span.keys, span.tokens, host_pages.tolist())
        nothing = Written(operation, 0, list(range(count)))
        expected_s = (self._writing_pages + count) * self._write_page_s
        if self._writing_pages and expected_s > WRITE_SHARE * self._limits.limbo_s:
            self._loop.call_soon(done, nothing)
            return
        self._writing_pages += count
        sent_s = self._loop.time()

        def ended(reply: Finished | None) -> None:
            self._writing_pages -= count
            if not isinstance(reply, Written):
                done(nothing)
                return
            # Writes are made one after the other: this one's time began when the last one's ended.
            now_s = self._loop.time()
            page_s = (now_s - max(sent_s, self._last_written_s)) / count
            self._write_page_s += WRITE_SMOOTHING * (page_s - self._write_page_s)
            self._last_written_s = now_s
            done(reply)

        self._begin(write, self._limits.limbo_s, self._in_limbo, lambda: ended(None), ended)

    def delete(self, namespace: bytes | None, done: Callable[[Deleted], None]) -> None:
        """Delete this model's pages, of one namespace or of all. It holds no host page: when it takes too long, it is
        only not waited for."""
        operation = self._next_id
        late = f"storage has not said in {self._limits.limbo_s:g} s that the pages are deleted; they may still be"

        def missed() -> None:
            if self._over(operation) is not None:
                done(Deleted(operation, 0, 0, late))

        self._begin(
            Delete(operation, namespace),
            self._limits.limbo_s,
            missed,
            lambda: done(Deleted(operation, 0, 0, self.message or "it was silent, and is not asked for a while")),
            lambda reply: done(reply if isinstance(reply, Deleted) else Deleted(operation, 0, 0, "no answer")),
        )

    def cancel(self, operation: int) -> None:
        """Begin nothing more of a read or write; its `done` comes when nothing touches its pages."""
        if operation in self._operations:
            self._send(Cancel(operation))

    def touch(self, group: int, keys: bytes) -> None:
        """These pages were used."""
        if self.usable:
            self._send(Touch(group, keys))

    # ------------------------------------------------------------------------------------------------------------

    def _begin(
        self,
        command: Lookup | Read | Write | Delete,
        deadline_s: float,
        missed: Callable[[], None],
        fail: Callable[[], None],
        finish: Callable[[Finished], None],
    ) -> None:
        self._next_id += 1
        if not self.usable or len(self._operations) >= MAX_UNDER_WAY:
            self._loop.call_soon(fail)
            return
        deadline = self._loop.call_later(deadline_s, missed)
        self._operations[command.id] = _Operation(fail, finish, deadline)
        self._idle.clear()
        self._send(command)

    def _over(self, operation: int) -> _Operation | None:
        """Take an operation out; None if it was over before."""
        taken = self._operations.pop(operation, None)
        if not self._operations:
            self._idle.set()
        return taken

    def _lookup_missed(self, operation: int, done: Callable[[int], None]) -> None:
        """A lookup holds no pages: it is over, and its late reply means nothing."""
        if self._over(operation) is not None:
            self._trip("storage did not answer a lookup in time")
            done(0)

    def _in_limbo(self) -> None:
        """A transfer holds host pages past the bound: only the agent's end gives them back."""
        self._trip("storage has held host pages for too long")
        self._lose(f"the storage agent has not answered in {self._limits.limbo_s:.0f} s")

    def _trip(self, message: str) -> None:
        self.deadlines_missed += 1
        if self._loop.time() >= self._shut_until_s:
            log.warning("%s; it is not asked for %.0f s", message, self._limits.breaker_s)
        self._shut_until_s = self._loop.time() + self._limits.breaker_s
        if self._shut is not None:
            self._shut.cancel()
        self._shut = self._loop.call_at(self._shut_until_s, self._on_change)

    async def _live(self) -> str:
        """Connect, open, serve until the agent is lost; the reason. It has ended when this returns or raises."""
        self._lost = self._loop.create_future()
        try:
            connection = await self._connect()
        except OSError as error:
            return f"the storage agent can't be started: {error}"
        try:
            self._transport = connection.transport
            self._transport.open(self._reply, self._lose)
            self._send(self._open_store)
            return await self._lost
        finally:
            self._open = False
            self._transport = None
            connection.close()

    def _reply(self, message: bytes) -> None:
        """One reply. A fault in handling it is the stage's, not only this callback's."""
        try:
            self._handle(reply_decoder.decode(message))
        except Exception as error:
            self._open = False
            if not self._lost.done():
                self._lost.set_exception(error)

    def _handle(self, reply: Reply) -> None:
        match reply:
            case Opened():
                self._open = self._was_open = True
                self.message = "" if self.attached else DETACHED
                self._told.set()
                log.info("storage holds %d pages, opened in %.0f ms", reply.stats.pages, reply.open_ms)
                self._on_change()
            case Found() | ReadDone() | Written() | Deleted():
                if (operation := self._over(reply.id)) is not None:
                    operation.deadline.cancel()
                    operation.finish(reply)
            case Refused():
                self._lose(reply.message)
            case StoreFailed():
                self._open = False
                self.message = reply.message
                log.error("storage can't go on: %s", reply.message)
            case ReadProgress():
                return
            case other:
                self._lose(f"the storage agent said {other}, which nothing asked for")

    def _lose(self, reason: str) -> None:
        self._open = False
        self.message = reason if self.attached else DETACHED
        self._told.set()
        if not self._lost.done():
            self._lost.set_result(reason)

    def _fail_all(self) -> None:
        """The agent has ended: whatever it had is ours again."""
        operations, self._operations = self._operations, {}
        self._gave_up |= bool(operations)
        self._idle.set()
        for operation in operations.values():
            operation.deadline.cancel()
            operation.fail()

    def _send(self, command: Command) -> None:
        if self._transport is not None:
            try:
                self._transport.send(encoder.encode(command))
            except TransportClosed:
                self._lose("the storage agent closed its command pipe")

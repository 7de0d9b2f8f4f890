"""The seeded transport, and the far side that serves behind it in virtual time.

in     messages of either end; faults; one `random.Random`, from which every choice is drawn
out    the same messages in the same order, later; then perhaps the stream's end
state  per direction the messages under way (bounded), and a timer for the first
owner  the users of the two ends; deliveries are made by the loop's timers alone
ready  a message, when `on_message` gets it; a sent one may still be lost if its sender dies
end    `close` or `kill` of an end drops what travels to it; the other end learns of it in order, after a delay

An ordered stream loses nothing from the middle. So there is no drop: what a death loses is a tail, and what was sent to
the dead. As with a SEQPACKET pair, the survivor's next send may fail at once or vanish unread; the seed says which.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from headrace.ops.transport import MAX_BACKLOG_MESSAGES, TransportClosed
from headrace.ops.wire import MAX_MESSAGE_BYTES
from headrace.server.sim.trace import Trace, fingerprint
from headrace.server.sim.virtual_loop import VirtualLoop, VirtualTimer

DelayNs: TypeAlias = Callable[[random.Random], int]
"""Draws one message's time on the way."""

CLOSED: Final = "the other end closed"


class Faults(msgspec.Struct, frozen=True):
    """What befalls one end, in virtual time since the loop began."""

    kill_at_ns: int | None = None
    kill_at_message: int | None = None
    """It dies at its n-th message, sent or received, from 1: a received one is not handled, a sent one is under way."""
    hang_at_ns: int | None = None
    hang_for_ns: int = 0


NO_FAULTS: Final = Faults()


class SimLink:
    """Two connected ends, `near` (the server's) and `far`."""

    def __init__(
        self,
        rng: random.Random,
        loop: VirtualLoop,
        delay_ns: DelayNs,
        *,
        near: Faults = NO_FAULTS,
        far: Faults = NO_FAULTS,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        trace: Trace | None = None,
        name: str = "link",
    ) -> None:
        """`delay_ns` is drawn from for each message and each end of stream, in the order of sending."""
        self.rng = rng
        self.loop = loop
        self.delay_ns = delay_ns
        self.max_message_bytes = max_message_bytes
        self.trace = trace
        self.near = SimEnd(self, f"{name}.near", near)
        self.far = SimEnd(self, f"{name}.far", far)
        self.near._peer, self.far._peer = self.far, self.near


class SimEnd:
    """One end of a `SimLink`: a `Transport`. It holds what travels to it."""

    _peer: SimEnd

    def __init__(self, link: SimLink, name: str, faults: Faults) -> None:
        self.name = name
        self.on_kill: Callable[[], None] | None = None
        """Called when this end is killed: its process is gone, nothing of it may run any more."""
        self.hung_until_ns = 0
        self._link = link
        self._loop = link.loop
        self._on_message: Callable[[bytes], None] | None = None
        self._on_close: Callable[[str], None] | None = None
        self._closed = False
        self._inbound: deque[tuple[int, bytes | None]] = deque()
        """Due times and messages, None being the stream's end. Only the first is looked at: it holds up the others."""
        self._end_reason = ""
        self._delivery: VirtualTimer | None = None
        self._refused = False
        self._messages = 0
        self._kill_at_message = faults.kill_at_message
        self._fault_timers: list[VirtualTimer] = []
        if faults.kill_at_ns is not None:
            self._fault_timers.append(self._loop.call_at_ns(faults.kill_at_ns, self.kill))
        if faults.hang_at_ns is not None:
            self._fault_timers.append(self._loop.call_at_ns(faults.hang_at_ns, self.hang, faults.hang_for_ns))

    # -----------------------------------------------------------------------------------------------------------
    # Transport

    def open(self, on_message: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        assert self._on_message is None, "opened twice"
        self._on_message, self._on_close = on_message, on_close
        self._set_delivery()

    def send(self, message: bytes) -> None:
        assert len(message) <= self._link.max_message_bytes, (
            f"a message of {len(message)} bytes must be cut by its sender"
        )
        if self._closed:
            raise TransportClosed
        if self._refused:
            self._lose("sending failed: the other end is gone")
            raise TransportClosed
        if len(self._peer._inbound) >= MAX_BACKLOG_MESSAGES:
            self._lose(f"the peer has not read {MAX_BACKLOG_MESSAGES} messages")
            raise TransportClosed
        self._record("send", len(message), fingerprint(message))
        self._peer._put(message)
        if self._is_fatal_message():
            self.kill()

    def close(self) -> None:
        """Stop at once. What is under way still reaches the other end, then it learns of the closing."""
        self._on_close = None
        if not self._closed:
            self._record("close")
            self._stop()
            self._peer._end(CLOSED, lost=0)

    # -----------------------------------------------------------------------------------------------------------
    # Faults

    def kill(self, reason: str = CLOSED) -> None:
        """This end's process dies: a seeded tail of what it sent is lost, then the other end's `on_close(reason)`."""
        if self._closed:
            return
        self._stop()
        lost = self._link.rng.randint(0, len(self._peer._inbound))
        self._record("kill", reason, lost)
        self._peer._end(reason, lost)
        if self.on_kill is not None:
            self.on_kill()

    def hang(self, duration_ns: int) -> None:
        """This end's process is stopped for a while: nothing is delivered in either direction, then everything.

        Its death is noticed all the same, as the kernel notices it.
        """
        assert duration_ns >= 0
        if self._closed:
            return
        self.hung_until_ns = max(self.hung_until_ns, self._loop.time_ns() + duration_ns)
        self._record("hang", self.hung_until_ns)
        self._set_delivery()
        self._peer._set_delivery()

    def _is_fatal_message(self) -> bool:
        self._messages += 1
        return self._messages == self._kill_at_message

    # -----------------------------------------------------------------------------------------------------------
    # What travels to this end

    def _put(self, message: bytes | None) -> None:
        if self._closed:
            return
        delay_ns = self._link.delay_ns(self._link.rng)
        assert delay_ns >= 0, f"a message can't arrive {-delay_ns} ns before it was sent"
        self._inbound.append((self._loop.time_ns() + delay_ns, message))
        if self._delivery is None:
            self._set_delivery()

    def _end(self, reason: str, lost: int) -> None:
        """The other end is gone: take the last `lost` messages away and put the stream's end behind the others."""
        if self._closed:
            return
        for _ in range(lost):
            self._inbound.pop()
        self._end_reason = reason
        self._refused = self._link.rng.random() < 0.5
        self._put(None)
        self._set_delivery()

    def _set_delivery(self) -> None:
        if self._delivery is not None:
            self._delivery.cancel()
            self._delivery = None
        if self._inbound and self._on_message is not None and not self._closed:
            self._delivery = self._loop.call_at_ns(self._next_ns(), self._deliver)

    def _next_ns(self) -> int:
        return max(self._inbound[0][0], self.hung_until_ns, self._peer.hung_until_ns)

    def _deliver(self) -> None:
        """Hand over all that is due, in one callback, as a socket's reader does."""
        self._delivery = None
        assert self._on_message is not None
        now_ns = self._loop.time_ns()
        while self._inbound and self._next_ns() <= now_ns:
            _, message = self._inbound.popleft()
            if message is None:
                self._lose(self._end_reason)
            elif self._is_fatal_message():
                self.kill()
            else:
                self._record("deliver", len(message), fingerprint(message))
                self._on_message(message)
        self._set_delivery()

    def _lose(self, reason: str) -> None:
        self._record("lose", reason)
        self._stop()
        self._peer._end(CLOSED, lost=0)
        self._loop.call_soon(self._report, reason)

    def _report(self, reason: str) -> None:
        if self._on_close is not None:  # unless `close` came in between
            self._on_close(reason)

    def _stop(self) -> None:
        self._closed = True
        self.hung_until_ns = 0
        self._inbound.clear()
        self._set_delivery()
        for timer in self._fault_timers:
            timer.cancel()

    def _record(self, kind: str, *details: int | str) -> None:
        if self._link.trace is not None:
            self._link.trace.record(kind, self.name, *details)


class CommandsUnbounded(Exception):
    """The client has sent more commands ahead of the one being served than any production transport would keep."""


class SimServer:
    """Runs a state machine at one end of a link, in virtual time: the device worker's stream, or the storage agent.

    A command starts when it has arrived and a lane is free, takes `cost_ns(command)`, and is handled at its *end*: its
    inputs are read, and its effects appear, as late as a correct client must bear. With one lane (the default)
    commands are a stream; with k (the agent's I/O threads) up to k overlap and may end out of order. While its end
    hangs nothing ends; when it is killed nothing more does.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        end: SimEnd,
        cost_ns: Callable[[bytes], int],
        lanes: int = 1,
        is_urgent: Callable[[bytes], bool] = lambda command: False,
    ) -> None:
        """`is_urgent`: commands that wait for no lane and take no time, as a cancellation."""
        assert lanes >= 1
        self._loop = loop
        self._end = end
        self._cost_ns = cost_ns
        self._lanes = lanes
        self._is_urgent = is_urgent
        self._handle: Callable[[bytes], None] | None = None
        self._waiting: deque[bytes] = deque()
        self._running: dict[int, VirtualTimer] = {}
        self._commands = 0
        self.stopped = False
        end.on_kill = self._drop

    def serve(self, handle: Callable[[bytes], None]) -> None:
        """Begin to take commands. `handle` answers through `reply`, now or in a later command."""
        self._handle = handle
        self._end.open(self._arrived, self._client_gone)

    def reply(self, message: bytes) -> None:
        """Raises TransportClosed."""
        self._end.send(message)

    def withdraw(self, is_wanted: Callable[[bytes], bool]) -> bytes | None:
        """Take the first command away that is so and waits for a lane."""
        command = next(filter(is_wanted, self._waiting), None)
        if command is not None:
            self._waiting.remove(command)
        return command

    def stop(self) -> None:
        """The process exits: commands that wait or run are dropped, the client sees the end of the stream."""
        self._drop()
        self._end.close()

    def _arrived(self, command: bytes) -> None:
        if len(self._waiting) >= MAX_BACKLOG_MESSAGES:
            raise CommandsUnbounded(f"{len(self._waiting)} commands wait for {self._end.name}: send fewer ahead")
        if self._is_urgent(command):
            self._act(command)
        else:
            self._waiting.append(command)
            self._start()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._lanes:
            command = self._waiting.popleft()
            self._commands += 1
            cost_ns = self._cost_ns(command)
            assert cost_ns >= 0, f"a command can't take {cost_ns} ns"
            self._running[self._commands] = self._loop.call_later_ns(cost_ns, self._finish, self._commands, command)

    def _finish(self, number: int, command: bytes) -> None:
        if self._end.hung_until_ns > self._loop.time_ns():
            self._running[number] = self._loop.call_at_ns(self._end.hung_until_ns, self._finish, number, command)
            return
        del self._running[number]
        self._act(command)
        self._start()

    def _act(self, command: bytes) -> None:
        assert self._handle is not None
        try:
            self._handle(command)
        except TransportClosed:
            self.stop()  # nobody hears the answer any more: the process ends, as it does in production

    def _client_gone(self, reason: str) -> None:
        self._drop()

    def _drop(self) -> None:
        self.stopped = True
        self._waiting.clear()
        for timer in self._running.values():
            timer.cancel()
        self._running.clear()

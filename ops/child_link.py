"""A child process and the packet socket to it: how the server holds a device worker or a storage agent.

in     a module to run, descriptors to hand over
out    a `Transport`; its `on_close` says how the process ended, after its last words
state  the child and our end of the socket
owner  whoever made it, in the event loop on the main thread
ready  when the child says so
end    `close`: killed and reaped; it touches nothing of ours any more
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from headrace.ops.child import Child
from headrace.ops.transport import SocketTransport, socket_pair

EXIT_GRACE_S: Final = 1.0
"""How long a child may live on after its socket has ended: Python takes some 0.1 s from there to its exit code."""


class _ExplainedTransport(SocketTransport):
    """The socket, whose end is explained by how the process ended."""

    explain: Callable[[str], None] | None = None
    on_end: Callable[[str], None]
    """The socket has ended, and the process perhaps not."""

    def open(self, on_message: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        self.explain = on_close
        super().open(on_message, self.on_end)


class ChildLink:
    """`python -m module --parent PID --socket FD arguments…`, and a packet socket to it."""

    def __init__(
        self,
        module: str,
        name: str,
        arguments: Sequence[str],
        pass_fds: Sequence[int],
        max_message_bytes: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`name` is for messages: "the device worker". Raises OSError where the system refuses."""
        ours, theirs = socket_pair()
        with theirs:
            self.transport = _ExplainedTransport(ours, max_message_bytes)
            self.transport.on_end = self._socket_ended
            socket_argument = ["--socket", str(theirs.fileno())]
            descriptors = [theirs.fileno(), *pass_fds]
            self._child = Child(module, [*socket_argument, *arguments], descriptors, self._exited, environment)
        self._name = name
        self._closed = False
        self._last_resort: asyncio.TimerHandle | None = None
        self._killed_because: str | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """End it now, as when it hangs; `on_close` follows."""
        self._child.kill()

    def close(self) -> None:
        """Kill and reap; harmless twice."""
        self._shut()
        self._child.kill_and_reap()

    def _shut(self) -> None:
        self._closed = True
        self.transport.close()
        if self._last_resort is not None:
            self._last_resort.cancel()

    def _socket_ended(self, reason: str) -> None:
        """As a rule the process is ending too, and its pidfd will say how. One that lives on can't be spoken to."""
        if not self._closed and self._last_resort is None:
            loop = asyncio.get_running_loop()
            self._last_resort = loop.call_later(EXIT_GRACE_S, self._kill_the_silent, reason)

    def _kill_the_silent(self, reason: str) -> None:
        self._killed_because = reason
        self._child.kill()

    def _exited(self, returncode: int) -> None:
        if self._closed:
            return
        explain = self.transport.explain
        # What it said last, perhaps why it refused, lies in the socket and counts more than how it ended.
        self.transport.drain()
        self._shut()
        how = signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
        if self._killed_because is not None:
            how += f", which it was sent because its socket had ended: {self._killed_because}"
        if explain is not None:
            explain(f"{self._name} (pid {self._child.pid}) ended with {how}")

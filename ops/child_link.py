"""A child process and the packet socket to it: how the server holds a device worker or a storage agent.

in     a module to run, descriptors to hand over
out    a `Transport`; its `on_close` says how the process ended, after its last words
state  the child and our end of the socket
owner  whoever made it, in the event loop on the main thread
ready  when the child says so
end    `close`: killed and reaped; it touches nothing of ours any more
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence

from headrace.ops.child import Child
from headrace.ops.transport import SocketTransport, socket_pair


class _ExplainedTransport(SocketTransport):
    """The socket, whose end of file is explained by how the process ended."""

    explain: Callable[[str], None] | None = None

    def open(self, on_message: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        self.explain = on_close
        # The end of the process is seen through its pidfd; the socket's end of file says nothing more.
        super().open(on_message, lambda reason: None)


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
            socket_argument = ["--socket", str(theirs.fileno())]
            descriptors = [theirs.fileno(), *pass_fds]
            self._child = Child(module, [*socket_argument, *arguments], descriptors, self._exited, environment)
        self._name = name
        self._closed = False

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """End it now, as when it hangs; `on_close` follows."""
        self._child.kill()

    def close(self) -> None:
        """Kill and reap; harmless twice."""
        self._closed = True
        self.transport.close()
        self._child.kill_and_reap()

    def _exited(self, returncode: int) -> None:
        if self._closed:
            return
        explain = self.transport.explain
        # What it said last, perhaps why it refused, lies in the socket and counts more than how it ended.
        self.transport.drain()
        self._closed = True
        self.transport.close()
        how = signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
        if explain is not None:
            explain(f"{self._name} (pid {self._child.pid}) ended with {how}")

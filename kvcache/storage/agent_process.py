"""A storage agent's process as the server sees it: its socket and its life.

in     the host pool's memfd
out    a `Transport` of the storage protocol; its `on_close` when the process has ended, with how it ended
state  the child, our end of the socket
owner  the cache's storage side
ready  when the agent has said `Opened`
end    when `on_close` is called or `close` returns the process has been reaped: it touches no host page any more
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from headrace.kvcache.storage.protocol import MAX_MESSAGE_BYTES
from headrace.ops.child import Child
from headrace.ops.transport import SocketTransport, socket_pair


class _AgentTransport(SocketTransport):
    """The socket, whose end of file is explained by how the process ended."""

    def open(self, on_message: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        self.explain = on_close
        # The end of the process is seen through its pidfd; the socket's end of file says nothing more.
        super().open(on_message, lambda reason: None)


class AgentProcess:
    """A connection to `python -m headrace.kvcache.storage.agent`."""

    def __init__(self, host_pool_fd: int, module: str = "headrace.kvcache.storage.agent") -> None:
        """Start the process; raises OSError where the system refuses a process or a socket. Open the transport in the
        same turn of the loop."""
        ours, theirs = socket_pair()
        self.transport = _AgentTransport(ours, MAX_MESSAGE_BYTES)
        self._child = Child(
            module,
            ["--socket", str(theirs.fileno()), "--host-pool", str(host_pool_fd)],
            [theirs.fileno(), host_pool_fd],
            self._exited,
        )
        self._closed = False
        theirs.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """End it now, as when it hangs; `on_close` follows."""
        self._child.kill()

    def close(self) -> None:
        """End it now and wait for it, without `on_close`."""
        self._closed = True
        self.transport.close()
        self._child.kill_and_reap()

    def _exited(self, returncode: int) -> None:
        if self._closed:
            return
        # What it said last, perhaps why it refused, lies in the socket and counts more than how it ended.
        self.transport.drain()
        self._closed = True
        self.transport.close()
        how = signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
        self.transport.explain(f"the storage agent (pid {self._child.pid}) ended with {how}")

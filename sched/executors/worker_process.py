"""A device worker process: its socket, its ring in shared memory, its life.

in     the settings of `Start` (by the engine), a thread count for the environment
out    a `Connection`; `on_close` when the process ends, with how it ended
state  the child, our end of the socket, the ring's mapping
owner  the engine's device stage
ready  when the worker has said `Ready`
end    `close`: the process is killed and reaped, then the mapping goes with the last view of it
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable

from headrace.ops.child import Child
from headrace.ops.transport import SocketTransport, socket_pair
from headrace.ops.wire import MAX_MESSAGE_BYTES, BatchRing, RingGeometry


class _WorkerTransport(SocketTransport):
    """The socket, whose end of file is explained by how the process ended."""

    def open(self, on_message: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        self.explain = on_close
        # The end of the process is seen through its pidfd; the socket's end of file says nothing more.
        super().open(on_message, lambda reason: None)


class WorkerProcess:
    """A `Connection` to `python -m headrace.ops.worker`."""

    def __init__(self, geometry: RingGeometry, threads: int, module: str = "headrace.ops.worker") -> None:
        """Start the process; raises OSError where the system refuses a process, a socket or memory."""
        fd = os.memfd_create("headrace-ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, geometry.size_bytes)
        self.ring = BatchRing(mmap.mmap(fd, geometry.size_bytes), geometry)
        ours, theirs = socket_pair()
        self.transport = _WorkerTransport(ours, MAX_MESSAGE_BYTES)
        cores = len(os.sched_getaffinity(0))
        # With as many threads as cores, a thread that spins at a barrier takes the core that the server needs.
        environment = {"OMP_NUM_THREADS": str(threads)} | ({"OMP_WAIT_POLICY": "passive"} if threads >= cores else {})
        self._child = Child(
            module,
            ["--socket", str(theirs.fileno()), "--ring", str(fd)],
            [theirs.fileno(), fd],
            self._exited,
            environment,
        )
        self._closed = False
        theirs.close()
        os.close(fd)

    @property
    def pid(self) -> int:
        return self._child.pid

    def close(self) -> None:
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
        self.transport.explain(f"the device worker (pid {self._child.pid}) ended with {how}")

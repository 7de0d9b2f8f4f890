"""A device worker process: its socket, its ring in shared memory, its life.

in     sizes of the ring, a thread count for the environment, the host pool's descriptor
out    a `Connection`
state  the child and its socket; the ring's mapping
owner  the engine's device stage
ready  when the worker has said `Ready`
end    `close`: the process is killed and reaped, then the mapping goes with the last view of it
"""

from __future__ import annotations

import mmap
import os

from headrace.ops.child_link import ChildLink
from headrace.ops.wire import MAX_MESSAGE_BYTES, BatchRing, RingGeometry


class WorkerProcess(ChildLink):
    """A `Connection` to `python -m headrace.ops.worker`."""

    def __init__(self, geometry: RingGeometry, threads: int, host_pool: int | None = None) -> None:
        """`host_pool`: the descriptor of the host tier's memory. Raises OSError where the system refuses a process, a
        socket or memory."""
        fd = os.memfd_create("headrace-ring", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, geometry.size_bytes)
            self.ring = BatchRing(mmap.mmap(fd, geometry.size_bytes), geometry)
            cores = len(os.sched_getaffinity(0))
            # With as many threads as cores, one that spins at a barrier takes the core that the server needs.
            passive = {"OMP_WAIT_POLICY": "passive"} if threads >= cores else {}
            arguments, descriptors = ["--ring", str(fd)], [fd]
            if host_pool is not None:
                arguments += ["--host-pool", str(host_pool)]
                descriptors.append(host_pool)
            super().__init__(
                "headrace.ops.worker",
                "the device worker",
                arguments,
                descriptors,
                MAX_MESSAGE_BYTES,
                {"OMP_NUM_THREADS": str(threads)} | passive,
            )
        finally:
            os.close(fd)

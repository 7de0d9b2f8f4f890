"""A storage agent's process as the server sees it."""

from __future__ import annotations

from headrace.kvcache.storage.protocol import MAX_MESSAGE_BYTES
from headrace.ops.child_link import ChildLink


class AgentProcess(ChildLink):
    """A connection to `python -m headrace.kvcache.storage.agent`. When it has been closed, or has told its end, the
    process has been reaped: it touches no host page any more."""

    def __init__(self, host_pool_fd: int) -> None:
        """Start the process; raises OSError where the system refuses. Open the transport in the same turn of the
        loop."""
        super().__init__(
            "headrace.kvcache.storage.agent",
            "the storage agent",
            ["--host-pool", str(host_pool_fd)],
            [host_pool_fd],
            MAX_MESSAGE_BYTES,
        )

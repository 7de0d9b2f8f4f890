"""The host tier's memory: an anonymous mapping that the server owns and its children share.

A memfd has no name, so nothing is left behind after kill -9, and is not bounded by the size of /dev/shm. The server
itself never maps it: the device worker copies pages in and out, the storage agent reads and writes them in place.
"""

from __future__ import annotations

import os


class HostPool:
    """`descriptor` is to be handed to children; pages are made when they are first touched."""

    def __init__(self, size_bytes: int) -> None:
        """Raises OSError where the system refuses."""
        self.size_bytes = size_bytes
        self.descriptor = os.memfd_create("headrace-host", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size_bytes)

    def close(self) -> None:
        """The memory goes when the last child has ended. Harmless twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

"""The process of the storage agent: receives commands, runs the store's blocking calls on a few threads, replies.

Started as `python -P -m headrace.kvcache.storage.agent --parent PID --socket FD --host-pool FD`.

in     packets on the socket; the host pool's memfd, which it reads and writes in place
out    packets on the socket
state  the service's
owner  the main thread; lane threads run calls of the store and nothing else
ready  -
end    `Close`, `Refused`, or the end of the server, of which the kernel tells with SIGKILL, the socket with EOF
"""

from __future__ import annotations

import argparse
import gc
import logging
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Final

from headrace.kvcache.storage.agent_lanes import ThreadLanes
from headrace.kvcache.storage.disk.opening import open_disk_store
from headrace.kvcache.storage.disk.store import DiskSettings
from headrace.kvcache.storage.lanes import InlineLanes
from headrace.kvcache.storage.memory import MemoryStore
from headrace.kvcache.storage.page_store import PageStore
from headrace.kvcache.storage.protocol import MAX_MESSAGE_BYTES, OpenStore, Reply, command_decoder, encoder
from headrace.kvcache.storage.service import Lanes, StorageService
from headrace.ops.child import die_with_parent

IDLE_MS: Final = 1000
"""Without a command or a result for so long, the store is tidied: then it delays nobody."""
SWITCH_INTERVAL_S: Final = 0.0005
"""The main thread answers lookups: it gets the interpreter from a busy lane within this, not within 5 ms."""
MAX_OPEN_FILES: Final = 16384


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="The storage agent of a headrace server; started by the server.")
    parser.add_argument("--parent", type=int, required=True, help="process id of the server")
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the command pipe")
    parser.add_argument("--host-pool", type=int, required=True, help="descriptor of the host pool's memfd")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    # The server alone decides what a Ctrl-C means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s storage agent: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _allow_open_files()
    pool = mmap.mmap(arguments.host_pool, os.fstat(arguments.host_pool).st_size)
    os.close(arguments.host_pool)
    pipe = socket.socket(fileno=arguments.socket)
    pipe.setblocking(True)
    try:
        Agent(pipe, memoryview(pool)).serve()
    except (BrokenPipeError, ConnectionResetError):
        logging.getLogger(__name__).info("the server has closed its end")


class Agent:
    """The service, its socket and its lanes."""

    def __init__(self, pipe: socket.socket, host_pool: memoryview) -> None:
        self._pipe = pipe
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lanes: ThreadLanes | InlineLanes = InlineLanes()
        self._service = StorageService(self._reply, host_pool, self._open_backend, _clock_ms)

    def serve(self) -> None:
        """Receive and act until the service has finished or the server is gone."""
        packet = memoryview(bytearray(MAX_MESSAGE_BYTES))
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        idle = False
        while not self._service.finished:
            ready = poll.poll(None if idle else IDLE_MS)
            if not ready:
                self._service.idle()
                self._deliver()
                gc.collect()
                idle = True
                continue
            idle = False
            for fd, _ in ready:
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif not self._receive(packet):
                    return
            self._deliver()

    def _receive(self, packet: memoryview) -> bool:
        """Act on one packet; False when the server is gone."""
        size_bytes = self._pipe.recv_into(packet)
        if not size_bytes:
            return False
        self._service.handle(command_decoder.decode(packet[:size_bytes]))
        return True

    def _deliver(self) -> None:
        while self._lanes.deliver():
            pass

    def _reply(self, reply: Reply) -> None:
        self._pipe.send(encoder.encode(reply))

    def _open_backend(self, command: OpenStore) -> tuple[PageStore, Lanes]:
        if command.backend == "memory":
            return MemoryStore(command.capacity_bytes), self._lanes
        settings = DiskSettings(
            directory=command.directory,
            capacity_bytes=command.capacity_bytes,
            page_tokens=command.page_tokens,
            payload_bytes=tuple(command.slot_bytes),
            model=command.model,
            fsync=command.fsync,
            read_bytes_per_s=command.read_bytes_per_s,
        )
        store = open_disk_store(settings)
        # What opening left behind stays; a collection over it would only cost time.
        gc.freeze()
        # With one lane, housekeeping and writes would stand in front of reads.
        self._lanes = ThreadLanes(max(2, command.threads), self._wake)
        return store, self._lanes


def _clock_ms() -> float:
    return time.monotonic() * 1000


def _allow_open_files() -> None:
    """A large store has a thousand segments, and shells allow a thousand files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    main()

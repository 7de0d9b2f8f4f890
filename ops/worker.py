"""The process of a device worker: receives commands, hands them to a `DeviceWorker` one by one, sends its replies.

Started as `python -P -m headrace.ops.worker --parent PID --socket FD --ring FD [--host-pool FD]`, with
`OMP_WAIT_POLICY=passive` in the environment where torch computes on all cores, so that its threads sleep between steps
instead of spinning; those of the compiled kernels (`simd.team`) do so by themselves.

in     packets on the socket; the ring's and the host pool's memfds
out    packets on the socket
state  none but the worker's
owner  the main thread; of the others only the one that copies to the host runs Python, which sends nothing
ready  -
end    `Stop`, `Refused`, SIGTERM, or the end of the parent, of which the kernel tells with SIGKILL, the socket with EOF
"""

from __future__ import annotations

import argparse
import gc
import logging
import mmap
import os
import select
import signal
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Final

from headrace.ops.child import die_with_parent
from headrace.ops.wire import MAX_MESSAGE_BYTES, MakePools, Reply, command_decoder, encoder

if TYPE_CHECKING:
    from headrace.ops.device_worker import DeviceWorker

IDLE_MS: Final = 100
"""Without a command for so long, garbage is collected: then it delays nobody."""


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="The device worker of a headrace server; started by the server.")
    parser.add_argument("--parent", type=int, required=True, help="process id of the server")
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the command pipe")
    parser.add_argument("--ring", type=int, required=True, help="descriptor of the batch ring's memfd")
    parser.add_argument("--host-pool", type=int, help="descriptor of the host pool's memfd")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    # The server alone decides what a Ctrl-C means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s worker: %(message)s")
    # What loading leaves behind stays; a collection over torch's 300k objects would only cost time.
    gc.disable()
    # Only now: torch takes a second to import, in which the parent may die.
    from headrace.ops.device_worker import DeviceWorker

    pipe = socket.socket(fileno=arguments.socket)
    pipe.setblocking(True)
    ring = _mapped(arguments.ring)
    host_pool = None if arguments.host_pool is None else _mapped(arguments.host_pool)

    def reply(message: Reply) -> None:
        pipe.send(encoder.encode(message))

    with closing(DeviceWorker(reply, ring, host_pool)) as worker:
        serve(pipe, worker)


def serve(pipe: socket.socket, worker: DeviceWorker) -> None:
    """Receive and execute until the worker has finished or the server is gone."""
    packet = memoryview(bytearray(MAX_MESSAGE_BYTES))
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    idle_ms: int | None = IDLE_MS
    while not worker.finished:
        if worker.poll():
            # `poll` counts in milliseconds; a reply should not be so late.
            if not select.select([pipe], [], [], worker.look_s)[0]:
                continue
        elif not poll.poll(idle_ms):
            idle_ms = 0 if worker.idle() else None
            if idle_ms is None:
                gc.collect()
            continue
        try:
            size_bytes = pipe.recv_into(packet)
        except ConnectionResetError:
            return
        if not size_bytes:
            return
        command = command_decoder.decode(packet[:size_bytes])
        worker.handle(command)
        if isinstance(command, MakePools):
            gc.freeze()
        idle_ms = IDLE_MS


def _mapped(descriptor: int) -> mmap.mmap:
    mapping = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    os.close(descriptor)
    return mapping


if __name__ == "__main__":
    main()

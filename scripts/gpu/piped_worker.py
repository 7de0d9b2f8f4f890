"""A device worker in a process of its own, behind a pipe, with a model of random weights; `gpu.pipe` starts it."""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import sys
from pathlib import Path
from unittest import mock


def main() -> None:
    """Serves until it is told to stop, or its parent is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("parent", "socket", "ring", "context"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from gpu.checkout import make_importable

    make_importable()
    from gpu.decode import model_of
    from gpu.random_model import RandomBackend
    from gpu.timing import Device

    from headrace.ops import device_worker
    from headrace.ops.child import die_with_parent
    from headrace.ops.wire import Reply, Start, encoder
    from headrace.ops.worker import serve

    die_with_parent(options.parent)
    config = model_of(Device(options.dry), options.context)
    pipe = socket.socket(fileno=options.socket)
    ring = mmap.mmap(options.ring, os.fstat(options.ring).st_size)

    def backend(start: Start, reply: object, streams: object) -> RandomBackend:
        return RandomBackend(config, start, drawn_on_card=not options.dry)

    def reply(message: Reply) -> None:
        pipe.send(encoder.encode(message))

    with mock.patch.object(device_worker, "open_backend", backend):
        serve(pipe, device_worker.DeviceWorker(reply, ring))
    # Triton's library counts at an ordinary end what is still alive, a page long.
    os._exit(0)


if __name__ == "__main__":
    main()

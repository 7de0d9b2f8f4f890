"""A child that ends its socket: `--exit-code N` and itself too, else it lives on."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from headrace.ops.child import die_with_parent


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int)
    parser.add_argument("--socket", type=int)
    parser.add_argument("--exit-code", type=int)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    os.write(arguments.socket, b"last words")
    os.close(arguments.socket)
    if arguments.exit_code is not None:
        return int(arguments.exit_code)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())

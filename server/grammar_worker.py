"""The grammar worker's process: receives commands, hands them to the service, sends its replies.

Started as `python -P -m headrace.server.grammar_worker --parent PID --socket FD --model FILE`. Compiling runs on
threads of its own, which hold no lock of the interpreter meanwhile: a large schema (0.3 s) keeps no other request's
mask waiting, and no short grammar.

in     packets on the socket; the model file's vocabulary
out    packets on the socket
state  the service's
owner  the main thread; the others compile and nothing else
ready  after `Ready`; commands may be sent before
end    the end of the server, of which the kernel tells with SIGKILL, the socket with EOF
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import select
import signal
import socket
import threading
from typing import Final

from headrace.kvcache.storage.agent_lanes import ThreadLanes
from headrace.ops.child import die_with_parent
from headrace.ops.weights.files import open_model_file
from headrace.sched.grammar import MAX_MESSAGE_BYTES, Grammar, Matcher, Ready, Reply, command_decoder, encoder
from headrace.server.grammar_library import GrammarLibrary
from headrace.server.grammar_service import LANES, GrammarService
from headrace.server.metered_lanes import MeteredLanes
from headrace.server.tokenizer import Tokenizer

MAX_MEMORY_BYTES: Final = 4 << 30
"""Address space. The vocabulary takes 60 MB; a grammar at its limits some 100."""
COMPILE_STACK_BYTES: Final = 256 << 20
"""Address space, of which what is used is taken. The library recurses once or more a rule: in 8 MiB a chain of 1,500
ended the process; in 64, whatever 128 KiB of text can say compiles or is refused."""
METER_MS: Final = 100
"""How often it is looked at what a compilation has taken."""
COMPILE_NICENESS: Final = 5
"""Masks and steps come first."""


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="The grammar worker of a headrace server; started by the server.")
    parser.add_argument("--parent", type=int, required=True, help="process id of the server")
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the command pipe")
    parser.add_argument("--model", required=True, help="the model file or folder, for its vocabulary")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    # The server alone decides what a Ctrl-C means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open_model_file(arguments.model) as file:
        tokenizer = Tokenizer.of(file)
    with socket.socket(fileno=arguments.socket) as pipe:
        try:
            _serve(pipe, tokenizer)
        except (BrokenPipeError, ConnectionResetError):
            return  # the server has gone


def _serve(pipe: socket.socket, tokenizer: Tokenizer) -> None:
    wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    threading.stack_size(COMPILE_STACK_BYTES)
    lanes = ThreadLanes(LANES, wake)

    def reply(message: Reply) -> None:
        pipe.send(encoder.encode(message))

    library = GrammarLibrary.of(tokenizer)

    def compile_grammar(grammar: Grammar) -> Matcher:
        # On Linux niceness is a thread's own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)
        return library.compile(grammar)

    metered = MeteredLanes(lanes)
    service = GrammarService(reply, compile_grammar, metered, (tokenizer.vocab_size + 31) // 32)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    # What loading left behind stays; a collection over it would only cost time.
    gc.freeze()
    reply(Ready())
    packet = memoryview(bytearray(MAX_MESSAGE_BYTES))
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        metered.check()
        for fd, _ in poll.poll(METER_MS if metered.running else None):
            if fd == wake:
                os.eventfd_read(wake)
                lanes.deliver()
                continue
            size_bytes = pipe.recv_into(packet)
            if not size_bytes:
                return
            service.handle(command_decoder.decode(packet[:size_bytes]))


if __name__ == "__main__":
    main()

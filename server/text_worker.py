"""The text worker: renders long conversations and encodes long texts, in a process of its own.

`python -P -m headrace.server.text_worker --parent PID --socket FD`. One thread: between two pieces of some
milliseconds it takes in what has come, and it gives each job one piece in turn, so that a short text does not wait for
a long one. Only the rendering of a template is done in one go: if it does not end, the server kills the process.

in     jobs, in parts (`text_wire`)
out    their ids, piece by piece; `Working` before a piece of another job
state  the model's vocabulary and template; jobs that are arriving or being worked on
owner  this process; the server bounds what it sends
ready  after `Loaded`
end    the end of its input, or of the server
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from headrace.ops.child import die_with_parent
from headrace.ops.weights.gguf import BadModelFile
from headrace.server.chat import BadChat, BadTemplate, Chat, TextModel
from headrace.server.chat_sandbox import TemplateLimit
from headrace.server.text_wire import (
    Cancel,
    Close,
    Done,
    Failed,
    FrameReader,
    Ids,
    Item,
    Load,
    Loaded,
    Open,
    Refused,
    Text,
    ToServer,
    ToWorker,
    Working,
    frame,
    item_of,
    to_worker_decoder,
)
from headrace.server.tokenizer import PIECE_CHARS, BadText, BadTokenizer

MAX_MEMORY_BYTES: Final = 4 << 30
"""Address space. A text of 10 million characters without a place to cut it takes 2 GB."""
NICENESS: Final = 5
"""The device worker's threads and the server come first: a step waits for the slowest of its threads."""
_RECEIVE_BYTES: Final = 1 << 18
_IDS_BYTES: Final = 1 << 16
"""Of ids in one frame: the server takes it in within 0.1 ms."""


class _Job:
    """A job that is arriving, or being worked on."""

    def __init__(self, opened: Open) -> None:
        self.opened = opened
        self.parts: list[str] = []
        self.texts: list[str] = []
        self.messages: list[dict[str, object]] = []
        self.tools: list[dict[str, object]] = []


class TextWorker:
    """Takes messages, works on one piece at a time, answers through `send`."""

    def __init__(self, send: Callable[[ToServer], None]) -> None:
        self._send = send
        self._model: TextModel | None = None
        self._arriving: dict[int, _Job] = {}
        self._running: deque[tuple[int, Iterator[bytes]]] = deque()
        self._working = -1

    @property
    def is_busy(self) -> bool:
        return len(self._running) > 0

    def handle(self, message: ToWorker) -> None:
        """Take a message. Raises BadModelFile, BadTokenizer and BadTemplate for a `Load`."""
        match message:
            case Load():
                self._model = TextModel.load(message.model_path, message.chat_template)
                self._send(Loaded())
            case Open():
                self._arriving[message.job] = _Job(message)
            case Cancel():
                self._arriving.pop(message.job, None)
                self._running = deque(entry for entry in self._running if entry[0] != message.job)
            case Text() | Item() | Close():
                # A job that failed or was cancelled may still be arriving.
                job = self._arriving.get(message.job)
                if job is not None:
                    self._add(job, message)

    def work(self) -> None:
        """One piece of the job whose turn it is."""
        number, pieces = self._running.popleft()
        if self._working != number:
            self._working = number
            self._send(Working(number))
        try:
            data = next(pieces, None)
        except (BadChat, TemplateLimit) as error:
            self._send(Failed(number, "chat", str(error)))
        except BadText as error:
            self._send(Failed(number, "text", str(error)))
        except MemoryError:
            self._send(Failed(number, "other", f"the text needs more than {MAX_MEMORY_BYTES >> 30} GiB of memory"))
        else:
            if data is None:
                self._send(Done(number))
            else:
                for begin in range(0, len(data), _IDS_BYTES):
                    self._send(Ids(number, data[begin : begin + _IDS_BYTES]))
                self._running.append((number, pieces))

    def _add(self, job: _Job, message: Text | Item | Close) -> None:
        match message:
            case Text():
                job.parts.append(message.text)
                if message.is_last:
                    job.texts.append("".join(job.parts))
                    job.parts.clear()
            case Item():
                items = job.messages if message.kind == "message" else job.tools
                items.append(item_of(message.data, job.texts))
            case Close():
                del self._arriving[message.job]
                self._running.append((message.job, self._pieces(job)))

    def _pieces(self, job: _Job) -> Iterator[bytes]:
        """The job's ids. Short pieces go together: a conversation is mostly control tokens and short messages."""
        assert self._model is not None, "a job came before `Load`"
        tokenizer = self._model.tokenizer
        taken, chars = [], 0
        for piece in tokenizer.pieces(self._parts(job, self._model)):
            taken.append(tokenizer.encode_piece(piece))
            chars += len(piece) if isinstance(piece, str) else 1
            if chars >= PIECE_CHARS:
                yield np.concatenate(taken).tobytes()
                taken, chars = [], 0
        if taken:
            yield np.concatenate(taken).tobytes()

    def _parts(self, job: _Job, model: TextModel) -> Iterator[int | str]:
        if job.opened.kind == "text":
            yield from job.texts
            return
        opened, template = job.opened, model.required_template()
        chat = Chat(
            job.messages,
            job.tools,
            opened.add_generation_prompt,
            opened.continue_final_message,
            opened.template_kwargs,
        )
        yield from template.parts(template.render(chat))


def _serve(sock: socket.socket) -> None:
    worker = TextWorker(lambda message: sock.sendall(frame(message)))
    reader = FrameReader()
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        if poll.poll(0 if worker.is_busy else None):
            data = sock.recv(_RECEIVE_BYTES)
            if not data:
                return
            for body in reader.feed(data):
                message = to_worker_decoder.decode(body)
                worker.handle(message)
                if isinstance(message, Load):
                    gc.freeze()
                    # Only now: the model file was mapped as a whole.
                    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        if worker.is_busy:
            worker.work()


def main() -> None:
    parser = argparse.ArgumentParser(prog="headrace.server.text_worker")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--socket", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    os.nice(NICENESS)
    with socket.socket(fileno=arguments.socket) as sock:
        try:
            _serve(sock)
        except ConnectionError:
            return  # the server has gone
        except (BadModelFile, BadTokenizer, BadTemplate, OSError) as error:
            sock.sendall(frame(Refused(str(error))))


if __name__ == "__main__":
    main()

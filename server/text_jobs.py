"""The server's side of a text worker: sends it jobs, takes their ids, starts it anew when it dies or hangs.

Nothing here waits and there is no task: the socket's callbacks do a slice of about 0.3 ms each (3 ms for the largest
message there can be), and jobs take turns, so that neither the loop nor a short text waits for a long one.

in     jobs: the frames that describe them, and a bound on their time
out    a future of int32 ids for each
state  jobs in flight; the worker's process and socket; the frame that is being sent
owner  the event loop's thread; `TextService` submits and drops
ready  when the future is
end    `close`; a job that ends, fails, is dropped or runs out of time is forgotten at once
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import msgspec
import numpy as np

from headrace.ops.child import Child
from headrace.ops.wire import I32
from headrace.sched.messages import Overloaded
from headrace.server.chat import BadChat
from headrace.server.text_wire import (
    Cancel,
    Done,
    Failed,
    FrameReader,
    Ids,
    Load,
    Loaded,
    Refused,
    ToServer,
    Working,
    frame,
    to_server_decoder,
)
from headrace.server.tokenizer import BadText

_log = logging.getLogger(__name__)

_RECEIVE_BYTES: Final = 1 << 18
_SEND_BYTES: Final = 1 << 15
_SEND_S: Final = 0.0003
"""After so much of either, the loop has its turn."""
_SOCKET_BUFFER_BYTES: Final = 1 << 19
_MAX_STARTS: Final = 2
"""How often a job is given to a worker: it may have stood beside the job that killed the first."""


class TextFailed(Exception):
    """A text could not be encoded, through no fault of its own; the message says what happened and what to do."""


class TextTimeout(TextFailed):
    """It took longer than a job may."""


class TextLimits(msgspec.Struct, frozen=True):
    """Bounds on the work of a text worker."""

    job_s: float = 60.0
    """From submission to the last id. Ten million characters take 3 to 10 s."""
    jobs: int = 256
    chars: int = 64 << 20
    """In all jobs together."""


Future: TypeAlias = asyncio.Future[I32]


class _Job:
    """A job that is not done."""

    def __init__(self, number: int, chars: int, make_frames: Callable[[int], Iterator[bytes]], future: Future) -> None:
        self.number = number
        self.chars = chars
        self.make_frames = make_frames
        self.frames = make_frames(number)
        self.future = future
        self.ids = bytearray()
        self.starts = 0
        self.deadline: asyncio.TimerHandle | None = None


class _Process:
    """One life of the worker: its process and connection."""

    def __init__(self, on_readable: Callable[[], None], on_exit: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            arguments = ["--socket", str(theirs.fileno())]
            try:
                self.child = Child("headrace.server.text_worker", arguments, [theirs.fileno()], on_exit)
            except OSError as error:
                self.sock.close()
                raise TextFailed(f"the text worker can't be started: {error}") from error
        self.reader = FrameReader()
        self.outgoing = memoryview(b"")
        self.is_connected = True
        """False: it has closed its end, or was killed; the kernel has not said yet that it has ended."""
        self.is_loaded = False
        self.working = -1
        """The job that it last said it was working on."""
        self._loop.add_reader(self.sock, on_readable)

    def hang_up(self) -> None:
        """Close the connection; harmless twice."""
        if self.is_connected:
            self.is_connected = False
            self._loop.remove_reader(self.sock)
            self._loop.remove_writer(self.sock)
            self.sock.close()


class TextJobs:
    """Jobs for one text worker, which is started with the first of them."""

    def __init__(self, model_path: str, chat_template: str | None, limits: TextLimits) -> None:
        self._load = Load(model_path, chat_template)
        self.limits = limits
        self._process: _Process | None = None
        self._jobs: dict[int, _Job] = {}
        self._unsent: deque[_Job] = deque()
        self._cancellations: list[int] = []
        self._chars = 0
        self._next_number = 0
        self._refusal = ""
        self._is_closed = False
        self.restarts = 0

    @property
    def worker_pid(self) -> int | None:
        return self._process.child.pid if self._process is not None else None

    @property
    def waiting(self) -> int:
        """Jobs that are not done."""
        return len(self._jobs)

    def start(self) -> None:
        """Start the worker now, so that the first long text does not wait for it (0.4 s). Raises TextFailed."""
        if self._is_closed:
            raise TextFailed("the server is stopping")
        if self._process is None:
            self._process = _Process(self._readable, self._exited)
            self._process.outgoing = memoryview(frame(self._load))
            self._refusal = ""
            self._want_to_send()

    def submit(self, chars: int, make_frames: Callable[[int], Iterator[bytes]]) -> tuple[int, Future]:
        """Queue a job. Raises Overloaded, TextFailed. The future may raise BadChat, BadText, TextFailed."""
        if len(self._jobs) >= self.limits.jobs or (self._jobs and self._chars + chars > self.limits.chars):
            raise Overloaded(
                f"{len(self._jobs)} texts with {self._chars} characters are waiting to be tokenized; try again later",
                retry_after_s=1 + self._chars // 1_000_000,
            )
        self.start()
        loop = asyncio.get_running_loop()
        self._next_number += 1
        job = _Job(self._next_number, chars, make_frames, loop.create_future())
        job.deadline = loop.call_later(self.limits.job_s, self._expired, job)
        self._jobs[job.number] = job
        self._chars += chars
        if self._is_connected:
            self._begin(job)
        return job.number, job.future

    def drop(self, number: int) -> None:
        """Nobody waits for this job any more. Unknown or done: no effect."""
        job = self._jobs.get(number)
        if job is not None:
            self._forget(job)
            self._cancel_in_worker(job)

    def close(self) -> None:
        """End the worker and fail what it has not done."""
        self._is_closed = True
        process, self._process = self._process, None
        if process is not None:
            process.child.kill_and_reap()
            process.hang_up()
        for job in list(self._jobs.values()):
            self._fail(job, TextFailed("the server is stopping"))

    # -----------------------------------------------------------------------------------------------------------
    # Sending

    def _begin(self, job: _Job) -> None:
        job.starts += 1
        self._unsent.append(job)
        self._want_to_send()

    @property
    def _is_connected(self) -> bool:
        return self._process is not None and self._process.is_connected

    def _want_to_send(self) -> None:
        if self._process is not None and self._process.is_connected:
            asyncio.get_running_loop().add_writer(self._process.sock, self._writable)

    def _writable(self) -> None:
        """Send some frames of one job, or what the socket takes of them."""
        process = self._process
        assert process is not None
        if not process.outgoing:
            process.outgoing = memoryview(self._next_frames())
        if not process.outgoing:
            asyncio.get_running_loop().remove_writer(process.sock)
            return
        try:
            sent = process.sock.send(process.outgoing)
        except BlockingIOError:
            return
        except OSError:
            process.hang_up()  # `_exited` will say how it ended
            return
        process.outgoing = process.outgoing[sent:]

    def _next_frames(self) -> bytes:
        """What is to be sent next: cancellations, or a part of the job whose turn it is."""
        if self._cancellations:
            notes = b"".join(frame(Cancel(number)) for number in self._cancellations)
            self._cancellations.clear()
            return notes
        while self._unsent:
            job = self._unsent.popleft()
            if job.number not in self._jobs:
                continue
            data, end_s = b"", time.perf_counter() + _SEND_S
            try:
                for part in job.frames:
                    data += part
                    if len(data) >= _SEND_BYTES or time.perf_counter() > end_s:
                        self._unsent.append(job)
                        break
            except (BadChat, BadText) as error:
                self._fail(job, error)
                return data + frame(Cancel(job.number))
            if data:
                return data
        return b""

    # -----------------------------------------------------------------------------------------------------------
    # Receiving

    def _readable(self) -> None:
        process = self._process
        assert process is not None
        try:
            data = process.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._take(process, data)
        else:
            process.hang_up()

    def _take(self, process: _Process, data: bytes) -> None:
        for body in process.reader.feed(data):
            self._receive(process, to_server_decoder.decode(body))

    def _receive(self, process: _Process, message: ToServer) -> None:
        match message:
            case Loaded():
                process.is_loaded = True
            case Refused():
                self._refusal = message.message
            case Working():
                process.working = message.job
            case Ids() if job := self._jobs.get(message.job):
                job.ids += message.data
            case Done() if job := self._jobs.get(message.job):
                self._forget(job)
                if not job.future.done():
                    job.future.set_result(np.frombuffer(job.ids, np.int32))
            case Failed() if job := self._jobs.get(message.job):
                kinds = {"chat": BadChat, "text": BadText, "other": TextFailed}
                self._fail(job, kinds[message.kind](message.message))

    # -----------------------------------------------------------------------------------------------------------
    # Ends

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.number]
        self._chars -= job.chars
        assert job.deadline is not None
        job.deadline.cancel()

    def _fail(self, job: _Job, error: Exception) -> None:
        self._forget(job)
        if not job.future.done():
            job.future.set_exception(error)

    def _expired(self, job: _Job) -> None:
        """A job's time is over. The worker is killed if it hangs: if it is working on this job, or never started."""
        process = self._process
        self._fail(job, TextTimeout(f"tokenizing took longer than {self.limits.job_s:g} s; send a shorter text"))
        if process is None:
            return
        if process.working == job.number or not process.is_loaded or not process.is_connected:
            _log.warning("the text worker did not finish a text within %g s; it is started anew", self.limits.job_s)
            process.hang_up()
            process.child.kill()
        else:
            self._cancel_in_worker(job)

    def _cancel_in_worker(self, job: _Job) -> None:
        self._cancellations.append(job.number)
        self._want_to_send()

    def _exited(self, returncode: int) -> None:
        process = self._process
        assert process is not None
        while process.is_connected:  # what it said at last may not have been read yet; its end is closed by now
            self._readable()
        self._process = None
        self._unsent.clear()
        self._cancellations.clear()
        self._blame(process, returncode)
        if not self._jobs:
            return
        self.restarts += 1
        try:
            self.start()
        except TextFailed as error:
            for job in list(self._jobs.values()):
                self._fail(job, TextFailed(str(error)))
        for job in self._jobs.values():
            job.ids.clear()
            job.frames = job.make_frames(job.number)
            self._begin(job)

    def _blame(self, process: _Process, returncode: int) -> None:
        """Fail the job that the worker died of, if it did; all of them if it can't even start."""
        how = f"signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
        if process.is_loaded:
            message = f"the text worker ended ({how}) while it worked on this text"
            blamed = [job for job in self._jobs.values() if job.number == process.working or job.starts >= _MAX_STARTS]
        else:
            message = f"the text worker can't start ({self._refusal or how})"
            blamed = list(self._jobs.values())
        if process.is_loaded or self._jobs:
            lost = f"; {len(blamed)} of {len(self._jobs)} texts failed" if self._jobs else ", with no text to work on"
            _log.warning("the text worker ended (%s)%s", how, lost)
        for job in blamed:
            self._fail(job, TextFailed(message))

"""A real storage agent process, spoken to over its socket without an event loop."""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from storage.pages import MODEL, PAGE_BYTES, PAGE_TOKENS, keys_of, payload

from headrace.kvcache.storage.page_store import PageRun
from headrace.kvcache.storage.protocol import (
    MAX_MESSAGE_BYTES,
    Command,
    Opened,
    OpenStore,
    Read,
    ReadDone,
    Reply,
    Write,
    Written,
    encoder,
    reply_decoder,
)
from headrace.ops.transport import socket_pair

R = TypeVar("R", bound=Reply)
PATIENCE_S = 60


class Agent:
    """An agent with a host pool of its own, killed when the test is done with it."""

    def __init__(self, host_pages: int = 64, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.host_pages = host_pages
        fd = os.memfd_create("host-pool", os.MFD_CLOEXEC)
        os.ftruncate(fd, host_pages * page_bytes)
        self._mapping = mmap.mmap(fd, host_pages * page_bytes)
        self.pool = memoryview(self._mapping)
        self.pipe, theirs = socket_pair()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "headrace.kvcache.storage.agent"),
                *("--parent", str(os.getpid()), "--socket", str(theirs.fileno()), "--host-pool", str(fd)),
            ],
            pass_fds=(theirs.fileno(), fd),
            stderr=subprocess.PIPE,
        )
        theirs.close()
        os.close(fd)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def open_disk(self, directory: Path, capacity_bytes: int = 64 << 20, threads: int = 4) -> Opened:
        return self.open_store(self.settings(directory, capacity_bytes, threads))

    def settings(self, directory: Path, capacity_bytes: int, threads: int) -> OpenStore:
        return OpenStore(
            "disk",
            capacity_bytes,
            PAGE_TOKENS,
            [self.page_bytes],
            [0],
            [self.host_pages],
            MODEL,
            directory=str(directory),
            threads=threads,
        )

    def open_store(self, command: OpenStore) -> Opened:
        self.send(command)
        return self.expect(Opened)

    def send(self, command: Command) -> None:
        self.pipe.send(encoder.encode(command))

    def receive(self, patience_s: float = PATIENCE_S) -> Reply | None:
        """The next reply; None when the agent has closed its end, or nothing came for so long."""
        if not select.select([self.pipe], [], [], patience_s)[0]:
            return None
        try:
            message = self.pipe.recv(MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            return None
        return reply_decoder.decode(message) if message else None

    def expect(self, kind: type[R]) -> R:
        """The next reply that is of this kind."""
        while (reply := self.receive()) is not None:
            if isinstance(reply, kind):
                return reply
        raise AssertionError(f"no {kind.__name__} came")

    def fill(self, run: PageRun, first_page: int) -> list[int]:
        """Put a run's content into host pages."""
        pages = list(range(first_page, first_page + run.count))
        for page, key in zip(pages, keys_of(run)):
            self.view(page)[:] = payload(run.group, key, self.page_bytes)
        return pages

    def view(self, page: int) -> memoryview:
        return self.pool[page * self.page_bytes : (page + 1) * self.page_bytes]

    def begin_write(self, id: int, run: PageRun, first_page: int = 0) -> None:
        pages = self.fill(run, first_page)
        self.send(Write(id, run.group, run.namespace, run.parents, run.keys, run.tokens, pages))

    def begin_read(self, id: int, run: PageRun, pages: Sequence[int]) -> None:
        for page in pages:
            self.view(page)[:8] = bytes(8)
        self.send(Read(id, run.group, run.namespace, run.parents[:16], run.keys, run.tokens, list(pages)))

    def write(self, run: PageRun) -> Written:
        self.begin_write(1, run)
        return self.expect(Written)

    def read(self, run: PageRun) -> ReadDone:
        """Read a run; what counts as good must be right."""
        self.begin_read(1, run, range(run.count))
        done = self.expect(ReadDone)
        assert self.right(run, range(run.count), done.good), "a wrong page counted as good"
        return done

    def right(self, run: PageRun, pages: Sequence[int], good: int) -> bool:
        return all(
            bytes(self.view(page)) == payload(run.group, key, self.page_bytes)
            for page, key in zip(pages[:good], keys_of(run))
        )

    def kill(self) -> None:
        """kill -9, and what it said."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
        self.pipe.close()

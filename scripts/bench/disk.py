#!/usr/bin/env python3
"""The disk store against the disk: MB/s through a storage agent, and of a plain preadv/pwritev loop beside it.

    scripts/bench/disk.py [--directory DIR] [--size 768MB] [--repeats 5] [--open 1000000 10000000] [--json FILE]

Both sides take turns, in fresh directories on one file system: the same records in the same preallocated files, calls
of the same size, as many at a time. Then: how long stores of so many (synthetic) entries take to open, what their index
takes in RAM, and how long a lookup in them takes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from headrace.kvcache.storage.disk.entries import PAGE, entry_bytes, new_entries, seal, space_entry
from headrace.kvcache.storage.disk.opening import open_disk_store
from headrace.kvcache.storage.disk.ownership import FormatFile
from headrace.kvcache.storage.disk.record import FORMAT, HEADER_BYTES
from headrace.kvcache.storage.disk.segments import segment_name
from headrace.kvcache.storage.disk.store import DiskSettings
from headrace.kvcache.storage.protocol import (
    MAX_MESSAGE_BYTES,
    Close,
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
from headrace.kvcache.storage.service import PIECE_BYTES
from headrace.ops.transport import socket_pair

PAGE_BYTES: Final = 368_640
"""16 tokens of the default model in bfloat16."""
RECORD_BYTES: Final = HEADER_BYTES + PAGE_BYTES
PAGE_TOKENS: Final = 16
REQUEST_PAGES: Final = 32
REQUESTS_AT_A_TIME: Final = 4
SEGMENT_RECORDS: Final = (64 << 20) // RECORD_BYTES
THREADS: Final = 4
MODEL: Final = b"bench.disk.model"
LOOKUPS: Final = (64, 512, 8192)


class Speed(msgspec.Struct):
    """One direction; MB/s of pages, without their headers."""

    direction: str
    agent_mb_s: float
    plain_mb_s: float
    ratio: float
    """Median of the ratios of the pairs."""
    ratios: list[float]


class Opening(msgspec.Struct):
    """A store of so many pages."""

    pages: int
    open_s: float
    index_bytes_per_page: float
    """By the sizes of the arrays."""
    resident_bytes_per_page: float
    """What the process grew by."""
    lookup_us: dict[str, float]
    """By the number of keys."""


class Report(msgspec.Struct):
    size_bytes: int
    page_bytes: int
    speeds: list[Speed]
    openings: list[Opening]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="where to put files (default: a temporary one)")
    parser.add_argument("--size", default="768MB", help="pages to write and read (default 768MB)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs (default 5)")
    parser.add_argument("--open", type=int, nargs="*", default=[1_000_000, 10_000_000], help="entries to open")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here too")
    options = parser.parse_args()
    size_bytes = int(options.size.removesuffix("MB")) * 1_000_000
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        speeds = throughput(Path(directory), size_bytes, options.repeats) if options.repeats else []
        openings = [opening(Path(directory) / "synthetic", pages) for pages in options.open]
    report = Report(size_bytes, PAGE_BYTES, speeds, openings)
    show(report)
    if options.json is not None:
        options.json.write_text(json.dumps(msgspec.to_builtins(report), indent=1))
    return 0


def show(report: Report) -> None:
    console = Console()
    table = Table(title=f"{report.size_bytes / 1e6:.0f} MB of pages of {report.page_bytes} bytes, {THREADS} threads")
    for heading in ("", "agent MB/s", "plain loop MB/s", "ratio", "ratios of the pairs"):
        table.add_column(heading, justify="right")
    for speed in report.speeds:
        pairs = " ".join(f"{ratio:.2f}" for ratio in speed.ratios)
        row = (speed.direction, f"{speed.agent_mb_s:.0f}", f"{speed.plain_mb_s:.0f}", f"{speed.ratio:.2f}", pairs)
        table.add_row(*row)
    console.print(table)
    table = Table(title="opening, and looking up in what was opened")
    for heading in ("pages", "open s", "index B/page", "resident B/page", *(f"{keys} keys µs" for keys in LOOKUPS)):
        table.add_column(heading, justify="right")
    for line in report.openings:
        lookups = [f"{us:.0f}" for us in line.lookup_us.values()]
        sizes = (f"{line.index_bytes_per_page:.1f}", f"{line.resident_bytes_per_page:.1f}")
        table.add_row(f"{line.pages:,}", f"{line.open_s:.2f}", *sizes, *lookups)
    console.print(table)


# ---------------------------------------------------------------------------------------------------------------
# Throughput


class Pool:
    """A host pool in a memfd, full of bytes that compress badly."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.fd = os.memfd_create("host-pool", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, pages * PAGE_BYTES)
        self.view = memoryview(mmap.mmap(self.fd, pages * PAGE_BYTES))
        np.frombuffer(self.view, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, len(self.view), np.uint8)

    def page(self, number: int) -> memoryview:
        start = number % self.pages * PAGE_BYTES
        return self.view[start : start + PAGE_BYTES]


def throughput(directory: Path, size_bytes: int, repeats: int) -> list[Speed]:
    """Agent and plain loop in turns, each time writing to fresh files and reading back."""
    pages = size_bytes // PAGE_BYTES // REQUEST_PAGES * REQUEST_PAGES
    pool = Pool(REQUEST_PAGES * REQUESTS_AT_A_TIME)
    agent, plain = [], []
    for repeat in range(repeats + 1):
        pair = (agent_run(directory / "agent", pool, pages), plain_run(directory / "plain", pool, pages))
        # The first pair warms up.
        if repeat:
            agent.append(pair[0])
            plain.append(pair[1])
    speeds = []
    for index, direction in enumerate(("write", "read")):
        mine = [run[index] for run in agent]
        theirs = [run[index] for run in plain]
        ratios = [a / b for a, b in zip(mine, theirs)]
        speeds.append(
            Speed(direction, statistics.median(mine), statistics.median(theirs), statistics.median(ratios), ratios)
        )
    return speeds


def agent_run(directory: Path, pool: Pool, pages: int) -> tuple[float, float]:
    """(write, read) MB/s through an agent's process."""
    agent = Agent(pool)
    agent.call(
        OpenStore(
            "disk",
            (pages // SEGMENT_RECORDS + 64) * SEGMENT_RECORDS * RECORD_BYTES * 2,
            PAGE_TOKENS,
            [PAGE_BYTES],
            [0],
            [pool.pages],
            MODEL,
            directory=str(directory),
            threads=THREADS,
        ),
        Opened,
    )
    chains = [Chain(number) for number in range(pages // REQUEST_PAGES)]

    def write(slot: int, chain: Chain) -> Command:
        return Write(slot, 0, chain.root, chain.parents, chain.keys, chain.tokens, host_pages(slot))

    def read(slot: int, chain: Chain) -> Command:
        return Read(slot, 0, chain.root, chain.root, chain.keys, chain.tokens, host_pages(slot))

    write_s = agent.run_all(chains, write)
    read_s = agent.run_all(chains, read)
    agent.pipe.send(encoder.encode(Close()))
    agent.process.wait()
    agent.pipe.close()
    shutil.rmtree(directory)
    return pages * PAGE_BYTES / write_s / 1e6, pages * PAGE_BYTES / read_s / 1e6


def host_pages(slot: int) -> list[int]:
    return list(range(slot * REQUEST_PAGES, (slot + 1) * REQUEST_PAGES))


class Chain:
    """What a request for REQUEST_PAGES pages says."""

    def __init__(self, number: int) -> None:
        self.root = xxhash.xxh3_128_digest(b"namespace")
        tokens = np.random.default_rng(number).integers(0, 50_000, REQUEST_PAGES * PAGE_TOKENS).astype("<i4")
        self.tokens = tokens.tobytes()
        links = [self.root]
        for at in range(0, len(self.tokens), PAGE_TOKENS * 4):
            links.append(xxhash.xxh3_128_digest(links[-1] + self.tokens[at : at + PAGE_TOKENS * 4]))
        self.parents, self.keys = b"".join(links[:-1]), b"".join(links[1:])


class Agent:
    """An agent's process, with as many requests at a time as the pool has room for."""

    def __init__(self, pool: Pool) -> None:
        self.pipe, theirs = socket_pair()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "headrace.kvcache.storage.agent"),
                *("--parent", str(os.getpid()), "--socket", str(theirs.fileno()), "--host-pool", str(pool.fd)),
            ],
            pass_fds=(theirs.fileno(), pool.fd),
        )
        theirs.close()

    def call(self, command: Command, answer: type[Reply]) -> None:
        self.pipe.send(encoder.encode(command))
        reply = self.receive()
        assert isinstance(reply, answer), reply

    def receive(self) -> Reply:
        return reply_decoder.decode(self.pipe.recv(MAX_MESSAGE_BYTES))

    def run_all(self, chains: Sequence[Chain], command: Callable[[int, Chain], Command]) -> float:
        """Seconds for all requests."""
        began = time.perf_counter()
        waiting = list(reversed(chains))
        free = list(range(REQUESTS_AT_A_TIME))
        ended = 0
        while ended < len(chains):
            while waiting and free:
                self.pipe.send(encoder.encode(command(free.pop(), waiting.pop())))
            match self.receive():
                case Written(id, dropped=dropped, message=message):
                    assert not dropped, message
                    free.append(id)
                    ended += 1
                case ReadDone(id, good=good, message=message):
                    assert good == REQUEST_PAGES, message
                    free.append(id)
                    ended += 1
        return time.perf_counter() - began


def plain_run(directory: Path, pool: Pool, pages: int) -> tuple[float, float]:
    """(write, read) MB/s of threads that do nothing else. Writes have a thread less, as in the agent."""
    directory.mkdir()
    headers = memoryview(mmap.mmap(-1, HEADER_BYTES * THREADS * 4))
    files: list[int] = []

    def file(number: int) -> int:
        while number >= len(files):
            fd = os.open(directory / str(len(files)), os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(fd, 0, SEGMENT_RECORDS * RECORD_BYTES)
            files.append(fd)
        return files[number]

    each = PIECE_BYTES // PAGE_BYTES
    pieces = []
    for start in range(0, pages, each):
        number, at = divmod(start, SEGMENT_RECORDS // each * each)
        pieces.append((number, at * RECORD_BYTES, start))

    def transfer(call: Callable[[int, Sequence[memoryview], int], int], number: int, offset: int, start: int) -> None:
        header = headers[:HEADER_BYTES]
        buffers = [part for page in range(start, start + each) for part in (header, pool.page(page))]
        assert call(files[number], buffers, offset) == each * RECORD_BYTES

    def run_all(call: Callable[[int, Sequence[memoryview], int], int], threads: int) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as lanes:
            running = []
            for number, offset, start in pieces:
                file(number)
                running.append(lanes.submit(transfer, call, number, offset, start))
            for one in running:
                one.result()
        return time.perf_counter() - began

    write_s, read_s = run_all(os.pwritev, THREADS - 1), run_all(os.preadv, THREADS)
    for fd in files:
        os.close(fd)
    shutil.rmtree(directory)
    return pages * PAGE_BYTES / write_s / 1e6, pages * PAGE_BYTES / read_s / 1e6


# ---------------------------------------------------------------------------------------------------------------
# Opening


def opening(directory: Path, pages: int) -> Opening:
    """Open a store of so many synthetic entries, and look up in it."""
    keys = synthetic(directory, pages)
    settings = DiskSettings(str(directory), (pages + 4096) * (RECORD_BYTES + 400), PAGE_TOKENS, (PAGE_BYTES,), MODEL)
    before = resident_bytes()
    began = time.perf_counter()
    store = open_disk_store(settings)
    open_s = time.perf_counter() - began
    grown = resident_bytes() - before
    stats = store.stats()
    assert stats.pages == pages, stats
    rng = np.random.default_rng(1)
    lookup_us = {}
    for count in LOOKUPS:
        asked = [keys[rng.integers(0, pages, count)].tobytes() for _ in range(50)]
        began = time.perf_counter()
        found = [store.contains(0, one) for one in asked]
        lookup_us[str(count)] = (time.perf_counter() - began) / len(asked) * 1e6
        assert found == [count] * len(asked)
    store.close()
    shutil.rmtree(directory)
    return Opening(pages, open_s, stats.index_bytes / pages, grown / pages, lookup_us)


def synthetic(directory: Path, pages: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """A directory as a store of so many pages leaves it, but that its segments are holes; the pages' keys."""
    directory.mkdir(mode=0o700)
    store_id = 12345
    (directory / "format").write_bytes(msgspec.json.encode(FormatFile("page cache", FORMAT, store_id)))
    records = max(SEGMENT_RECORDS, pages // 1000)
    for segment in range(-(-pages // records)):
        with (directory / segment_name(segment, RECORD_BYTES)).open("wb") as file:
            file.truncate(min(records, pages - segment * records) * RECORD_BYTES)
    keys = np.random.default_rng(0).integers(0, 1 << 64, (pages, 2), dtype=np.uint64)
    with (directory / "journal").open("wb") as journal:
        journal.write(entry_bytes(seal(space_entry(0, bytes(16), MODEL, 0), store_id)))
        for start in range(0, pages, 1 << 20):
            numbers = np.arange(start, min(start + (1 << 20), pages))
            entries = new_entries(len(numbers))
            entries["key"] = keys[numbers]
            entries["generation"] = 1 + numbers // 3
            entries["segment"], entries["slot"] = np.divmod(numbers, records)
            entries["tick"] = 1 + numbers // 100
            entries["op"] = PAGE
            journal.write(entry_bytes(seal(entries, store_id)))
    return keys


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


if __name__ == "__main__":
    sys.exit(main())

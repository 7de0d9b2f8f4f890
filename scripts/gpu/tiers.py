"""A prompt whose KV is on the host, or on disk, against computing it: how long until its first id.

Disk: pages are read from a file that no cache holds (O_DIRECT) into the host pool, by eight threads, and are loaded
when all of them are there. The server's own store adds a checksum and an index to this.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from gpu.decode import model_of, page_bytes, requests_for
from gpu.report import Report
from gpu.requests import Feed, Requests
from gpu.timing import Device

from headrace.ops.wire import Backup

PROMPTS: Final = (2048, 8192)
REST: Final = 16
"""Tokens that no tier has: the question after the document."""
CHUNK: Final = 2048
THREADS: Final = 8
READ_BYTES: Final = 16 << 20


def run(report: Report, options: argparse.Namespace) -> None:
    device = Device(options.dry)
    prompts = (32,) if device.dry else PROMPTS
    longest = prompts[-1] + REST
    config = model_of(device, longest)
    host_pages = prompts[-1] // 16
    host = mmap.mmap(-1, host_pages * page_bytes(config))
    requests, _ = requests_for(device, config, 2, longest, 3 * (longest // 16 + 1), host)
    ids = np.random.default_rng(5).integers(0, config.vocab_size, longest).tolist()
    for tokens in prompts:
        pages = tokens // 16
        size_bytes = pages * page_bytes(config)
        prompt = ids[: tokens + REST]
        chunk = device.size(CHUNK, 16)
        computed = _median(device, lambda p=prompt, c=chunk: _compute(requests, p, c))  # type: ignore[misc]
        report.figure(f"{tokens} tokens computed in chunks of {chunk}", computed, "ms", note=f"and {REST} more")
        loaded = _median(device, lambda p=prompt, n=pages: _load(requests, p, n))  # type: ignore[misc]
        report.figure(f"{tokens} tokens from the host", loaded, "ms", note=f"{computed / loaded:.1f} × as fast")
        _check_loaded(report, requests, prompt, pages)
        with tempfile.TemporaryDirectory(dir=None if device.dry else ".") as folder:
            file = Path(folder, "pages")
            note = _write(file, host, size_bytes)
            read = _median(device, lambda f=file, s=size_bytes: _read(f, host, s))  # type: ignore[misc]
        report.figure(f"{tokens} tokens read from disk", read, "ms", note=f"{size_bytes / read / 1e6:.1f} GB/s, {note}")
        both = read + loaded
        report.figure(
            f"{tokens} tokens from disk, read and loaded", both, "ms", note=f"{computed / both:.1f} × as fast"
        )


def _median(device: Device, work: Callable[[], float]) -> float:
    return sorted(work() for _ in range(device.size(5, 1)))[device.size(2, 0)]


def _compute(requests: Requests, prompt: list[int], chunk: int) -> float:
    """ms until the first id is on the host."""
    requests.begin(0)
    began = time.perf_counter()
    for start in range(0, len(prompt), chunk):
        requests.launch([Feed(0, prompt[start : start + chunk], sample=start + chunk >= len(prompt))])
    requests.finish()
    return (time.perf_counter() - began) * 1e3


def _load(requests: Requests, prompt: list[int], pages: int) -> float:
    """The same for a prompt whose first pages are on the host."""
    own = requests.begin(1, pages * 16)
    began = time.perf_counter()
    requests.launch([Feed(1, prompt[pages * 16 :])], list(enumerate(own)))
    requests.finish()
    return (time.perf_counter() - began) * 1e3


def _check_loaded(report: Report, requests: Requests, prompt: list[int], pages: int) -> None:
    """What was computed, backed up and loaded again comes to the same id."""
    requests.begin(0)
    requests.launch([Feed(0, prompt[: pages * 16], sample=False)])
    requests.finish()
    own = requests.pages_of(0)[:pages]
    backup = requests.runner.back_up(Backup(1, 0, own, list(range(pages))))
    while not backup.done.query():
        pass
    requests.launch([Feed(0, prompt[pages * 16 :])])
    requests.finish()
    _load(requests, prompt, pages)
    same = requests.outputs[0] == requests.outputs[1] and requests.logprobs[0] == requests.logprobs[1]
    report.check(f"{pages * 16} tokens from the host come to the id that they came to", same)


def _write(file: Path, host: mmap.mmap, size_bytes: int) -> str:
    """→ how it will be read."""
    with file.open("wb") as target:
        target.write(memoryview(host)[:size_bytes])
        target.flush()
        os.fsync(target.fileno())
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return "perhaps from memory: this file system has no O_DIRECT"
    return "past the page cache"


def _read(file: Path, host: mmap.mmap, size_bytes: int) -> float:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        descriptor = os.open(file, os.O_RDONLY)
    view = memoryview(host)

    def read(start: int) -> None:
        end = min(start + READ_BYTES, size_bytes)
        while start < end:
            got = os.preadv(descriptor, [view[start:end]], start)
            if got <= 0:
                raise OSError(f"{file} ended at {start} of {size_bytes} bytes")
            start += got

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            began = time.perf_counter()
            list(pool.map(read, range(0, size_bytes, READ_BYTES)))
            return (time.perf_counter() - began) * 1e3
    finally:
        os.close(descriptor)
        view.release()

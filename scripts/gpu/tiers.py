"""A prompt whose KV is on the host, or on disk, against computing it: how long until its first id.

Disk: the server's own store reads and verifies pages into the host pool, on as many threads as a server has by
default, past the page cache where the file system allows it; they are loaded when all of them are there.
"""

from __future__ import annotations

import argparse
import mmap
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from gpu.decode import model_of, page_bytes, requests_for
from gpu.disk import Disk, prefix_key, verified_by
from gpu.report import Report
from gpu.requests import Feed, Requests
from gpu.timing import Device

from headrace.ops.wire import Backup

PROMPTS: Final = (2048, 8192)
REST: Final = 16
"""Tokens that no tier has: the question after the document."""
CHUNK: Final = 2048


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
        prompt = ids[: tokens + REST]
        chunk = device.size(CHUNK, 16)
        computed = _median(device, lambda p=prompt, c=chunk: _compute(requests, p, c))  # type: ignore[misc]
        report.figure(f"{tokens} tokens computed in chunks of {chunk}", computed, "ms", note=f"and {REST} more")
        loaded = _median(device, lambda p=prompt, n=pages: _load(requests, p, n))  # type: ignore[misc]
        report.figure(f"{tokens} tokens from the host", loaded, "ms", note=f"{computed / loaded:.1f} × as fast")
        _check_loaded(report, requests, prompt, pages)
        temporary = tempfile.TemporaryDirectory(dir=None if device.dry else ".")
        with temporary as folder, Disk(Path(folder), host, page_bytes(config)) as disk:
            _from_disk(report, device, requests, prompt, pages, host, disk, computed)


def _from_disk(
    report: Report,
    device: Device,
    requests: Requests,
    prompt: list[int],
    pages: int,
    host: mmap.mmap,
    disk: Disk,
    computed_ms: float,
) -> None:
    """Of the pages that are on the host now."""
    tokens, size_bytes, key = pages * 16, pages * disk.slot_bytes, prefix_key(prompt)
    written = disk.write(key, pages)
    report.check(f"{tokens} tokens are stored", written.stored == pages, written.message)
    taken = []
    for _ in range(device.size(5, 1)):
        host[:size_bytes] = bytes(size_bytes)
        began = time.perf_counter()
        read = disk.read(key, pages)
        read_ms = (time.perf_counter() - began) * 1e3
        if read.good < pages:
            report.check(f"{tokens} tokens come back from disk", False, f"{read.good} of {pages}: {read.message}")
            return
        taken.append((read_ms + _load(requests, prompt, pages), read_ms))
    same = requests.outputs[0] == requests.outputs[1] and requests.logprobs[0] == requests.logprobs[1]
    report.check(f"{tokens} tokens from disk come to the id that they came to", same)
    both, read_ms = sorted(taken)[len(taken) // 2]
    how = "past the page cache" if disk.stats.direct_io else "perhaps from memory: no O_DIRECT here"
    note = f"{size_bytes / read_ms / 1e6:.1f} GB/s, verified by {verified_by()}, {how}"
    report.figure(f"{tokens} tokens read from disk", read_ms, "ms", note=note)
    name = f"{tokens} tokens from disk, read and loaded"
    report.figure(name, both, "ms", note=f"{computed_ms / both:.1f} × as fast")


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

"""Compiles a decoder's program and the choice of ids, or loads what was compiled before.

Compiling takes 10 to 13 s of CPU time, loading 0.3. What was compiled lies in a folder named after a digest of the
kernels' sources and numba's version; inside it, numba tells programs of different CPUs apart. The versions that were
used last stay, the others are deleted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numba
import numpy as np
from numba.core import event, types

from headrace.ops.simd import blocks, instructions
from headrace.ops.simd.target import AMX
from headrace.ops.simd.vector import BF16, F32, Q8

Elements: TypeAlias = Literal["float32", "bfloat16", "q8"]

_log: Final = logging.getLogger("headrace.worker")
KEPT_VERSIONS: Final = 16
"""Of the kernels, compiled for one CPU: 2 MB each for each kind of elements."""
WITNESSES: Final[dict[str, Any]] = {"float32": F32, "bfloat16": BF16, "q8": Q8}


def prepare(elements: Elements, kv: Elements, folder: str, progress: Callable[[int, int], None]) -> None:
    """Have the program for weights of `elements` and KV of `kv` ready, and the choice of ids.

    `folder`: where compiled code is kept; empty, or not to be written: nowhere but in this process, until its end.
    `progress(done, total)` is called with kernels, if there is something to compile.
    """
    kept = keep(folder)
    from headrace.ops.simd import decoder, draws

    if kept:
        decoder.run.enable_caching()
        draws.choose_rows.enable_caching()
    listener = _Listener(progress, len(instructions.KERNELS))
    with event.install_listener("numba:compile", listener):
        tables = types.int64[::1], types.int64[:, ::1], types.float64[::1]
        witnesses = (numba.typeof(WITNESSES[name]) for name in (elements, kv))
        decoder.run.compile((*witnesses, *tables, types.int64))
        draws.choose_rows.compile(draws.SIGNATURE)
    listener.finish()


def keep(folder: str) -> bool:
    """Have what decodes stored blocks kept in the folder when it is compiled; whether anything can be kept there."""
    own = _writable(Path(folder) / _digest()) if folder else None
    if own is None:
        return False
    # Read by numba when it makes a function's cache.
    numba.config.CACHE_DIR = str(own)
    blocks.keep()
    os.utime(own)
    _prune(own.parent)
    return True


class _Listener(event.Listener):  # type: ignore[misc]
    """Counts kernels as they are compiled."""

    def __init__(self, progress: Callable[[int, int], None], total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def on_start(self, event: object) -> None:
        pass

    def on_end(self, event: object) -> None:
        self._done += 1
        if self._done <= self._total:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        """Not every program needs all kernels."""
        if 0 < self._done < self._total:
            self._progress(self._total, self._total)


def _writable(folder: Path) -> Path | None:
    """The folder, made if need be; None, with a line in the log, where it can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as problem:
        _log.warning("compiled kernels are not kept (%s): every start compiles them anew. See HEADRACE_CACHE", problem)
        return None


def _prune(folder: Path) -> None:
    """Delete the versions that were used longest ago. A process that has loaded one of them does not need it again."""
    versions = [path for path in folder.iterdir() if re.fullmatch("[0-9a-f]{16}", path.name)]
    # Another start may delete them at this moment.
    with suppress(FileNotFoundError):
        versions.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for version in versions[KEPT_VERSIONS:]:
            shutil.rmtree(version, ignore_errors=True)


def _digest() -> str:
    """numba itself looks at the time of one of the files only, and knows the CPU, not whether its tiles are refused."""
    digest = hashlib.sha256(f"{numba.__version__} {np.__version__} {AMX}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]

"""What a device worker needs of a device: to load a model, to make pools, and to give steps to its streams."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import torch

from headrace.ops.kv_pool import KvPool
from headrace.ops.models.config import ModelConfig
from headrace.ops.runner import Runner
from headrace.ops.streams import Streams
from headrace.ops.wire import HostArea, Progress, Reply, Start

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROGRESS_STEPS: Final = 50
"""Messages that a load sends at most."""


class CannotServe(Exception):
    """The settings do not fit the model or this machine; the message says what to change."""


class Weights(Protocol):
    """A model that has been loaded."""

    config: ModelConfig

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights in the device's memory."""


class Promised(Protocol):
    """Memory that the system hands out when it is first used."""

    def touch(self, budget_ms: float) -> bool:
        """Make more of it real, for about so long; → whether all of it is, or can't be."""


class Made(NamedTuple):
    """Pools, and who runs steps over them."""

    pools: list[KvPool]
    runner: Runner
    host: Promised | None = None
    """The host pool's memory, where nobody has touched it yet."""


class Backend(Protocol):
    """One device, for one model."""

    streams: Streams

    def load(self, start: Start) -> Weights:
        """Raises CannotServe, ValueError or OSError with a sentence for the user, MemoryError or RuntimeError where
        memory lacks."""

    @property
    def free_bytes(self) -> int:
        """Of the device's memory; 0 where it is the host's."""

    def make_runner(
        self,
        start: Start,
        num_pages: list[int],
        ring: mmap.mmap | bytearray,
        host_pool: mmap.mmap | bytearray | None,
    ) -> Made:
        """Of the model that was loaded. Raises CannotServe, or MemoryError, OSError, torch.OutOfMemoryError where
        memory lacks."""

    def name(self, start: Start) -> str:
        """What a person would call the device."""

    def numerics(self, start: Start) -> str:
        """As `wire.Ready` tells it."""


def dtype_of(start: Start) -> torch.dtype:
    """Raises CannotServe."""
    if start.dtype not in DTYPES:
        raise CannotServe(f"--dtype {start.dtype} is not supported: use {' or '.join(DTYPES)}")
    return DTYPES[start.dtype]


def host_areas(start: Start, host_pool: mmap.mmap | bytearray | None, pools: list[KvPool]) -> list[HostArea]:
    """Where each pool's pages are in the host pool: full groups share its beginning, window groups have areas of their
    own. None without one. Raises CannotServe where a page is larger than the server's plan has it."""
    if host_pool is None or not start.host_slot_bytes:
        return []
    windows = start.window_areas
    full_bytes = min((area.offset for area in windows), default=len(host_pool))
    full = HostArea(0, start.host_slot_bytes, full_bytes // start.host_slot_bytes)
    areas = [*[full] * (len(pools) - len(windows)), *windows]
    for pool, area in zip(pools, areas, strict=True):
        page_bytes = len(pool.shape.layers) * pool.layer_elements * pool.pages.element_size()
        if page_bytes > area.slot_bytes:
            raise CannotServe(f"a page takes {page_bytes} bytes, a slot of the host pool {area.slot_bytes}")
    return areas


def weights_progress(reply: Callable[[Reply], None]) -> Callable[[int, int], None]:
    """→ what a load calls with bytes done and in all; tells the server of some."""
    reported = 0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if done == total or (done - reported) * PROGRESS_STEPS >= total:
            reported = done
            reply(Progress("weights", done, total))

    return progress

"""A card as a worker's device; on request the CPU in its place, for tests of all but the card itself."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from headrace.ops.backend import CannotServe, Made, Weights, dtype_of, host_areas, weights_progress
from headrace.ops.cuda import card
from headrace.ops.cuda.copies import PinnedPages
from headrace.ops.cuda.first_steps import run_first_steps
from headrace.ops.cuda.kv import DevicePools
from headrace.ops.cuda.sampler import DeviceSampler
from headrace.ops.cuda.step import DeviceStepRunner
from headrace.ops.cuda.streams import cuda_streams
from headrace.ops.device import device_name
from headrace.ops.kv_pool import CPU, KvPool
from headrace.ops.models.registry import load_on_device
from headrace.ops.streams import Streams, in_order_streams
from headrace.ops.wire import BatchRing, Progress, Reply, Start

CPU_MULTIPROCESSORS: Final = 2
"""Of a CPU in a card's place: few enough that long contexts are cut."""


class CudaBackend:
    """A `Backend`."""

    def __init__(self, start: Start, reply: Callable[[Reply], None], streams: Streams | None) -> None:
        """`streams`: None for the device's own. Raises CannotServe where no card can be used."""
        if start.quantization != "none":
            raise CannotServe(f"--quantization {start.quantization} is not supported on a GPU: use none")
        self._reply = reply
        self._device = card.open_card() if start.device == "cuda" else CPU
        self.streams = streams or (cuda_streams(self._device) if self._on_card else in_order_streams())

    @property
    def _on_card(self) -> bool:
        return self._device.type == "cuda"

    @property
    def free_bytes(self) -> int:
        return card.free_bytes(self._device) if self._on_card else 0

    def name(self, start: Start) -> str:
        return torch.cuda.get_device_name(self._device) if self._on_card else device_name(start.threads)

    def numerics(self, start: Start) -> str:
        return start.dtype

    def load(self, start: Start) -> Weights:
        torch.set_num_threads(start.threads)
        progress = weights_progress(self._reply)
        path, context_tokens = start.model_path, start.max_context_tokens
        self._model = load_on_device(path, dtype_of(start), context_tokens, self._device, progress, start.kernel_cache)
        return self._model

    def make_runner(
        self,
        start: Start,
        num_pages: list[int],
        ring: mmap.mmap | bytearray,
        host_pool: mmap.mmap | bytearray | None,
    ) -> Made:
        dtype = dtype_of(start)
        sizes = (start.page_tokens, start.max_slots, start.max_context_tokens, dtype, self._device)
        pools = [KvPool(shape, pages, *sizes) for shape, pages in zip(start.groups, num_pages, strict=True)]
        if self._on_card:
            card.pin(ring)
        copiers = self._copiers(start, pools, host_pool)
        count = card.multiprocessors(self._device) if self._on_card else CPU_MULTIPROCESSORS
        config = self._model.config
        windows = [sorted({config.window(layer) for layer in pool.shape.layers}) for pool in pools]
        runner = DeviceStepRunner(
            self._model,
            DevicePools(pools, config.heads, self._device, count, windows),
            DeviceSampler(start.max_slots, start.ring.vocab, self._device),
            copiers,
            self.streams,
            start.ring,
            partial(self._tell, "capturing decode steps"),
        )
        if self._on_card:
            # What was made so far was made in another stream.
            torch.cuda.synchronize()
            self._reply(Progress("compiling kernels for this card, once", 0, 1))
            run_first_steps(runner, pools, BatchRing(ring, start.ring), bool(copiers))
        return Made(pools, runner)

    def _copiers(self, start: Start, pools: list[KvPool], host_pool: mmap.mmap | bytearray | None) -> list[PinnedPages]:
        areas = host_areas(start, host_pool, pools)
        if not areas:
            return []
        assert host_pool is not None
        if self._on_card:
            self._reply(Progress(f"locking {len(host_pool) >> 30} GiB of host memory for the card", 0, 1))
            card.pin(host_pool)
            card.make_pinned_blocks()
        return [PinnedPages(host_pool, area, dtype_of(start)) for area in areas]

    def _tell(self, phase: str, done: int, total: int) -> None:
        self._reply(Progress(phase, done, total))

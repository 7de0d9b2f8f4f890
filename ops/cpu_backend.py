"""The CPU as a worker's device: compiled kernels, or torch's layers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Final

from headrace.ops.backend import CannotServe, Made, Weights, dtype_of, host_areas, weights_progress
from headrace.ops.copy_thread import cpu_streams
from headrace.ops.device import device_name, prepare_cpu
from headrace.ops.kv_copy import HostPages
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.model import Model
from headrace.ops.models.registry import load_compiled, load_model
from headrace.ops.sampler import Sampler
from headrace.ops.sampling import Choose, choose
from headrace.ops.step import StepRunner
from headrace.ops.step_copies import Copier
from headrace.ops.streams import Streams
from headrace.ops.wire import Progress, Reply, Start
from headrace.ops.zeroed_memory import SharedMemory

QUANTIZATIONS: Final = ("none", "q8")


class CpuBackend:
    """A `Backend`."""

    def __init__(self, reply: Callable[[Reply], None], streams: Streams | None) -> None:
        """`streams`: None for the CPU's own."""
        self.streams = streams or cpu_streams()
        self._reply = reply

    @property
    def free_bytes(self) -> int:
        return 0

    def name(self, start: Start) -> str:
        return device_name(start.threads)

    def numerics(self, start: Start) -> str:
        return "row-exact" if start.kernels == "compiled" else start.dtype

    def load(self, start: Start) -> Weights:
        self._model = self._load(start)
        return self._model

    def make_runner(
        self,
        start: Start,
        num_pages: list[int],
        ring: mmap.mmap | bytearray,
        host_pool: mmap.mmap | bytearray | None,
    ) -> Made:
        dtype = dtype_of(start)
        pools = [
            KvPool(shape, pages, start.page_tokens, start.max_slots, start.max_context_tokens, dtype)
            for shape, pages in zip(start.groups, num_pages, strict=True)
        ]
        host: list[Copier] = []
        for area in host_areas(start, host_pool, pools):
            assert host_pool is not None
            bring, back_up = self._model.copy_pages, self._model.back_up_pages
            host.append(HostPages(host_pool, area.slot_bytes, dtype, bring, back_up, area))
        sampler = Sampler(start.max_slots, start.ring.vocab, self._choose(start))
        runner = StepRunner(self._model, pools, sampler, host, self.streams)
        return Made(pools, runner, SharedMemory(host_pool) if host and isinstance(host_pool, mmap.mmap) else None)

    def _choose(self, start: Start) -> Choose:
        if start.kernels == "torch":
            return choose
        from headrace.ops.simd.draws import Chooser

        return Chooser(start.ring.vocab)

    def _load(self, start: Start) -> Model:
        dtype = dtype_of(start)
        if start.quantization not in QUANTIZATIONS or (start.quantization != "none" and start.kernels != "compiled"):
            raise CannotServe(
                f"--quantization {start.quantization} is not supported with --cpu-kernels {start.kernels}: use none"
            )
        progress, quantized = weights_progress(self._reply), start.quantization == "q8"
        if start.kernels == "torch":
            prepare_cpu(start.threads)
            return load_model(start.model_path, dtype, start.max_context_tokens, progress, start.kernel_cache)
        # torch only penalizes and reports: its threads would wait by spinning, on the cores of the kernels' threads.
        prepare_cpu(1)
        self._compile(start)
        threads = start.threads
        model = load_compiled(start.model_path, dtype, quantized, start.max_context_tokens, threads, progress)
        if start.pinned:
            model.pin(sorted(os.sched_getaffinity(0)))
        return model

    def _compile(self, start: Start) -> None:
        try:
            from headrace.ops.simd.compiler import prepare
        except ImportError as problem:
            raise CannotServe(
                f"the compiled kernels need numba, which can't be imported ({problem}). Install it, or give "
                "--cpu-kernels torch"
            ) from problem
        from headrace.ops.simd.target import DOT

        if start.dot not in ("", DOT):
            raise CannotServe(
                f"this CPU should multiply bfloat16 by {start.dot}, but the kernels do it by {DOT}: their KV would be"
                " taken for another's. Unset NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, or give --cpu-kernels torch"
            )
        kv: Final = "float32" if start.dtype == "float32" else "bfloat16"
        prepare(
            "q8" if start.quantization == "q8" else kv,
            kv,
            start.kernel_cache,
            self._tell_compiling,
        )

    def _tell_compiling(self, done: int, total: int) -> None:
        """A line for each tenth. Of the 10 to 20 s, once, some come after the last: the program that calls them."""
        if done == total:
            self._reply(Progress(f"compiling kernels for this CPU, once: all {total}, now the whole of them", 0, 0))
        elif done * 10 // total > (done - 1) * 10 // total:
            self._reply(Progress(f"compiling kernels for this CPU, once: {done} of {total}", done, total))

"""The compiled program of a decoder, with its tables and threads.

in     addresses and sizes, written into `step`; jobs
out    a job's effects in the memory that the tables name
state  the tables; helper threads, which sleep between jobs
owner  the thread that made it: the worker's main thread
ready  when `run` returns
end    `stop` ends the helper threads
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np

from headrace.ops.simd import decoder
from headrace.ops.simd.compiler import WITNESSES, Elements
from headrace.ops.simd.copies import Pages
from headrace.ops.simd.tables import COPY, STOP, Constant, LayerField, StepField
from headrace.ops.simd.team import begin_job, new_cells


class Program:
    """A decoder for weights of `elements` and KV of `kv`."""

    def __init__(self, elements: Elements, kv: Elements, layers: int, threads: int) -> None:
        self._witnesses = WITNESSES[elements], WITNESSES[kv]
        self._cells = new_cells(threads)
        self.step = np.zeros(len(StepField), np.int64)
        self.layers = np.zeros((layers, len(LayerField)), np.int64)
        self.constants = np.zeros(len(Constant), np.float64)
        self.step[StepField.CELLS] = self._cells.ctypes.data
        self.step[StepField.THREADS] = threads
        self._helpers = [
            threading.Thread(target=self._execute, args=(thread,), name=f"kernels-{thread}", daemon=True)
            for thread in range(1, threads)
        ]
        for helper in self._helpers:
            helper.start()

    @property
    def threads(self) -> int:
        return 1 + len(self._helpers)

    def pin(self, cores: Sequence[int]) -> None:
        """Give each thread, the calling one too, a core of its own, where there are just as many. Of more the kernel
        knows better which are free.

        A helper that is woken begins on its waker's core, or finds a server's loop on its own, and may wait there for
        the kernel's next look at its queues, 4 ms: with two threads on two cores a token over HTTP took 11.2 ms, and
        takes 9.9.
        """
        if self.threads > 1 and len(cores) == self.threads:
            for thread, core in zip((0, *(helper.native_id for helper in self._helpers)), cores):
                assert thread is not None
                os.sched_setaffinity(thread, {core})

    def run(self, job: int) -> None:
        """Run a job on all threads."""
        self.step[StepField.JOB] = job
        self._execute(0)

    def run_layers(self, job: int, first: int, end: int) -> None:
        """The same for the parts of a job that go from layer `first` to the one before `end`."""
        self.step[StepField.FIRST_LAYER], self.step[StepField.END_LAYER] = first, end
        self.run(job)

    def copy(self, pages: int, layers: int, size_bytes: int, to: Pages, source: Pages, run_bytes: int) -> None:
        """Copy `size_bytes` in each layer of so many pages, on all threads."""
        numbers = pages, layers, size_bytes, run_bytes, *to, *source
        self.step[StepField.COPY_PAGES : StepField.FROM_LAYER_BYTES + 1] = numbers
        self.run(COPY)

    def stop(self) -> None:
        """End the helper threads; no job can be run afterwards."""
        self.step[StepField.JOB] = STOP
        begin_job(self._cells.ctypes.data, self.threads)
        for helper in self._helpers:
            helper.join()

    def _execute(self, thread: int) -> None:
        decoder.run(*self._witnesses, self.step, self.layers, self.constants, thread)

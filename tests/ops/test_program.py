"""The compiled program's threads, and the memory of its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from headrace.ops.simd.compiler import prepare
from headrace.ops.simd.program import Program
from headrace.ops.simd.tables import ATTEND, MLP
from headrace.ops.simd.team import ARRIVALS
from headrace.ops.zeroed_memory import KeptTensors
from headrace.server.models import cache_folder

THREADS = 2


@pytest.fixture
def cores() -> Iterator[list[int]]:
    """That this process may use; as before afterwards."""
    before = os.sched_getaffinity(0)
    if len(before) < THREADS:
        pytest.skip("one core has no room for two threads")
    yield sorted(before)
    os.sched_setaffinity(0, before)


def new_program() -> Program:
    prepare("float32", "float32", str(cache_folder(os.environ) / "kernels"), lambda done, total: None)
    return Program("float32", "float32", 1, THREADS)


def where_threads_may_run(given: list[int]) -> list[set[int]]:
    """The caller's and the helper's cores, when a program was offered the given ones."""
    program = new_program()
    try:
        program.pin(given)
        ids = (0, *(helper.native_id for helper in program._helpers))
        return [os.sched_getaffinity(number) for number in ids if number is not None]
    finally:
        program.stop()


def test_threads_get_a_core_each_where_there_are_just_as_many(cores: list[int]) -> None:
    assert where_threads_may_run(cores[:THREADS]) == [{core} for core in cores[:THREADS]]


@pytest.mark.parametrize("count", [1, THREADS + 1])
def test_threads_stay_where_they_may_be_if_there_are_fewer_cores_or_more(cores: list[int], count: int) -> None:
    given = [cores[at % len(cores)] for at in range(count)]
    assert where_threads_may_run(given) == [set(cores)] * THREADS


def test_a_job_of_no_layer_ends_when_every_thread_has_seen_it() -> None:
    program = new_program()
    try:
        for jobs in (1, 2):
            program.run_layers(ATTEND | MLP, 1, 1)
            arrivals = program._cells[ARRIVALS // program._cells.itemsize]
            assert arrivals == jobs * THREADS, "the next job's tables are written while a thread looks at this one's"
    finally:
        program.stop()


def test_kept_tensors_are_copies_that_leave_each_other_alone() -> None:
    memory, random = KeptTensors(), torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=random) for size in ((3,), (1000, 7), (5000, 4000), (2, 1))]
    kept = [memory.keep(tensor) for tensor in given]
    expected = [tensor.clone() for tensor in given]
    for tensor in given:
        tensor.zero_()
    assert all(torch.equal(*pair) for pair in zip(kept, expected))
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in kept)

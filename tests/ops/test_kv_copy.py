"""Pages go to the host and come back, layer by layer, bit by bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ops.driver import Driver, Feed
from ops.slot_inits import SlotInit
from ops.small_llama import SmallLlama

from headrace.ops.kv_copy import CopyPages, HostPages, PageLoad, copy_pages, copy_pages_by
from headrace.ops.kv_pool import KvPool
from headrace.ops.simd.compiler import prepare
from headrace.ops.step_kv import StepKv
from headrace.ops.wire import GroupShape, StepFailed
from headrace.server.models import cache_folder

SHAPE = GroupShape("full", 0, [0, 1, 2], 2, 8)
PAGE_VALUES = 3 * 2 * 2 * 16 * 8
SLOT_BYTES = 12288
DTYPES = [torch.float32, torch.bfloat16]


def pool_of(pages: int, dtype: torch.dtype) -> KvPool:
    """Every value is different."""
    pool = KvPool(SHAPE, pages, 16, 2, 64, dtype)
    pool.pages.copy_(torch.randn(pool.pages.shape, generator=torch.Generator().manual_seed(pages)))
    return pool


def bits(pages: torch.Tensor) -> bytes:
    return pages.contiguous().view(torch.uint8).numpy().tobytes()


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_on_the_host_is_one_blob_of_its_layers(dtype: torch.dtype) -> None:
    pool = pool_of(5, dtype)
    buffer = bytearray(4 * SLOT_BYTES)
    HostPages(buffer, SLOT_BYTES, dtype).back_up(pool, [4, 1], [0, 2])()
    for device, host in ((4, 0), (1, 2)):
        blob = buffer[host * SLOT_BYTES :][: PAGE_VALUES * dtype.itemsize]
        assert bytes(blob) == bits(pool.pages[:, device])
    assert not any(buffer[SLOT_BYTES : 2 * SLOT_BYTES])


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_come_back_as_they_went(dtype: torch.dtype) -> None:
    pool = pool_of(6, dtype)
    before = pool.pages.clone()
    host = HostPages(bytearray(3 * SLOT_BYTES), SLOT_BYTES, dtype)
    host.back_up(pool, [0, 5, 3], [2, 0, 1])()
    load = PageLoad(pool, host, i32(1, 2, 0), i32(1, 2, 4))
    for layer in range(3):
        load.bring(layer)
    assert bits(pool.pages[:, [1, 2, 4]]) == bits(before[:, [3, 0, 5]])
    assert bits(pool.pages[:, [0, 3, 5]]) == bits(before[:, [0, 3, 5]])


@pytest.fixture(scope="module", params=[(1, sys.maxsize), (3, sys.maxsize), (1, 1000)])
def compiled(request: pytest.FixtureRequest) -> Iterator[CopyPages]:
    """By the threads of a program, which may let others have their cores."""
    prepare("float32", "float32", str(cache_folder(os.environ) / "kernels"), lambda done, total: None)
    from headrace.ops.simd.program import Program

    threads, run_bytes = request.param
    program = Program("float32", "float32", 1, threads)
    yield copy_pages_by(program, run_bytes)
    program.stop()


@st.composite
def copies(draw: st.DrawFn) -> tuple[torch.Tensor, np.ndarray, torch.Tensor, np.ndarray]:
    """Two pools, each with its pages or its layers side by side, and at any address; and pages to copy."""
    layers, dtype = draw(st.integers(1, 3)), draw(st.sampled_from([*DTYPES, torch.uint8]))
    elements = draw(st.one_of(st.integers(1, 70), st.sampled_from([256, 1024, 5000])))

    def pool(count: int) -> torch.Tensor:
        shape = draw(st.permutations([count, layers]))
        gap = draw(st.integers(0, 3))
        values = torch.randint(1, 100, (shape[0] * (shape[1] * elements + gap) + 64,), dtype=torch.uint8).to(dtype)
        rows = values[draw(st.integers(0, 20)) :][: shape[0] * (shape[1] * elements + gap)].view(shape[0], -1)
        pages = rows[:, : shape[1] * elements].view(shape[0], shape[1], elements)
        return pages if shape == [count, layers] else pages.transpose(0, 1)

    sizes = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    to, source = (pool(size) for size in sizes)
    to_pages = np.array(draw(st.lists(st.integers(0, sizes[0] - 1), unique=True)), np.int32)
    source_pages = np.array(draw(st.lists(st.integers(0, sizes[1] - 1), min_size=9, max_size=9)), np.int32)
    return to, to_pages, source, source_pages[: len(to_pages)].copy()


@given(copies())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_compiled_copies_are_the_references(
    compiled: CopyPages, given: tuple[torch.Tensor, np.ndarray, torch.Tensor, np.ndarray]
) -> None:
    to, to_pages, source, source_pages = given
    expected, around = to.clone(), source.clone()
    copy_pages(expected, to_pages, source, source_pages)
    compiled(to, to_pages, source, source_pages)
    assert torch.equal(to, expected), "and nothing else was written"
    assert torch.equal(source, around)


def test_bringing_a_layer_touches_no_other() -> None:
    pool = pool_of(4, torch.float32)
    host = HostPages(bytearray(SLOT_BYTES), SLOT_BYTES, torch.float32)
    host.back_up(pool, [3], [0])()
    before = pool.pages.clone()
    PageLoad(pool, host, i32(0), i32(1)).bring(1)
    assert bits(pool.pages[1, 1]) == bits(before[1, 3])
    assert bits(pool.pages[[0, 2]]) == bits(before[[0, 2]])


@pytest.mark.parametrize(("device", "host"), [(9, 0), (-1, 0), (0, 9), (0, -1)])
def test_a_page_outside_its_pool_is_an_error(device: int, host: int) -> None:
    pool = pool_of(4, torch.float32)
    pages = HostPages(bytearray(2 * SLOT_BYTES), SLOT_BYTES, torch.float32)
    with pytest.raises(IndexError):
        pages.back_up(pool, [device], [host])
    with pytest.raises(IndexError):
        PageLoad(pool, pages, i32(host), i32(device)).bring(0)


@pytest.mark.parametrize(("kernels", "threads"), [("torch", 1), ("compiled", 1), ("compiled", 2)])
def test_a_request_goes_on_from_pages_that_were_on_the_host(
    small_model: Path, small_llama: SmallLlama, kernels: str, threads: int
) -> None:
    prompt = np.random.default_rng(1).integers(0, 131, 50).tolist()
    best = small_llama.logits(prompt)[-1].argmax()
    host = bytearray(8 * 16384)
    driver = Driver(small_model, host_pool=host, host_slot_bytes=16384, num_pages=256, kernels=kernels, threads=threads)
    driver.begin(SlotInit(0, prompt))
    driver.run(Feed(0, prompt))
    pages = list(driver.slots[0].pages[:3])
    driver.back_up(pages, [5, 0, 7])
    for page in range(driver.pool.num_pages):
        driver.fill(page, 7.0)
    # Several times: of several threads each has to be told of each layer's job.
    for _ in range(20):
        driver.begin(SlotInit(1, prompt))
        loaded = list(driver.give_pages(1, 48))
        driver.slots[1].length = 48
        step = driver.launch([Feed(1, prompt[48:])], loads=list(zip([5, 0, 7], loaded)))
        assert driver.drawn(step)[1] == best
    if kernels == "compiled":
        driver.model.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_each_layer_is_loaded_when_it_is_about_to_compute(small_model: Path, kernels: str) -> None:
    driver = Driver(small_model, host_pool=bytearray(16384), host_slot_bytes=16384, kernels=kernels)
    driver.begin(SlotInit(0))
    driver.begin(SlotInit(1))
    driver.run(Feed(0, list(range(16)), sample=False))
    driver.back_up(driver.slots[0].pages[:1], [0])
    loaded = driver.give_pages(1, 16)[0]
    driver.slots[1].length = 16
    driver.fill(loaded, 7.0)
    seen = []

    def watch(layer: int) -> None:
        seen.append([layer, *(bool((driver.pool.pages[index, loaded] == 7).all()) for index in range(2))])

    model = driver.model
    forward = model.forward

    def watched(ids: NDArray[np.int64], kv: StepKv, keep: NDArray[np.int64]) -> torch.Tensor:
        bring = kv.bring

        def watched_bring(layer: int) -> tuple[KvPool, int]:
            watch(layer)
            place = bring(layer)
            watch(layer)
            return place

        kv.bring = watched_bring  # type: ignore[method-assign]
        return forward(ids, kv, keep)

    model.forward = watched  # type: ignore[method-assign]
    driver.run(Feed(1, [3]), loads=[(0, loaded)])
    # Layer, and whether the old bytes are still in layer 0 and 1: before and after each layer's load.
    assert seen == [[0, True, True], [0, False, True], [1, False, True], [1, False, False]]


def test_a_batch_of_loads_alone_loads_all_layers(small_model: Path) -> None:
    driver = Driver(small_model, host_pool=bytearray(16384), host_slot_bytes=16384)
    driver.fill(3, 5.0)
    driver.back_up([3], [0])
    driver.launch([], loads=[(0, 9)])
    driver.results(1)
    assert (driver.pool.pages[:, 9] == 5).all()


def test_loads_without_a_host_pool_fail_the_step(small_model: Path) -> None:
    driver = Driver(small_model)
    driver.launch([], loads=[(0, 9)])
    assert isinstance(driver.replies[-1], StepFailed)
    assert "has no host pool" in driver.replies[-1].message

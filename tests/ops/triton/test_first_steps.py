"""Before the first request every kernel has been launched that a request or a tier could need, as it will need it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ops.driver import Driver, Feed, future, read_config, window_groups
from ops.slot_inits import SlotInit
from ops.small_llama import SmallLlama
from ops.stream_server import StreamServer
from ops.triton.launches import noted_launches

from headrace.ops.cuda.first_steps import run_first_steps
from headrace.ops.streams import Streams, in_order_streams
from headrace.ops.wire import HostArea

KERNELS = Path(__file__).parents[3] / "ops" / "triton"
ELSEWHERE = {"_norm_heads"}
"""Launched for other models than the small Llama."""
HOST_SLOT_BYTES = 16384


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of extend attention, so that short contexts have what only long ones have else."""
    monkeypatch.setattr("headrace.ops.triton.extend_attention._LEAST_SPAN", 64)


def capturing_streams() -> Streams:
    """Of a CPU, but work is done when it is captured, as a card's is."""

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work

    return in_order_streams()._replace(capture=capture)


class Unwatched:
    """A device of which nobody asks what it does."""

    def __init__(self) -> None:
        self.streams = capturing_streams()

    def host_uses(self, name: str, reads: object = (), writes: object = ()) -> None:
        pass


def started(model: Path, host: bytearray, slots: int, windows: bool = False) -> Driver:
    """A worker that has captured its graphs and run its first steps. `windows`: its layers with a window are a group of
    their own."""
    start: dict[str, Any] = {"kernels": "triton", "host_pool": host, "host_slot_bytes": HOST_SLOT_BYTES}
    if windows:
        area = HostArea(2 * HOST_SLOT_BYTES, HOST_SLOT_BYTES, 2)
        start |= {"groups": window_groups(read_config(model)), "window_areas": [area]}
    driver = Driver(model, slots=slots, streams=capturing_streams(), **start)
    with torch.inference_mode():
        run_first_steps(driver.worker._runner, driver.worker._pools, driver.ring, copies=True)
    return driver


def launched_anywhere() -> set[str]:
    text = "\n".join(file.read_text() for file in KERNELS.glob("*.py"))
    return set(re.findall(r"^ +(_\w+)\[\(", text, re.M))


@pytest.mark.parametrize("slots", [1, 4])
def test_the_first_steps_launch_every_kernel_and_leave_nothing_behind(
    small_model: Path, small_llama: SmallLlama, slots: int
) -> None:
    host = bytearray(4 * HOST_SLOT_BYTES)
    with noted_launches(runs=True) as launched:
        driver = started(small_model, host, slots)
    assert {variant.kernel for variant in launched} == launched_anywhere() - ELSEWHERE

    assert (driver.pool.table == -1).all() and not np.frombuffer(host, np.uint8).any()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    driver.begin(SlotInit(0, prompt))
    assert driver.run(Feed(0, prompt)) == {0: small_llama.greedy(prompt, 1)[0]}


def serve_everything(model: Path, windows: bool) -> None:
    """Requests with whatever can be asked for, alone and beside each other, and copies of all sizes."""
    for seed in range(8):
        StreamServer(model, seed, Unwatched(), kernels="triton", windows=windows).run(12)
    groups = {"groups": window_groups(read_config(model))} if windows else {}
    driver = Driver(model, slots=4, kernels="triton", streams=capturing_streams(), **groups)  # type: ignore[arg-type]
    everything = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition": 1.1, "presence": 0.2}
    for logprobs in (-1, 0, 5):
        driver.begin(SlotInit(0, [1, 2], [3], {4: 1.0}, [5], min_tokens=3, logprobs=logprobs, **everything))  # type: ignore[arg-type]
        driver.begin(SlotInit(1))
        driver.launch([Feed(0, range(90), want={3: 7, 80: 1}), Feed(1, [9])], masks={0: [1, 2]})
        driver.launch([Feed(0, [future(0)]), Feed(1, range(33))], masks={1: [8], 0: [0]})
        driver.launch([Feed(0, [future(0)], want={0: 3}), Feed(1, [future(1)])])
        driver.launch([Feed(0, [future(0)]), Feed(1, [future(1)], sample=False)])


@pytest.mark.parametrize("windows", [False, True])
def test_no_request_and_no_copy_waits_for_a_compiler(small_model: Path, windowed_model: Path, windows: bool) -> None:
    model = windowed_model if windows else small_model
    with noted_launches(runs=False) as before_requests:
        # As many slots as the requests' server has: all its batches are captured.
        started(model, bytearray(4 * HOST_SLOT_BYTES), slots=4, windows=windows)

    with noted_launches(runs=False) as launched:
        serve_everything(model, windows)

    assert {variant.kernel for variant in launched} == launched_anywhere() - (set() if windows else ELSEWHERE)
    late = launched - before_requests
    assert not late, "\n".join(map(str, late))

"""Before the first request every kernel has been launched that a request could need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ops.driver import Driver, Feed
from ops.slot_inits import SlotInit
from ops.small_llama import SmallLlama
from triton.runtime.interpreter import GridExecutor

from headrace.ops.cuda.first_steps import run_first_steps

KERNELS = Path(__file__).parents[3] / "ops" / "triton"
ELSEWHERE = {"_norm_heads"}
"""Launched for other models."""


def launched_anywhere() -> set[str]:
    text = "\n".join(file.read_text() for file in KERNELS.glob("*.py"))
    return set(re.findall(r"^ +(_\w+)\[\(", text, re.M))


@pytest.mark.parametrize("slots", [1, 4])
def test_the_first_steps_launch_every_kernel_and_leave_nothing_behind(
    small_model: Path, small_llama: SmallLlama, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = bytearray(4 * 16384)
    driver = Driver(small_model, slots=slots, host_pool=host, host_slot_bytes=16384, kernels="triton")
    launched = set()
    launch = GridExecutor.__call__

    def noted(executor: Any, *arguments: Any, **named: Any) -> object:
        launched.add(executor.fn.__name__)
        return launch(executor, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    monkeypatch.setattr("headrace.ops.triton.extend_attention._LEAST_SPAN", 64)
    with torch.inference_mode():
        run_first_steps(driver.worker._runner, driver.worker._pools, driver.ring, loads=True)
    # One row has no decode beside it; graphs launch that, when they are captured.
    decode = set() if slots > 1 else {"_attend_spans", "_merge_spans"}
    assert launched == launched_anywhere() - ELSEWHERE - decode

    assert (driver.pool.table == -1).all() and not np.frombuffer(host, np.uint8).any()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    driver.begin(SlotInit(0, prompt))
    assert driver.run(Feed(0, prompt)) == {0: small_llama.greedy(prompt, 1)[0]}

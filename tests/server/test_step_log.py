"""`--record-steps`: a line a step, which the simulation's calibration reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.sched.collect import LaunchedStep
from headrace.server.config import BadSetting
from headrace.server.sim.step_costs import read_steps
from headrace.server.step_log import RecordedStep, StepLog


def launched(rows: int) -> LaunchedStep:
    none = np.zeros(0, np.int64)
    return LaunchedStep(
        step=0,
        ring_slot=0,
        slots=none,
        generations=none,
        wants=[],
        loading=[],
        decode_rows=rows,
        kv_tokens=rows * 100,
        prefill_tokens=7,
        prefill_pairs=70,
        read_tokens=rows * 90,
        launched_s=0.0,
    )


def test_what_is_recorded_is_what_a_calibration_reads(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.record(launched(1), 12.5, -1.0)
    log.record(launched(2), 13.25, 14.0)
    log.close()
    assert list(read_steps(tmp_path / "steps.jsonl")) == [
        RecordedStep(1, 100, 7, 70, 12.5, -1.0),
        RecordedStep(2, 200, 7, 70, 13.25, 14.0),
    ]


def test_a_file_that_cannot_be_written_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"--record-steps .* can't be written: No such file or directory"):
        StepLog(tmp_path / "nowhere" / "steps.jsonl")

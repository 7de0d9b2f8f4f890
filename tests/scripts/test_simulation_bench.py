"""The bench that holds the simulation against a real server: the parts that need no server."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.simulation import scaled_trace, speed_for

from headrace.server.sim.step_costs import Calibration, prefill_work
from headrace.server.sim.workload import read_trace
from headrace.server.step_log import RecordedStep

TRACE = Path(__file__).parent.parent / "data" / "conversation_cut.jsonl"


def test_a_scaled_trace_shares_what_the_trace_shares(tmp_path: Path) -> None:
    scaled_trace(TRACE, tmp_path / "small.jsonl", 40, 32)
    whole, small = read_trace(TRACE), read_trace(tmp_path / "small.jsonl", block_tokens=16)
    assert len(small.requests) == 40
    assert small.prompt_tokens == pytest.approx(whole.prompt_tokens / 32, rel=0.01)
    assert small.shared_tokens() / small.prompt_tokens == pytest.approx(
        whole.shared_tokens() / whole.prompt_tokens, rel=0.05
    )


def test_the_trace_is_timed_so_that_computing_it_takes_the_asked_share_of_it() -> None:
    steps = [RecordedStep(n % 4 + 1, 100, 0, 0, 1.0) for n in range(20)]
    steps += [RecordedStep(0, 0, 10 * n, 100 * n * n, 10.0 * n) for n in range(1, 25)]
    costs, workload = Calibration(steps), read_trace(TRACE)
    speed = speed_for(workload, costs, 0.5)
    computed = workload.prompt_tokens - workload.shared_tokens()
    assert costs.step_ms(prefill_work(1000, 0)) == pytest.approx(1000.0, rel=0.01)
    lasts_s = workload.requests[-1].arrival_ns / 1e9 / speed
    assert lasts_s == pytest.approx(2 * computed / 1e3, rel=0.1)

"""What a simulated step costs: the roofline against arithmetic by hand, a calibration against what made it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.ops.wire import BatchRing, Counts, RingGeometry, batch_bytes
from headrace.server.config import BadSetting
from headrace.server.sim.shapes import DEVICES, MODELS, Efficiency
from headrace.server.sim.step_costs import (
    Calibration,
    Roofline,
    StepWork,
    decode_work,
    prefill_work,
    read_calibration,
    warm_up_costs,
    work_of,
)
from headrace.server.step_log import RecordedStep

PERFECT = Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
LLAMA, H200 = MODELS["llama-3.1-8b"], DEVICES["h200"]


def test_the_shape_of_llama_8b_has_its_eight_billion_parameters_and_128_kib_of_kv_a_token() -> None:
    assert LLAMA.weights_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert LLAMA.layout(16).page_bytes(0) == 16 * 32 * 2 * 8 * 128 * 2 == 2 << 20


def test_one_decode_row_takes_the_time_to_read_the_weights_and_its_context() -> None:
    # (6.98e9 + 0.525e9) parameters of 2 bytes, and 1001 tokens of 131072 bytes, at 4.8 TB/s.
    expected_ms = (15.009e9 + 0.1312e9) / 4.8e12 * 1e3
    assert Roofline(LLAMA, H200, 1, PERFECT).step_ms(decode_work(1, 1000)) == pytest.approx(expected_ms, rel=1e-3)


def test_a_long_chunk_takes_the_time_of_its_flops() -> None:
    # 8192 tokens: 2 FLOPs a parameter and token, one row of the output projection; attention of 4 x 32 layers x 4096
    # for each of 8192 x 8193 / 2 pairs.
    linear = 2 * 6.9793e9 * 8192 + 2 * 0.5253e9
    attention = 4 * 32 * 4096 * 8192 * 8193 / 2
    expected_ms = (linear + attention) / 989e12 * 1e3
    assert Roofline(LLAMA, H200, 1, PERFECT).step_ms(prefill_work(8192, 0)) == pytest.approx(expected_ms, rel=1e-3)


def test_two_devices_halve_flops_and_bytes_and_pay_for_all_reduces() -> None:
    work = prefill_work(4096, 0)
    one, two = (Roofline(LLAMA, H200, tp, PERFECT).step_ms(work) for tp in (1, 2))
    # Two all-reduces a layer of 4096 x 4096 values; with two devices each sends its half and gets the other.
    reduces_ms = 64 * 4096 * 4096 * 2 / 450e9 * 1e3
    assert two == pytest.approx(one / 2 + reduces_ms, rel=1e-6)


def test_a_batch_s_work_is_read_off_its_arrays() -> None:
    counts = Counts(2 + 30, 3, 2, 3, 0, 0, 0, 0, 0, 0)
    geometry = RingGeometry(1, batch_bytes(counts), 4, 1, 100)
    ring = BatchRing(bytearray(geometry.size_bytes), geometry)
    batch = ring.write(0, 0, counts)
    batch.row_start[:] = (0, 1, 2, 32)
    batch.row_kv_len[:] = (11, 21, 50)  # two decode rows, and positions 20 to 49 of a prompt
    assert work_of(batch) == StepWork(
        decode_rows=2,
        kv_tokens=32,
        prefill_tokens=30,
        prefill_pairs=30 * 35,
        attended=11 + 21 + sum(range(21, 51)),
        context_tokens=82,
        samples=3,
    )


def _steps() -> list[RecordedStep]:
    decode = [
        RecordedStep(n, n * 100 * k, 0, 0, 5.0 + 0.5 * n + 1e-4 * n * 100 * k) for n in range(1, 9) for k in (1, 5, 9)
    ]
    prefill = [
        RecordedStep(n, n * 100, tokens, tokens * end, 7.0 + 0.25 * n + 0.6 * tokens + 2e-5 * tokens * end)
        for n in (0, 1, 4)
        for tokens, end in ((10, 10), (100, 100), (100, 900), (500, 500), (500, 3000), (64, 1000), (200, 200))
    ]
    return decode + prefill


def test_a_calibration_finds_the_costs_that_made_its_steps() -> None:
    costs = Calibration(_steps())
    assert costs.step_ms(decode_work(16, 400)) == pytest.approx(5.0 + 8.0 + 16 * 401 * 1e-4, rel=1e-3)
    assert costs.step_ms(prefill_work(1000, 0)) == pytest.approx(7.0 + 600 + 20, rel=1e-2)


def test_a_calibration_does_not_follow_a_single_stalled_step() -> None:
    steady = Calibration(_steps()).step_ms(prefill_work(256, 0))
    stalled = Calibration([*_steps(), RecordedStep(0, 0, 100, 10_000, 5000.0)]).step_ms(prefill_work(256, 0))
    assert stalled == pytest.approx(steady, rel=0.02)


def test_no_coefficient_of_a_calibration_is_negative() -> None:
    falling = [RecordedStep(n, n * 10, 0, 0, 20.0 - n) for n in range(1, 10)] * 3
    costs = Calibration([*falling, *_steps()])
    assert min(*costs.decode, *costs.prefill) >= 0


def test_what_the_loop_adds_between_steps_is_part_of_a_calibrated_step() -> None:
    quick = [msgspec.structs.replace(step, since_last_ms=step.ms + 0.75) for step in _steps()]
    assert Calibration(quick).overhead_ms == pytest.approx(0.75)
    assert Calibration(quick).step_ms(decode_work(1, 10)) > Calibration(_steps()).step_ms(decode_work(1, 10)) + 0.7


def test_a_calibration_with_too_few_steps_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(msgspec.json.encode(_steps()[0]) + b"\n")
    with pytest.raises(BadSetting, match=r"it has 1 decode steps, and .* are needed"):
        read_calibration(path)


def test_a_malformed_line_of_a_calibration_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(msgspec.json.encode(_steps()[0]) + b'\n{"decode_rows": "many"}\n')
    with pytest.raises(BadSetting, match="line 2"):
        read_calibration(path)


def test_the_engine_is_told_costs_from_which_it_can_plan() -> None:
    costs = warm_up_costs(Roofline(LLAMA, H200), 256, 8192)
    near = [cost.decode_rows for cost in costs if not cost.prefill_tokens and cost.context_tokens == 192]
    assert near == [1, 8, 32]
    assert {cost.context_tokens for cost in costs if cost.decode_rows == 1} == {192, 1792}
    assert max(cost.context_tokens for cost in costs) > max(cost.prefill_tokens for cost in costs)

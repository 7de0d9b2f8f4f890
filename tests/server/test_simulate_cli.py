"""`headrace simulate`: its table, its files, and what it says to a wrong command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.server import cli
from headrace.server.config import flag_of
from headrace.server.sim.scenario import SIM_RULES
from headrace.server.sim.shapes import DEVICES, MODELS
from headrace.server.simulate_cli import MANUAL

TRACE = Path(__file__).parent.parent / "data" / "conversation_cut.jsonl"
QUICK = ["simulate", "--trace", str(TRACE), "--limit", "6", "--page-size", "64", "--hicache-size", "8"]
QUICK += ["--disk-cache-size", "40GB", "--max-total-tokens", "16384"]


def test_every_field_has_a_rule_and_a_place_in_the_manual() -> None:
    assert sorted(flag.field for group in MANUAL.values() for flag in group) == sorted(SIM_RULES)


def test_a_run_is_a_table_of_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(QUICK) == 0
    shown = capsys.readouterr().out
    for name in (
        "TTFT p50 / p90 / p99 ms",
        "hit ratio, storage",
        "hit ratio, no bounds",
        "retractions",
        "virtual time",
    ):
        assert name in shown
    assert "6 of 6" in shown and "TTFT ≤ 5000 ms, mean ITL ≤ 100 ms" in shown


def test_compared_values_are_columns_and_two_flags_are_combined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "runs.json"
    compare = ["--compare", "prefetch-policy=best_effort,adaptive", "--compare", "device=h200,a100"]
    assert cli.main([*QUICK, *compare, "--json", str(json_file)]) == 0
    header = capsys.readouterr().out
    names = ["best_effort, h200", "best_effort, a100", "adaptive, h200", "adaptive, a100"]
    assert all(name in header for name in names)
    rows = json.loads(json_file.read_text())
    assert [(row["flags"]["prefetch_policy"], row["flags"]["device"]) for row in rows] == [
        tuple(name.split(", ")) for name in names
    ]
    assert all(row["figures"]["finished"] == 6 for row in rows)
    assert rows[0]["figures"]["ttft_ms"]["p50"] < rows[1]["figures"]["ttft_ms"]["p50"]


@pytest.mark.parametrize(("field", "names"), [("model_shape", MODELS), ("device", DEVICES)])
def test_the_manual_names_all_that_can_be_chosen(field: str, names: Mapping[str, object]) -> None:
    text = next(flag.help for flags in MANUAL.values() for flag in flags if flag.field == field)
    assert all(name in text for name in names)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate"], "Give --trace FILE"),
        ([*QUICK, "--device", "abacus"], "--device abacus: give h200, h100, a100, l4 or cpu."),
        ([*QUICK, "--model-shape", "gpt-7"], "--model-shape gpt-7: give llama-3.1-8b, "),
        ([*QUICK, "--speed", "fast"], "--speed fast: give a factor from 0.001 to 1000."),
        ([*QUICK, "--compare", "colour=red"], "--compare colour=red: give FLAG=VALUE,VALUE…"),
        ([*QUICK, "--compare", "device"], "--compare device: give FLAG=VALUE"),
        ([*QUICK, "--frobnicate"], "What is '--frobnicate'?"),
        (["simulate", "--trace", str(TRACE), "--disk-cache-size", "1TB"], "give --hicache-size GB"),
        (["simulate", "--trace", str(TRACE), "--model-shape", "llama-3.1-70b"], "give a larger --tp-size"),
        (["simulate", "--trace", "/nowhere.jsonl"], "--trace /nowhere.jsonl can't be read"),
        ([*QUICK, "--json", "/nowhere/runs.json"], "/nowhere is no directory"),
        ([*QUICK, "--json", "/"], "/ can't be written: it is a directory."),
        ([*QUICK, "--disk-cache-size", "99999999TB"], "--disk-cache-size 99999999TB: give a size below 1000TB"),
        ([*QUICK, "--calibration", "/nowhere.jsonl"], "--calibration /nowhere.jsonl can't be read"),
    ],
)
def test_a_wrong_command_line_is_answered_with_a_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == cli.USAGE_ERROR
    assert says in capsys.readouterr().err


def test_runs_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "runs.png"
    assert cli.main([*QUICK, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_flag_is_in_the_manual(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["simulate", "--help"])
    manual = " ".join(capsys.readouterr().out.split())
    assert [flag_of(field) for field in SIM_RULES if f" {flag_of(field)} " not in manual] == []

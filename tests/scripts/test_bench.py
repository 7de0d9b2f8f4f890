"""The benches of scheduler and index run and say what they measured; how fast it was is no test's business."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench import index, scheduler

from headrace.kvcache.pool import EVICTED_SHARE

SMALL = ["--pages", "500", "--path-nodes", "4", "--node-pages", "2", "--siblings", "1", "--repeats", "2"]


def test_the_index_bench_measures_every_operation_of_every_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert index.main([*SMALL, "--per-turn", "3", "--json", str(report)]) == 0
    side = json.loads(report.read_text())["sides"]["headrace"]
    assert 500 * (1 - EVICTED_SHARE) <= side["facts"]["pages"] <= 500, "the index is full"
    assert [len(turn) for turn in side["turns"]] == [3, 3]
    assert all(sorted(sample) == sorted(index.OPERATIONS) for turn in side["turns"] for sample in turn)
    assert "a prompt of 128 tokens over 4 nodes" in " ".join(capsys.readouterr().out.split())


def test_an_index_too_small_for_its_turns_is_refused_with_the_size_that_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        index.parsed([*SMALL, "--per-turn", "40"])
    needed = capsys.readouterr().err.split("give ")[1].split(" or more")[0]
    assert index.parsed([*SMALL, "--per-turn", "40", "--pages", needed]).pages == int(needed)


def test_a_side_that_ends_is_named_with_what_it_said() -> None:
    nothing = index.Contender("a peer", "bench.no_such_module", Path(sys.executable), {})
    with (
        pytest.raises(SystemExit, match=r"a peer ended:\n(.*\n)*.*no_such_module"),
        index.running([nothing], [1, 1, 1, 1]) as processes,
    ):
        processes[0].answer(60.0)


def test_the_scheduler_bench_measures_both_kinds_of_step(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert scheduler.main(["--requests", "8", "--steps", "12", "--waiting", "4", "--json", str(report)]) == 0
    steps = json.loads(report.read_text())["steps"]
    assert sorted(steps) == ["a tenth ends and joins", "plain decode"]
    assert all(figures["both_us"] > 0 for figures in steps.values())

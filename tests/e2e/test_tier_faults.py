"""Processes are killed and stopped under load: right answers, nothing lost, nothing left behind (scripts/faults.py)."""

from __future__ import annotations

from pathlib import Path

import faults
import pytest


async def test_answers_stay_right_and_pages_stay_when_processes_are_killed_and_stopped(
    tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "MODEL", str(model_file))
    outcomes: list[faults.Outcome] = []
    schedule: list[faults.Fault] = ["kill server", "kill agent", "stop agent long"]
    await faults.run_rounds(schedule, 3, tmp_path, lambda number, outcome: outcomes.append(outcome))
    assert [outcome.fault for outcome in outcomes] == schedule
    assert outcomes[0].cut_off > 0, "the server was killed under load"
    assert outcomes[-1].pages > outcomes[0].pages > 0
    assert sum(outcome.storage for outcome in outcomes) > 0
    assert sum(outcome.acknowledged for outcome in outcomes) > 0
    assert not sum(outcome.lost for outcome in outcomes)

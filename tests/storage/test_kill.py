"""kill -9 of the agent under load: what was acknowledged is there, and nothing is wrong."""

from __future__ import annotations

from pathlib import Path

from storage.kill_rounds import kill_rounds


def test_what_was_acknowledged_survives_kill_9_at_any_point(tmp_path: Path) -> None:
    outcome = kill_rounds(tmp_path, rounds=15, seed=1)
    assert outcome.lost == 0
    assert outcome.acknowledged > 500 and outcome.checked > 2000
    assert outcome.killed_in_flight > 15, "kills must come in the middle of work"

"""`scripts/torture.py`: what its command line answers. What it finds is held in tests/sim/test_torture_finds.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "torture.py"


def torture(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", str(SCRIPT), *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seed", "-1"], "argument --seed: '-1': give a whole number from 0 on"),
        (["--requests", "0"], "argument --requests: '0': give a whole number from 1 on"),
        (["--seed-requests", "0"], "argument --seed-requests: '0': give a whole number from 1 on"),
        (["--jobs", "0"], "argument --jobs: '0': give a whole number from 1 on"),
        (["--json", "/nowhere/table.json"], "--json /nowhere/table.json can't be written"),
        (["--json", "/"], "--json / can't be written"),
    ],
)
def test_a_wrong_number_is_answered_with_a_sentence_before_anything_runs(arguments: list[str], says: str) -> None:
    ended = torture(*arguments, "--seed-requests=3") if "--seed-requests" not in arguments else torture(*arguments)
    assert ended.returncode == 2 and says in ended.stderr and not ended.stdout


def test_seeds_of_several_processes_are_one_table(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    ended = torture("--seed", "7", "--requests", "12", "--seed-requests", "4", "--jobs", "2", "--json", str(table))
    assert ended.returncode == 0, ended.stderr
    assert "everything was given back" in ended.stdout and table.stat().st_size > 0

"""Every kernel compiles for GPUs that are not here, within their registers and shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aot_check
import pytest

ROOT = Path(__file__).parents[3]


def compiled(table: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the check says of kernels. In a process of its own: here they were made to be interpreted."""
    command = [sys.executable, "-P", str(ROOT / "scripts" / "aot_check.py"), *arguments, "--json", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(table.read_text())
    return found


def test_decode_attention_is_compiled_four_times_for_all_numbers_of_rows(tmp_path: Path) -> None:
    """With a kernel for each number, the mixed batches of a server would compile for minutes, seconds at a time."""
    found = compiled(tmp_path / "table.json", "--variant", "decode, 1 to 1024 rows", "--arch", "90")
    assert sorted(one["kernel"] for one in found) == ["_attend_spans"] * 4 + ["_merge_spans"]


def test_each_kernel_compiles_for_two_generations_without_spilling(tmp_path: Path) -> None:
    found = compiled(tmp_path / "table.json", "--short", "--arch", "80", "90")
    kernels = {one["kernel"] for one in found}
    texts = (path.read_text() for path in (ROOT / "ops" / "triton").glob("*.py"))
    launched = {line.split("[(")[0].strip() for text in texts for line in text.splitlines() if line.startswith("    _")}
    assert {name for name in launched if name.isidentifier()} <= kernels
    assert {(one["kernel"], one["arch"]) for one in found} == {(name, arch) for name in kernels for arch in (80, 90)}
    assert all(one["registers"] > 0 and one["programs_per_sm"] > 0 for one in found)


@pytest.mark.parametrize(
    ("stack", "shared", "may_spill", "problem"),
    [
        (0, 1000, "", ""),
        (8, 1000, "", "spills"),
        (8, 1000, "_kernel", ""),
        (8, 1000, "_another", "spills"),
        (0, 170_000, "_kernel", "shared memory"),
    ],
)
def test_a_spill_or_too_much_shared_memory_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, stack: int, shared: int, may_spill: str, problem: str
) -> None:
    class Metadata:
        num_warps = 4

    Metadata.shared = shared  # type: ignore[attr-defined]
    monkeypatch.setattr(aot_check, "_resource_usage", lambda cubin: {"REG": 128, "STACK": stack, "LOCAL": 0})
    variant = aot_check.Variant("any", lambda: None, short=True, may_spill=may_spill)
    described = aot_check._described(variant, "_kernel", 80, Metadata, b"", 0.0)
    assert problem in described.problem and bool(described.problem) == bool(problem)

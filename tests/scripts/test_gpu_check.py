"""The one command of a GPU machine: without a card it runs dry, and says what is missing, what failed, what hung."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from gpu import check, decode, report
from gpu.cases import Case
from gpu.kernels import compared
from gpu.report import Report
from gpu.timing import Device

from headrace.ops.runner import CopyTime, Sampled
from headrace.ops.triton import dispatch

ROOT = Path(__file__).parents[2]
BARE = """
import importlib.machinery, sys

HIDDEN = {hidden!r}
found = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name in HIDDEN else found(name, path, target)
)
sys.meta_path[:] = [finder for finder in sys.meta_path if "ditable" not in repr(finder)]
"""
"""A Python without some packages, this one among them."""
NEEDED_BY_THE_SERVER = ["headrace", "msgspec", "xxhash", "uvloop", "aiohttp", "rich", "safetensors", "numba", "jinja2"]


def gpu_check(folder: Path, *arguments: str, hidden: list[str]) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(BARE.format(hidden=hidden))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def test_a_dry_run_has_every_part_and_needs_no_package_but_torch_triton_and_numpy(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--dry", hidden=NEEDED_BY_THE_SERVER)

    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu-check.json").read_text())
    assert results["parts"] == {part.name: "done" for part in check.PARTS}
    assert done.stdout.count("msgspec is not installed") == len(check.PARTS)
    findings = results["findings"]
    assert {found["part"] for found in findings} == {part.name for part in check.PARTS}
    assert all(found["holds"] for found in findings if "holds" in found)
    assert sum("holds" in found for found in findings) > 40
    names = " ".join(found["name"] for found in findings)
    for wanted in ("greedy ids", "same bits", "too early", "windows", "came back from the host", "pages to the host"):
        assert wanted in names
    for wanted in ("overlapped", "through the pipe", "from disk"):
        assert wanted in names


def test_without_a_card_it_says_so_at_once(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, hidden=[])
    assert done.returncode == 2 and "finds no card that it can use. Without a card: gpu_check --dry" in done.stderr


def test_without_triton_it_says_so_at_once(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--dry", hidden=["triton", "torch"])
    assert done.returncode == 2
    assert "has no torch and no triton: call gpu_check with a Python that has them" in done.stderr


STUB = """
import json, os, sys
part, found = sys.argv[2], sys.argv[4]
open(found, "w").write(json.dumps([{"part": part, "name": "a first finding", "holds": part != "wrong"}]))
print("says", part)
if part == "breaks":
    os.abort()
while part == "hangs":
    os.read(0, 0)
"""


def run_stubs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str, minutes: float = 1.0
) -> tuple[int, dict[str, Any]]:
    """Parts that do as they are called."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(check, "ENTRY", tmp_path / "stub.py")
    monkeypatch.setattr(check, "PARTS", tuple(check.Part(name, 20, name != "first", "a stub") for name in names))
    monkeypatch.setattr(check, "LEAST_SECONDS", 0)
    monkeypatch.setattr(check, "_no_card", lambda: "")
    file = tmp_path / "results.json"
    status = check.main(["--json", str(file), "--minutes", str(minutes)])
    return status, json.loads(file.read_text())


def test_a_part_that_breaks_stops_no_other_and_what_it_had_found_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    status, results = run_stubs(tmp_path, monkeypatch, "first", "breaks", "last")
    assert status == 1
    assert results["parts"] == {"first": "done", "breaks": "ended with status -6", "last": "done"}
    assert [found["part"] for found in results["findings"]] == ["first", "breaks", "last"]
    said = capfd.readouterr().out
    assert "says breaks" in said and "NOT DONE: breaks: ended with status -6" in said


def test_a_part_that_hangs_is_killed_when_its_time_is_over_and_the_next_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "LEAST_SECONDS", 0.5)
    status, results = run_stubs(tmp_path, monkeypatch, "hangs", "last", minutes=1 / 60)
    assert status == 1
    assert results["parts"] == {"hangs": "stopped: not done within 1 s", "last": "not begun: no time was left"}


def test_a_check_that_fails_is_the_exit_status_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_stubs(tmp_path, monkeypatch, "first")[0] == 0
    assert run_stubs(tmp_path, monkeypatch, "wrong", "last")[0] == 1
    assert "FAILED: wrong: a first finding" in capsys.readouterr().out


def test_a_kernel_that_differs_from_its_reference_is_found() -> None:
    def call(tensors: dict[str, torch.Tensor]) -> None:
        tensors["out"][1] = 2.01 if dispatch.INTERPRETED else 2.0
        tensors["ids"][0] = 7

    tensors = {"out": torch.zeros(3), "ids": torch.zeros(2, dtype=torch.int32)}
    holds, note = compared(Case("a kernel", call, tensors, ("out", "ids")), Device(dry=True))
    assert not holds and note == "apart by 1.0e-02 at most"
    assert compared(Case("a kernel", call, tensors, ("ids",)), Device(dry=True))[0]


class At(NamedTuple):
    """An event at a time of its own."""

    ms: float

    def query(self) -> bool:
        return True

    def ms_until(self, later: At) -> float:
        return later.ms - self.ms


def step_at(start_ms: float) -> Sampled:
    """6 ms of forward, 1 ms of nothing, 2 ms of sampling."""
    spans = (At(start_ms), At(start_ms + 6)), (At(start_ms + 7), At(start_ms + 9))
    return Sampled(0, cast(Any, spans[1][1]), cast(Any, spans), CopyTime())


def test_gaps_are_all_the_time_in_which_the_card_has_nothing_of_a_step(tmp_path: Path) -> None:
    found = Report("decode", tmp_path / "findings.json")
    decode.figures(found, [step_at(start) for start in (0, 50, 60, 70, 80)], 64, 5.0, overlap=True, host_ms=0.3)
    values = {finding["name"].split(": ")[1]: finding for finding in found.findings}
    assert values["step"]["value"] == 10 and values["step"]["share"] == 0.5
    assert values["tokens"]["value"] == 6400
    assert values["gap"]["value"] == 2000
    assert values["the card at work"]["value"] == 80 and values["the card at work"]["aim"] == 0.95
    assert json.loads((tmp_path / "findings.json").read_text()) == found.findings


RESULTS = {
    "date": "2031-01-02",
    "dry": False,
    "machine": {"card": "A Card", "torch": "9.9"},
    "parts": {"kernels": "done", "decode": "stopped: not done within 3 s"},
    "findings": [
        {"part": "kernels", "name": "norm", "holds": True, "note": "apart by 1e-6"},
        {"part": "copies", "name": "pages", "value": 41.25, "unit": "GB/s", "share": 0.9, "ceiling": "it", "aim": 0.85},
    ],
}


def test_results_stand_in_the_page_in_the_place_of_those_before(tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "gpu.md"
    page.write_text(f"before\n{check.BEGIN}\nof another day\n{check.END}\nbehind\n")
    results.write_text(json.dumps(RESULTS))
    assert check.write_docs(results, page) == 0 == check.write_docs(results, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{check.END}\nbehind\n") and "another day" not in text
    assert "Measured on 2031-01-02: card: A Card · torch: 9.9." in text
    assert "Not whole: decode (stopped: not done within 3 s)" in text
    assert "| copies | pages | 41.25 GB/s | 90% of it (aim 85%) | – |" in text
    assert check.BEGIN in check.DOCS.read_text() and check.END in check.DOCS.read_text()


def test_results_of_a_dry_run_never_get_into_the_page(tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "gpu.md"
    page.write_text(f"{check.BEGIN}\n{check.END}\n")
    results.write_text(json.dumps({**RESULTS, "dry": True}))
    assert check.write_docs(results, page) == 2
    assert page.read_text() == f"{check.BEGIN}\n{check.END}\n"


def test_a_finding_that_fails_is_seen_in_its_line() -> None:
    assert report.row({"part": "a", "name": "b", "holds": False, "note": "why"}) == ("b", "FAILS", "", "why")

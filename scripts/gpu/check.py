"""Runs the parts of `gpu_check` one after the other, each in a process of its own, and gathers what they found."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpu import report
from gpu.checkout import ROOT, make_importable
from gpu.report import Finding, Report

ENTRY: Final = ROOT / "scripts" / "gpu_check"
DOCS: Final = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- gpu_check: begin -->", "<!-- gpu_check: end -->"
MINUTES: Final = 9.5


class Part(NamedTuple):
    """A module of this folder that has `run(report, options)`."""

    name: str
    seconds: int
    """After which it is killed."""
    timed: bool
    """Whether it must have the card for itself. The others run beside each other: what they wait for is compilers."""
    about: str


PARTS: Final = (
    Part("kernels", 240, False, "each kernel beside attention against its reference"),
    Part("attention", 240, False, "the kernels of attention against theirs"),
    Part("steps", 240, False, "steps that wait for nothing; ids of models against torch's"),
    Part("machine", 40, True, "the card, and what it can do at most"),
    Part("copies", 60, True, "pages between host and device"),
    Part("speed", 120, True, "kernels against what the card can do"),
    Part("decode", 150, True, "decode steps of an 8B-shaped model, with overlap and without"),
    Part("pipe", 90, True, "a worker behind its pipe: latency, and gaps between steps"),
    Part("tiers", 90, True, "KV from the host and from disk against computing it"),
)
DRY_SECONDS: Final = 3600
"""Of a part in the interpreter, on a machine that may have other things to do."""
LEAST_SECONDS: Final = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.write_docs:
        return write_docs(options.write_docs)
    if options.child:
        return _run_part(options)
    if not options.dry and (problem := _no_card()):
        print(f"{problem}. Without a card: gpu_check --dry", file=sys.stderr)
        return 2
    results = _run_all(options)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    failed = [found for found in results["findings"] if found.get("holds") is False]
    broken = {part: how for part, how in results["parts"].items() if how != "done"}
    for found in failed:
        print(f"FAILED: {found['part']}: {found['name']} {found.get('note', '')}")
    for part, how in broken.items():
        print(f"NOT DONE: {part}: {how}")
    print(f"{len(results['findings'])} findings, {len(failed)} failed; all in {options.json}")
    return 1 if failed or broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Checks and measures the CUDA path on this machine.")
    names = [part.name for part in PARTS]
    parser.add_argument("--part", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument(
        "--dry", action="store_true", help="on the CPU, interpreted, at tiny sizes: are the checks well?"
    )
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), metavar="FILE", help="where results go")
    parser.add_argument("--model", type=Path, metavar="FILE", help="the default model's GGUF, if it is at hand")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    parser.add_argument("--write-docs", type=Path, metavar="FILE", help="put the results of a run into docs/gpu.md")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser


def _no_card() -> str:
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no card that it can use"


def _run_all(options: argparse.Namespace) -> dict[str, Any]:
    """First the parts that need no quiet, together, then the others one by one."""
    deadline = time.monotonic() + (DRY_SECONDS if options.dry else options.minutes * 60)
    results: dict[str, Any] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "dry": options.dry, "machine": {}}
    results |= {"parts": {}, "findings": []}
    chosen = [part for part in PARTS if part.name in options.part]
    together = [part for part in chosen if not part.timed]
    for parts in ([together] if together else []) + [[part] for part in chosen if part.timed]:
        with tempfile.TemporaryDirectory() as folder:
            children = [_Child(part, options, Path(folder), deadline) for part in parts]
            for child in children:
                results["parts"][child.part.name] = child.ended()
                results["findings"] += child.findings
    results["machine"] = {
        found["name"]: found["note"]
        for found in results["findings"]
        if found["part"] == "machine" and "value" not in found and "holds" not in found
    }
    return results


class _Child:
    """A part's process."""

    def __init__(self, part: Part, options: argparse.Namespace, folder: Path, deadline: float) -> None:
        self.part = part
        self.findings: list[Finding] = []
        self._began = time.monotonic()
        self._ends = min(deadline, self._began + (DRY_SECONDS if options.dry else part.seconds))
        self._found, self._log = folder / f"{part.name}.json", folder / f"{part.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        if self._ends - self._began < LEAST_SECONDS:
            return
        command = [sys.executable, str(ENTRY), "--part", part.name, "--child", str(self._found)]
        command += ["--dry"] if options.dry else []
        command += ["--model", str(options.model.absolute())] if options.model else []
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.pop("TRITON_INTERPRET", None)
        if options.dry:
            environment["TRITON_INTERPRET"] = "1"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def ended(self) -> str:
        """Wait for it → how it ended; then its findings are there, and what it said has been printed."""
        how = self._how()
        print(f"{self.part.name}: {self.part.about}")
        if self._log.exists():
            print(self._log.read_text(errors="replace"), end="")
        print(f"  {how} after {time.monotonic() - self._began:.0f} s", flush=True)
        if self._found.exists():
            self.findings = json.loads(self._found.read_text())
        return how

    def _how(self) -> str:
        if self._process is None:
            return "not begun: no time was left"
        try:
            status = self._process.wait(max(self._ends - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"stopped: not done within {self._ends - self._began:.0f} s"
        return "done" if status == 0 else f"ended with status {status}"


def _run_part(options: argparse.Namespace) -> int:
    """In the part's own process. What it raises is a failed check; what it found before stays."""
    (name,) = options.part
    found = Report(name, options.child)
    for sentence in make_importable():
        print(f"  {sentence}")
    try:
        importlib.import_module(f"gpu.{name}").run(found, options)
    except Exception as problem:
        import traceback

        traceback.print_exc()
        found.check("runs to its end", False, f"{type(problem).__name__}: {problem}"[:300])
    return 0


def write_docs(results_file: Path, docs: Path = DOCS) -> int:
    """Put a run's table into the page, in the place of the one before."""
    results = json.loads(results_file.read_text())
    if results["dry"]:
        print("these are results of --dry: they say nothing about a card", file=sys.stderr)
        return 2
    text = docs.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        print(f"{docs} has no lines {BEGIN} and {END}", file=sys.stderr)
        return 2
    docs.write_text(f"{before}{BEGIN}\n{report.table(results)}\n{END}{after}")
    return 0

"""What a part has found, kept in a file while it runs: what a part found before it was stopped counts.

A finding is a check, which holds or doesn't, or a figure that was measured, perhaps beside the ceiling that was
measured in the same process and the share of it that we aim for. Missing an aim is no failure.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict

DASH: Final = "–"


class Finding(TypedDict):
    """One line of the table."""

    part: str
    name: str
    holds: NotRequired[bool]
    """Of a check."""
    note: NotRequired[str]
    value: NotRequired[float]
    unit: NotRequired[str]
    share: NotRequired[float]
    """Of `ceiling`."""
    ceiling: NotRequired[str]
    aim: NotRequired[float]
    """Least `share` that we want."""


class Report:
    """The findings of one part."""

    def __init__(self, part: str, path: Path) -> None:
        self.part = part
        self.findings: list[Finding] = []
        self._path = path
        self._write()

    def check(self, name: str, holds: bool, note: str = "") -> None:
        """Something that must be so."""
        self._add({"part": self.part, "name": name, "holds": bool(holds), "note": note})

    def fact(self, name: str, note: str) -> None:
        """Something that is so."""
        self._add({"part": self.part, "name": name, "note": note})

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        share: float | None = None,
        ceiling: str = "",
        aim: float | None = None,
        note: str = "",
    ) -> None:
        """Something that was measured."""
        found: Finding = {"part": self.part, "name": name, "value": value, "unit": unit, "note": note}
        if share is not None:
            found |= {"share": share, "ceiling": ceiling}
        if aim is not None:
            found["aim"] = aim
        self._add(found)

    def _add(self, found: Finding) -> None:
        self.findings.append(found)
        print(line(found), flush=True)
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self.findings, indent=1))


def line(found: Finding) -> str:
    """A finding for the terminal."""
    cells = row(found)
    return f"  {cells[0]:<70} {cells[1]:>16} {cells[2]:>30}  {cells[3]}".rstrip()


def row(found: Finding) -> tuple[str, str, str, str]:
    """What was looked at, what came out, how near to a ceiling, and a note."""
    measured = ""
    if "holds" in found:
        measured = "holds" if found["holds"] else "FAILS"
    if "value" in found:
        measured = f"{found['value']:.4g} {found['unit']}"
    share = f"{found['share']:.0%} of {found['ceiling']}" if "share" in found else ""
    if "aim" in found:
        share += f" (aim {found['aim']:.0%})"
    return found["name"], measured, share, found.get("note", "")


def table(results: dict[str, Any]) -> str:
    """All findings of a run in Markdown."""
    facts = " · ".join(f"{name}: {value}" for name, value in results["machine"].items())
    lines = [f"Measured on {results['date']}: {facts}.", ""]
    if missed := [f"{part} ({why})" for part, why in results["parts"].items() if why != "done"]:
        lines += [f"Not whole: {'; '.join(missed)}.", ""]
    lines += ["| part | what | result | of the ceiling | |", "|---|---|---|---|---|"]
    for found in results["findings"]:
        cells = (found["part"], *row(found))
        lines.append(f"| {' | '.join(cell.replace('|', '/') or DASH for cell in cells)} |")
    return "\n".join(lines)

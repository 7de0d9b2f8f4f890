"""The project's source as the guards see it: files, their place among the floors, their syntax trees."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
FLOORS: Final = ("ops", "kvcache", "sched", "server")
"""From the lowest up: a package imports from those before it, and from itself."""


class Fault(NamedTuple):
    """Something that a guard does not allow."""

    path: str
    """Relative to the root."""
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


class Source(NamedTuple):
    """One Python file."""

    path: str
    """Relative to the root."""
    tree: ast.Module

    @property
    def floor(self) -> str:
        """The package, or the folder at the top."""
        return self.path.partition("/")[0]


def parse(path: str, text: str) -> Source:
    return Source(path, ast.parse(text, path))


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file below these folders at the top."""
    found = []
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            found.append(parse(str(file.relative_to(ROOT)), file.read_text()))
    assert found, f"no Python files below {folders}: the guards look in the wrong place"
    return tuple(found)


@cache
def tracked_files() -> tuple[str, ...]:
    """Paths of what is under version control, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(path for path in listed.stdout.split("\0") if path)


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands; `from a import b` gives a and a.b, since b may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of names; calls in it are shown as `()`; "" where it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{dotted(node.func)}()"
    return ""


def report(faults: list[Fault]) -> str:
    return "\n" + "\n".join(map(str, faults))

"""Imports go down only, torch stays on the lowest floor, and packages are imported by their full names."""

import subprocess
import sys

import pytest
from guards.source import FLOORS, ROOT, Fault, Source, imported_modules, parse, report, sources


def upward_imports(source: Source) -> list[Fault]:
    """Imports from a floor above, also inside functions; bare or relative names of the packages."""
    faults = []
    allowed = FLOORS[: FLOORS.index(source.floor) + 1]
    for line, module in imported_modules(source.tree):
        parts = module.split(".")
        if module.startswith("."):
            faults.append(Fault(source.path, line, f"a relative import, {module}: write headrace.…"))
        elif parts[0] in FLOORS and parts[0] != "sched":
            faults.append(Fault(source.path, line, f"{parts[0]} by its bare name: write headrace.{parts[0]}"))
        elif parts[0] == "sched":
            faults.append(Fault(source.path, line, "sched is the standard library's: write headrace.sched"))
        elif parts[0] == "headrace" and len(parts) > 1 and parts[1] in FLOORS and parts[1] not in allowed:
            faults.append(Fault(source.path, line, f"{source.floor} imports {module}, which is above it"))
    return faults


def torch_imports(source: Source) -> list[Fault]:
    return [
        Fault(source.path, line, "torch is imported; only ops may")
        for line, module in imported_modules(source.tree)
        if module.split(".")[0] in ("torch", "triton")
    ]


@pytest.mark.parametrize("floor", FLOORS)
def test_no_package_imports_from_a_floor_above(floor: str) -> None:
    faults = [fault for source in sources(floor) for fault in upward_imports(source)]
    assert faults == [], report(faults)


@pytest.mark.parametrize("floor", ["kvcache", "sched", "server"])
def test_only_ops_imports_torch(floor: str) -> None:
    faults = [fault for source in sources(floor) for fault in torch_imports(source)]
    assert faults == [], report(faults)


@pytest.mark.parametrize(
    "text",
    [
        "import headrace.server.config",
        "from headrace import sched",
        "from headrace.sched import messages",
        "def late():\n    from headrace.sched.messages import Submit",
        "from . import pool",
        "import sched",
        "from ops import wire",
    ],
)
def test_the_guard_sees_an_import_that_goes_up_or_sideways(text: str) -> None:
    assert upward_imports(parse("kvcache/pool.py", text))


@pytest.mark.parametrize("text", ["import headrace.ops.wire", "from headrace.kvcache import layout", "import numpy"])
def test_the_guard_lets_imports_go_down(text: str) -> None:
    assert upward_imports(parse("kvcache/pool.py", text)) == []


def test_the_guard_sees_torch_inside_a_function() -> None:
    assert torch_imports(parse("sched/engine.py", "def f():\n    import torch.nn"))


def test_no_module_of_server_sched_and_kvcache_brings_torch_along() -> None:
    """In a fresh interpreter: also what is imported through ops, or by a library, counts."""
    script = """
import importlib, pkgutil, sys, traceback

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            traceback.print_stack()
        return None

sys.meta_path.insert(0, Watch())
for floor in ("server", "sched", "kvcache"):
    package = importlib.import_module(f"headrace.{floor}")
    for module in pkgutil.walk_packages(package.__path__, f"headrace.{floor}."):
        importlib.import_module(module.name)
        print(module.name)
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "headrace.server.cli" in done.stdout.split()

"""What is installed is what is here: the package list, the wheel, the source archive, the commands."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from guards.source import FLOORS, ROOT, tracked_files

import headrace

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_in(root: Path) -> list[str]:
    """Full names of all folders with Python files below the four packages, and of headrace itself."""
    folders = {
        file.parent.relative_to(root) for floor in FLOORS for file in (root / floor).rglob("*.py") if file.is_file()
    }
    return sorted({"headrace", *("headrace." + ".".join(folder.parts) for folder in folders)})


def modules_in(root: Path) -> set[str]:
    """Paths of all modules as they must stand in a wheel."""
    ours = {
        f"headrace/{file.relative_to(root)}"
        for floor in FLOORS
        for file in (root / floor).rglob("*.py")
        if file.is_file()
    }
    return ours | {f"headrace/{file.name}" for file in (root / ".package").iterdir() if file.is_file()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree with traces of an older build in it: a module that has been deleted since."""
    copy: Path = tmp_path_factory.mktemp("checkout") / "headrace"
    for name in (*FLOORS, ".package", ".ci", "scripts", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    stale = copy / "build" / "lib" / "headrace" / "server" / "deleted.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    return copy


def build(kind: str, root: Path, into: Path) -> Path:
    """Build a wheel or an sdist with the project's own backend, asking no index for anything."""
    script = f"import sys, build_backend; print(build_backend.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(into)],
        cwd=root,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root / "scripts")},
    )
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", checkout, tmp_path_factory.mktemp("wheel")))


def test_every_package_is_listed() -> None:
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == packages_in(ROOT)


def test_every_package_says_what_it_is() -> None:
    folders = [ROOT / name.replace(".", "/").removeprefix("headrace/") for name in packages_in(ROOT)[1:]]
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_a_package_that_is_not_listed_is_noticed(tmp_path: Path) -> None:
    for floor in FLOORS:
        (tmp_path / floor / "new").mkdir(parents=True)
        (tmp_path / floor / "new" / "module.py").write_text("")
    assert "headrace.ops.new" in packages_in(tmp_path)


def test_the_wheel_holds_every_module_and_nothing_else(wheel: zipfile.ZipFile, checkout: Path) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == modules_in(checkout)
    assert "headrace/py.typed" in inside


def test_the_wheel_has_the_licence_the_version_and_the_command(wheel: zipfile.ZipFile) -> None:
    info = f"headrace-{headrace.__version__}.dist-info"
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "headrace = headrace.server.entry:main" in wheel.read(f"{info}/entry_points.txt").decode()
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {headrace.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def test_the_wheel_works_by_itself(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import headrace.server.cli as cli\n"
        "print(cli.__file__); cli.main(['--version'])"
    )
    # -I -S: neither this checkout nor its editable installation is found; its requirements are, by path.
    requirements = next(path for path in sys.path if path.endswith("site-packages"))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({requirements!r})\n{script}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path / "headrace/server/cli.py"), "headrace", headrace.__version__], done


def test_the_source_archive_builds_the_same_wheel(checkout: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    subprocess.run(["tar", "-xzf", build("sdist", checkout, tmp_path), "-C", tmp_path], check=True)
    unpacked = tmp_path / f"headrace-{headrace.__version__}"
    assert (unpacked / "scripts" / "test").is_file()
    assert (unpacked / "tests" / "guards" / "test_packaging.py").is_file()
    again = zipfile.ZipFile(build("wheel", unpacked, tmp_path))
    assert sorted(again.namelist()) == sorted(wheel.namelist())


def test_every_requirement_says_what_it_is_for() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    start = lines.index("dependencies = [") + 1
    listed = lines[start : lines.index("]", start)]
    assert len(listed) == len(PROJECT["project"]["dependencies"])
    assert [line for line in listed if "#" not in line] == []


@pytest.mark.parametrize("command", ["scripts/serve", "scripts/test", ".ci/run"])
def test_a_command_can_be_run_and_stops_at_its_first_error(command: str) -> None:
    path = ROOT / command
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_nothing_that_is_built_is_under_version_control() -> None:
    built = (".venv/", "build/", "__pycache__/", ".egg-info/", ".mypy_cache/", ".hypothesis/")
    assert [path for path in tracked_files() if any(part in path for part in built)] == []

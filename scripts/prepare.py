"""Set-up for `scripts/serve` and `scripts/test`: an environment in .venv with headrace in it. Standard library alone.

in     --dev for the test tools; HEADRACE_TORCH, a requirement or wheel to install as torch
out    .venv, with headrace installed in editable mode
state  .venv/headrace.json: what the environment was made from; written last, so that a broken set-up is done again
owner  whoever holds the lock on pyproject.toml
ready  when the process exits with 0
end    delete .venv
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until `main` has a sentence for Ctrl-C, it ends this in silence.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

TESTED_TORCH: Final = "torch==2.13.0"
"""Tried before the range in pyproject.toml: a newer release may be there as a CUDA build alone."""
STANDARD_ERROR: Final = 2


class SetupFailed(Exception):
    """The environment can't be made; the message says what happened and what to do."""


class Environment:
    """The virtual environment of one checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.stamp = self.folder / "headrace.json"
        self.pip_log = self.folder / "pip.log"

    def prepare(self, dev: bool) -> None:
        """Make the environment, or leave it alone where it is what is wanted. Raises SetupFailed."""
        was = self._stamped()
        wanted = {"root": str(self.root), "project": self._fingerprint(), "python": self._version()}
        if was is not None and all(was.get(key) == value for key, value in wanted.items()) and (was["dev"] or not dev):
            return
        # An environment that was moved, or whose Python was replaced, has wrong paths in all its programs.
        if was is not None and (was.get("root"), was.get("python")) != (wanted["root"], wanted["python"]):
            self._make(True)
        elif not self.python.exists():
            self._make(False)
        elif not any((self.folder / "lib").glob("python*/site-packages/pip")):
            # Other tools make environments without pip.
            subprocess.run([self.python, "-m", "ensurepip"], stdout=STANDARD_ERROR, check=False)
        dev = dev or (was is not None and bool(was["dev"]))
        self._install_torch()
        say("Installing headrace and what it needs into .venv (a minute or two at first)")
        self._pip_install(["--editable", f"{self.root}[dev]" if dev else str(self.root)])
        self.stamp.write_text(json.dumps({**wanted, "python": self._version(), "dev": dev}))

    def _stamped(self) -> dict[str, Any] | None:
        """What the environment was made from, None where no set-up was completed."""
        try:
            stamp = json.loads(self.stamp.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return stamp if isinstance(stamp, dict) and "dev" in stamp else None

    def _fingerprint(self) -> str:
        return hashlib.sha256((self.root / "pyproject.toml").read_bytes()).hexdigest()

    def _version(self) -> str:
        """The version of the environment's Python, "" where it doesn't run."""
        if not self.python.exists():
            return ""
        asked = subprocess.run(
            [self.python, "-I", "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip() if asked.returncode == 0 else ""

    def _make(self, clear: bool) -> None:
        say(f"Making .venv with Python {sys.version.split()[0]}")
        made = subprocess.run(
            [sys.executable, "-m", "venv", *(["--clear"] if clear else []), str(self.folder)], check=False
        )
        if made.returncode:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise SetupFailed(
                "Python could not make a virtual environment. On Debian and Ubuntu the module is a package of its own: "
                "apt install python3-venv. Then run this again."
            )

    def _install_torch(self) -> None:
        """See to torch before pip does, since pip's choice on x86-64 is a CUDA build of several GB."""
        if any((self.folder / "lib").glob("python*/site-packages/torch-*.dist-info")):
            return
        if own := os.environ.get("HEADRACE_TORCH"):
            say(f"Installing torch as HEADRACE_TORCH says: {own}")
            self._pip_install(shlex.split(own))
        elif shutil.which("nvidia-smi") is None:
            self._install_cpu_torch()

    def _install_cpu_torch(self) -> None:
        say("Looking for a CPU build of torch")
        project = tomllib.loads((self.root / "pyproject.toml").read_text())["project"]
        offers = 0
        for requirement in (TESTED_TORCH, *(name for name in project["dependencies"] if name.startswith("torch>"))):
            offered = self._offered(requirement)
            if offered is None:
                continue
            offers += 1
            if is_cpu_build(offered):
                say(f"Installing {requirement}, a CPU build (about 200 MB)")
                self._pip_install([requirement])
                return
        if offers:
            say(
                "pip offers torch as a CUDA build alone, about 3 GB with its libraries, though no NVIDIA GPU is here. "
                "It works. To have a small one instead, stop this (Ctrl-C) and give a CPU build's wheel, or pip's "
                "options for an index that has one: HEADRACE_TORCH='/path/to/torch.whl'"
            )

    def _offered(self, requirement: str) -> dict[str, Any] | None:
        """pip's report on what it would install for a requirement; None where it finds nothing."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            asked = subprocess.run(
                [*self._pip("install"), "--dry-run", "--no-deps", "--quiet", "--report", str(report), requirement],
                capture_output=True,
                check=False,
            )
            if asked.returncode:
                return None
            answer: dict[str, Any] = json.loads(report.read_text())["install"][0]
            return answer

    def _pip(self, command: str) -> list[str]:
        options = ["--disable-pip-version-check", "--no-input", "--log", str(self.pip_log)]
        return [str(self.python), "-m", "pip", command, *options]

    def _pip_install(self, arguments: Sequence[str]) -> None:
        self.pip_log.unlink(missing_ok=True)
        # What a server prints on its standard output is its own; set-up talks on the other one.
        if subprocess.run([*self._pip("install"), *arguments], stdout=STANDARD_ERROR, check=False).returncode:
            log = self.pip_log.read_text(errors="replace") if self.pip_log.exists() else ""
            raise SetupFailed(f"{why_pip_failed(log)} All that pip said is in {self.pip_log}.")


def check_platform(system: str, machine: str) -> None:
    """Raises SetupFailed where headrace can't run: before anything is downloaded."""
    if system != "Linux" or machine not in ("x86_64", "aarch64", "arm64"):
        raise SetupFailed(f"It runs on Linux on x86-64 and arm64; this is {system} on {machine}.")


def is_cpu_build(offered: dict[str, Any] | None, machine: str = platform.machine()) -> bool:
    """Whether pip's choice of torch, an entry of its installation report, comes without CUDA libraries."""
    if offered is None:
        return False
    for requirement in offered["metadata"].get("requires_dist", []):
        elsewhere = "platform_machine ==" in requirement and f'"{machine}"' not in requirement
        if requirement.startswith(("nvidia-", "cuda-")) and not elsewhere:
            return False
    return True


def why_pip_failed(log: str) -> str:
    """A sentence for the person before the screen, from pip's log."""
    if "No space left on device" in log:
        return (
            "The disk is full: headrace and torch need about 1.5 GB (a CUDA build of torch 7 GB). Make room, run again."
        )
    unreachable = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ReadTimeoutError", "ProxyError")
    if any(name in log for name in (*unreachable, "Connection refused", "Network is unreachable")):
        return (
            "pip could not reach its package index. Check the network, or pip's settings for a proxy or a mirror "
            "(`pip config list`), and run this again: what was downloaded is kept."
        )
    if "CERTIFICATE_VERIFY_FAILED" in log:
        return "pip does not trust the package index's certificate: set its `cert` option to your authority's file."
    if "No matching distribution found" in log:
        line = next(line for line in log.splitlines() if "No matching distribution found" in line)
        wanted = line.partition("No matching distribution found")[2].removeprefix(" for ")
        python = sys.version.split()[0]
        return (
            f"pip found no build of {wanted} for Python {python} on this machine. With another Python "
            "(HEADRACE_PYTHON=/path/to/python, after deleting .venv) there may be one."
        )
    return "pip failed; its own message is above."


def say(sentence: str) -> None:
    print(f"headrace: {sentence}", file=sys.stderr, flush=True)


def locked(root: Path, act: Callable[[], None]) -> None:
    """Two commands started together must not set up the same folder: the second one waits, then finds it done."""
    with (root / "pyproject.toml").open() as project:
        try:
            fcntl.flock(project, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another set-up of this folder to end")
            fcntl.flock(project, fcntl.LOCK_EX)
        act()


def main() -> int:
    parser = argparse.ArgumentParser(description="Make .venv and install headrace into it.")
    parser.add_argument("--dev", action="store_true", help="with the tools that the tests need")
    dev = bool(parser.parse_args().dev)
    environment = Environment(Path(__file__).resolve().parent.parent)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        check_platform(platform.system(), platform.machine())
        locked(environment.root, lambda: environment.prepare(dev))
    except SetupFailed as failure:
        say(str(failure))
        return 1
    except KeyboardInterrupt:
        say("Stopped. Run the same command again to go on.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

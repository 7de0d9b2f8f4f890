"""`headrace cache`: what it shows, what it deletes, and its exit codes, on sound and damaged directories."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from storage.disks import opened, segment_files, settings, store
from storage.pages import MODEL, OTHER_MODEL, RECORD_BYTES, chain

from headrace.kvcache.identity import namespace
from headrace.kvcache.storage.disk.inspect import summary
from headrace.kvcache.storage.disk.opening import open_disk_store
from headrace.kvcache.storage.page_store import PageRun
from headrace.server import cli
from headrace.server.cache_cli import cache_command
from headrace.server.config import BadSetting
from headrace.server.salt_key import salt_key


def salted(run: PageRun, space: bytes) -> PageRun:
    return PageRun(run.group, space, run.parents, run.keys, run.tokens)


def fill(directory: Path, cache: Path) -> None:
    """Seven pages without a salt and three with `tenant` of one model, four without of another."""
    other = open_disk_store(settings(directory, payload_bytes=(8192,), model=OTHER_MODEL))
    store(other, salted(chain("other", 4), namespace(OTHER_MODEL, "", "")), 8192)
    other.close()
    disk = opened(directory)
    store(disk, salted(chain("a", 7), namespace(MODEL, "", "")))
    store(disk, salted(chain("b", 3), namespace(MODEL, "", "tenant", salt_key(cache), "sha256")))
    disk.close()


def run(action: str, directory: Path, cache: Path, **flags: Any) -> tuple[int, str, str]:
    out, errors = io.StringIO(), io.StringIO()
    code = cache_command({"action": action, "disk_cache_dir": str(directory), **flags}, cache, out, errors)
    return code, out.getvalue(), errors.getvalue()


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    directory, cache = tmp_path / "kv", tmp_path / "cache"
    fill(directory, cache)
    return directory, cache


def test_ls_lists_models_and_namespaces(places: tuple[Path, Path]) -> None:
    code, out, errors = run("ls", *places)
    head, *rows = [line.split() for line in out.splitlines()]
    assert (code, errors, head) == (0, "", ["MODEL", "NAMESPACE", "PAGES", "SIZE"])
    assert sorted((row[0], int(row[2])) for row in rows) == sorted(
        [(MODEL.hex(), 7), (MODEL.hex(), 3), (OTHER_MODEL.hex(), 4)]
    )


@pytest.mark.parametrize(("salt", "pages"), [("tenant", [3]), ("", [4, 7]), ("nobody", [])])
def test_a_salt_is_found_by_its_hash_in_every_model(places: tuple[Path, Path], salt: str, pages: list[int]) -> None:
    code, out, errors = run("ls", *places, salt=salt)
    assert code == 0 and sorted(int(line.split()[2]) for line in out.splitlines()[1:]) == pages
    assert ("no pages of these" in errors) == (not pages)


def test_a_salt_can_not_be_tried_without_the_key(places: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="HEADRACE_CACHE"):
        run("ls", places[0], tmp_path / "elsewhere", salt="tenant")
    assert not (tmp_path / "elsewhere").exists()
    assert run("ls", places[0], tmp_path / "elsewhere", salt="")[0] == 0


def test_rm_deletes_a_salt_and_leaves_the_others(places: tuple[Path, Path]) -> None:
    code, out, _ = run("rm", *places, salt="tenant")
    assert code == 0 and out.startswith("3 pages deleted")
    assert sorted(space.pages for space in summary(str(places[0])).spaces) == [4, 7]


def test_rm_deletes_a_model(places: tuple[Path, Path]) -> None:
    assert run("rm", *places, model=MODEL.hex()[:24])[1].startswith("10 pages deleted")
    assert [space.model for space in summary(str(places[0])).spaces] == [OTHER_MODEL.hex()]


def test_the_beginning_of_several_models_is_not_enough(places: tuple[Path, Path]) -> None:
    with pytest.raises(BadSetting, match="more digits"):
        run("rm", *places, model=MODEL.hex()[:4])
    assert summary(str(places[0])).pages == 14


def test_rm_of_a_salt_that_is_not_there_deletes_nothing(places: tuple[Path, Path]) -> None:
    assert run("rm", *places, salt="nobody")[1].startswith("0 pages deleted")
    assert summary(str(places[0])).pages == 14


def test_rm_deletes_everything(places: tuple[Path, Path]) -> None:
    assert run("rm", *places)[1].startswith("14 pages deleted")
    assert summary(str(places[0])).pages == 0


def test_stat_describes_the_directory(places: tuple[Path, Path]) -> None:
    (places[0] / "notes.txt").write_text("a user's file")
    code, out, errors = run("stat", *places)
    told = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(("in use", "other")))
    assert (code, errors) == (0, "")
    assert told["pages"].startswith("14 in") and told["models"] == "2" and told["namespaces"] == "3"
    assert "notes.txt" in out and "nobody" in out


def test_verify_counts_and_names_bad_pages(places: tuple[Path, Path]) -> None:
    assert run("verify", *places)[:2] == (0, "14 pages: 14 good, 0 bad\n")
    with segment_files(places[0])[-1].open("r+b") as file:
        file.seek(2 * RECORD_BYTES + 5000)
        file.write(b"damage")
    code, out, errors = run("verify", *places)
    assert code == 1 and "slot 2: " in out and "14 pages: 13 good, 1 bad" in out and "never served" in errors


@pytest.mark.parametrize("action", ["ls", "stat", "verify"])
def test_a_directory_without_its_journal_is_still_looked_into(places: tuple[Path, Path], action: str) -> None:
    (places[0] / "journal").unlink()
    code, out, errors = run(action, *places)
    assert code == 1 and out and "the journal is missing" in errors


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "rm"])
def test_what_is_no_directory_is_refused(tmp_path: Path, action: str) -> None:
    code, out, errors = run(action, tmp_path / "nothing", tmp_path)
    assert (code, out) == (1, "") and errors.startswith("headrace: ") and "can't be looked into" in errors


def test_a_directory_in_use_is_read_only_and_says_so(places: tuple[Path, Path]) -> None:
    disk = opened(places[0])
    code, out, _ = run("stat", *places)
    assert code == 0 and "read-only until it stops" in out
    assert run("verify", *places)[0] == 0
    code, out, errors = run("rm", *places)
    assert (code, out) == (1, "") and "stop the server" in errors and "/cache/clear" in errors
    disk.close()
    assert summary(str(places[0])).pages == 14


def test_the_default_directory_is_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "kv", tmp_path)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert cli.main(["cache", "stat"]) == 0
    assert str(tmp_path / "kv") in capsys.readouterr().out


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "rm"])
def test_every_action_explains_itself(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["cache", action, "--help"])
    assert "Exit codes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["cache"], ["cache", "eat"], ["cache", "ls", "x"], ["cache", "stat", "--salt", "x"]]
)
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith("headrace: ")


def test_progress_is_shown_after_two_seconds(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr("headrace.server.progress.time.monotonic", lambda: next(clock))
    _, _, errors = run("verify", *places)
    assert "pages checked: 14 of 14 (100 %)" in errors.splitlines()
    for action in ("verify", "ls", "stat", "rm"):
        _, _, errors = run(action, *places)
        assert errors.splitlines()[0].startswith("bytes of the index read: "), action

"""Looking into a cache directory from outside, sound or damaged, in use or not."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from storage.disks import fetch, opened, segment_files, settings, store
from storage.pages import MODEL, OTHER_MODEL, PAGE_BYTES, RECORD_BYTES, chain, namespace

from headrace.kvcache.storage.disk.files import Files
from headrace.kvcache.storage.disk.inspect import remove, summary, verify
from headrace.kvcache.storage.disk.opening import open_disk_store
from headrace.kvcache.storage.disk.ownership import boot_id
from headrace.kvcache.storage.page_store import StoreRefused


def filled_directory(directory: Path) -> None:
    """Ten pages of one model in two namespaces, four larger ones of another."""
    disk = open_disk_store(settings(directory, payload_bytes=(8192,), model=OTHER_MODEL))
    store(disk, chain("other", 4, "other space"), 8192)
    disk.close()
    disk = opened(directory)
    store(disk, chain("a", 7, "a"))
    store(disk, chain("b", 3, "b"))
    disk.close()


def damage(directory: Path, slot: int) -> None:
    with segment_files(directory)[-1].open("r+b") as file:
        file.seek(slot * RECORD_BYTES + 5000)
        file.write(b"damage")


def test_a_summary_counts_pages_by_model_and_namespace(tmp_path: Path) -> None:
    filled_directory(tmp_path)
    (tmp_path / "notes.txt").write_text("a user's file")
    seen = summary(str(tmp_path))
    assert (seen.pages, seen.segments, seen.format, seen.in_use_by, seen.faults) == (14, 2, 1, "", [])
    assert {(space.model, space.namespace, space.pages, space.size_bytes) for space in seen.spaces} == {
        (MODEL.hex(), namespace("a").hex(), 7, 7 * PAGE_BYTES),
        (MODEL.hex(), namespace("b").hex(), 3, 3 * PAGE_BYTES),
        (OTHER_MODEL.hex(), namespace("other space").hex(), 4, 4 * 8192),
    }
    assert seen.foreign == ["notes.txt"]
    assert seen.size_bytes == sum(path.stat().st_size for path in tmp_path.iterdir()) - len("a user's file")


def test_a_directory_whose_lock_is_free_is_in_use_by_nobody_whatever_process_its_file_names(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, chain("a", 3))
    disk.close()
    owner = {"pid": os.getpid(), "parent_pid": os.getppid(), "boot_id": boot_id()}
    (tmp_path / "owner").write_bytes(msgspec.json.encode(owner))
    assert summary(str(tmp_path)).in_use_by == ""


def test_a_summary_of_an_owned_directory_names_its_owner_and_disturbs_nothing(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, chain("a", 7))
    seen = summary(str(tmp_path))
    assert "process" in seen.in_use_by and seen.pages == 7
    assert verify(str(tmp_path)).good == 7
    store(disk, chain("b", 7))
    assert (fetch(disk, chain("a", 7)).good, fetch(disk, chain("b", 7)).good) == (7, 7)
    disk.close()


def test_verify_reads_every_page_and_tells_how_far_it_is(tmp_path: Path) -> None:
    filled_directory(tmp_path)
    steps: list[tuple[str, int, int]] = []
    seen = verify(str(tmp_path), lambda *step: steps.append(step))
    assert (seen.pages, seen.good, seen.bad, seen.changed) == (14, 14, [], 0)
    assert steps[0][0] == "bytes of the index read" and steps[0][1] == steps[0][2]
    assert steps[1:] == [("pages checked", done, 14) for done in range(1, 15)]


def test_verify_names_each_bad_page_and_changes_nothing(tmp_path: Path) -> None:
    filled_directory(tmp_path)
    damage(tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    seen = verify(str(tmp_path))
    (bad,) = seen.bad
    assert (seen.pages, seen.good, bad.file, bad.slot) == (14, 13, segment_files(tmp_path)[-1].name, 2)
    assert "checksum" in bad.what
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_verify_sees_a_page_that_is_another_than_the_journal_says(tmp_path: Path) -> None:
    filled_directory(tmp_path)
    segment = segment_files(tmp_path)[-1]
    content = segment.read_bytes()
    segment.write_bytes(content[RECORD_BYTES : 2 * RECORD_BYTES] + content[RECORD_BYTES:])
    (bad,) = verify(str(tmp_path)).bad
    assert bad.slot == 0 and "another page" in bad.what


def test_a_page_that_was_written_anew_meanwhile_is_not_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = opened(tmp_path, 400_000)
    store(disk, chain("old", 12))
    read = Files.read
    monkeypatch.setattr(Files, "read", lambda files, fd, buffers, offset: fill_or_read(files, fd, buffers, offset))
    written: list[bool] = []

    def fill_or_read(files: Files, fd: int, buffers: list[memoryview], offset: int) -> int:
        if len(buffers[0]) == RECORD_BYTES and not written:
            written.append(True)
            for number in range(20):
                store(disk, chain(str(number), 12))
        return read(files, fd, buffers, offset)

    seen = verify(str(tmp_path))
    assert written and seen.changed > 5 and seen.bad == []
    disk.close()


@pytest.mark.parametrize("gone", ["format", "journal"])
def test_a_directory_without_its_small_files_is_still_looked_into(tmp_path: Path, gone: str) -> None:
    filled_directory(tmp_path)
    (tmp_path / gone).unlink()
    seen = summary(str(tmp_path))
    assert (seen.segments, seen.pages) == (2, 0)
    assert any(gone in fault for fault in seen.faults)


def test_without_a_format_file_verify_goes_by_the_pages_own_headers(tmp_path: Path) -> None:
    filled_directory(tmp_path)
    (tmp_path / "format").write_text("not json")
    damage(tmp_path, 2)
    seen = verify(str(tmp_path))
    assert (seen.pages, seen.good, len(seen.bad)) == (14, 13, 1)
    assert "damaged" in seen.faults[0]


@pytest.mark.parametrize("content", [b"", b"\xff" * 5000])
def test_any_journal_and_any_segment_can_be_looked_into(tmp_path: Path, content: bytes) -> None:
    filled_directory(tmp_path)
    (tmp_path / "journal").write_bytes(content)
    segment_files(tmp_path)[0].write_bytes(content)
    assert summary(str(tmp_path)).pages == 0
    assert verify(str(tmp_path)).bad == []


def test_where_there_is_nothing_to_look_into_that_is_said(tmp_path: Path) -> None:
    for look in (summary, verify, remove):
        with pytest.raises(StoreRefused, match="can't be looked into"):
            look(str(tmp_path / "nowhere"))


def test_remove_takes_one_namespace(tmp_path: Path) -> None:
    filled_directory(tmp_path)
    assert remove(str(tmp_path), namespace=namespace("a")).pages == 7
    disk = opened(tmp_path)
    assert disk.contains(0, chain("a", 7, "a").keys) == 0
    assert fetch(disk, chain("b", 3, "b")).good == 3
    disk.close()


def test_remove_takes_one_model_and_leaves_the_other(tmp_path: Path) -> None:
    filled_directory(tmp_path)
    assert remove(str(tmp_path), model=MODEL).pages == 10
    assert [space.model for space in summary(str(tmp_path)).spaces] == [OTHER_MODEL.hex()]


def test_remove_takes_all_and_leaves_a_users_file(tmp_path: Path) -> None:
    filled_directory(tmp_path)
    (tmp_path / "notes.txt").write_text("a user's file")
    assert remove(str(tmp_path)).pages == 14
    assert summary(str(tmp_path)).segments == 0
    assert (tmp_path / "notes.txt").read_text() == "a user's file"


def test_remove_is_refused_while_a_server_has_the_directory(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, chain("a", 3))
    with pytest.raises(StoreRefused, match="in use by process"):
        remove(str(tmp_path))
    assert fetch(disk, chain("a", 3)).good == 3
    disk.close()


def test_remove_does_not_make_a_cache_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="holds no page cache"):
        remove(str(tmp_path))
    assert list(tmp_path.iterdir()) == []

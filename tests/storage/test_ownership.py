"""Whose a cache directory is."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from storage.disks import FaultyDisk, fetch, opened, settings, store
from storage.pages import chain

from headrace.kvcache.storage.disk.files import Files
from headrace.kvcache.storage.disk.ownership import FormatFile, Owner, boot_id
from headrace.kvcache.storage.disk.record import FORMAT
from headrace.kvcache.storage.page_store import StoreRefused


def write_owner(directory: Path, pid: int, boot: str) -> None:
    (directory / "owner").write_bytes(msgspec.json.encode(Owner(pid, 1, boot)))


def test_a_second_owner_is_refused_with_the_firsts_process_id(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    with pytest.raises(StoreRefused, match=rf"{tmp_path} is in use by process {os.getpid()}\b.*of its own"):
        opened(tmp_path)
    disk.close()


def test_the_lock_holds_when_the_owner_file_is_removed(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    (tmp_path / "owner").unlink()
    with pytest.raises(StoreRefused, match="in use by another process"):
        opened(tmp_path)
    disk.close()


def test_a_directory_that_has_lost_its_format_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "format").unlink()
    with pytest.raises(StoreRefused, match="has lost its file 'format'"):
        opened(tmp_path)


def test_after_a_close_the_next_one_may(tmp_path: Path) -> None:
    for _ in range(3):
        opened(tmp_path).close()


def test_a_dead_ones_lock_is_taken_over(tmp_path: Path) -> None:
    run = chain("a", 3)
    disk = opened(tmp_path)
    store(disk, run)
    disk.close()
    # A process that holds the lock and is killed: the file goes on naming it.
    script = (
        "import os, fcntl, sys; fd = os.open(sys.argv[1], os.O_RDWR); fcntl.flock(fd, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "owner")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
    write_owner(tmp_path, holder.pid, boot_id())
    with pytest.raises(StoreRefused, match=f"process {holder.pid}"):
        opened(tmp_path)
    holder.kill()
    holder.communicate()
    disk = opened(tmp_path)
    assert fetch(disk, run).good == 3
    disk.close()


@pytest.mark.parametrize(
    ("pid", "boot", "refused"), [(1, "", True), (1, "another start of the machine", False), (2**22 + 1, "", False)]
)
def test_on_a_file_system_without_locks_the_named_process_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int, boot: str, refused: bool
) -> None:
    opened(tmp_path).close()
    write_owner(tmp_path, pid, boot or boot_id())

    def no_locks(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    if refused:
        with pytest.raises(StoreRefused, match="process 1 "):
            opened(tmp_path)
    else:
        opened(tmp_path).close()


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, chain("a", 3))
    disk.close()
    newer = msgspec.json.encode(FormatFile("page cache", FORMAT + 1, 7))
    (tmp_path / "format").write_bytes(newer)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StoreRefused, match=f"has format {FORMAT + 1}, this version reads {FORMAT}"):
        opened(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_damaged_format_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "format").write_bytes(b"{")
    with pytest.raises(StoreRefused, match=r"format is damaged.*start anew"):
        opened(tmp_path)


def test_a_directory_with_a_users_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreRefused, match=r"'thesis.tex'.*empty or a new"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("left", ["owner", "format.new", "lost+found"])
def test_what_an_interrupted_start_left_is_no_hindrance(tmp_path: Path, left: str) -> None:
    if left == "lost+found":
        (tmp_path / left).mkdir()
    else:
        (tmp_path / left).write_text("{")
    disk = opened(tmp_path)
    assert not store(disk, chain("a", 1)).dropped
    disk.close()


def test_a_symbolic_link_is_refused_with_the_real_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StoreRefused, match=f"symbolic link: name what it points to, {tmp_path}/real"):
        opened(tmp_path / "link")


def test_a_symbolic_link_in_place_of_a_segment_is_not_followed(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "target").write_bytes(bytes(81920))
    (tmp_path / "pages-00000000-8192").symlink_to(tmp_path / "target")
    with pytest.raises(StoreRefused, match="pages-00000000-8192"):
        opened(tmp_path)
    assert (tmp_path / "target").read_bytes() == bytes(81920)


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(StoreRefused, match=r"can be written by others.*chmod 700"):
        opened(tmp_path)


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StoreRefused, match="belongs to user"):
        opened(tmp_path)


def test_a_directory_that_others_can_read_is_closed_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    opened(tmp_path).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreRefused, match=r"file is not a directory: give a directory .* \(--disk-cache-dir\)"):
        opened(tmp_path / "file")


def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    class ReadOnly(Files):
        def open(self, name: str, flags: int = os.O_RDWR) -> int:
            if flags & (os.O_RDWR | os.O_CREAT):
                raise OSError(30, "Read-only file system")
            return super().open(name, flags)

    from headrace.kvcache.storage.disk.opening import open_disk_store

    opened(tmp_path).close()
    with pytest.raises(StoreRefused, match="Read-only file system"):
        open_disk_store(settings(tmp_path), ReadOnly)


def test_a_refusal_leaves_the_directory_free(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "pages-00000000-8192").symlink_to("nowhere")
    with pytest.raises(StoreRefused):
        opened(tmp_path)
    (tmp_path / "pages-00000000-8192").unlink()
    FaultyDisk(settings(tmp_path)).store.close()


def test_files_that_no_store_made_are_left_alone(tmp_path: Path) -> None:
    opened(tmp_path).close()
    strange = ["pages-1-8192", "pages-00000001-8193", "pages-00000001-8192.bak", "journal.old", "pages-0000000g-8192"]
    for name in strange:
        (tmp_path / name).write_text(name)
    disk = opened(tmp_path)
    store(disk, chain("a", 5))
    disk.delete(None)
    disk.close()
    assert [(tmp_path / name).read_text() for name in strange] == strange


def test_a_segment_that_was_being_made_is_cleared_away(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "pages-00000003-8192.new").write_bytes(bytes(8192))
    opened(tmp_path).close()
    assert not (tmp_path / "pages-00000003-8192.new").exists()

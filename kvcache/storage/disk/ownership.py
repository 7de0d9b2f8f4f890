"""Whose a cache directory is: one process's at a time, of one user, and never anything but a cache.

in     a path
out    the directory's descriptor, the id of the store in it
state  the lock, held as long as its descriptor is open
owner  whoever claimed the directory
ready  when `claim` returns
end    `release`, or the end of the process: the kernel gives the lock back, also after SIGKILL
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import Final

import msgspec

from headrace.kvcache.storage.disk.files import DIRECTORY_MODE, Files, MakeFiles, say, write_all
from headrace.kvcache.storage.disk.journal import NAME as JOURNAL
from headrace.kvcache.storage.disk.journal import NEW_NAME as NEW_JOURNAL
from headrace.kvcache.storage.disk.record import FORMAT
from headrace.kvcache.storage.page_store import StoreRefused

log = logging.getLogger(__name__)

FORMAT_NAME: Final = "format"
OWNER_NAME: Final = "owner"
_IGNORED: Final = frozenset((OWNER_NAME, FORMAT_NAME + ".new", "lost+found"))
"""What a directory may hold that has no store yet: what an interrupted start leaves, and a new file system has."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class FormatFile(msgspec.Struct, frozen=True):
    """Says what the directory is."""

    headrace: str
    format: int
    store: int


class Owner(msgspec.Struct, frozen=True):
    """Who holds the lock, or held it last."""

    pid: int
    parent_pid: int
    boot_id: str

    @property
    def alive(self) -> bool:
        """As far as can be seen without the lock."""
        return self.boot_id == boot_id() and Path(f"/proc/{self.pid}").exists()

    def __str__(self) -> str:
        return f"process {self.pid} (of the server with process id {self.parent_pid})"


class DirectoryOwned(StoreRefused):
    """Another process has the directory."""

    def __init__(self, path: str, owner: Owner | None) -> None:
        who = str(owner) if owner else "another process"
        super().__init__(
            f"the cache directory {path} is in use by {who}: stop it, or give each server a directory of its own"
        )
        self.owner = owner


class Claim:
    """A directory that is ours until `release`."""

    def __init__(self, path: str, files: Files, store_id: int, owner_fd: int) -> None:
        self.path = path
        self.files = files
        self.store_id = store_id
        self._owner_fd = owner_fd

    def release(self) -> None:
        """Say that nobody has it, and give it back."""
        try:
            self.files.truncate(self._owner_fd, 0)
        except OSError as error:
            log.warning("the cache directory %s goes on naming this process as its owner: %s", self.path, say(error))
        os.close(self._owner_fd)
        os.close(self.files.directory_fd)


def claim(path: str, make_files: MakeFiles = Files) -> Claim:
    """Make the directory if there is none, lock it, and check what it is. Raises StoreRefused."""
    try:
        os.makedirs(path, DIRECTORY_MODE, exist_ok=True)
        files = make_files(open_directory(path))
    except OSError as error:
        what = "give a directory that this user may write to (--disk-cache-dir)"
        if os.path.lexists(path) and not os.path.isdir(path):
            raise StoreRefused(f"the cache directory {path} is not a directory: {what}") from error
        raise StoreRefused(f"the cache directory {path} can't be opened: {say(error)}; {what}") from error
    try:
        return _lock(path, files)
    except OSError as error:
        os.close(files.directory_fd)
        raise StoreRefused(f"the cache directory {path} can't be used: {say(error)}") from error
    except StoreRefused:
        os.close(files.directory_fd)
        raise


def open_directory(path: str) -> int:
    """A descriptor of a directory that is ours alone. Raises OSError, StoreRefused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(path):
            raise StoreRefused(
                f"the cache directory {path} is a symbolic link: name what it points to, {os.path.realpath(path)}"
            ) from error
        raise
    there = os.fstat(fd)
    fault = ""
    if there.st_uid != os.geteuid():
        fault = f"belongs to user {there.st_uid}: prompts can be read from a cache, so it must be the server's own"
    elif there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        fault = "can be written by others, who could put pages into it: chmod 700 it"
    if fault:
        os.close(fd)
        raise StoreRefused(f"the cache directory {path} {fault}")
    return fd


def read_format(files: Files, path: str) -> FormatFile | None:
    """What the directory says it is, None if it says nothing. Raises OSError, StoreRefused."""
    try:
        text = _read_small(files, FORMAT_NAME)
    except FileNotFoundError:
        return None
    try:
        form = msgspec.json.decode(text, type=FormatFile)
    except msgspec.DecodeError as error:
        raise StoreRefused(f"{path}/{FORMAT_NAME} is damaged ({error}): remove the directory and start anew") from error
    if form.format > FORMAT:
        raise StoreRefused(
            f"the cache directory {path} has format {form.format}, this version reads {FORMAT}: "
            "use another directory, or the newer version"
        )
    return form


def read_owner(files: Files) -> Owner | None:
    """Who holds or held the lock, None if nobody knows. Raises OSError."""
    try:
        return msgspec.json.decode(_read_small(files, OWNER_NAME), type=Owner)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def current_owner(files: Files) -> str:
    """Who has the directory now, "" if nobody does. Raises OSError.

    The lock is what counts: a process id may be a zombie's, or another's by now, or of another container. Only where
    locks are not supported does the process have to stand for it.
    """
    owner = read_owner(files)
    try:
        descriptor = files.open(OWNER_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return str(owner) if owner is not None else "another process"
    except OSError:
        return str(owner) if owner is not None and owner.alive else ""
    finally:
        os.close(descriptor)
    return ""


def boot_id() -> str:
    """Differs after a restart of the machine, when process ids begin anew."""
    return _BOOT_ID.read_text().strip()


def _lock(path: str, files: Files) -> Claim:
    form = read_format(files, path)
    if form is None:
        names = files.names()
        strangers = [name for name in names if name not in _IGNORED]
        if JOURNAL in names:
            raise StoreRefused(
                f"the cache directory {path} has lost its file {FORMAT_NAME!r}: remove it and start anew"
            )
        if strangers:
            raise StoreRefused(
                f"the directory {path} holds {strangers[0]!r} and no page cache: name an empty or a new directory"
            )
    owner_fd = files.open(OWNER_NAME, os.O_RDWR | os.O_CREAT)
    try:
        _take_lock(path, files, owner_fd)
        if form is None:
            form = read_format(files, path) or _write_format(files)
        _write_owner(files, owner_fd)
    except BaseException:
        os.close(owner_fd)
        raise
    return Claim(path, files, form.store, owner_fd)


def _take_lock(path: str, files: Files, owner_fd: int) -> None:
    # The directory too, where that can be locked: the file may be removed by somebody who thinks that it is stale.
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(files.directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DirectoryOwned(path, read_owner(files)) from error
    try:
        fcntl.flock(owner_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DirectoryOwned(path, read_owner(files)) from error
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS):
            raise
        # A file system without locks: what the file says has to do.
        owner = read_owner(files)
        if owner is not None and owner.alive and owner.pid != os.getpid():
            raise DirectoryOwned(path, owner) from error


def _write_owner(files: Files, owner_fd: int) -> None:
    files.truncate(owner_fd, 0)
    text = msgspec.json.encode(Owner(os.getpid(), os.getppid(), boot_id()))
    write_all(files, owner_fd, [memoryview(text)], 0)


def _write_format(files: Files) -> FormatFile:
    """The last step of a directory's making: without it the directory is as good as empty."""
    os.fchmod(files.directory_fd, DIRECTORY_MODE)
    form = FormatFile("page cache", FORMAT, secrets.randbits(63))
    new = FORMAT_NAME + ".new"
    fd = files.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(files, fd, [memoryview(msgspec.json.encode(form))], 0)
        files.sync(fd)
    finally:
        files.close(fd)
    files.rename(new, FORMAT_NAME)
    files.sync_directory()
    return form


def _read_small(files: Files, name: str) -> bytes:
    fd = files.open(name, os.O_RDONLY)
    try:
        block = bytearray(4096)
        return bytes(block[: files.read(fd, [memoryview(block)], 0)])
    finally:
        files.close(fd)


def is_ours(name: str) -> bool:
    """Whether a file of a cache directory, segments apart, was made by a store."""
    return name in (FORMAT_NAME, FORMAT_NAME + ".new", OWNER_NAME, JOURNAL, NEW_JOURNAL)

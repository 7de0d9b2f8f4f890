"""The system calls of a disk store, in one small class: a test replaces it to make a disk full, broken or gone.

Every name is relative to the directory's descriptor, and no symbolic link is followed: what lies under a name is opened
in this directory or not at all.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700

_SAFE: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Not even a pipe under one of our names makes an open wait."""
_ZERO_RANGE: Final = 0x10
"""FALLOC_FL_ZERO_RANGE."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Files:
    """A directory, and calls on files in it. All raise OSError."""

    def __init__(self, directory_fd: int) -> None:
        self.directory_fd = directory_fd

    def names(self) -> list[str]:
        """What is in the directory, sorted."""
        return sorted(os.listdir(self.directory_fd))

    def open(self, name: str, flags: int = os.O_RDWR) -> int:
        """A descriptor of an existing file, or of one made now if the flags have O_CREAT."""
        return os.open(name, flags | _SAFE, FILE_MODE, dir_fd=self.directory_fd)

    def open_direct(self, name: str) -> int | None:
        """A descriptor past the page cache, None where the file system has no such thing."""
        try:
            return self.open(name, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            raise

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers from the file; fewer bytes only at its end."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write the buffers, or as much of them as is told."""
        return os.pwritev(fd, buffers, offset)

    def preallocate(self, fd: int, size_bytes: int) -> None:
        """Give the file its size, and the blocks for it."""
        os.posix_fallocate(fd, 0, size_bytes)

    def zero(self, fd: int, offset: int, size_bytes: int) -> None:
        """Make a range read as zeros, in no time where the file system can; EOPNOTSUPP where it can't."""
        if _libc.fallocate(fd, _ZERO_RANGE, offset, size_bytes):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self) -> None:
        os.fsync(self.directory_fd)

    def size_bytes(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def is_linked(self, fd: int) -> bool:
        """Whether the file still has a name."""
        return os.fstat(fd).st_nlink > 0

    def rename(self, name: str, new_name: str) -> None:
        """Atomically, over what had the new name."""
        os.rename(name, new_name, src_dir_fd=self.directory_fd, dst_dir_fd=self.directory_fd)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self.directory_fd)


MakeFiles: TypeAlias = Callable[[int], Files]
"""From a directory's descriptor."""


def write_all(files: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write everything, however often the system stops short. Raises OSError."""
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        count = files.write(fd, left, offset)
        if count <= 0:
            raise OSError(errno.EIO, "a write wrote nothing")
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def say(error: OSError) -> str:
    """An OSError for the person who must act."""
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no errno')})"

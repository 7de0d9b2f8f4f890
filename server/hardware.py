"""What this machine lets the process use: memory, cores, number formats. Read from /proc and the cgroup files.

A container sees the host's RAM and cores; what counts is the smallest limit on the way up through its control groups
(versions 1 and 2, nested). Every function takes the root of the file system, so that a test can bring its own.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from headrace.ops.dot import Dot, dot_of, kernel_has_tiles
from headrace.server.card import Card

_NO_LIMIT_BYTES: Final = 1 << 60
"""Version 1 says "no limit" with a number near 2^63."""


class Hardware(msgspec.Struct, frozen=True):
    """The machine, as far as this process may use it."""

    cpu_name: str
    architecture: str
    """As `uname -m` says: x86_64, aarch64, …"""
    cores: int
    """Cores the scheduler may place us on at once: the affinity mask, or less under a CPU quota."""
    ram_bytes: int
    available_bytes: int
    """Memory that can be taken now without swapping: the least of RAM and every control group's rest."""
    limit_bytes: int | None
    """The tightest control group's limit; None without one below the RAM."""
    bfloat16: bool
    """Whether the CPU multiplies bfloat16 in hardware."""
    card: Card | None = None
    """A GPU that a worker can use."""
    no_card: str = "it was not looked for"
    """Why there is none, and what to change."""
    dot: Dot = "fma"
    """And how the compiled kernels do."""


def read_hardware(root: Path = Path("/"), affinity: int | None = None, tiles: bool | None = None) -> Hardware:
    """Look at the machine. `affinity`: cores of the affinity mask, by default this process's. `tiles`: whether the
    kernel gives AMX to processes, by default this one."""
    memory = _meminfo(root)
    ram_bytes = memory["MemTotal"]
    # Kernels before 3.14 have no MemAvailable: what is free is a lower bound of it.
    available_bytes = memory.get("MemAvailable", memory["MemFree"])
    limit_bytes: int | None = None
    for limit, used in _memory_limits(root):
        if limit < ram_bytes:
            limit_bytes = limit if limit_bytes is None else min(limit_bytes, limit)
            available_bytes = min(available_bytes, max(limit - used, 0))
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    for quota in _cpu_quotas(root):
        cores = min(cores, max(int(quota), 1))
    name, features = _cpu(root)
    return Hardware(
        cpu_name=name,
        architecture=platform.machine(),
        cores=cores,
        ram_bytes=ram_bytes,
        available_bytes=available_bytes,
        limit_bytes=limit_bytes,
        bfloat16=bool(features & {"avx512_bf16", "amx_bf16", "bf16"}),
        dot=dot_of(features, kernel_has_tiles() if tiles is None else tiles),
    )


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    sizes: dict[str, int] = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return sizes


def _cpu(root: Path) -> tuple[str, set[str]]:
    """The CPU's name, and the features that its first core lists."""
    name, features = platform.machine(), set[str]()
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            features = set(value.split())
            break
    return name, features


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used without what the kernel would give back) of every control group that holds this process."""
    for folder, version in _groups(root, "memory"):
        files = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(folder / name) for name in files)
        if limit is None or used is None or limit >= _NO_LIMIT_BYTES:
            continue
        # File pages that nobody has touched lately count as used, and are dropped as soon as memory is short.
        idle = _statistic(folder / "memory.stat", "inactive_file" if version == 2 else "total_inactive_file")
        yield limit, max(used - idle, 0)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Cores' worth of time that every control group allows."""
    for folder, version in _groups(root, "cpu"):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            yield int(quota) / int(period)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of the control groups that this process is in, innermost first, and their version, for a controller."""
    paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, found = line.split(":", 2)
        for name in controllers.split(","):
            paths[name] = found
    for mounted_root, mount_point, kind, options in _mounts(root):
        version = 2 if kind == "cgroup2" else 1
        path = paths.get("" if version == 2 else controller)
        if path is None or not (kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))):
            continue
        top = root / mount_point.lstrip("/")
        # In a container the mount shows the group's own subtree, while the path is told from the host's root.
        inside = path[len(mounted_root) :] if mounted_root != "/" and path.startswith(mounted_root) else path
        folder = top / inside.lstrip("/")
        if ".." in folder.parts or not folder.is_dir():
            folder = top
        yield folder, version
        while folder != top:
            folder = folder.parent
            yield folder, version


def _mounts(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """(root within the file system, mount point, type, super options) of each mount; see proc_pid_mountinfo(5)."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        yield place[3], place[4], kind[0], kind[-1]


def _statistic(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """A file's text; "" where this kernel or this control group has no such file."""
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""

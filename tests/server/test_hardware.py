"""What the machine lets us use, from the files that a kernel shows: each test lays out its own."""

from collections.abc import Mapping
from pathlib import Path

from headrace.server.hardware import Hardware, read_hardware

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\nHugePages_Total: 0\n"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
NO_LIMIT = 9223372036854771712


def machine(root: Path, files: Mapping[str, str | int], affinity: int = 8, tiles: bool = False) -> Hardware:
    """The hardware that these files describe, over a machine of 16 GiB with 8 free."""
    laid = {"proc/meminfo": MEMINFO, "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2\n", **files}
    for name, content in laid.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n" if isinstance(content, int) else content)
    return read_hardware(root, affinity, tiles)


def test_without_control_groups_the_machine_itself_counts(tmp_path: Path) -> None:
    hardware = machine(tmp_path, {})
    assert (hardware.ram_bytes, hardware.available_bytes, hardware.limit_bytes) == (16 * GIB, 8 * GIB, None)
    assert hardware.cores == 8


def test_a_version_2_limit_counts_without_what_the_kernel_would_give_back(tmp_path: Path) -> None:
    hardware = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": 4 * GIB,
            "sys/fs/cgroup/memory.current": 3 * GIB,
            "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
        },
    )
    assert (hardware.limit_bytes, hardware.available_bytes) == (4 * GIB, 3 * GIB)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    hardware = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod7/box\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/kubepods/memory.max": 6 * GIB,
            "sys/fs/cgroup/kubepods/memory.current": 5 * GIB,
            "sys/fs/cgroup/kubepods/pod7/memory.max": 2 * GIB,
            "sys/fs/cgroup/kubepods/pod7/memory.current": 0,
            "sys/fs/cgroup/kubepods/pod7/box/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod7/box/memory.current": 0,
        },
    )
    # The limit to name is pod7's; what is left is the outer group's last GiB.
    assert (hardware.limit_bytes, hardware.available_bytes) == (2 * GIB, 1 * GIB)


def test_a_version_1_limit_counts_and_its_huge_number_is_none(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "proc/self/cgroup": "9:memory:/jobs/one\n3:cpu,cpuacct:/jobs/one\n0::/\n",
        "proc/self/mountinfo": "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 1,
        "sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes": 3 * GIB,
        "sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes": 1 * GIB,
    }
    assert machine(tmp_path, files).available_bytes == 2 * GIB
    files["sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes"] = NO_LIMIT
    assert machine(tmp_path, files).limit_bytes is None


def test_a_container_that_sees_only_its_own_group_finds_it(tmp_path: Path) -> None:
    hardware = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/0123abcd\n",
            "proc/self/mountinfo": "35 31 0:32 /docker/0123abcd /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 1 * GIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 0,
        },
    )
    assert hardware.limit_bytes == 1 * GIB


def test_a_group_outside_the_mount_is_read_at_the_mount(tmp_path: Path) -> None:
    hardware = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../elsewhere\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": 1 * GIB,
            "sys/fs/cgroup/memory.current": 0,
        },
    )
    assert hardware.limit_bytes == 1 * GIB


def test_a_limit_above_the_ram_is_none(tmp_path: Path) -> None:
    hardware = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": 64 * GIB,
            "sys/fs/cgroup/memory.current": 60 * GIB,
        },
    )
    assert (hardware.limit_bytes, hardware.available_bytes) == (None, 8 * GIB)


def test_a_full_group_has_nothing_left_rather_than_less(tmp_path: Path) -> None:
    hardware = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": 1 * GIB,
            "sys/fs/cgroup/memory.current": 2 * GIB,
        },
    )
    assert hardware.available_bytes == 0


def test_cores_are_bounded_by_affinity_and_by_quota(tmp_path: Path) -> None:
    assert machine(tmp_path / "free", {}, affinity=3).cores == 3
    quota: dict[str, str | int] = {
        "proc/self/cgroup": "0::/box\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/box/cpu.max": "250000 100000\n",
    }
    assert machine(tmp_path / "v2", quota).cores == 2
    quota["sys/fs/cgroup/box/cpu.max"] = "50000 100000\n"
    assert machine(tmp_path / "half", quota).cores == 1
    quota["sys/fs/cgroup/box/cpu.max"] = "max 100000\n"
    assert machine(tmp_path / "max", quota).cores == 8


def test_a_version_1_quota_bounds_the_cores(tmp_path: Path) -> None:
    hardware = machine(
        tmp_path,
        {
            "proc/self/cgroup": "2:cpu,cpuacct:/\n",
            "proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 400000,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
        },
    )
    assert hardware.cores == 4


def test_bfloat16_is_seen_on_x86_and_on_arm(tmp_path: Path) -> None:
    x86 = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: avx512f avx512_bf16\n"
    arm = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n"
    assert machine(tmp_path / "x86", {"proc/cpuinfo": x86}).bfloat16
    assert machine(tmp_path / "x86", {"proc/cpuinfo": x86}).cpu_name == "Some CPU"
    assert machine(tmp_path / "arm", {"proc/cpuinfo": arm}).bfloat16
    assert not machine(tmp_path / "old", {}).bfloat16


def test_how_bfloat16_is_multiplied_follows_from_the_cpu_and_its_kernel(tmp_path: Path) -> None:
    amx = {"proc/cpuinfo": "flags\t\t: avx512f avx512_bf16 amx_bf16 amx_tile\n"}
    assert machine(tmp_path / "amx", amx, tiles=True).dot == "amx"
    assert machine(tmp_path / "refused", amx, tiles=False).dot == "avx512"
    assert (
        machine(tmp_path / "avx512", {"proc/cpuinfo": "flags\t\t: avx512f avx512_bf16\n"}, tiles=True).dot == "avx512"
    )
    assert machine(tmp_path / "old", {}, tiles=True).dot == "fma"


def test_the_kernels_of_this_machine_multiply_as_the_server_says() -> None:
    from headrace.ops.simd.target import DOT

    assert read_hardware().dot == DOT


def test_this_machine_can_be_read() -> None:
    hardware = read_hardware()
    assert 0 < hardware.available_bytes <= hardware.ram_bytes
    assert hardware.cores >= 1

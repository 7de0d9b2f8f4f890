"""The lower tiers as the flags ask for them: what is planned, and what is refused with the flag to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from server.test_sizing import SMALL, machine

from headrace.kvcache.prefetch import PrefetchOptions
from headrace.kvcache.storage.client import StorageLimits
from headrace.server.config import BadSetting, Settings
from headrace.server.sizing import DoesNotFit, MemoryPlan, plan_memory
from headrace.server.tiering import DEFAULT_DISK_BYTES, TierPlan, check_tiers, plan_tiers, size_of, storage_backend

FINGERPRINT = bytes(range(16))


def memory(free_gib: float = 16, **flags: Any) -> MemoryPlan:
    return plan_memory(SMALL, Settings(**flags), machine(free_gib))


def tiers(free_gib: float = 16, **flags: Any) -> TierPlan:
    settings = Settings(**flags)
    check_tiers(settings)
    return plan_tiers(settings, memory(free_gib, **flags), machine(free_gib), FINGERPRINT)


def refusal(free_gib: float = 16, **flags: Any) -> str:
    with pytest.raises(BadSetting) as caught:
        tiers(free_gib, **flags)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------
# Which tiers there are


def test_without_flags_there_is_the_device_alone() -> None:
    assert tiers() == TierPlan()


def test_the_hierarchical_cache_is_a_host_tier_without_storage() -> None:
    plan = tiers(enable_hierarchical_cache=True)
    assert plan.host_pages > 0 and plan.storage is None


def test_a_directory_alone_turns_the_disk_on_with_a_host_tier_before_it(tmp_path: Path) -> None:
    plan = tiers(disk_cache_dir=str(tmp_path))
    assert plan.storage is not None and plan.host_pages > 0
    assert (plan.storage.backend, plan.storage.directory) == ("disk", str(tmp_path))
    assert plan.storage.capacity_bytes == DEFAULT_DISK_BYTES
    assert plan.storage.model == FINGERPRINT and plan.storage.host_pages == [plan.host_pages]


def test_a_disk_without_a_directory_lies_in_the_cache_folder(tmp_path: Path) -> None:
    plan = tiers(hicache_storage_backend="disk", cache=tmp_path)
    assert plan.storage is not None and plan.storage.directory == str(tmp_path / "kv")


def test_a_relative_directory_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = tiers(disk_cache_dir="kv")
    assert plan.storage is not None and plan.storage.directory == str(tmp_path / "kv")


def test_memory_as_storage_has_no_directory() -> None:
    plan = tiers(hicache_storage_backend="memory")
    assert plan.storage is not None and (plan.storage.backend, plan.storage.directory) == ("memory", "")


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ({}, None),
        ({"enable_hierarchical_cache": True}, None),
        ({"disk_cache_dir": "/kv"}, "disk"),
        ({"hicache_storage_backend": "disk"}, "disk"),
        ({"hicache_storage_backend": "memory"}, "memory"),
        ({"hicache_storage_backend": "none"}, None),
    ],
)
def test_the_backend_follows_from_the_flags(flags: dict[str, Any], backend: str | None) -> None:
    assert storage_backend(Settings(**flags)) == backend


def test_sizes_and_policies_reach_the_plan(tmp_path: Path) -> None:
    plan = tiers(
        disk_cache_dir=str(tmp_path),
        disk_cache_size="500MB",
        disk_cache_fsync=True,
        hicache_write_policy="write_back",
        hicache_storage_prefetch_policy="timeout",
    )
    assert plan.storage is not None
    assert (plan.storage.capacity_bytes, plan.storage.fsync) == (500_000_000, True)
    assert (plan.write_policy, plan.prefetch.policy) == ("write_back", "timeout")


# ---------------------------------------------------------------------------------------------------------------
# The host tier's size


def test_the_host_tier_is_twice_the_devices_where_memory_allows() -> None:
    plan, device = tiers(enable_hierarchical_cache=True), memory()
    assert plan.host_bytes == pytest.approx(2 * device.pool_bytes, rel=0.01)


def test_the_default_takes_at_most_half_of_what_is_left() -> None:
    plan, device = tiers(3, enable_hierarchical_cache=True), memory(3)
    assert 2 * device.pool_bytes > device.left_bytes / 2, "twice the device's would not fit"
    assert 0 < plan.host_bytes <= device.left_bytes / 2


def test_a_size_counts_before_a_ratio() -> None:
    plan = tiers(enable_hierarchical_cache=True, hicache_size=0.5, hicache_ratio=3.0)
    assert 0.49e9 < plan.host_bytes <= 0.5e9


def test_a_host_tier_may_be_smaller_than_the_devices() -> None:
    plan = tiers(enable_hierarchical_cache=True, hicache_ratio=0.1)
    assert plan.host_bytes == pytest.approx(0.1 * memory().pool_bytes, rel=0.01)


@pytest.mark.parametrize("flags", [{"hicache_size": 900.0}, {"hicache_ratio": 900.0}])
def test_a_host_tier_that_does_not_fit_is_refused_with_a_size_that_does(flags: dict[str, Any]) -> None:
    with pytest.raises(DoesNotFit) as caught:
        tiers(enable_hierarchical_cache=True, **flags)
    message = str(caught.value)
    assert message.startswith("--hicache-")
    named = re.search(r"--hicache-size ([0-9.]+) or less", message)
    assert named is not None
    assert tiers(enable_hierarchical_cache=True, hicache_size=float(named[1])).host_pages > 0


def test_a_host_tier_without_room_for_a_page_is_refused() -> None:
    refused = refusal(enable_hierarchical_cache=True, hicache_size=0.001, page_size=256)
    assert "must hold a page" in refused and "larger --hicache-size" in refused


def test_a_disk_without_room_for_a_page_is_refused() -> None:
    assert refusal(disk_cache_dir="/kv", disk_cache_size="1KB").startswith("--disk-cache-size 1KB holds no page")


# ---------------------------------------------------------------------------------------------------------------
# Flags that contradict each other


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"hicache_size": 1.0}, "--hicache-size has no effect here: it needs --enable-hierarchical-cache"),
        ({"hicache_ratio": 2.0}, "--hicache-ratio has no effect here: it needs --enable-hierarchical-cache"),
        ({"disk_cache_size": "1GB"}, "--disk-cache-size has no effect here: it needs --disk-cache-dir DIR"),
        (
            {"disk_cache_size": "1GB", "enable_hierarchical_cache": True},
            "--disk-cache-size has no effect here: it needs --disk-cache-dir DIR",
        ),
        (
            {"hicache_storage_backend_extra_config": "{}", "enable_hierarchical_cache": True},
            "--hicache-storage-backend-extra-config has no effect here",
        ),
        (
            {"disk_cache_fsync": True, "hicache_storage_backend": "memory"},
            "--disk-cache-fsync has no effect here: it needs --disk-cache-dir DIR",
        ),
        (
            {"disk_cache_dir": "/kv", "hicache_storage_backend": "memory"},
            "--disk-cache-dir has no effect here: it needs --hicache-storage-backend disk",
        ),
        (
            {"disk_cache_dir": "/kv", "hicache_storage_backend": "none"},
            "--disk-cache-dir has no effect here: it needs --hicache-storage-backend disk",
        ),
        ({"enable_hierarchical_cache": True, "disable_radix_cache": True}, "--disable-radix-cache keeps no KV at all"),
    ],
)
def test_a_flag_of_a_tier_that_is_not_there_is_refused(flags: dict[str, Any], says: str) -> None:
    assert refusal(**flags).startswith(says)


def test_a_directory_that_cant_be_used_is_refused_before_a_model_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadSetting, match=r"file/kv can't be made: Not a directory\. Give a directory"):
        check_tiers(Settings(disk_cache_dir=str(tmp_path / "file" / "kv")))
    check_tiers(Settings(disk_cache_dir=str(tmp_path / "kv")))
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_the_disk_tier_is_in_the_table_of_the_start(tmp_path: Path) -> None:
    plan = tiers(disk_cache_dir=str(tmp_path), disk_cache_size="1GB")
    assert plan.disk == (10**9, str(tmp_path))
    assert tiers(hicache_storage_backend="memory", disk_cache_size="1GB").disk is None


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"disk_cache_size": "20"}, "--disk-cache-size 20: give a size below 1000TB, such as 500MB, 20GB "),
        ({"disk_cache_size": "1000TB"}, "--disk-cache-size 1000TB: give a size below 1000TB"),
        ({"disk_cache_size": "-1GB"}, "--disk-cache-size -1GB: give a size"),
        ({"disk_cache_size": "1GiB"}, "--disk-cache-size 1GiB: give a size"),
        ({"hicache_ratio": 0.0}, "--hicache-ratio 0.0: give a factor from 0.1 to 1000."),
        ({"hicache_size": -1.0}, "--hicache-size -1.0: give GB, from 0.001 to 100000."),
        ({"hicache_write_policy": "later"}, "--hicache-write-policy later: give write_through, "),
        ({"hicache_storage_backend": "s3"}, "--hicache-storage-backend s3: give disk, memory or none."),
        ({"hicache_storage_prefetch_policy": "x"}, "--hicache-storage-prefetch-policy x: give best_effort, "),
        ({"disk_cache_dir": ""}, '--disk-cache-dir "": give the path of a directory.'),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_is_allowed(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting) as caught:
        Settings(**flags)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1KB", 1000), ("500MB", 5 * 10**8), ("20GB", 2 * 10**10), ("1.5TB", 15 * 10**11), ("2gb", 2 * 10**9)],
)
def test_sizes_are_read_in_powers_of_ten_in_either_case(text: str, size_bytes: int) -> None:
    assert size_of(Settings(disk_cache_size=text).disk_cache_size or "") == size_bytes


# ---------------------------------------------------------------------------------------------------------------
# The extra configuration


def extra(text: str) -> TierPlan:
    return tiers(hicache_storage_backend="memory", hicache_storage_backend_extra_config=text)


def test_the_extra_configuration_reaches_storage_and_prefetch() -> None:
    plan = extra(
        '{"prefetch_threshold": 256, "prefetch_timeout_base": 2, "prefetch_timeout_per_ki_token": 0.5, '
        '"io_threads": 8, "lookup_timeout_s": 0.2, "transfer_timeout_s": 3, "breaker_s": 4}'
    )
    assert plan.storage is not None and plan.storage.threads == 8
    assert plan.limits == StorageLimits(0.2, 3.0, 4.0)
    assert plan.prefetch == PrefetchOptions(threshold_tokens=256, timeout_base_ms=2000.0, timeout_per_ki_token_ms=500.0)


def test_the_extra_configuration_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "extra.json"
    path.write_text('{"prefetch_threshold": 7}')
    assert extra(f"@{path}").prefetch.threshold_tokens == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "Expected `object`"),
        ("{", "truncated"),
        ('{"prefetch_treshold": 1}', "unknown field `prefetch_treshold`"),
        ('{"io_threads": 0}', "Expected `int` >= 1 - at `$.io_threads`"),
        ('{"prefetch_threshold": -1}', "Expected `int` >= 0 - at `$.prefetch_threshold`"),
        ('{"transfer_timeout_s": 0}', "Expected `float` > 0.0 - at `$.transfer_timeout_s`"),
        ('{"lookup_timeout_s": "1"}', "Expected `float`, got `str` - at `$.lookup_timeout_s`"),
    ],
)
def test_a_wrong_extra_configuration_is_refused_with_the_fields_there_are(text: str, says: str) -> None:
    refused = refusal(hicache_storage_backend="memory", hicache_storage_backend_extra_config=text)
    assert refused.startswith("--hicache-storage-backend-extra-config: ") and says in refused
    assert "its fields are prefetch_threshold, prefetch_timeout_base" in refused


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "hicache_storage_backend": "memory",
        "hicache_storage_backend_extra_config": f"@{tmp_path}/none.json",
    }
    assert refusal(**flags) == (
        f"--hicache-storage-backend-extra-config @{tmp_path}/none.json: "
        "the file can't be read (No such file or directory)."
    )


def test_a_file_that_is_no_text_is_refused_as_one_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "extra.json").write_bytes(b'{"prefetch_threshold": "\xff"}')
    flags: dict[str, Any] = {
        "hicache_storage_backend": "memory",
        "hicache_storage_backend_extra_config": f"@{tmp_path}/extra.json",
    }
    assert "Give a JSON object" in refusal(**flags)


def test_a_bound_on_reading_reaches_the_disk_and_is_refused_without_one(tmp_path: Path) -> None:
    bound = '{"read_mb_per_s": 15}'
    plan = tiers(disk_cache_dir=str(tmp_path), hicache_storage_backend_extra_config=bound)
    assert plan.storage is not None and plan.storage.read_bytes_per_s == 15e6
    message = refusal(hicache_storage_backend="memory", hicache_storage_backend_extra_config=bound)
    assert "read_mb_per_s" in message and "disk" in message

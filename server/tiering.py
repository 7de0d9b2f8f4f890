"""The lower tiers, decided at the start: how large the host pool is, what stands behind it, and how it is used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from headrace.kvcache.host import WritePolicy
from headrace.kvcache.prefetch import PrefetchOptions
from headrace.kvcache.storage.client import StorageLimits
from headrace.kvcache.storage.disk.files import DIRECTORY_MODE
from headrace.kvcache.storage.protocol import OpenStore
from headrace.ops.wire import HostArea
from headrace.server.config import BadSetting, Settings, flag_of
from headrace.server.hardware import Hardware
from headrace.server.pool_sizes import PoolSizes
from headrace.server.sizing import DoesNotFit, MemoryPlan, size_text

DEFAULT_RATIO: Final = 2.0
"""Host pages for each device page, where memory allows."""
DEFAULT_SHARE: Final = 0.5
"""Of the memory that the plan leaves free, at most, where no size was asked for."""
MOST_EXTRA_BYTES: Final = 1 << 16
"""Of a file of settings; a longer one is cut, and then no JSON."""
DEFAULT_DISK_BYTES: Final = 20 * 10**9
_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=3600)]
_Deadline: TypeAlias = Annotated[float, Meta(gt=0, le=3600)]


class ExtraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--hicache-storage-backend-extra-config`: what is seldom set."""

    prefetch_threshold: Annotated[int, Meta(ge=0)] = 64
    """Missing tokens below which storage is not asked (SGLang's name)."""
    prefetch_timeout_base: _Seconds = 1.0
    """Seconds (SGLang's name)."""
    prefetch_timeout_per_ki_token: _Seconds = 0.25
    """Seconds (SGLang's name)."""
    io_threads: Annotated[int, Meta(ge=1, le=64)] = 4
    read_mb_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Read no faster, in MB a second, from a disk that others need too; 0 for no bound."""
    lookup_timeout_s: _Deadline = 0.1
    transfer_timeout_s: _Deadline = 10.0
    breaker_s: _Deadline = 10.0


class TierPlan(msgspec.Struct, frozen=True):
    """What stands below the device; all zero and None without tiers."""

    host_pages: int = 0
    """All full groups together."""
    slot_bytes: int = 0
    """Of their pages."""
    window_areas: list[HostArea] = []
    """Behind them: each window group's pages."""
    write_policy: WritePolicy = "write_through"
    storage: OpenStore | None = None
    limits: StorageLimits = StorageLimits()
    prefetch: PrefetchOptions = PrefetchOptions()

    @property
    def host_bytes(self) -> int:
        return self.host_pages * self.slot_bytes + sum(area.pages * area.slot_bytes for area in self.window_areas)

    @property
    def disk(self) -> tuple[int, str] | None:
        """Bytes and directory of the disk tier."""
        if self.storage is None or not self.storage.directory:
            return None
        return self.storage.capacity_bytes, self.storage.directory


def check_tiers(settings: Settings) -> None:
    """What is wrong with the flags whatever the model: said before one is fetched. Raises BadSetting."""
    backend = storage_backend(settings)
    _check_used(settings, backend)
    _extra(settings)
    if backend == "disk":
        directory = _directory(settings)
        try:
            os.makedirs(directory, DIRECTORY_MODE, exist_ok=True)
        except OSError as error:
            raise BadSetting(
                f"--disk-cache-dir {directory} can't be made: {error.strerror}. Give a directory that can be written."
            ) from None
        if not os.access(directory, os.W_OK | os.X_OK):
            raise BadSetting(f"--disk-cache-dir {directory} can't be written: give one that can.")


def plan_tiers(settings: Settings, plan: MemoryPlan, hardware: Hardware, fingerprint: bytes) -> TierPlan:
    """Raises BadSetting, DoesNotFit."""
    backend = storage_backend(settings)
    if not settings.enable_hierarchical_cache and backend is None:
        return TierPlan()
    if settings.disable_radix_cache:
        raise BadSetting("--disable-radix-cache keeps no KV at all: leave it out, or the flags of the lower tiers.")
    host_pages, slot_bytes, areas = _host_pages(settings, plan)
    extra = _extra(settings)
    storage = None
    if extra.read_mb_per_s and backend != "disk":
        raise BadSetting("read_mb_per_s has no effect here: it bounds the disk of --hicache-storage-backend disk.")
    if backend is not None:
        capacity_bytes = size_of(settings.disk_cache_size) if settings.disk_cache_size else DEFAULT_DISK_BYTES
        row_bytes = PoolSizes(plan.layout, 1).size_bytes(1, host=True)
        if capacity_bytes < row_bytes:
            raise BadSetting(
                f"--disk-cache-size {settings.disk_cache_size} holds no page of {size_text(row_bytes)}: "
                "give a larger one."
            )
        storage = OpenStore(
            backend=backend,
            capacity_bytes=capacity_bytes,
            page_tokens=plan.layout.page_tokens,
            slot_bytes=[area.slot_bytes for area in areas],
            host_offsets=[area.offset for area in areas],
            host_pages=[area.pages for area in areas],
            model=fingerprint,
            directory=_directory(settings) if backend == "disk" else "",
            fsync=settings.disk_cache_fsync,
            threads=extra.io_threads,
            read_bytes_per_s=extra.read_mb_per_s * 1e6,
        )
    return TierPlan(
        host_pages=host_pages,
        slot_bytes=slot_bytes,
        window_areas=areas[plan.layout.full_groups :],
        write_policy=settings.hicache_write_policy,
        storage=storage,
        limits=StorageLimits(extra.lookup_timeout_s, extra.transfer_timeout_s, extra.breaker_s),
        prefetch=PrefetchOptions(
            policy=settings.hicache_storage_prefetch_policy,
            threshold_tokens=extra.prefetch_threshold,
            timeout_base_ms=extra.prefetch_timeout_base * 1e3,
            timeout_per_ki_token_ms=extra.prefetch_timeout_per_ki_token * 1e3,
        ),
    )


def _host_pages(settings: Settings, plan: MemoryPlan) -> tuple[int, int, list[HostArea]]:
    """Pages of all full groups together, the bytes of each, and where every group has its own. Raises BadSetting."""
    layout, full = plan.layout, plan.layout.full_groups
    sizes = PoolSizes(layout, 1)
    row_bytes = sizes.size_bytes(1, host=True)
    pages = sizes.pages_in(_host_bytes(settings, plan, row_bytes), host=True)
    if not pages:
        raise BadSetting(f"The host tier must hold a page of {size_text(row_bytes)}: give a larger --hicache-size.")
    slot_bytes = max(layout.host_slot_bytes(group) for group in range(full))
    areas = [HostArea(0, slot_bytes, pages * full)] * full
    offset = pages * full * slot_bytes
    for group, count in list(enumerate(sizes.pages(pages)))[full:]:
        areas.append(HostArea(offset, layout.host_slot_bytes(group), count))
        offset += count * layout.host_slot_bytes(group)
    return pages * full, slot_bytes, areas


def storage_backend(settings: Settings) -> Literal["disk", "memory"] | None:
    """Which storage is used; --disk-cache-dir alone turns the disk on."""
    if settings.hicache_storage_backend == "none":
        return None
    if settings.hicache_storage_backend is not None:
        return settings.hicache_storage_backend
    return "disk" if settings.disk_cache_dir is not None else None


def _check_used(settings: Settings, backend: Literal["disk", "memory"] | None) -> None:
    """Raises BadSetting for a flag of a tier that is not there: it would have no effect."""
    host = settings.enable_hierarchical_cache or backend is not None
    needs_host = "--enable-hierarchical-cache, or --disk-cache-dir DIR for a disk tier as well"
    needs_storage = "--disk-cache-dir DIR, or --hicache-storage-backend"
    needs_disk = "--hicache-storage-backend disk, or leave that flag out"
    for field, used, needed in (
        ("hicache_ratio", host, needs_host),
        ("hicache_size", host, needs_host),
        ("hicache_storage_backend_extra_config", backend is not None, needs_storage),
        ("disk_cache_size", backend is not None, needs_storage),
        ("disk_cache_fsync", backend == "disk", "--disk-cache-dir DIR"),
        ("disk_cache_dir", backend == "disk", needs_disk),
    ):
        if getattr(settings, field) and not used:
            raise BadSetting(f"{flag_of(field)} has no effect here: it needs {needed}.")


def size_of(text: str) -> int:
    """Bytes of a size such as 20GB; the settings have checked its form."""
    return int(float(text[:-2]) * _UNITS[text[-2:].upper()])


def _directory(settings: Settings) -> str:
    if settings.disk_cache_dir is not None:
        return os.path.abspath(Path(settings.disk_cache_dir).expanduser())
    return str(settings.cache / "kv")


def _host_bytes(settings: Settings, plan: MemoryPlan, row_bytes: int) -> int:
    """Size of the host pool: as asked, else what the ratio gives and memory allows."""
    left_bytes = max(plan.left_bytes, 0)
    if settings.hicache_size is not None:
        asked_bytes = int(settings.hicache_size * 10**9)
        flag = f"--hicache-size {settings.hicache_size:g}"
    elif settings.hicache_ratio is not None:
        asked_bytes = int(settings.hicache_ratio * plan.pool_bytes)
        flag = f"--hicache-ratio {settings.hicache_ratio:g}"
    else:
        return max(min(int(DEFAULT_RATIO * plan.pool_bytes), int(DEFAULT_SHARE * left_bytes)), row_bytes)
    if asked_bytes > left_bytes:
        raise DoesNotFit(
            f"{flag} is {size_text(asked_bytes)} of host memory, but {size_text(left_bytes)} are left beside the model "
            f"and its KV cache: give --hicache-size {left_bytes * 0.9 / 1e9:.1f} or less."
        )
    return asked_bytes


def _extra(settings: Settings) -> ExtraConfig:
    text = settings.hicache_storage_backend_extra_config
    flag = "--hicache-storage-backend-extra-config"
    if text is None:
        return ExtraConfig()
    try:
        if text.startswith("@"):
            with Path(text[1:]).open("rb") as file:
                return msgspec.json.decode(file.read(MOST_EXTRA_BYTES), type=ExtraConfig)
        return msgspec.json.decode(text, type=ExtraConfig)
    except OSError as error:
        raise BadSetting(f"{flag} {text}: the file can't be read ({error.strerror}).") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        known = ", ".join(ExtraConfig.__struct_fields__)
        raise BadSetting(f"{flag}: {error}. Give a JSON object, or @FILE with one; its fields are {known}.") from None

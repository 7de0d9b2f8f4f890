"""What is simulated: a trace, a model's shape, a device, the tiers and their times. Built from flags, checked once.

A `Scenario` that exists is valid, as `Settings` are: the rest is refused with a sentence that names the flag. From it
come the options of the real engine and the costs of the simulated device and store.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.kvcache.prefetch import PrefetchOptions
from headrace.kvcache.storage.client import StorageLimits
from headrace.kvcache.storage.protocol import OpenStore, pages_per_message
from headrace.ops.wire import GroupShape, RingGeometry, Start
from headrace.sched.batch import max_batch_bytes
from headrace.sched.copying import MAX_COPY_BYTES
from headrace.sched.options import EngineOptions
from headrace.server.config import RULES, BadSetting, PrefetchPolicy, Rule, SchedulePolicy, WritePolicy, flag_of
from headrace.server.sim.cost_device import CopyCosts
from headrace.server.sim.cost_store import StoreTimes
from headrace.server.sim.shapes import DEVICES, EFFICIENCY, MODELS, DeviceFigures, ModelShape
from headrace.server.sim.step_costs import Roofline, StepCosts, read_calibration
from headrace.server.sizing import MEASURED_CHUNK_TOKENS
from headrace.server.tiering import size_of

RING_SLOTS: Final = 3
COPY_MS: Final = 10.0
"""Of one copy to the host from a GPU, at most. Some are always under way whatever their size; a copy of 8 MiB, as on a
CPU, would be one page of a large model, and most events those of copies."""
GPU_PIECE_BYTES: Final = 32 << 20
"""Of one read of a prefetch: 5 ms of a disk with 7 GB/s. A page of 16 tokens of an 8B model has 2 MiB."""
LARGEST_CHUNK_TOKENS: Final = 8192
"""Of a GPU's step, where its costs leave more room than that."""
MAX_WAIT_S: Final = 3600.0
"""For a step: a simulated device does not hang."""


def _number(low: float, high: float, what: str) -> Rule:
    return Rule(
        float, f"{what} from {low:g} to {high:g}", lambda value: type(value) in (int, float) and low <= value <= high
    )


def _whole(low: int, high: int) -> Rule:
    return Rule(int, f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def _named(names: Mapping[str, object]) -> Rule:
    return Rule(str, f"{', '.join(list(names)[:-1])} or {list(names)[-1]}", lambda value: value in names)


SIM_RULES: Final[Mapping[str, Rule]] = {
    "trace": Rule(str, "the path of a trace", lambda value: isinstance(value, str) and bool(value)),
    "limit": _whole(1, 1_000_000),
    "speed": _number(0.001, 1000, "a factor"),
    "block_tokens": _whole(1, 1 << 16),
    "seed": _whole(0, (1 << 63) - 1),
    "model_shape": _named(MODELS),
    "device": _named(DEVICES),
    "tp_size": _whole(1, 64),
    "calibration": Rule(str, "the path of a file of recorded steps", lambda value: isinstance(value, str)),
    "request_ms": _number(0, 10_000, "ms"),
    "mem_fraction_static": RULES["mem_fraction_static"],
    "max_total_tokens": RULES["max_total_tokens"],
    "context_length": RULES["context_length"],
    "page_size": RULES["page_size"],
    "disable_radix_cache": RULES["disable_radix_cache"],
    "hicache_size": RULES["hicache_size"],
    "hicache_write_policy": RULES["hicache_write_policy"],
    "disk_cache_size": RULES["disk_cache_size"],
    "prefetch_policy": RULES["hicache_storage_prefetch_policy"],
    "disk_read_gbps": _number(0.001, 1000, "GB/s"),
    "disk_write_gbps": _number(0.001, 1000, "GB/s"),
    "disk_latency_us": _number(1, 1e7, "µs"),
    "disk_hang_rate": _number(0, 1, "a share"),
    "disk_hang_s": _number(0, 3600, "seconds"),
    "disk_error_rate": _number(0, 1, "a share"),
    "max_running_requests": RULES["max_running_requests"],
    "max_queued_requests": RULES["max_queued_requests"],
    "chunked_prefill_size": _whole(1, 65536),
    "schedule_policy": RULES["schedule_policy"],
    "target_itl_ms": RULES["target_itl_ms"],
    "schedule_conservativeness": RULES["schedule_conservativeness"],
    "disable_overlap_schedule": RULES["disable_overlap_schedule"],
    "slo_ttft_ms": _number(1, 1e7, "ms"),
    "slo_itl_ms": _number(0.1, 1e6, "ms"),
}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Fields are the flags of `headrace simulate` without their dashes."""

    trace: str
    limit: int | None = None
    speed: float = 1.0
    block_tokens: int = 512
    seed: int = 0
    model_shape: str = "llama-3.1-8b"
    device: str = "h200"
    tp_size: int = 1
    calibration: str | None = None
    request_ms: float = 0.0
    mem_fraction_static: float = 0.88
    max_total_tokens: int | None = None
    context_length: int | None = None
    page_size: int = 16
    disable_radix_cache: bool = False
    hicache_size: float | None = None
    hicache_write_policy: WritePolicy = "write_through"
    disk_cache_size: str | None = None
    prefetch_policy: PrefetchPolicy = "adaptive"
    disk_read_gbps: float = 7.0
    disk_write_gbps: float = 5.0
    disk_latency_us: float = 100.0
    disk_hang_rate: float = 0.0
    disk_hang_s: float = 1.0
    disk_error_rate: float = 0.0
    max_running_requests: int = 256
    max_queued_requests: int = 1_000_000
    chunked_prefill_size: int | None = None
    schedule_policy: SchedulePolicy = "least-work"
    target_itl_ms: float | None = None
    schedule_conservativeness: float = 1.0
    disable_overlap_schedule: bool = False
    slo_ttft_ms: float = 5000.0
    slo_itl_ms: float = 100.0

    def __post_init__(self) -> None:
        for field, rule in SIM_RULES.items():
            value = getattr(self, field)
            if value is not None and not rule.holds(value):
                raise BadSetting(refusal(field, value))
        if self.disk_cache_size is not None and self.hicache_size is None:
            raise BadSetting("--disk-cache-size: pages reach the disk through the host tier: give --hicache-size GB.")
        if self.disable_radix_cache and self.hicache_size is not None:
            raise BadSetting("--disable-radix-cache keeps no KV at all: leave it out, or --hicache-size.")
        if self.num_pages < self.model.layout(self.page_size).pages(min(self.context_tokens, 256)):
            raise BadSetting(
                f"{self.model_shape} and its KV do not fit {self.tp_size} x {self.device} with --mem-fraction-static "
                f"{self.mem_fraction_static:g}: give a larger --tp-size, or --max-total-tokens."
            )

    # ------------------------------------------------------------------------------------------------------------
    # What the flags amount to

    @property
    def model(self) -> ModelShape:
        return MODELS[self.model_shape]

    @property
    def figures(self) -> DeviceFigures:
        return DEVICES[self.device]

    @property
    def page_bytes(self) -> int:
        return self.model.layout(self.page_size).host_slot_bytes(0)

    @property
    def context_tokens(self) -> int:
        return min(self.context_length or self.model.context_tokens, self.model.context_tokens)

    @property
    def num_pages(self) -> int:
        """Of the device, or of all devices together."""
        layout = self.model.layout(self.page_size)
        if self.max_total_tokens is not None:
            return layout.pages(self.max_total_tokens)
        room_bytes = self.figures.memory_bytes * self.tp_size * self.mem_fraction_static - self.model.weights_bytes
        return max(0, int(room_bytes) // layout.page_bytes(0))

    @property
    def host_pages(self) -> int:
        return int(self.hicache_size * 1e9) // self.page_bytes if self.hicache_size is not None else 0

    @property
    def disk_pages(self) -> int:
        return size_of(self.disk_cache_size) // self.page_bytes if self.disk_cache_size is not None else 0

    def step_costs(self) -> StepCosts:
        """Raises BadSetting where a calibration can't be used."""
        if self.calibration is not None:
            return read_calibration(Path(self.calibration))
        return Roofline(self.model, self.figures, self.tp_size)

    def copy_costs(self) -> CopyCosts:
        figures = self.figures
        bytes_per_s = figures.copy_bytes_per_s * self.tp_size * EFFICIENCY.copy
        return CopyCosts(self.page_bytes, bytes_per_s, self.model.layers, figures.loads_overlap)

    def store_times(self) -> StoreTimes:
        return StoreTimes(
            read_bytes_per_s=self.disk_read_gbps * 1e9,
            write_bytes_per_s=self.disk_write_gbps * 1e9,
            latency_us=self.disk_latency_us,
            hang_rate=self.disk_hang_rate,
            hang_s=self.disk_hang_s,
            error_rate=self.disk_error_rate,
        )

    def engine_options(self) -> EngineOptions:
        """What the real engine is told."""
        model, layout, slots = self.model, self.model.layout(self.page_size), self.max_running_requests
        context = min(self.context_tokens, self.num_pages * self.page_size)
        largest = LARGEST_CHUNK_TOKENS if self.figures.loads_overlap else MEASURED_CHUNK_TOKENS
        chunk = min(self.chunked_prefill_size or largest, context)
        room = max_batch_bytes(slots, context, chunk, self.page_size, 1)
        group = layout.groups[0]
        start = Start(
            model_path=self.model_shape,
            dtype="bfloat16",
            quantization="none",
            threads=1,
            max_slots=slots,
            max_context_tokens=context,
            page_tokens=self.page_size,
            ring=RingGeometry(RING_SLOTS, room, slots, chunk, model.vocab),
            groups=[GroupShape("full", 0, list(group.layers), group.kv_heads, group.head_dim)],
            host_slot_bytes=self.page_bytes if self.host_pages else 0,
        )
        return EngineOptions(
            layout=layout,
            start=start,
            num_pages=[self.num_pages],
            fingerprint=b"simulated",
            max_chunk_tokens=chunk,
            prefill_tokens=0 if self.chunked_prefill_size is None else chunk,
            overlap=not self.disable_overlap_schedule,
            reuse=not self.disable_radix_cache,
            host_pages=self.host_pages,
            write_policy=self.hicache_write_policy,
            max_copy_bytes=self._copy_bytes(),
            storage=self._open_store() if self.disk_pages else None,
            storage_limits=StorageLimits(),
            prefetch=self._prefetch(),
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=1 << 60,
            schedule_policy=self.schedule_policy,
            schedule_seed=self.seed,
            target_itl_ms=self.target_itl_ms or 0.0,
            conservativeness=self.schedule_conservativeness,
            step_timeout_s=MAX_WAIT_S,
        )

    def _copy_bytes(self) -> int:
        if not self.figures.loads_overlap:
            return MAX_COPY_BYTES
        bytes_in_time = int(self.copy_costs().bytes_per_s * COPY_MS / 1e3)
        return min(bytes_in_time, pages_per_message(self.page_size) * self.page_bytes)

    def _prefetch(self) -> PrefetchOptions:
        if not self.figures.loads_overlap:
            return PrefetchOptions(policy=self.prefetch_policy)
        return PrefetchOptions(policy=self.prefetch_policy, piece_bytes=GPU_PIECE_BYTES)

    def _open_store(self) -> OpenStore:
        return OpenStore(
            backend="memory",
            capacity_bytes=self.disk_pages * self.page_bytes,
            page_tokens=self.page_size,
            slot_bytes=[self.page_bytes],
            host_offsets=[0],
            host_pages=[self.host_pages],
            model=bytes(16),
        )


def scenario_from(flags: Mapping[str, str | bool]) -> Scenario:
    """A scenario from what stood on the command line, by field. Raises BadSetting."""
    given: dict[str, Any] = {}
    for field, value in flags.items():
        given[field] = parse(field, value) if isinstance(value, str) else value
    if "trace" not in given:
        raise BadSetting("What should be replayed? Give --trace FILE.")
    return Scenario(**given)


def parse(field: str, text: str) -> str | int | float | bool:
    """A flag's text as its value. Raises BadSetting."""
    rule = SIM_RULES[field]
    if rule.kind is bool:
        if text.lower() not in ("true", "false"):
            raise BadSetting(f"{flag_of(field)} {text}: give true or false.")
        return text.lower() == "true"
    try:
        return rule.kind(text)
    except ValueError:
        raise BadSetting(refusal(field, text)) from None


def refusal(field: str, value: object) -> str:
    """What to say to a value that can't be."""
    shown = value if value != "" else '""'
    return f"{flag_of(field)} {shown}: give {SIM_RULES[field].allowed}."

"""What a user may set: one struct, checked once. The only module that reads the environment.

`Settings` that exist are valid: `__post_init__` refuses the rest with a sentence that names the flag, the value and
what is allowed. What depends on the machine or the model (does it fit, how many threads) is decided in `sizing`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from headrace.server.models import DEFAULT_MODEL, cache_folder, hub_model

MAX_CHAT_TEMPLATE_BYTES: Final = 1 << 20


class BadSetting(ValueError):
    """A flag, or two flags together, can't be; the message says which and what to give instead."""


class Rule(NamedTuple):
    """What a flag may be."""

    kind: type[str] | type[int] | type[float] | type[bool]
    """What its text is read as; a bool takes no text."""
    allowed: str
    """Follows "give": "a whole number from 0 to 65535"."""
    holds: Callable[[Any], bool]


def _whole(low: int, high: int, also: str = "") -> Rule:
    allowed = f"a whole number from {low} to {high}" + (f" ({also})" if also else "")
    return Rule(int, allowed, lambda value: type(value) is int and low <= value <= high)


def _seconds(low: float, high: float, also: str = "") -> Rule:
    allowed = f"seconds from {low:g} to {high:g}" + (f" ({also})" if also else "")
    return Rule(float, allowed, lambda value: type(value) in (int, float) and low <= value <= high)


def _number(low: float, high: float, what: str) -> Rule:
    return Rule(float, f"{what} from {low:g} to {high:g}", lambda value: type(value) is float and low <= value <= high)


def _one_of(literal: object) -> Rule:
    names = get_args(literal)
    allowed = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
    return Rule(str, allowed, lambda value: value in names)


def _text(allowed: str, pattern: str) -> Rule:
    matches = re.compile(pattern).fullmatch
    return Rule(str, allowed, lambda value: isinstance(value, str) and matches(value) is not None)


LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
Dtype: TypeAlias = Literal["auto", "float32", "bfloat16"]
Quantization: TypeAlias = Literal["none", "q8"]
CpuKernels: TypeAlias = Literal["auto", "compiled", "torch"]
SamplingSource: TypeAlias = Literal["model", "openai"]
SchedulePolicy: TypeAlias = Literal["least-work", "fcfs", "lpm", "dfs-weight", "lof", "random", "hrrn"]

WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy: TypeAlias = Literal["best_effort", "wait_complete", "timeout", "adaptive"]
PageHash: TypeAlias = Literal["xxh3", "sha256"]
StorageBackend: TypeAlias = Literal["disk", "memory", "none"]

_SWITCH: Final = Rule(bool, "no value: it is a switch", lambda value: type(value) is bool)
_KEY: Final = _text("8 to 512 printable ASCII characters without spaces", r"[!-~]{8,512}")

RULES: Final[Mapping[str, Rule]] = {
    "model_path": _text(
        "the name of a known model (`headrace models list`), the path of a GGUF file or a Hugging Face folder, or a "
        "model of the Hugging Face Hub as ORG/NAME",
        r".+",
    ),
    "served_model_name": _text("a name of 1 to 256 characters", r"[^\x00-\x1f\x7f]{1,256}"),
    "chat_template": _text("the path of a Jinja file", r".+"),
    "sampling_defaults": _one_of(SamplingSource),
    "host": _text("an address or a host name alone, such as 127.0.0.1 or 0.0.0.0", r"[0-9A-Za-z.:_%-]+"),
    "port": _whole(0, 65535, "0: any free one"),
    "api_key": _KEY,
    "admin_api_key": _KEY,
    "log_level": _one_of(LogLevel),
    "request_timeout_s": _seconds(0, 1e6, "0: no limit"),
    "queue_timeout_s": _seconds(0, 1e6, "0: no limit"),
    "drain_timeout_s": _seconds(0, 3600),
    "device": _one_of(Device),
    "dtype": _one_of(Dtype),
    "quantization": _one_of(Quantization),
    "cpu_kernels": _one_of(CpuKernels),
    "cpu_threads": _whole(1, 1024),
    "context_length": _whole(2, 1 << 24),
    "max_total_tokens": _whole(1, 1 << 31),
    "mem_fraction_static": Rule(
        float, "a fraction above 0 and below 1", lambda value: type(value) is float and 0 < value < 1
    ),
    "page_size": Rule(
        int,
        "a power of two from 1 to 256",
        lambda value: type(value) is int and 1 <= value <= 256 and value & (value - 1) == 0,
    ),
    "enable_hierarchical_cache": _SWITCH,
    "hicache_ratio": Rule(
        float, "a factor from 0.1 to 1000", lambda value: type(value) is float and 0.1 <= value <= 1000
    ),
    "hicache_size": Rule(
        float, "GB, from 0.001 to 100000", lambda value: type(value) is float and 1e-3 <= value <= 1e5
    ),
    "hicache_write_policy": _one_of(WritePolicy),
    "hicache_storage_backend": _one_of(StorageBackend),
    "hicache_storage_prefetch_policy": _one_of(PrefetchPolicy),
    "hicache_storage_backend_extra_config": _text("a JSON object, or @FILE with one", r"(?s).+"),
    "disk_cache_dir": _text("the path of a directory", r".+"),
    "disk_cache_size": _text(
        "a size below 1000TB, such as 500MB, 20GB or 1.5TB",
        r"([0-9]{1,12}(\.[0-9]+)?[kK]|[0-9]{1,9}(\.[0-9]+)?[mM]|[0-9]{1,6}(\.[0-9]+)?[gG]|[0-9]{1,3}(\.[0-9]+)?[tT])[bB]",
    ),
    "disk_cache_fsync": _SWITCH,
    "page_hash": _one_of(PageHash),
    "max_running_requests": _whole(1, 1024),
    "max_queued_requests": _whole(1, 1_000_000),
    "max_queued_tokens": _whole(1, 1 << 31),
    "chunked_prefill_size": Rule(
        int,
        "a whole number from 1 to 65536, or -1 (whole prompts, no chunks)",
        lambda value: type(value) is int and (value == -1 or 1 <= value <= 65536),
    ),
    "schedule_policy": _one_of(SchedulePolicy),
    "enable_priority_scheduling": _SWITCH,
    "schedule_low_priority_values_first": _SWITCH,
    "priority_scheduling_preemption_threshold": _whole(0, (1 << 32) - 1),
    "disable_priority_preemption": _SWITCH,
    "abort_on_priority_when_disabled": _SWITCH,
    "target_itl_ms": Rule(
        float, "ms from 1 to 10000", lambda value: type(value) in (int, float) and 1 <= value <= 10_000
    ),
    "schedule_conservativeness": Rule(
        float, "a factor from 0.1 to 10", lambda value: type(value) in (int, float) and 0.1 <= value <= 10
    ),
    "disable_overlap_schedule": _SWITCH,
    "disable_radix_cache": _SWITCH,
    "skip_server_warmup": _SWITCH,
    "watchdog_timeout": _seconds(1, 86400),
    "record_steps": _text("the path of a file", r".+"),
}


def model_cache() -> Path:
    """Folder of fetched models, for commands that need no other setting."""
    return cache_folder(os.environ)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was chosen for this server. None: decided at start, as the flag's help says.

    Fields are the flags without their dashes, so that a message can name the flag of a field.
    """

    model_path: str = DEFAULT_MODEL
    served_model_name: str | None = None
    chat_template: str | None = None
    sampling_defaults: SamplingSource = "model"
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    admin_api_key: str | None = None
    log_level: LogLevel = "info"
    request_timeout_s: float = 3600.0
    queue_timeout_s: float = 0.0
    drain_timeout_s: float = 30.0
    device: Device = "auto"
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
    cpu_kernels: CpuKernels = "auto"
    cpu_threads: int | None = None
    context_length: int | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    page_size: int = 16
    enable_hierarchical_cache: bool = False
    hicache_ratio: float | None = None
    hicache_size: float | None = None
    hicache_write_policy: WritePolicy = "write_through"
    hicache_storage_backend: StorageBackend | None = None
    hicache_storage_prefetch_policy: PrefetchPolicy = "adaptive"
    hicache_storage_backend_extra_config: str | None = None
    disk_cache_dir: str | None = None
    disk_cache_size: str | None = None
    disk_cache_fsync: bool = False
    page_hash: PageHash = "xxh3"
    max_running_requests: int = 64
    max_queued_requests: int = 512
    max_queued_tokens: int | None = None
    chunked_prefill_size: int | None = None
    target_itl_ms: float | None = None
    schedule_policy: SchedulePolicy = "least-work"
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    disable_priority_preemption: bool = False
    abort_on_priority_when_disabled: bool = False
    schedule_conservativeness: float = 1.0
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    skip_server_warmup: bool = False
    watchdog_timeout: float = 300.0
    record_steps: str | None = None
    cache: Path = msgspec.field(default_factory=model_cache)
    """Folder of fetched models. No flag: from the environment."""

    def __post_init__(self) -> None:
        for field, rule in RULES.items():
            value = getattr(self, field)
            if value is not None and not rule.holds(value):
                raise BadSetting(_refusal(field, value, rule))
        _check_together(self)
        if self.chat_template is not None:
            _check_chat_template(Path(self.chat_template))

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.public().items())})"

    @property
    def model_name(self) -> str:
        """What the API calls the model: --served-model-name, else the model's name (on the hub with its owner's) or
        its file's."""
        if self.served_model_name is not None:
            return self.served_model_name
        hub = hub_model(self.model_path)
        if hub is not None and not Path(self.model_path).exists():
            return hub.name
        return Path(self.model_path).name.removesuffix(".gguf") or self.model_path

    @property
    def exposed(self) -> bool:
        """Whether other machines may reach the server."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True

    def warnings(self) -> list[str]:
        """Choices that are allowed, and that the user should know of."""
        warnings: list[str] = []
        if self.exposed and self.api_key is None:
            warnings.append(
                f"--host {self.host} lets other machines use this server, and without a key anyone who reaches it can. "
                "Set --api-key, or keep --host 127.0.0.1."
            )
        if not self.enable_priority_scheduling:
            for field in ("schedule_low_priority_values_first", "disable_priority_preemption"):
                if getattr(self, field):
                    warnings.append(f"{flag_of(field)} does nothing without --enable-priority-scheduling.")
        return warnings

    @property
    def preempt_above(self) -> int | None:
        """By how much a priority must be exceeded to be preempted; None: never."""
        preempts = self.enable_priority_scheduling and not self.disable_priority_preemption
        return self.priority_scheduling_preemption_threshold if preempts else None

    def public(self) -> dict[str, Any]:
        """Field by field, fit for logs and `/server_info`: a key shows only that it is set."""
        values: dict[str, Any] = msgspec.structs.asdict(self)
        for name in ("api_key", "admin_api_key"):
            values[name] = None if values[name] is None else "(set)"
        values["cache"] = str(self.cache)
        return values


def flag_of(field: str) -> str:
    """The flag that sets a field."""
    return "--" + field.replace("_", "-")


def settings_from(flags: Mapping[str, str | bool], environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from what stood on the command line, by field, and the environment. Raises BadSetting.

    Keys may come as HEADRACE_API_KEY and HEADRACE_ADMIN_API_KEY: a command line is there for every user of the
    machine to read.
    """
    given: dict[str, Any] = {"cache": cache_folder(environ)}
    for field in ("api_key", "admin_api_key"):
        if (key := environ.get(f"HEADRACE_{field.upper()}")) is not None:
            given[field] = key
    for field, value in flags.items():
        given[field] = _parse(field, value) if isinstance(value, str) else value
    return Settings(**given)


def _parse(field: str, text: str) -> str | int | float:
    rule = RULES[field]
    try:
        return rule.kind(text)
    except ValueError:
        raise BadSetting(_refusal(field, text, rule)) from None


def _refusal(field: str, value: object, rule: Rule) -> str:
    shown = "(hidden)" if field.endswith("api_key") else value if value != "" else '""'
    return f"{flag_of(field)} {shown}: give {rule.allowed}."


def _check_together(settings: Settings) -> None:
    """Numbers that contradict each other, whatever the model and the machine."""
    context, pool = settings.context_length, settings.max_total_tokens
    if context is not None and pool is not None and context > pool:
        raise BadSetting(
            f"--context-length {context} is more than the cache of --max-total-tokens {pool} can hold: "
            f"give --max-total-tokens {context} or more, or --context-length {pool} or less."
        )
    if context is not None and settings.max_queued_tokens is not None and context > settings.max_queued_tokens:
        raise BadSetting(
            f"A prompt as long as --context-length {context} could never wait under --max-queued-tokens "
            f"{settings.max_queued_tokens}: give --max-queued-tokens {context} or more, or a shorter context."
        )
    if settings.target_itl_ms is not None and settings.skip_server_warmup:
        raise BadSetting(
            "--target-itl-ms needs what the warm-up measures: leave out --skip-server-warmup, or fix the tokens of a "
            "step with --chunked-prefill-size."
        )
    if settings.admin_api_key is not None and settings.admin_api_key == settings.api_key:
        raise BadSetting("--admin-api-key is the same as --api-key: give another, or leave it out.")


def _check_chat_template(path: Path) -> None:
    if not path.is_file():
        raise BadSetting(f"--chat-template {path}: there is no such file. Give the path of a Jinja file.")
    size_bytes = path.stat().st_size
    if size_bytes > MAX_CHAT_TEMPLATE_BYTES:
        raise BadSetting(
            f"--chat-template {path} has {size_bytes} bytes; a template may have {MAX_CHAT_TEMPLATE_BYTES}. "
            "Is this the right file?"
        )

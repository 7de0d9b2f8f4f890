"""Where memory goes, decided before anything is loaded: what fits is planned, what doesn't is refused with a way out.

The plan is made of the model's shape, the settings and the machine; it settles everything that the settings left open
(dtype, pool size, longest context, threads). Weights and KV are counted; workspace is bounded from above, by what the
model's operations keep alive at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.ops.models.config import ModelConfig
from headrace.server.card_sizing import (
    CARD_PROGRAM_BYTES,
    CHUNK_TOKENS,
    HOST_PROGRAM_BYTES,
    card_weights_bytes,
    card_workspace_bytes,
)
from headrace.server.config import BadSetting, Settings
from headrace.server.hardware import Hardware
from headrace.server.pool_sizes import PoolSizes

if TYPE_CHECKING:
    from rich.table import Table

RUNTIME_BYTES: Final = 550 << 20
"""Python, torch and their libraries in all processes: the server 60 MiB and its tokenizer 50, the worker 170 and its
compiler 110, a text worker 110 (measured), and room to breathe."""
SPARE_FRACTION: Final = 0.05
"""Of the free memory, left alone: page tables, sockets, and everybody else."""
DEFAULT_POOL_BYTES: Final = 1 << 30
"""The worker touches the pool when it starts, 0.7 s a GiB: a larger one is worth its wait to whoever asks for it."""
DEFAULT_POOL_FRACTION: Final = 0.25
"""Of what is left after weights and workspace, where that is less: the machine has other uses too."""
LARGEST_DEFAULT_FRACTION: Final = 0.5
"""The same, where it takes more to hold one whole context."""
MEASURED_CHUNK_TOKENS: Final = 2048
"""The longest prefill chunk that the warm-up may choose."""
DEFAULT_QUEUED_TOKENS: Final = 262_144
SMALLEST_POOL_TOKENS: Final = 256
"""A cache that memory alone leaves smaller than this is no server."""

COMPILED_ARCHITECTURES: Final = ("x86_64", "aarch64")
"""For which kernels are compiled: with instructions for bfloat16 and int8 where the CPU has them, else without."""
Q8_GROUP_BYTES: Final = 48
"""32 weights of 8 bits, with the scales and offsets of their halves; those that a file has in 4 bits take half."""
_log: Final = logging.getLogger("headrace.sizing")
_VALUE_BYTES: Final = {"float32": 4, "bfloat16": 2}


class DoesNotFit(BadSetting):
    """What was asked for needs more memory than there is; the message says which flag would make it fit."""


class MemoryPlan(msgspec.Struct, frozen=True):
    """What the server will run with, and the bytes of each part."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    kernels: Literal["compiled", "torch", "triton"]
    quantization: str
    layout: KvLayout
    num_pages: tuple[int, ...]
    """Device pages of each layer group."""
    pool_tokens: int
    """Tokens that the pool holds."""
    max_context_tokens: int
    """The longest prompt plus output that can run: the context length, or the pool where that is smaller."""
    max_chunk_tokens: int
    """The longest prefill chunk that a step may have."""
    prefill_tokens: int
    """Prefill tokens of a step; 0: as many as were measured to fit."""
    max_running_requests: int
    max_queued_tokens: int
    cpu_threads: int
    weights_bytes: int
    pool_bytes: int
    window_saved_bytes: int
    """What window groups would take more if they kept every token that the full groups do."""
    workspace_bytes: int
    runtime_bytes: int
    """Of the host: programs and their libraries."""
    available_bytes: int
    """Of the host."""
    card_bytes: int = 0
    """Of a card, before anything is loaded: then weights, KV and workspace are there."""

    @property
    def left_bytes(self) -> int:
        """What stays free of the host's memory when everything is in use."""
        on_host = 0 if self.device == "cuda" else self.model_bytes
        return self.available_bytes - on_host - self.runtime_bytes

    @property
    def card_left_bytes(self) -> int:
        """The same of a card's."""
        return self.card_bytes - self.model_bytes - CARD_PROGRAM_BYTES

    @property
    def model_bytes(self) -> int:
        """Where the model runs: weights, KV and workspace."""
        return self.weights_bytes + self.pool_bytes + self.workspace_bytes


class _Needs(msgspec.Struct, frozen=True):
    """What is settled before the size of the pool."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    kernels: Literal["compiled", "torch", "triton"]
    context_tokens: int
    chunk_tokens: int
    layout: KvLayout
    weights_bytes: int
    workspace_bytes: int
    runtime_bytes: int
    free_bytes: int
    """Where the model runs."""
    room_bytes: int
    """For the pool; negative where not even the rest fits."""
    sizes: PoolSizes
    """Of the pools, told by the pages of a full group."""

    @property
    def most_pages(self) -> int:
        return self.sizes.pages_in(self.room_bytes)

    @property
    def context_pages(self) -> int:
        return self.layout.pages(self.context_tokens)


def plan_memory(model: ModelConfig, settings: Settings, hardware: Hardware) -> MemoryPlan:
    """Decide, or raise BadSetting (DoesNotFit where it is memory that lacks)."""
    cpu_threads = _threads(settings, hardware)
    needs = _needs(model, settings, hardware)
    if not _has_room(needs):
        raise DoesNotFit(_no_room(model, settings, hardware, needs))
    pages = _pages(settings, needs)
    pool_tokens = pages * needs.layout.page_tokens
    chunk_tokens = min(needs.chunk_tokens, pool_tokens)
    return MemoryPlan(
        device=needs.device,
        dtype=needs.dtype,
        kernels=needs.kernels,
        quantization=settings.quantization,
        layout=needs.layout,
        num_pages=needs.sizes.pages(pages),
        pool_tokens=pool_tokens,
        max_context_tokens=min(needs.context_tokens, pool_tokens),
        max_chunk_tokens=chunk_tokens,
        prefill_tokens=0 if settings.chunked_prefill_size is None else chunk_tokens,
        max_running_requests=settings.max_running_requests,
        max_queued_tokens=settings.max_queued_tokens or max(DEFAULT_QUEUED_TOKENS, needs.context_tokens),
        cpu_threads=cpu_threads,
        weights_bytes=needs.weights_bytes,
        pool_bytes=needs.sizes.size_bytes(pages),
        window_saved_bytes=needs.sizes.saved_bytes(pages),
        workspace_bytes=needs.workspace_bytes,
        runtime_bytes=HOST_PROGRAM_BYTES if needs.device == "cuda" else RUNTIME_BYTES,
        available_bytes=hardware.available_bytes,
        card_bytes=needs.free_bytes if needs.device == "cuda" else 0,
    )


def kv_layout(model: ModelConfig, dtype: str, page_tokens: int, context_tokens: int) -> KvLayout:
    """The model's KV. Layers with a window have a group of their own, which keeps only that, where some have none, and
    contexts (of `context_tokens` at most) can become longer; else all layers are one full group."""

    def group(kind: Literal["full", "window"], window_tokens: int, layers: Sequence[int]) -> LayerGroup:
        return LayerGroup(kind, window_tokens, tuple(layers), model.kv_heads, model.head_dim, _VALUE_BYTES[dtype])

    full = [layer for layer in range(model.layers) if layer not in model.window_layers]
    if not full or not model.window_layers or context_tokens <= model.window_span:
        return KvLayout(page_tokens, (group("full", 0, range(model.layers)),))
    return KvLayout(page_tokens, (group("full", 0, full), group("window", model.window_span, model.window_layers)))


# ---------------------------------------------------------------------------------------------------------------
# What the settings left open


def chosen_device(settings: Settings, hardware: Hardware) -> Literal["cpu", "cuda"]:
    """What the model runs on. Raises BadSetting."""
    on_cpu = [
        f"{flag} {value}"
        for flag, value, default in (
            ("--cpu-kernels", settings.cpu_kernels, "auto"),
            ("--quantization", settings.quantization, "none"),
        )
        if value != default
    ]
    if settings.device != "cuda":
        return "cuda" if settings.device == "auto" and hardware.card is not None and not on_cpu else "cpu"
    if hardware.card is None:
        raise BadSetting(f"--device cuda: {hardware.no_card}, or give --device cpu.")
    if on_cpu:
        raise BadSetting(f"{on_cpu[0]} is for CPUs only: leave it out, or give --device cpu.")
    return "cuda"


def _dtype(settings: Settings, hardware: Hardware, device: Literal["cpu", "cuda"]) -> Literal["float32", "bfloat16"]:
    if settings.dtype != "auto":
        return settings.dtype
    return "bfloat16" if device == "cuda" or hardware.bfloat16 else "float32"


def _kernels(
    model: ModelConfig, settings: Settings, hardware: Hardware, device: Literal["cpu", "cuda"]
) -> Literal["compiled", "torch", "triton"]:
    if device == "cuda":
        return "triton"
    if settings.cpu_kernels == "torch":
        if settings.quantization != "none":
            raise BadSetting(
                f"--quantization {settings.quantization} needs the compiled kernels: leave --cpu-kernels torch out, or "
                "give --quantization none."
            )
        return "torch"
    lacking = model.not_compiled
    if not lacking and hardware.architecture not in COMPILED_ARCHITECTURES:
        lacking = f"this is a {hardware.architecture} CPU, not {' or '.join(COMPILED_ARCHITECTURES)}"
    if not lacking:
        return "compiled"
    if settings.cpu_kernels == "compiled" or settings.quantization != "none":
        raise BadSetting(f"The compiled kernels can't run {model.name}: {lacking}. Give --cpu-kernels torch instead.")
    _log.info("the compiled kernels can't run %s (%s): torch computes instead", model.name, lacking)
    return "torch"


def _threads(settings: Settings, hardware: Hardware) -> int:
    if settings.cpu_threads is None:
        # As many threads as cores is the worst case beside a busy server: a decode step took 34 ms instead of 17.
        return max(1, hardware.cores - 1)
    if settings.cpu_threads > hardware.cores:
        raise BadSetting(
            f"--cpu-threads {settings.cpu_threads}: this process may use {hardware.cores} "
            f"core{'s' if hardware.cores > 1 else ''}; give {hardware.cores} or fewer."
        )
    return settings.cpu_threads


def _context(model: ModelConfig, settings: Settings) -> int:
    if settings.context_length is None:
        return model.context_tokens
    if settings.context_length > model.context_tokens:
        raise BadSetting(
            f"--context-length {settings.context_length}: {settings.model_name} was trained for contexts of "
            f"{model.context_tokens} tokens; give --context-length {model.context_tokens} or less."
        )
    return settings.context_length


def _chunk(settings: Settings, context_tokens: int, device: Literal["cpu", "cuda"]) -> int:
    if settings.chunked_prefill_size == -1:
        return context_tokens
    usual = CHUNK_TOKENS if device == "cuda" else MEASURED_CHUNK_TOKENS
    return min(settings.chunked_prefill_size or usual, context_tokens)


def _pages(settings: Settings, needs: _Needs) -> int:
    """Pages of the pool: as asked, else a share of the room."""
    if settings.mem_fraction_static is not None:
        pages = most = _pages_of_fraction(settings.mem_fraction_static, needs)
    elif needs.device == "cuda":
        # Nobody else wants a card's memory, and nothing of it must be touched first.
        most = needs.most_pages
        pages = min(most, settings.max_running_requests * needs.context_pages)
    else:
        most = needs.most_pages
        # A quarter or a GiB; up to a half for one whole context; never more than all requests together could use.
        sizes = needs.sizes
        most_bytes = sizes.size_bytes(most)
        quarter, half = (
            sizes.pages_in(int(most_bytes * part)) for part in (DEFAULT_POOL_FRACTION, LARGEST_DEFAULT_FRACTION)
        )
        usual = min(quarter, sizes.pages_in(DEFAULT_POOL_BYTES))
        half = max(half, needs.layout.pages(SMALLEST_POOL_TOKENS))
        pages = min(max(usual, min(needs.context_pages, half)), settings.max_running_requests * needs.context_pages)
    if settings.context_length is not None:
        if needs.context_pages > most:
            raise DoesNotFit(_context_too_long(needs, most))
        pages = max(pages, needs.context_pages)
    if settings.max_total_tokens is not None:
        pages = needs.layout.pages(settings.max_total_tokens)
        if pages > most:
            raise DoesNotFit(_pool_too_large(settings, needs, pages, most))
    return pages


def _pages_of_fraction(fraction: float, needs: _Needs) -> int:
    """Pages that --mem-fraction-static leaves beside the weights."""
    free_bytes = needs.free_bytes
    smallest_bytes = needs.sizes.size_bytes(needs.layout.pages(SMALLEST_POOL_TOKENS))
    pool_bytes = int(free_bytes * fraction) - needs.weights_bytes
    if smallest_bytes <= pool_bytes <= needs.room_bytes:
        return needs.sizes.pages_in(pool_bytes)
    least = math.ceil((needs.weights_bytes + smallest_bytes) / free_bytes * 100) / 100
    largest = math.floor((needs.weights_bytes + needs.room_bytes) / free_bytes * 100) / 100
    if pool_bytes < smallest_bytes:
        says = f"is too little for {size_text(needs.weights_bytes)} of weights and a KV cache"
    else:
        says = f"leaves less than the server itself needs ({size_text(needs.workspace_bytes + needs.runtime_bytes)})"
    # Both ends are rounded inwards; where nothing is left between them, the default is what fits.
    gives = f"give {least:g} to {largest:g}" if least <= largest else "leave the flag out"
    raise DoesNotFit(f"--mem-fraction-static {fraction:g} of {size_text(free_bytes)} free memory {says}: {gives}.")


# ---------------------------------------------------------------------------------------------------------------
# Bytes


def _needs(model: ModelConfig, settings: Settings, hardware: Hardware) -> _Needs:
    device = chosen_device(settings, hardware)
    dtype, kernels = _dtype(settings, hardware, device), _kernels(model, settings, hardware, device)
    context_tokens = _context(model, settings)
    chunk_tokens = _chunk(settings, context_tokens, device)
    layout = kv_layout(model, dtype, settings.page_size, context_tokens)
    sizes = (model, settings.max_running_requests, chunk_tokens, context_tokens)
    if device == "cuda":
        assert hardware.card is not None
        weights_bytes = card_weights_bytes(model, _VALUE_BYTES[dtype])
        workspace_bytes = card_workspace_bytes(*sizes, settings.page_size, _VALUE_BYTES[dtype])
        runtime_bytes, free_bytes = CARD_PROGRAM_BYTES, hardware.card.free_bytes
    else:
        weights_bytes = _weights_bytes(model, dtype, settings.quantization)
        workspace_bytes = _workspace_bytes(*sizes)
        runtime_bytes, free_bytes = RUNTIME_BYTES, hardware.available_bytes
    return _Needs(
        device=device,
        dtype=dtype,
        kernels=kernels,
        context_tokens=context_tokens,
        chunk_tokens=chunk_tokens,
        layout=layout,
        weights_bytes=weights_bytes,
        workspace_bytes=workspace_bytes,
        runtime_bytes=runtime_bytes,
        free_bytes=free_bytes,
        room_bytes=int(free_bytes * (1 - SPARE_FRACTION)) - weights_bytes - workspace_bytes - runtime_bytes,
        sizes=PoolSizes(layout, settings.max_running_requests, chunk_tokens),
    )


def _has_room(needs: _Needs) -> bool:
    return needs.most_pages >= needs.layout.pages(SMALLEST_POOL_TOKENS)


def _weights_bytes(model: ModelConfig, dtype: str, quantization: str) -> int:
    table = model.vocab_size * model.hidden
    # The table is read by row as an embedding; what is multiplied is kept packed, a tied table once more.
    multiplied = model.parameters - (0 if model.tied_embeddings else table)
    packed_bytes = multiplied * Q8_GROUP_BYTES // 32 if quantization == "q8" else multiplied * _VALUE_BYTES[dtype]
    return table * _VALUE_BYTES[dtype] + packed_bytes


def _workspace_bytes(model: ModelConfig, rows: int, chunk_tokens: int, context_tokens: int) -> int:
    """An upper bound of what a step keeps alive beside weights and KV."""
    tokens = chunk_tokens + rows
    # Residual, normed input, attention's output and the projection's; fused qkv; fused gate-up and its product. Any of
    # them may be float32 between two operations, so all are counted so.
    widths = 4 * model.hidden + (model.heads + 2 * model.kv_heads) * model.head_dim + 3 * model.intermediate
    layer = tokens * widths * 4
    # Logits of every row that samples, in float32, with a sorted copy, its indices and a normalised copy.
    logits = rows * model.vocab_size * 4 * 4
    # Penalty counts and biases of every request slot.
    sampler = rows * model.vocab_size * 4 * 3
    # K and V of one layer of the longest row, gathered from its pages, and the mask of a chunk after it, in float32.
    attention = context_tokens * (2 * model.kv_heads * model.head_dim + chunk_tokens) * 4
    return layer + logits + sampler + attention


# ---------------------------------------------------------------------------------------------------------------
# What to say


def memory_table(
    model: ModelConfig,
    plan: MemoryPlan,
    hardware: Hardware,
    host_tier_bytes: int = 0,
    disk: tuple[int, str] | None = None,
) -> Table:
    """The plan as a table for the terminal. `disk`: bytes and directory of the disk tier."""
    from rich.table import Table  # 60 ms, which `headrace --help` need not pay

    on_card = plan.device == "cuda"
    table = Table(title=_free_text(hardware, plan.device), title_justify="left", title_style="", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    pool = f"{plan.pool_tokens} tokens in {plan.num_pages[0]} pages of {plan.layout.page_tokens}"
    kept = plan.dtype if plan.quantization == "none" else plan.quantization
    table.add_row(
        "weights", size_text(plan.weights_bytes), _of_weights(model, kept, twice=model.tied_embeddings and not on_card)
    )
    table.add_row("KV cache", size_text(plan.pool_bytes), pool)
    if plan.layout.is_hybrid:
        pages = " + ".join(map(str, plan.num_pages[plan.layout.full_groups :]))
        table.add_row("", "", f"windows in {pages} pages, {size_text(plan.window_saved_bytes)} less than all tokens'")
    if host_tier_bytes:
        tokens = PoolSizes(plan.layout).pages_in(host_tier_bytes, host=True) * plan.layout.page_tokens
        table.add_row("host tier", size_text(host_tier_bytes), f"{tokens} tokens that the device has let go of")
    if disk is not None:
        tokens = disk[0] * plan.pool_tokens // plan.pool_bytes
        table.add_row("disk tier", size_text(disk[0]), f"{tokens} tokens, in {disk[1]}")
    table.add_row("workspace", size_text(plan.workspace_bytes), f"{plan.max_running_requests} requests at once")
    if on_card:
        table.add_row("CUDA", size_text(CARD_PROGRAM_BYTES), "its context and libraries: an estimate")
    else:
        table.add_row("programs", size_text(plan.runtime_bytes), f"server, and worker with threads: {plan.cpu_threads}")
    context = f"contexts up to {plan.max_context_tokens} tokens"
    if plan.max_context_tokens < model.context_tokens:
        context += f" of the model's {model.context_tokens}"
    left_bytes = plan.left_bytes - host_tier_bytes
    table.add_row("left free", size_text(plan.card_left_bytes if on_card else left_bytes), context)
    if on_card:
        table.add_row("on the host", size_text(plan.runtime_bytes), f"programs; {size_text(left_bytes)} stay free")
    return table


def _of_weights(model: ModelConfig, kept: str, twice: bool) -> str:
    said = f"{model.parameters / 1e6:.0f} million in {kept}"
    return f"{said}, embeddings twice" if twice else said


def size_text(size_bytes: int) -> str:
    """Bytes for people: "326 MiB", "5.6 GiB"."""
    if size_bytes < 1 << 20:
        return f"{size_bytes / (1 << 10):.1f} KiB"
    if size_bytes < 1023 << 20:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes / (1 << 30):.1f} GiB"


def _free_text(hardware: Hardware, device: Literal["cpu", "cuda"] = "cpu") -> str:
    if device == "cuda":
        assert hardware.card is not None
        of = size_text(hardware.card.total_bytes)
        return f"{size_text(hardware.card.free_bytes)} of memory free, of {of}, on a {hardware.card.name}"
    limit = hardware.limit_bytes
    of = size_text(hardware.ram_bytes) if limit is None else f"the {size_text(limit)} that this control group may use"
    return f"{size_text(hardware.available_bytes)} of memory free, of {of}"


def _context_too_long(needs: _Needs, most_pages: int) -> str:
    takes, room = (size_text(needs.sizes.size_bytes(pages)) for pages in (needs.context_pages, most_pages))
    return (
        f"--context-length {needs.context_tokens} takes {takes} of KV cache, and there is room for {room}: "
        f"give --context-length {most_pages * needs.layout.page_tokens} or less."
    )


def _pool_too_large(settings: Settings, needs: _Needs, pages: int, most_pages: int) -> str:
    takes, room = (size_text(needs.sizes.size_bytes(count)) for count in (pages, most_pages))
    says = f"--max-total-tokens {settings.max_total_tokens} takes {takes} of KV cache, and"
    gives = f"give --max-total-tokens {most_pages * needs.layout.page_tokens} or less"
    if (fraction := settings.mem_fraction_static) is not None:
        return f"{says} --mem-fraction-static {fraction:g} leaves {room}: {gives}, or leave one of the two out."
    return f"{says} there is room for {room}: {gives}."


def _no_room(model: ModelConfig, settings: Settings, hardware: Hardware, needs: _Needs) -> str:
    """What to change when not even the smallest cache fits beside the weights."""
    fixed = size_text(needs.weights_bytes + needs.workspace_bytes + needs.runtime_bytes)
    says = f"{model.name} needs {fixed} besides its KV cache, and there is {_free_text(hardware, needs.device)}"
    small: dict[str, Any] = {"max_running_requests": 1, "chunked_prefill_size": 64}
    ways_out: tuple[dict[str, Any], ...] = (
        {"chunked_prefill_size": 256},
        {"max_running_requests": 8, "chunked_prefill_size": 256},
        small,
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", **small},
        *([{"device": "cpu"}] if needs.device == "cuda" else []),
    )
    for change in ways_out:
        if _has_room(_needs(model, msgspec.structs.replace(settings, **change), hardware)):
            flags = " ".join(f"--{field.replace('_', '-')} {value}" for field, value in change.items())
            return f"{says}. It fits with {flags}."
    return f"{says}, {SPARE_FRACTION:.0%} of which stays free. Free some memory, or take a smaller model."

"""Decode steps of an 8B-shaped model in bfloat16: how long, and how much of it the card waits between two steps.

A gap is from the last event of a step to the first one of the next, by the card's clock. With overlap a step is
launched while the one before it runs; without, when its ids have been read.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any, Final

import torch
from gpu.random_model import RandomBackend, llama, llama_8b, made, shared_ring, start_of
from gpu.report import Report
from gpu.requests import Feed, Requests
from gpu.timing import GIB, Ceilings, Device

from headrace.ops.models.config import ModelConfig
from headrace.ops.runner import Sampled

BATCHES: Final = (1, 8, 32, 64, 128, 256)
CONTEXT: Final = 1024
STEPS: Final = 40
EMPTY_STEPS: Final = 200
AIM: Final = 0.95
AIMED_AT: Final = 64
"""From so many rows on."""
TINY: Final[dict[str, int]] = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}


def model_of(device: Device, context: int) -> ModelConfig:
    """8B, or in a dry run next to nothing."""
    return llama(**TINY, intermediate=96, vocab=131, context=context) if device.dry else llama_8b(context)


def page_bytes(config: ModelConfig) -> int:
    """Of 16 tokens, all layers, in bfloat16."""
    return config.layers * 2 * config.kv_heads * 16 * config.head_dim * 2


def run(report: Report, options: argparse.Namespace) -> None:
    device = Device(options.dry)
    context = device.size(CONTEXT, 32)
    longest = context + device.size(256, 32)
    config = model_of(device, longest)
    ceilings = Ceilings.measured(device)
    if not device.dry:
        torch.cuda.empty_cache()
    batches = (2,) if device.dry else _fitting(device, config, longest)
    if not batches:
        report.check("the model fits the card", False, f"{device.free_bytes() / GIB:.0f} GiB are free")
        return
    slots = batches[-1]
    requests, weights_bytes = requests_for(device, config, slots, longest, slots * longest // 16)
    report.figure("weights", weights_bytes / GIB, "GiB")
    report.figure("a step of nothing, in this process", empty_step_us(device, requests), "µs")
    for rows in batches:
        kv_bytes = rows * context // 16 * page_bytes(config)
        floor_ms = (weights_bytes + kv_bytes) / ceilings.bytes_s * 1e3
        for overlap in (True, False):
            _measure(report, device, requests, rows, context, floor_ms, overlap)


def _fitting(device: Device, config: ModelConfig, longest: int) -> tuple[int, ...]:
    """Batches whose KV fits beside 17 GiB of weights, an embedding table that is drawn in float32, and scratch."""
    room = device.free_bytes() - 21 * GIB
    return tuple(rows for rows in BATCHES if rows * longest // 16 * page_bytes(config) < room)


def requests_for(
    device: Device, config: ModelConfig, slots: int, context: int, pages: int, host: Any = None
) -> tuple[Requests, int]:
    """A worker's runner over random weights → requests for it, bytes of the weights."""
    slot_bytes = page_bytes(config) if host is not None else 0
    start = start_of(config, device.dry, "bfloat16", slots, context, device.size(8192, 64) + slots, slot_bytes)
    memory, ring = shared_ring(start)
    with torch.inference_mode():
        backend = RandomBackend(config, start, drawn_on_card=not device.dry)
        (pools, runner, _), weights = made(backend, start, pages, memory, host)
        # Not zeros: a card does those faster.
        pools[0].pages.normal_()
    device.wait()
    return Requests(runner, ring, pages), weights.size_bytes


def begin_decoding(requests: Requests, rows: int, context: int) -> list[Feed]:
    """→ what a step of these rows launches. Before it slots are begun and tables edited, which no decode step does."""
    for slot in range(rows):
        requests.begin(slot, context)
    feeds = [Feed(slot) for slot in range(rows)]
    requests.launch([Feed(slot, [slot % 100]) for slot in range(rows)])
    requests.launch(feeds)
    requests.finish()
    return feeds


def _measure(
    report: Report, device: Device, requests: Requests, rows: int, context: int, floor_ms: float, overlap: bool
) -> None:
    feeds = begin_decoding(requests, rows, context)
    steps: list[Sampled] = []
    host_ms = []
    for _ in range(device.size(STEPS, 3)):
        began = time.perf_counter()
        steps.append(requests.launch(feeds))
        host_ms.append((time.perf_counter() - began) * 1e3)
        if not overlap:
            requests.finish()
    requests.finish()
    device.wait()
    figures(report, steps, rows, floor_ms, overlap, statistics.median(host_ms))


def empty_step_us(device: Device, requests: Requests) -> float:
    """Of a step without tokens, from its launch until it is seen to be done: the median."""
    taken = []
    for _ in range(device.size(EMPTY_STEPS, 3)):
        began = time.perf_counter()
        requests.launch([])
        requests.finish()
        taken.append((time.perf_counter() - began) * 1e6)
    return statistics.median(taken)


def figures(report: Report, steps: list[Sampled], rows: int, floor_ms: float, overlap: bool, host_ms: float) -> None:
    """From the steps' events; the first two steps don't count."""
    steps = steps[min(2, len(steps) - 2) :]
    busy = [step.step_ms for step in steps]
    gaps = [before.done.ms_until(after.spans[0][0]) + _between(before) for before, after in itertools.pairwise(steps)]
    whole = statistics.median(busy) + statistics.median(gaps)
    how = "overlapped" if overlap else "one by one"
    name = f"{rows} rows, {how}"
    report.figure(f"{name}: step", whole, "ms", floor_ms / whole, "reading weights and KV once")
    report.figure(f"{name}: tokens", rows / whole * 1e3, "tokens/s")
    report.figure(f"{name}: gap", statistics.median(gaps) * 1e3, "µs", note=f"launched within {host_ms:.2f} ms")
    aim = AIM if overlap and rows >= AIMED_AT else None
    share = statistics.median(busy) / whole if whole else 0.0
    report.figure(f"{name}: the card at work", share * 100, "%", share, "the time", aim)


def _between(step: Sampled) -> float:
    """From the end of `forward` to the beginning of `sample`."""
    return step.spans[0][1].ms_until(step.spans[1][0])

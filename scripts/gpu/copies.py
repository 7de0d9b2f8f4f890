"""Pages between host and device, scattered on both sides, against one plain copy of as many pinned bytes."""

from __future__ import annotations

import argparse
import mmap
from collections.abc import Callable
from typing import Final

import torch
from gpu.report import Report
from gpu.timing import Device, event
from torch import Tensor

from headrace.ops.cuda import card
from headrace.ops.triton.kv_copy import back_up, load_layer

AIM: Final = 0.85


def run(report: Report, options: argparse.Namespace) -> None:
    """Pages of 16 tokens of an 8B model in bfloat16: 64 KiB a layer, 2 MiB in all."""
    device = Device(options.dry)
    layers, kv_heads, head_dim = device.size(32, 2), device.size(8, 1), device.size(128, 16)
    count = device.size(512, 6)
    pool = device.random(layers, count, 2, kv_heads, 16, head_dim)
    host = _host_pool(device, count, pool[:, 0].numel())
    moved = count // 2
    pages = [torch.randperm(count, device=device.torch)[:moved].int() for _ in range(2)]
    bytes_moved = moved * pool[:, 0].nbytes

    def load() -> None:
        for layer in range(layers):
            load_layer(host, pool[layer], layer, *pages)

    plain_host, plain_device = host[:moved].flatten(), torch.empty_like(pool).flatten()[: moved * host.shape[1]]
    plain = {
        "to the device": device.ms(lambda: plain_device.copy_(plain_host, non_blocking=True)),
        "to the host": device.ms(lambda: plain_host.copy_(plain_device, non_blocking=True)),
    }
    paged = {"to the device": device.ms(load), "to the host": device.ms(lambda: back_up(pool, host, *pages))}
    for way, plain_ms in plain.items():
        plain_s = plain_host.nbytes / plain_ms * 1e3
        report.figure(f"plain copy {way}, {plain_host.nbytes >> 20} MiB pinned", plain_s / 1e9, "GB/s")
        paged_s = bytes_moved / paged[way] * 1e3
        report.figure(f"{moved} pages {way}", paged_s / 1e9, "GB/s", paged_s / plain_s, "the plain copy", AIM)
    _beside_compute(report, device, load)


def _host_pool(device: Device, count: int, values: int) -> Tensor:
    """bfloat16 `[count, values]`, registered as a server's is."""
    memory = mmap.mmap(-1, 2 * count * values)
    if not device.dry:
        card.pin(memory)
    slots = torch.frombuffer(memory, dtype=torch.bfloat16).view(count, values)
    return slots.copy_(device.random(count, values))


def _beside_compute(report: Report, device: Device, load: Callable[[], None]) -> None:
    """What loads of all layers cost a step that runs beside them."""
    if device.dry:
        return
    a, b = device.random(8192, 8192), device.random(8192, 8192)
    alone = device.ms(lambda: a @ b)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    ratios = []
    for _ in range(5):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            load()
        began, ended = event(), event()
        began.record()
        a @ b
        ended.record()
        torch.cuda.synchronize()
        ratios.append(began.elapsed_time(ended) / alone)
    report.figure("a product of matrices beside loads, against alone", sorted(ratios)[2], "×")

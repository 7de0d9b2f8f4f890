"""Kernels against the ceilings: bytes over what a copy moves, operations over what a product of matrices does."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import torch
from gpu.report import Report
from gpu.timing import Ceilings, Device

from headrace.ops.triton.activation import gated
from headrace.ops.triton.argmax import best, blocks
from headrace.ops.triton.decode_attention import attend_decode
from headrace.ops.triton.draw import draw
from headrace.ops.triton.extend_attention import attend_extend, plan_extend, tile_tokens
from headrace.ops.triton.kv_write import write_kv
from headrace.ops.triton.norm import rms_norm
from headrace.ops.triton.rotary import rotate_
from headrace.ops.triton.slot_tables import make_tables
from headrace.ops.triton.spans import max_spans
from headrace.ops.wire import INIT_FLOATS

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 32, 8, 128, 4096, 14336, 128256
"""An 8B model's."""
DRY_HEADS, DRY_KV_HEADS, DRY_HEAD_DIM = 4, 2, 16
TOKENS: Final = 8192
"""Of a prefill chunk whose layers are far larger than the caches."""


class Measure:
    """Times work and says how near to a ceiling it comes."""

    def __init__(self, report: Report, device: Device) -> None:
        self.report = report
        self.device = device
        self.ceilings = Ceilings.measured(device)
        report.figure("ceiling: copy on the card", self.ceilings.bytes_s / 1e9, "GB/s")
        report.figure("ceiling: product of matrices", self.ceilings.flops / 1e12, "TFLOP/s")

    def bytes(self, name: str, moved: int, work: Callable[[], object]) -> None:
        ms = self.device.ms(work)
        share = moved / ms * 1e3 / self.ceilings.bytes_s
        self.report.figure(name, ms, "ms", share, "the copy's bytes", note=f"{moved / ms / 1e6:.0f} GB/s")

    def operations(self, name: str, done: float, work: Callable[[], object]) -> None:
        ms = self.device.ms(work)
        share = done / ms * 1e3 / self.ceilings.flops
        self.report.figure(name, ms, "ms", share, "the product's FLOP", note=f"{done / ms / 1e9:.0f} TFLOP/s")


def run(report: Report, options: argparse.Namespace) -> None:
    measure = Measure(report, Device(options.dry))
    for part in (_decode, _extend, _layer, _sampling):
        try:
            part(measure)
        except Exception as problem:
            traceback.print_exc()
            report.check(f"{part.__name__[1:]} could be measured", False, f"{type(problem).__name__}: {problem}"[:200])


def _heads(device: Device) -> tuple[int, int, int]:
    return (DRY_HEADS, DRY_KV_HEADS, DRY_HEAD_DIM) if device.dry else (HEADS, KV_HEADS, HEAD_DIM)


def _decode(measure: Measure) -> None:
    """Rows of one token; KV is what moves."""
    device = measure.device
    shapes = [(1, 131072), (16, 8192), (64, 8192), (256, 2048)] if not device.dry else [(2, 70)]
    multiprocessors = 2 if device.dry else torch.cuda.get_device_properties(0).multi_processor_count
    heads, kv_heads, head_dim = _heads(device)
    for rows, context in shapes:
        pages = -(-context // 16)
        layer = device.random(rows * pages, 2, kv_heads, 16, head_dim)
        table = torch.randperm(rows * pages, device=device.torch).int().view(rows, pages)
        slots = torch.arange(rows, device=device.torch, dtype=torch.int32)
        contexts = torch.full_like(slots, context)
        q, out = device.random(rows, heads, head_dim), device.random(rows, heads, head_dim)
        parts = torch.empty(rows, max_spans(131072), heads, head_dim, device=device.torch)
        sums = torch.empty(rows, max_spans(131072), heads, device=device.torch)
        # What is served is the first; which is best only a card can tell.
        for programs in (4, 2, 3, 6) if rows in (1, 64) else (4,):
            measure.bytes(
                f"decode attention, {rows} × {context} tokens, {programs} programs an SM",
                rows * context * 2 * kv_heads * head_dim * 2,
                partial(
                    attend_decode,
                    *(q, layer, table, slots, contexts, out, parts, sums),
                    scale=0.1,
                    programs=programs * multiprocessors,
                ),
            )


def _extend(measure: Measure) -> None:
    """A chunk behind a prefix: half of a square of scores, and a rectangle."""
    device = measure.device
    shapes = [(0, 8192), (0, 2048), (30720, 2048), (32752, 16)] if not device.dry else [(20, 8)]
    multiprocessors = 2 if device.dry else torch.cuda.get_device_properties(0).multi_processor_count
    heads, kv_heads, head_dim = _heads(device)
    for prefix, tokens in shapes:
        context = prefix + tokens
        pages = -(-context // 16)
        layer, table = device.random(pages, 2, kv_heads, 16, head_dim), torch.randperm(pages).int()[None]
        start, kv_len = np.array([0, tokens], np.int32), np.array([context], np.int32)
        tile = tile_tokens(heads, kv_heads, head_dim, torch.bfloat16)
        plan = plan_extend(start, kv_len, tile, kv_heads, programs=2 * multiprocessors)
        numbers = [torch.from_numpy(each).to(device.torch) for each in (start, kv_len, plan.pieces, plan.merges)]
        q, out = device.random(tokens, heads, head_dim), device.random(tokens, heads, head_dim)
        parts = torch.empty(max(plan.parts, 1), heads, tile, head_dim, device=device.torch)
        kv = (layer, table.to(device.torch), numbers[0], torch.zeros_like(numbers[1]), numbers[1], out)
        cut = (numbers[2], numbers[3], parts, parts[..., 0].contiguous())
        measure.operations(
            f"extend attention, {tokens} tokens behind {prefix}",
            4 * heads * head_dim * tokens * (prefix + (tokens + 1) / 2),
            lambda q=q, kv=kv, cut=cut: attend_extend(q, *kv, *cut, scale=0.1),  # type: ignore[misc]
        )


def _layer(measure: Measure) -> None:
    device = measure.device
    tokens, hidden, inner = device.size(TOKENS, 3), device.size(HIDDEN, 64), device.size(INNER, 96)
    x, branch = torch.randn(tokens, hidden, device=device.torch), device.random(tokens, hidden)
    weight, out = torch.rand(hidden, device=device.torch), device.random(tokens, hidden)
    measure.bytes(
        f"norm with addition, {tokens} tokens", tokens * hidden * 12, lambda: rms_norm(x, weight, out, 1e-5, branch)
    )
    gate_up, active = device.random(tokens, 2 * inner), device.random(tokens, inner)
    measure.bytes(f"silu, {tokens} tokens", tokens * inner * 6, lambda: gated(gate_up, active, "silu"))
    heads, kv_heads, head_dim = _heads(device)
    qkv = device.random(tokens, heads + 2 * kv_heads, head_dim)
    positions = torch.arange(tokens, device=device.torch, dtype=torch.int32)
    turns = torch.randn(tokens, head_dim // 2, 2, device=device.torch)
    turned = qkv[:, : heads + kv_heads]
    measure.bytes(
        f"rotary, {tokens} tokens",
        turned.numel() * 4 + turns.nbytes,
        lambda: rotate_(turned, positions, turns, "interleaved"),
    )
    pages = -(-tokens // 16)
    pool = device.random(pages, 2, kv_heads, 16, head_dim)
    table, slots = torch.randperm(pages, device=device.torch).int()[None], torch.zeros_like(positions)
    kv = qkv[:, heads:]
    measure.bytes(
        f"KV into pages, {tokens} tokens", kv.numel() * 4, lambda: write_kv(kv, pool, table, slots, positions)
    )


def _sampling(measure: Measure) -> None:
    """The logits are 131 MB, twice what a large L2 cache holds."""
    device = measure.device
    rows, vocab = device.size(256, 2), device.size(VOCAB, 300)
    logits = torch.randn(rows, vocab, device=device.torch) * 4
    values, ids = torch.empty(rows, device=device.torch), torch.empty(rows, device=device.torch, dtype=torch.int32)
    left = torch.empty(rows, blocks(vocab), device=device.torch)
    left_ids = torch.empty(rows, blocks(vocab), device=device.torch, dtype=torch.int32)
    measure.bytes(f"best of {rows} × {vocab} logits", logits.nbytes, lambda: best(logits, values, ids, left, left_ids))
    best(logits, values, ids, left, left_ids)
    slots = torch.arange(rows, device=device.torch, dtype=torch.int32)
    future, drawn = torch.zeros(rows, dtype=torch.int64, device=device.torch), torch.empty_like(ids)
    commits, status = torch.ones_like(slots), torch.empty_like(ids)
    tables = make_tables(rows, vocab, device.torch)
    for name, top_p in (("temperature alone", 1.0), ("top_p 0.9", 0.9)):
        wanted = {"temperature": 0.8, "top_p": top_p, "repetition": 1.0}
        tables.floats[:] = torch.tensor([wanted.get(each, 0.0) for each in INIT_FLOATS], device=device.torch)
        measure.bytes(
            f"draws from {rows} × {vocab} logits, {name}",
            logits.nbytes,
            lambda: draw(logits, tables, values, ids, slots, slots, commits, future, drawn, status),
        )

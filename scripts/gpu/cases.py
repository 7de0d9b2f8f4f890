"""Calls of every launcher, with the shapes of models that are served and with the edges of each kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu.timing import Device
from torch import Tensor

from headrace.ops.triton.activation import gated
from headrace.ops.triton.argmax import best, blocks
from headrace.ops.triton.decode_attention import attend_decode
from headrace.ops.triton.draw import draw
from headrace.ops.triton.embedding import embed
from headrace.ops.triton.extend_attention import attend_extend, plan_extend, tile_tokens
from headrace.ops.triton.kv_copy import back_up, load_layer
from headrace.ops.triton.kv_write import write_kv
from headrace.ops.triton.logprobs import report_logprobs
from headrace.ops.triton.norm import norm_heads_, rms_norm
from headrace.ops.triton.penalties import adjust
from headrace.ops.triton.rotary import rotate_
from headrace.ops.triton.slot_tables import SlotTables, begin_slots, make_tables
from headrace.ops.triton.spans import max_spans
from headrace.ops.wire import INIT_FLOATS, INIT_INTS, MAX_LOGPROBS

BF16, F16, F32, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int32


class Case(NamedTuple):
    """One call of a launcher."""

    name: str
    call: Callable[[dict[str, Tensor]], None]
    tensors: dict[str, Tensor]
    """On the CPU, by the names that `call` uses."""
    outputs: tuple[str, ...]
    """Those that it writes."""
    pinned: tuple[str, ...] = ()
    """Those that stay in the host's memory, which the card reaches."""


def wide(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows that stand apart, as those of a part of something wider."""
    return torch.randn(rows, columns + 64).to(dtype)[:, :columns]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=I32)


# ---------------------------------------------------------------------------------------------------------------
# A layer beside attention


def layer_cases(device: Device) -> Iterator[Case]:
    rows = device.size(67, 3)
    for hidden, inner in ((4096, 14336), (576, 1536)) if not device.dry else ((96, 160),):
        for dtype in (BF16, F32):
            shape = f"{hidden} of {str(dtype)[6:]}"
            x, add, weight = torch.randn(rows, hidden), wide(rows, hidden, dtype), torch.rand(hidden)
            tensors = {"x": x, "add": add, "weight": weight, "out": torch.zeros(rows, hidden, dtype=dtype)}
            yield Case(f"norm with addition, {shape}", _norm, tensors, ("x", "out"))
            for kind in ("silu", "gelu"):
                tensors = {"x": wide(rows, 2 * inner, dtype), "out": torch.zeros(rows, inner, dtype=dtype)}
                yield Case(f"{kind}, {inner} of {str(dtype)[6:]}", partial(_gated, kind), tensors, ("out",))
            ids = torch.randint(-7, 300, (rows,), dtype=I32)
            tensors = {"ids": ids, "drawn": torch.randint(300, (8,)), "table": torch.randn(300, hidden).to(dtype)}
            tensors |= {"out": torch.zeros(rows, hidden)}
            yield Case(f"embedding, {shape}", _embed, tensors, ("out",))
    for head_dim, dtype in ((128, BF16), (64, BF16), (80, F32)):
        heads = torch.randn(rows, 12, head_dim).to(dtype)[:, :10]
        turns, positions = torch.randn(50, head_dim // 2, 2), torch.randint(50, (rows,), dtype=I32)
        tensors = {"heads": heads, "turns": turns, "positions": positions}
        for pairs in ("interleaved", "halves"):
            name = f"rotary of {pairs} pairs, heads of {head_dim}"
            yield Case(name, partial(_rotate, pairs), tensors, ("heads",))
        normed = {"heads": heads, "weights": torch.rand(10, head_dim)}
        yield Case(f"norm of heads of {head_dim}", _norm_heads, normed, ("heads",))
        slots = torch.randint(-1, 4, (rows,), dtype=I32)
        # Each token has a place of its own, or the order of programs would decide.
        tensors = {"kv": torch.randn(rows, 6, head_dim).to(dtype)[:, 2:], "slots": slots, "at": _arange(rows)}
        tensors |= {"pages": torch.randn(60, 2, 2, 16, head_dim).to(dtype), "table": _table(4, 10, 60)}
        yield Case(f"KV into pages, heads of {head_dim}", _write, tensors, ("pages",))


def _norm(t: dict[str, Tensor]) -> None:
    rms_norm(t["x"], t["weight"], t["out"], 1e-5, t["add"])


def _norm_heads(t: dict[str, Tensor]) -> None:
    norm_heads_(t["heads"], t["weights"], 1e-5)


def _gated(kind: Any, t: dict[str, Tensor]) -> None:
    gated(t["x"], t["out"], kind)


def _embed(t: dict[str, Tensor]) -> None:
    embed(t["ids"], t["drawn"], t["table"], t["out"], 2.5)


def _rotate(pairs: Any, t: dict[str, Tensor]) -> None:
    rotate_(t["heads"], t["positions"], t["turns"], pairs)


def _write(t: dict[str, Tensor]) -> None:
    write_kv(t["kv"], t["pages"], t["table"], t["slots"], t["at"])


def _arange(count: int) -> Tensor:
    return torch.arange(count, dtype=I32)


def _table(slots: int, columns: int, pages: int) -> Tensor:
    """Pages in random order, none twice."""
    return torch.randperm(pages, dtype=I32)[: slots * columns].view(slots, columns)


# ---------------------------------------------------------------------------------------------------------------
# Copies between host and device


def copy_cases(device: Device) -> Iterator[Case]:
    count = device.size(300, 5)
    for layers, heads, dtype in ((device.size(32, 2), device.size(8, 1), BF16), (3, 2, F32)):
        pool = torch.randn(layers, count, 2, heads, 16, 64).to(dtype)
        host = torch.randn(count, pool[:, 0].numel() + 512).to(dtype)
        pages = {"device": torch.randperm(count, dtype=I32)[:-2], "host_at": torch.randperm(count, dtype=I32)[:-2]}
        tensors = {"pool": pool, "host": host, **pages}
        yield Case(f"{layers} layers of pages to the host", _back_up, tensors, ("host",), ("host",))
        yield Case(f"one layer of {layers} to the device", _load, tensors, ("pool",), ("host",))


def _back_up(t: dict[str, Tensor]) -> None:
    back_up(t["pool"], t["host"], t["device"], t["host_at"])


def _load(t: dict[str, Tensor]) -> None:
    load_layer(t["host"], t["pool"][1], 1, t["host_at"], t["device"])


# ---------------------------------------------------------------------------------------------------------------
# From logits to ids


def sampling_cases(device: Device) -> Iterator[Case]:
    for vocab in (128256, 32000, 131) if not device.dry else (131,):
        rows, slots = device.size(9, 4), 12
        tables = _begun(slots, vocab)
        logits = torch.randn(rows, vocab) * 4
        logits[0, 5] = float("-inf")
        logits[2, 1] = float("nan")
        row_slots, positions = _arange(rows), torch.randint(60, (rows,), dtype=I32)
        row_slots[3] = -1
        row = {"slots": row_slots, "positions": positions}
        values, ids = torch.zeros(rows), torch.zeros(rows, dtype=I32)
        left = {"left": torch.zeros(rows, blocks(vocab)), "left_ids": torch.zeros(rows, blocks(vocab), dtype=I32)}
        named = {f"table_{name}": table for name, table in zip(SlotTables._fields, tables)}
        masks = {"mask_row": _arange(rows) % 3 - 1, "masks": torch.randint(-(2**31), 2**31, (2, -(-vocab // 32))).int()}
        best_of = {"logits": logits.nan_to_num(), "values": values, "ids": ids, **left}
        yield Case(f"best of {vocab} ids", _best, best_of, ("values", "ids"))
        # Which id a broken row gets is nobody's business: it is not used.
        yield Case(f"best of {vocab} ids with NaN", _best, {**best_of, "logits": logits}, ("values",))
        adjusted = {"logits": logits, "out": torch.zeros_like(logits), **row, **named, **masks, **left}
        yield Case(f"penalties, biases, masks over {vocab} ids", _adjust, adjusted, ("out",))
        highest = logits.nan_to_num(9.0).max(1)
        drawn = {"logits": logits, "values": highest.values.where(~logits.isnan().any(1), float("nan")), **row, **named}
        drawn |= {"ids": highest.indices.int(), "commits": torch.ones(rows, dtype=I32)}
        drawn |= {"future": torch.zeros(slots, dtype=torch.int64), "out": ids, "status": ids.clone()}
        yield Case(f"draws from {vocab} ids", _draw, drawn, ("future", "out", "status", "table_outputs"))
        reported = {"logits": logits[3:], "ids": torch.randint(vocab, (rows - 3,), dtype=I32)}
        reported |= {"counts": torch.tensor([20, -1, 3, 0, 20, 1][: rows - 3], dtype=I32)[: rows - 3]}
        reported |= {"chosen": torch.zeros(rows - 3), "top_ids": torch.zeros(rows - 3, MAX_LOGPROBS, dtype=I32)}
        reported |= {"top": torch.zeros(rows - 3, MAX_LOGPROBS)}
        yield Case(f"log-probabilities of {vocab} ids", _logprobs, reported, ("chosen", "top_ids", "top"))
        yield _inits(slots, vocab)


def _begun(slots: int, vocab: int) -> SlotTables:
    """Slots whose requests ask for everything, each for something else."""
    tables = make_tables(slots, vocab, torch.device("cpu"))
    columns = INIT_INTS.index
    tables.ints[:, columns("seed_low")] = torch.arange(slots, dtype=I32) * 7919
    tables.ints[:, columns("top_k")] = torch.tensor([0, 5, 0, 40] * slots, dtype=I32)[:slots]
    tables.ints[:, columns("min_tokens")] = torch.tensor([0, 100, 0] * slots, dtype=I32)[:slots]
    tables.ints[:, columns("bias_len")] = 1
    wanted = {"temperature": (0.0, 0.7, 1.3), "top_p": (1.0, 0.9, 0.5), "min_p": (0.0, 0.02, 0.0)}
    wanted |= {"repetition": (1.0, 1.2, 1.0), "frequency": (0.0, 0.3, 0.1), "presence": (0.0, 0.0, 0.4)}
    for name, values in wanted.items():
        tables.floats[:, INIT_FLOATS.index(name)] = torch.tensor(list(values) * slots)[:slots]
    tables.prompt.copy_(torch.rand(slots, vocab) < 0.1)
    tables.outputs.copy_(torch.randint(0, 30, (slots, vocab)).clamp(min=27) - 27)
    tables.biases.copy_(torch.randn(slots, vocab) * (torch.rand(slots, vocab) < 0.05))
    tables.stops.copy_(torch.rand(slots, vocab) < 0.02)
    return tables


def _tables_of(t: dict[str, Tensor]) -> SlotTables:
    return SlotTables(*(t[f"table_{name}"] for name in SlotTables._fields))


def _best(t: dict[str, Tensor]) -> None:
    best(t["logits"], t["values"], t["ids"], t["left"], t["left_ids"])


def _adjust(t: dict[str, Tensor]) -> None:
    row = (t["slots"], t["positions"], t["mask_row"], t["masks"])
    adjust(t["logits"], _tables_of(t), *row, t["out"], t["left"])


def _draw(t: dict[str, Tensor]) -> None:
    row = (t["slots"], t["positions"], t["commits"])
    draw(t["logits"], _tables_of(t), t["values"], t["ids"], *row, t["future"], t["out"], t["status"])


def _logprobs(t: dict[str, Tensor]) -> None:
    report_logprobs(t["logits"], t["ids"], t["counts"], t["chosen"], t["top_ids"], t["top"])


def _inits(slots: int, vocab: int) -> Case:
    """Two requests, with prompts, outputs, biases and stops, in slots that had others."""
    tables = _begun(slots, vocab)
    lengths = [[700, 30, 5, 2], [3, 0, 0, 1]]
    ints = torch.zeros(2, len(INIT_INTS), dtype=I32)
    ints[:, INIT_INTS.index("prompt_len") :] = torch.tensor(lengths, dtype=I32)
    ints[:, INIT_INTS.index("min_tokens")] = 4
    floats = torch.tensor([[1.0, 1.0, 0.0, 1.1, 0.2, 0.0], [0.0, 1.0, 0.0, 1.0, 0.0, 0.5]])
    counts, biases = [sum(each) for each in lengths], [each[2] for each in lengths]
    ids = torch.cat([_distinct_ids(each, vocab) for each in lengths])
    tensors = {f"table_{name}": table for name, table in zip(SlotTables._fields, tables)}
    tensors |= {"slot": int32(7, 2), "ints": ints, "floats": floats, "ids": ids, "biases": torch.randn(sum(biases))}
    tensors |= {"starts": torch.tensor([[0, 0], [counts[0], biases[0]]], dtype=I32)}
    return Case(f"slots begun anew, {vocab} ids", partial(_begin, max(counts)), tensors, tuple(tensors)[:6])


def _distinct_ids(lengths: list[int], vocab: int) -> Tensor:
    prompt, outputs, biased, stops = lengths
    biased_and_stops = torch.randperm(vocab, dtype=I32)[: biased + stops]
    return torch.cat((torch.randint(vocab, (prompt + outputs,), dtype=I32), biased_and_stops))


def _begin(most: int, t: dict[str, Tensor]) -> None:
    begin_slots(_tables_of(t), t["slot"], t["ints"], t["floats"], t["ids"], t["biases"], t["starts"], most)


# ---------------------------------------------------------------------------------------------------------------
# Attention


class Shape(NamedTuple):
    """What a kernel of attention is compiled for."""

    head_dim: int
    group: int
    dtype: torch.dtype
    window: int = 0
    soft_cap: float = 0.0
    page_tokens: int = 16
    kv_heads: int = 2

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def __str__(self) -> str:
        name = f"{self.head_dim}×{self.group}, pages of {self.page_tokens}, {str(self.dtype)[6:]}"
        return name + f", window {self.window}" * bool(self.window) + f", cap {self.soft_cap:g}" * bool(self.soft_cap)


SHAPES = (
    Shape(128, 4, BF16, kv_heads=8),
    Shape(128, 8, BF16),
    Shape(128, 1, F16),
    Shape(64, 3, BF16),
    Shape(80, 7, BF16, page_tokens=24),
    Shape(96, 4, BF16, page_tokens=64),
    Shape(256, 2, BF16, 1000, 50.0),
    Shape(256, 8, BF16),
    Shape(128, 4, BF16, 300),
    Shape(128, 4, F32),
    Shape(64, 1, F32, 700, 30.0),
)
DRY_SHAPES = (Shape(16, 3, F32), Shape(32, 2, BF16, 40, 20.0))


def attention_cases(device: Device) -> Iterator[Case]:
    for shape in DRY_SHAPES if device.dry else SHAPES:
        # The longest has more spans of 512 tokens than a row may have.
        contexts = [1, 60, 129] if device.dry else [0, 1, 511, 512, 513, 40000, 3000, *range(7, 700, 53)]
        q, kv = _paged(shape, contexts, len(contexts))
        parts = torch.zeros(len(contexts), max_spans(max(contexts), window=shape.window), shape.heads, shape.head_dim)
        kv |= {"q": q, "parts": parts, "sums": parts[..., 0].contiguous()}
        yield Case(f"decode attention, {shape}", partial(_decode, shape), kv, ("out",))
        rows = [(0, 5), (70, 9)] if device.dry else [(0, 1), (0, 700), (9000, 33), (300, 129), (30000, 5), (15, 64)]
        for programs in (8, 264):
            yield _extend_case(shape, rows, programs)


def _extend_case(shape: Shape, rows: list[tuple[int, int]], programs: int) -> Case:
    contexts, starts = [sum(row) for row in rows], np.cumsum([0, *(tokens for _, tokens in rows)]).astype(np.int32)
    q, tensors = _paged(shape, contexts, int(starts[-1]))
    tile = tile_tokens(shape.heads, shape.kv_heads, shape.head_dim, shape.dtype)
    sizes = (np.array(contexts, np.int32), tile, shape.kv_heads)
    plan = plan_extend(starts, *sizes, window=shape.window, programs=programs)
    parts = torch.zeros(max(plan.parts, 1), shape.heads, tile, shape.head_dim)
    tensors |= {"q": q, "start": torch.from_numpy(starts), "pieces": torch.from_numpy(plan.pieces)}
    tensors |= {"merges": torch.from_numpy(plan.merges), "parts": parts, "sums": parts[..., 0].contiguous()}
    return Case(f"extend attention, {shape}, for {programs} programs", partial(_extend, shape), tensors, ("out",))


def _paged(shape: Shape, contexts: list[int], tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows in slots of their own, over pages in random order; behind their ends stands NaN."""
    counts = [-(-context // shape.page_tokens) for context in contexts]
    pages = torch.randperm(sum(counts) + 2, dtype=I32)
    layer = torch.randn(len(pages), 2, shape.kv_heads, shape.page_tokens, shape.head_dim).to(shape.dtype)
    layer[pages[sum(counts) :].long()] = float("nan")
    table = torch.full((len(contexts), max(counts) + 1), -1, dtype=I32)
    slots = torch.randperm(len(contexts), dtype=I32)
    taken = 0
    for slot, context, count in zip(slots.tolist(), contexts, counts):
        table[slot, :count] = pages[taken : taken + count]
        if context % shape.page_tokens:
            layer[pages[taken + count - 1], :, :, context % shape.page_tokens :] = float("nan")
        taken += count
    q = torch.randn(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim).to(shape.dtype)[:, : shape.heads]
    out = torch.zeros(tokens, shape.heads, shape.head_dim, dtype=shape.dtype)
    return q, {"layer": layer, "table": table, "slots": slots, "contexts": int32(*contexts), "out": out}


def _decode(shape: Shape, t: dict[str, Tensor]) -> None:
    kv = (t["layer"], t["table"], t["slots"], t["contexts"])
    scale = shape.head_dim**-0.5
    masks: dict[str, Any] = {"window": shape.window, "soft_cap": shape.soft_cap}
    attend_decode(t["q"], *kv, t["out"], t["parts"], t["sums"], scale=scale, **masks)


def _extend(shape: Shape, t: dict[str, Tensor]) -> None:
    kv = (t["layer"], t["table"], t["start"], t["slots"], t["contexts"], t["out"])
    plan = (t["pieces"], t["merges"], t["parts"], t["sums"])
    masks: dict[str, Any] = {"window": shape.window, "soft_cap": shape.soft_cap}
    attend_extend(t["q"], *kv, *plan, scale=shape.head_dim**-0.5, **masks)

"""The CPU kernels one by one, on one thread, against their floor: bytes over bandwidth, or operations over the peak.

Bandwidth is what one thread reads from memory here; the peak is what the product's own tile reaches where everything
lies in the first cache. Time is the thread's CPU time, and the fastest of the repeats counts.

    python scripts/bench/kernels.py --json kernels.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.ops.simd.amx import release_tiles
from headrace.ops.simd.attention import attend_block, block_tokens, scratch_bytes
from headrace.ops.simd.head_pages import HeadPages
from headrace.ops.simd.inputs import GROUP, q8_row_bytes
from headrace.ops.simd.instructions import LANES, kernel
from headrace.ops.simd.packing import group_bytes
from headrace.ops.simd.products import BUFFER_BYTES, begin_products, block_rows, blocks_of, end_products, multiply_block
from headrace.ops.simd.rows import normalize_row
from headrace.ops.simd.softmax import Sight
from headrace.ops.simd.target import AMX
from headrace.ops.simd.tiles import PANELS, TILE_COLUMNS
from headrace.ops.simd.vector import BF16, F32, Q8

IN, OUT = 576, 3072
"""The default model's largest product in a layer: gate and up."""
HEADS, KV_HEADS, DIM, PAGE = 9, 3, 64, 16
BLOCK_TOKENS: Final = block_tokens(HEADS // KV_HEADS, AMX)
ROWS: Final = (1, 8, 32, 512)
COPIES: Final = 30
"""Weights of so many layers take turns, so that they come from memory."""
REPEATS: Final = 7


class Element(NamedTuple):
    name: str
    witness: Any
    row_bytes: int
    """Of a row of inputs."""
    panel_bytes: int
    """Of 16 columns of weights."""
    steps: int


ELEMENTS: Final = (
    Element("float32", F32, IN * 4, IN * 4 * LANES, IN),
    Element("bfloat16", BF16, IN * 2, IN * 2 * LANES, IN // 2),
    Element("q8", Q8, q8_row_bytes(IN), IN // GROUP * group_bytes(4), IN // GROUP),
)


class Figure(msgspec.Struct):
    kernel: str
    read_kb: float
    operations_m: float
    floor_us: float
    measured_us: float
    ratio: float
    """Measured over floor."""


@kernel
def all_columns(
    element: Any,
    x: int,
    x_bytes: int,
    rows: int,
    weights: int,
    panel_bytes: int,
    steps: int,
    out: int,
    columns: int,
    buffer: int,
) -> None:
    """The product as a layer does it: for each block of rows, tiles of columns."""
    begin_products(element, rows)
    block = block_rows(element, rows, columns // TILE_COLUMNS, 1)
    blocks = blocks_of(rows, block)
    for number in range(blocks):
        first = number * block
        height = rows - first if number == blocks - 1 else block
        for tile in range(columns // TILE_COLUMNS):
            multiply_block(
                element,
                PANELS,
                x + first * x_bytes,
                x_bytes,
                height,
                weights + tile * 4 * panel_bytes,
                weights + (tile + 1) * 4 * panel_bytes,
                panel_bytes,
                steps,
                out + (first * columns + tile * TILE_COLUMNS) * 4,
                columns * 4,
                buffer,
            )
    end_products(element)


@kernel
def all_heads(
    queries: int, out: int, table: int, context: int, pages: int, rows: int, tokens: int, scratch: int
) -> None:
    """Attention of `rows` requests in bfloat16, each with `tokens` tokens at the end of its context."""
    sharing, page_bytes = HEADS // KV_HEADS, 2 * KV_HEADS * PAGE * DIM * 2
    row_bytes, block, shaped = HEADS * DIM * 2, BLOCK_TOKENS, 0
    for row in range(rows):
        for first in range(0, tokens, block):
            for head in range(KV_HEADS):
                at = (row * tokens + first) * row_bytes + head * sharing * DIM * 2
                keys, values = head * PAGE * DIM * 2, (KV_HEADS + head) * PAGE * DIM * 2
                shaped = attend_block(
                    BF16_WITNESS,
                    HeadPages(table + row * (context // PAGE + 1) * 4, pages, page_bytes, PAGE, DIM, keys, values),
                    queries + at,
                    row_bytes,
                    min(block, tokens - first),
                    context - tokens + first,
                    Sight(sharing, 0, 0.125, 0.0),
                    scratch,
                    out + at,
                    row_bytes,
                    shaped,
                )
    if shaped > 0:
        release_tiles()


BF16_WITNESS: Final = BF16


def fastest_us(run: Callable[[int], object], turns: int) -> float:
    """CPU time of one turn; `run(turn)`."""
    run(0)
    best = float("inf")
    for _ in range(REPEATS):
        began = time.thread_time()
        for turn in range(turns):
            run(turn)
        best = min(best, (time.thread_time() - began) / turns)
    return best * 1e6


def read_gb_s() -> float:
    one, other = torch.ones(32 << 20), torch.ones(32 << 20)
    return 2 * one.nbytes / fastest_us(lambda turn: torch.dot(one, other), 2) / 1e3


def products(element: Element, read: float) -> list[Figure]:
    weight_bytes = OUT // LANES * element.panel_bytes
    # Small values: what is multiplied does not change how long it takes, but subnormals would.
    weights = torch.full((COPIES, weight_bytes), 60, dtype=torch.uint8)
    x = torch.full((max(ROWS), element.row_bytes), 60, dtype=torch.uint8)
    out, buffer = torch.zeros((max(ROWS), OUT)), torch.zeros(BUFFER_BYTES, dtype=torch.uint8)

    def multiply(rows: int, columns: int, copy: int) -> None:
        of = weights[copy].data_ptr()
        all_columns(
            element.witness,
            x.data_ptr(),
            element.row_bytes,
            rows,
            of,
            element.panel_bytes,
            element.steps,
            out.data_ptr(),
            columns,
            buffer.data_ptr(),
        )

    peak = 2 * 96 * TILE_COLUMNS * IN / fastest_us(lambda turn: multiply(96, TILE_COLUMNS, 0), 200)
    figures = []
    print(f"{element.name}: a tile's peak is {peak / 1e3:.0f} G operations a second", flush=True)
    for rows in ROWS:
        operations = 2 * rows * IN * OUT
        size = weight_bytes + rows * (element.row_bytes + OUT * 4)
        floor = max(size / read / 1e3, operations / peak)
        took = fastest_us(lambda turn, rows=rows: multiply(rows, OUT, turn % COPIES), COPIES if rows < 100 else 2)  # type: ignore[misc]
        figures.append(
            Figure(f"product {element.name}, {rows} rows", size / 1e3, operations / 1e6, floor, took, took / floor)
        )
    return figures


def attention(read: float, peak: float) -> list[Figure]:
    shapes = ((1, 1, 192), (8, 1, 192), (32, 1, 192), (32, 1, 1008), (1, 512, 512), (1, 512, 2048))
    return [attention_at(*shape, read, peak) for shape in shapes]


def attention_at(rows: int, tokens: int, context: int, read: float, peak: float) -> Figure:
    per_row = context // PAGE + 1
    pages: Tensor = torch.randn((rows * per_row, 2, KV_HEADS, PAGE * DIM)).bfloat16()
    layers = [pages.clone() for _ in range(max(1, min(COPIES, (256 << 20) // pages.nbytes)))]
    table = np.random.default_rng(0).permutation(rows * per_row).astype(np.int32)
    queries = torch.randn((rows * tokens, HEADS * DIM)).bfloat16()
    out = torch.empty_like(queries)
    scratch = torch.zeros(scratch_bytes(HEADS // KV_HEADS, DIM, AMX), dtype=torch.uint8)

    def attend(turn: int) -> None:
        layer = layers[turn % len(layers)].data_ptr()
        to, by = out.data_ptr(), table.ctypes.data
        all_heads(queries.data_ptr(), to, by, context, layer, rows, tokens, scratch.data_ptr())

    seen = rows * tokens * (context - (tokens - 1) / 2)
    operations = 4 * seen * HEADS * DIM
    size = rows * context * 2 * KV_HEADS * DIM * 2
    floor = max(size / read / 1e3, operations / peak)
    took = fastest_us(attend, len(layers) if tokens == 1 else 2)
    return Figure(f"attention, {rows} × {tokens} at {context}", size / 1e3, operations / 1e6, floor, took, took / floor)


def norm(read: float) -> Figure:
    x, weight, out = torch.randn((32, IN)), torch.ones(IN), torch.empty((32, IN), dtype=torch.bfloat16)
    for_row = x.stride(0) * 4

    def normalize(turn: int) -> None:
        row = turn % 32
        normalize_row(BF16, x.data_ptr() + row * for_row, weight.data_ptr(), IN, 1e-5, out[row].data_ptr())

    # The call from Python is most of it: it is taken off.
    empty = fastest_us(lambda turn: normalize_row(BF16, x.data_ptr(), weight.data_ptr(), 0, 1e-5, out.data_ptr()), 500)
    took = fastest_us(normalize, 500) - empty
    size = IN * 10
    return Figure("norm, a row", size / 1e3, 4 * IN / 1e6, size / read / 1e3, took, took / (size / read / 1e3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    read = read_gb_s()
    figures: list[Figure] = []
    for element in ELEMENTS:
        figures += products(element, read)
    peak = figures[7].operations_m / figures[7].measured_us * 1e6
    figures += attention(read, peak)
    figures.append(norm(read))
    print(f"one thread reads {read:.1f} GB/s")
    print(f"{'':32}{'read kB':>10}{'M ops':>10}{'floor µs':>10}{'measured':>10}{'ratio':>8}")
    for one in figures:
        numbers = f"{one.read_kb:>10.0f}{one.operations_m:>10.1f}{one.floor_us:>10.1f}{one.measured_us:>10.1f}"
        print(f"{one.kernel:32}{numbers}{one.ratio:>8.2f}")
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))


if __name__ == "__main__":
    main()

"""A decoder layer, and the output projection, as one program that all threads of a team run.

The program's only arguments are tables of numbers: addresses and sizes of the step (`StepField`), addresses of the
weights of each layer (`LayerField`). A call from Python costs 3 µs, and a job's parts are divided by barriers:

    ATTEND  normalize rows │ qkv = rows · Wqkv │ rotate, write keys and values │ attend
    MLP     x += attended · Wo │ normalize rows │ act = silu(gate) · up │ x += act · Wdown
    OUTPUT  normalize rows │ logits = rows · Wout

Activations between products are float32 where they are sums (x, qkv, logits), and inputs of the next product where they
are not. Every row is padded with zeros to whole groups of 32.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any, Final

import numba
import numpy as np

from headrace.ops.simd.attention import HeadPages, attend_block
from headrace.ops.simd.inputs import GROUP, group_bytes, store_group
from headrace.ops.simd.instructions import KERNEL_OPTIONS, LANES, kernel
from headrace.ops.simd.rows import normalize_row, rotate_head, write_key, write_value
from headrace.ops.simd.team import await_job, barrier, begin_job, claim
from headrace.ops.simd.tiles import MAX_ROWS, PANELS, TILE_COLUMNS, fetched_beside, product_rows, tile_height
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    VECTOR_BYTES,
    add,
    divide,
    exp,
    get_address,
    get_i32,
    load,
    multiply,
    splat,
    store,
    subtract,
    value_bytes,
    zeros,
)

ATTEND: Final = 1
MLP: Final = 2
OUTPUT: Final = 4
STOP: Final = 8


class StepField(IntEnum):
    """Columns of the step's table (int64)."""

    JOB = 0
    LAYER = auto()
    CELLS = auto()
    """The team's counters."""
    THREADS = auto()
    # Sizes of the model.
    WIDTH = auto()
    """Of a row of x."""
    HEADS = auto()
    KV_HEADS = auto()
    HEAD_DIM = auto()
    ROTARY_DIM = auto()
    WINDOW = auto()
    X_BYTES = auto()
    """From one row to the next: x, rows, qkv, queries, attended, act, logits."""
    ROWS_BYTES = auto()
    QKV_BYTES = auto()
    QUERY_BYTES = auto()
    ATTENDED_BYTES = auto()
    ATTENDED_INPUT_BYTES = auto()
    ACT_BYTES = auto()
    LOGITS_BYTES = auto()
    SCRATCH_BYTES = auto()
    """From one thread's scratch to the next's."""
    WIDTH_STEPS = auto()
    """Lanes (or groups) of a sum over a row of x, over the attended heads, over the activated."""
    ATTENDED_STEPS = auto()
    ACT_STEPS = auto()
    QKV_TILES = auto()
    """Tiles of 64 columns: of qkv, of x, of gate and up, of the logits."""
    WIDTH_TILES = auto()
    GATE_UP_TILES = auto()
    LOGITS_TILES = auto()
    WIDTH_PANEL_BYTES = auto()
    """From one panel of 16 columns to the next, by what is summed over."""
    ATTENDED_PANEL_BYTES = auto()
    ACT_PANEL_BYTES = auto()
    # The step.
    TOKENS = auto()
    """Rows of x."""
    ITEMS = auto()
    """Blocks of tokens that attend."""
    ITEM_ROW = auto()
    """Addresses of int32 arrays: an item's row of the batch and its first token; a row's first token, its length, its
    context; a token's row and position; the page table, by row."""
    ITEM_TOKEN = auto()
    BLOCK_TOKENS = auto()
    ROW_START = auto()
    ROW_KV_LEN = auto()
    TOKEN_ROW = auto()
    POSITIONS = auto()
    TABLES = auto()
    """Address of int64 [rows]: each row's part of the page table."""
    PAGES = auto()
    """Address of the layer's pages."""
    PAGE_BYTES = auto()
    PAGE_TOKENS = auto()
    HEAD_PLANE_BYTES = auto()
    """A head's keys of a page, or its values."""
    TURNS = auto()
    """Address of float32 [positions, rotary_dim]."""
    # Buffers.
    X = auto()
    ROWS = auto()
    QKV = auto()
    QUERIES = auto()
    ATTENDED = auto()
    ATTENDED_INPUT = auto()
    """The attended heads as inputs of a product: `ATTENDED` itself where the elements are KV's."""
    ACT = auto()
    LOGITS = auto()
    SCRATCH = auto()
    OUTPUT_NORM = auto()
    OUTPUT_WEIGHTS = auto()


class LayerField(IntEnum):
    """Columns of the table of weights (int64 addresses)."""

    ATTENTION_NORM = 0
    QKV = auto()
    OUTPUT = auto()
    MLP_NORM = auto()
    GATE_UP = auto()
    DOWN = auto()


class Constant(IntEnum):
    """Columns of the table of constants (float64)."""

    NORM_EPSILON = 0
    SCORE_SCALE = auto()
    SCORE_CAP = auto()


ROW_BLOCK: Final = 96
"""Rows that a tile of columns takes at a time: their inputs and the tile's weights fit the second cache together."""
NORM_ROWS: Final = 4
"""Rows of one claim of what is done row by row."""
TILE_BYTES: Final = TILE_COLUMNS * F32_BYTES
SCRATCH_TILE_BYTES: Final = MAX_ROWS * TILE_BYTES

_S: Final = StepField
_L: Final = LayerField


@kernel
def multiply_block(
    element: Any,
    x: int,
    x_bytes: int,
    rows: int,
    weights: int,
    following: int,
    panel_bytes: int,
    steps: int,
    out: int,
    out_bytes: int,
) -> None:
    """`rows` rows times a tile of 64 columns → float32; `following`: the columns that this thread takes next."""
    row = 0
    while row < rows:
        height, to = tile_height(rows - row), out + row * out_bytes
        ahead = fetched_beside(row, rows, weights, following, panel_bytes)
        product_rows(element, height, x + row * x_bytes, x_bytes, weights, ahead, panel_bytes, steps, to, out_bytes)
        row += height


@kernel
def product_phase(
    element: Any,
    cells: int,
    threads: int,
    phase: int,
    x: int,
    x_bytes: int,
    rows: int,
    weights: int,
    panel_bytes: int,
    steps: int,
    tiles: int,
    out: int,
    out_bytes: int,
) -> None:
    """out = x · weights."""
    blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
    piece = claim(cells, phase)
    while piece < tiles * blocks:
        tile, first = piece // blocks, piece % blocks * ROW_BLOCK
        multiply_block(
            element,
            x + first * x_bytes,
            x_bytes,
            min(ROW_BLOCK, rows - first),
            weights + PANELS * tile * panel_bytes,
            weights + PANELS * (tile + threads) * panel_bytes,
            panel_bytes,
            steps,
            out + first * out_bytes + tile * TILE_BYTES,
            out_bytes,
        )
        piece = claim(cells, phase)


@kernel
def adding_phase(
    element: Any,
    cells: int,
    threads: int,
    phase: int,
    x: int,
    x_bytes: int,
    rows: int,
    weights: int,
    panel_bytes: int,
    steps: int,
    tiles: int,
    scratch: int,
    out: int,
    out_bytes: int,
) -> None:
    """out += x · weights."""
    blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
    piece = claim(cells, phase)
    while piece < tiles * blocks:
        tile, first = piece // blocks, piece % blocks * ROW_BLOCK
        columns = weights + PANELS * tile * panel_bytes
        following = columns + PANELS * threads * panel_bytes
        row, end = first, min(first + ROW_BLOCK, rows)
        while row < end:
            height = tile_height(end - row)
            ahead = fetched_beside(row - first, end - first, columns, following, panel_bytes)
            product_rows(
                element, height, x + row * x_bytes, x_bytes, columns, ahead, panel_bytes, steps, scratch, TILE_BYTES
            )
            for at in range(height):
                here, to = scratch + at * TILE_BYTES, out + (row + at) * out_bytes + tile * TILE_BYTES
                for column in range(0, TILE_BYTES, VECTOR_BYTES):
                    store(F32, to + column, add(load(F32, to + column), load(F32, here + column)))
            row += height
        piece = claim(cells, phase)


@kernel
def silu(x: Any) -> Any:
    """x / (1 + exp(-x))."""
    return divide(x, add(splat(np.float32(1)), exp(subtract(zeros(), x))))


@kernel
def gated_phase(
    element: Any,
    cells: int,
    threads: int,
    phase: int,
    x: int,
    x_bytes: int,
    rows: int,
    weights: int,
    panel_bytes: int,
    steps: int,
    tiles: int,
    scratch: int,
    out: int,
    out_bytes: int,
) -> None:
    """out = silu(x · gate) · (x · up), as inputs of the next product. A tile is 32 columns of gate, then the same of
    up."""
    blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
    piece = claim(cells, phase)
    while piece < tiles * blocks:
        tile, first = piece // blocks, piece % blocks * ROW_BLOCK
        columns = weights + PANELS * tile * panel_bytes
        following = columns + PANELS * threads * panel_bytes
        row, end = first, min(first + ROW_BLOCK, rows)
        while row < end:
            height = tile_height(end - row)
            ahead = fetched_beside(row - first, end - first, columns, following, panel_bytes)
            product_rows(
                element, height, x + row * x_bytes, x_bytes, columns, ahead, panel_bytes, steps, scratch, TILE_BYTES
            )
            for at in range(height):
                here = scratch + at * TILE_BYTES
                low = multiply(silu(load(F32, here)), load(F32, here + 2 * VECTOR_BYTES))
                high = multiply(silu(load(F32, here + VECTOR_BYTES)), load(F32, here + 3 * VECTOR_BYTES))
                store_group(element, out + (row + at) * out_bytes + tile * group_bytes(element), low, high)
            row += height
        piece = claim(cells, phase)


@kernel
def norm_phase(element: Any, cells: int, phase: int, step: Any, weight: int, epsilon: float) -> None:
    """rows = normalized x."""
    piece = claim(cells, phase)
    while piece * NORM_ROWS < step[_S.TOKENS]:
        for row in range(piece * NORM_ROWS, min((piece + 1) * NORM_ROWS, step[_S.TOKENS])):
            x, out = step[_S.X] + row * step[_S.X_BYTES], step[_S.ROWS] + row * step[_S.ROWS_BYTES]
            normalize_row(element, x, weight, step[_S.WIDTH], epsilon, out)
        piece = claim(cells, phase)


@kernel
def rotary_phase(kv: Any, cells: int, phase: int, step: Any, scratch: int) -> None:
    """Queries turned; keys turned, and with the values in their pages."""
    heads, kv_heads, dim = step[_S.HEADS], step[_S.KV_HEADS], step[_S.HEAD_DIM]
    rotary_dim, page_tokens = step[_S.ROTARY_DIM], step[_S.PAGE_TOKENS]
    packed = page_tokens % LANES == 0
    piece = claim(cells, phase)
    while piece * NORM_ROWS < step[_S.TOKENS]:
        for token in range(piece * NORM_ROWS, min((piece + 1) * NORM_ROWS, step[_S.TOKENS])):
            position = get_i32(step[_S.POSITIONS] + token * 4)
            turns = step[_S.TURNS] + position * rotary_dim * F32_BYTES
            qkv = step[_S.QKV] + token * step[_S.QKV_BYTES]
            queries = step[_S.QUERIES] + token * step[_S.QUERY_BYTES]
            for head in range(heads):
                to = queries + head * dim * value_bytes(kv)
                rotate_head(kv, qkv + head * dim * F32_BYTES, turns, rotary_dim, dim, to)
            table = table_of(step, get_i32(step[_S.TOKEN_ROW] + token * 4))
            page = step[_S.PAGES] + get_i32(table + position // page_tokens * 4) * step[_S.PAGE_BYTES]
            for head in range(kv_heads):
                key = qkv + (heads + head) * dim * F32_BYTES
                plane = page + head * step[_S.HEAD_PLANE_BYTES]
                rotate_head(kv, key, turns, rotary_dim, dim, scratch)
                write_key(kv, scratch, dim, packed, plane, position % page_tokens)
                plane += kv_heads * step[_S.HEAD_PLANE_BYTES]
                rotate_head(kv, key + kv_heads * dim * F32_BYTES, turns, 0, dim, scratch)
                write_value(kv, scratch, dim, packed, plane, position % page_tokens)
        piece = claim(cells, phase)


@kernel
def input_phase(element: Any, kv: Any, cells: int, phase: int, step: Any, width: int) -> None:
    """Attended heads, of KV's elements, as inputs of a product with weights of others."""
    group = GROUP * value_bytes(kv)
    piece = claim(cells, phase)
    while piece * NORM_ROWS < step[_S.TOKENS]:
        for row in range(piece * NORM_ROWS, min((piece + 1) * NORM_ROWS, step[_S.TOKENS])):
            source = step[_S.ATTENDED] + row * step[_S.ATTENDED_BYTES]
            out = step[_S.ATTENDED_INPUT] + row * step[_S.ATTENDED_INPUT_BYTES]
            for at in range(width // GROUP):
                here = source + at * group
                low, high = load(kv, here), load(kv, here + group // 2)
                store_group(element, out + at * group_bytes(element), low, high)
        piece = claim(cells, phase)


@kernel
def table_of(step: Any, row: int) -> int:
    """The address of a row's page table."""
    address: int = get_address(step[_S.TABLES] + row * 8)
    return address


@kernel
def attention_phase(kv: Any, cells: int, phase: int, step: Any, constants: Any, scratch: int) -> None:
    """Every block of tokens, with each KV head."""
    heads, kv_heads, dim = step[_S.HEADS], step[_S.KV_HEADS], step[_S.HEAD_DIM]
    sharing, size = heads // kv_heads, value_bytes(kv)
    piece = claim(cells, phase)
    while piece < step[_S.ITEMS] * kv_heads:
        # The last blocks of a chunk see the most: they come first.
        item, head = step[_S.ITEMS] - 1 - piece // kv_heads, piece % kv_heads
        row = get_i32(step[_S.ITEM_ROW] + item * 4)
        token = get_i32(step[_S.ITEM_TOKEN] + item * 4)
        end = get_i32(step[_S.ROW_START] + (row + 1) * 4)
        tokens = min(step[_S.BLOCK_TOKENS], end - token)
        of_head = head * sharing * dim * size
        head_pages = HeadPages(
            table_of(step, row),
            step[_S.PAGES],
            step[_S.PAGE_BYTES],
            step[_S.PAGE_TOKENS],
            dim,
            head * step[_S.HEAD_PLANE_BYTES],
            (kv_heads + head) * step[_S.HEAD_PLANE_BYTES],
        )
        attend_block(
            kv,
            head_pages,
            step[_S.QUERIES] + token * step[_S.QUERY_BYTES] + of_head,
            step[_S.QUERY_BYTES],
            tokens,
            get_i32(step[_S.ROW_KV_LEN] + row * 4) - end + token,
            sharing,
            constants[Constant.SCORE_SCALE],
            step[_S.WINDOW],
            constants[Constant.SCORE_CAP],
            scratch,
            step[_S.ATTENDED] + token * step[_S.ATTENDED_BYTES] + of_head,
            step[_S.ATTENDED_BYTES],
        )
        piece = claim(cells, phase)


@kernel
def attend_job(element: Any, kv: Any, step: Any, layers: Any, constants: Any, scratch: int) -> None:
    cells, threads, layer = step[_S.CELLS], step[_S.THREADS], layers[step[_S.LAYER]]
    norm_phase(element, cells, 0, step, layer[_L.ATTENTION_NORM], constants[Constant.NORM_EPSILON])
    barrier(cells, threads)
    product_phase(
        element,
        cells,
        threads,
        1,
        step[_S.ROWS],
        step[_S.ROWS_BYTES],
        step[_S.TOKENS],
        layer[_L.QKV],
        step[_S.WIDTH_PANEL_BYTES],
        step[_S.WIDTH_STEPS],
        step[_S.QKV_TILES],
        step[_S.QKV],
        step[_S.QKV_BYTES],
    )
    barrier(cells, threads)
    rotary_phase(kv, cells, 2, step, scratch)
    barrier(cells, threads)
    attention_phase(kv, cells, 3, step, constants, scratch)
    barrier(cells, threads)


@kernel
def mlp_job(element: Any, kv: Any, step: Any, layers: Any, constants: Any, scratch: int) -> None:
    cells, threads, layer = step[_S.CELLS], step[_S.THREADS], layers[step[_S.LAYER]]
    tokens = step[_S.TOKENS]
    if step[_S.ATTENDED_INPUT] != step[_S.ATTENDED]:
        width = (step[_S.HEADS] * step[_S.HEAD_DIM] + GROUP - 1) // GROUP * GROUP
        input_phase(element, kv, cells, 4, step, width)
        barrier(cells, threads)
    adding_phase(
        element,
        cells,
        threads,
        5,
        step[_S.ATTENDED_INPUT],
        step[_S.ATTENDED_INPUT_BYTES],
        tokens,
        layer[_L.OUTPUT],
        step[_S.ATTENDED_PANEL_BYTES],
        step[_S.ATTENDED_STEPS],
        step[_S.WIDTH_TILES],
        scratch,
        step[_S.X],
        step[_S.X_BYTES],
    )
    barrier(cells, threads)
    norm_phase(element, cells, 6, step, layer[_L.MLP_NORM], constants[Constant.NORM_EPSILON])
    barrier(cells, threads)
    gated_phase(
        element,
        cells,
        threads,
        7,
        step[_S.ROWS],
        step[_S.ROWS_BYTES],
        tokens,
        layer[_L.GATE_UP],
        step[_S.WIDTH_PANEL_BYTES],
        step[_S.WIDTH_STEPS],
        step[_S.GATE_UP_TILES],
        scratch,
        step[_S.ACT],
        step[_S.ACT_BYTES],
    )
    barrier(cells, threads)
    adding_phase(
        element,
        cells,
        threads,
        8,
        step[_S.ACT],
        step[_S.ACT_BYTES],
        tokens,
        layer[_L.DOWN],
        step[_S.ACT_PANEL_BYTES],
        step[_S.ACT_STEPS],
        step[_S.WIDTH_TILES],
        scratch,
        step[_S.X],
        step[_S.X_BYTES],
    )
    barrier(cells, threads)


@kernel
def output_job(element: Any, step: Any, constants: Any) -> None:
    cells, threads = step[_S.CELLS], step[_S.THREADS]
    norm_phase(element, cells, 9, step, step[_S.OUTPUT_NORM], constants[Constant.NORM_EPSILON])
    barrier(cells, threads)
    product_phase(
        element,
        cells,
        threads,
        10,
        step[_S.ROWS],
        step[_S.ROWS_BYTES],
        step[_S.TOKENS],
        step[_S.OUTPUT_WEIGHTS],
        step[_S.WIDTH_PANEL_BYTES],
        step[_S.WIDTH_STEPS],
        step[_S.LOGITS_TILES],
        step[_S.LOGITS],
        step[_S.LOGITS_BYTES],
    )
    barrier(cells, threads)


@kernel
def do_job(element: Any, kv: Any, step: Any, layers: Any, constants: Any, thread: int) -> None:
    scratch = step[_S.SCRATCH] + thread * step[_S.SCRATCH_BYTES]
    job = step[_S.JOB]
    if job & ATTEND:
        attend_job(element, kv, step, layers, constants, scratch)
    if job & MLP:
        mlp_job(element, kv, step, layers, constants, scratch)
    if job & OUTPUT:
        output_job(element, step, constants)


@numba.njit(**KERNEL_OPTIONS)  # type: ignore[untyped-decorator]
def run(element: Any, kv: Any, step: Any, layers: Any, constants: Any, thread: int) -> None:
    """In the main thread (0): run the job of the step's table. In a helper: all jobs, until one that says stop."""
    if thread == 0:
        begin_job(step[_S.CELLS], step[_S.THREADS])
        do_job(element, kv, step, layers, constants, thread)
        return
    number = 1
    await_job(step[_S.CELLS], number)
    while step[_S.JOB] != STOP:
        do_job(element, kv, step, layers, constants, thread)
        number += 1
        await_job(step[_S.CELLS], number)

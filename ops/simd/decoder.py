"""A decoder's layers, and the output projection, as one program that all threads of a team run.

The program's only arguments are tables of numbers: addresses and sizes of the step (`StepField`), addresses of the
weights and pages of each layer (`LayerField`). A call from Python costs 3 µs, so a job may have several parts, and its
layers are as many as need not wait for pages. Parts are divided by barriers:

    BEGIN   x = embeddings of the ids; which blocks of tokens attend
    ATTEND  normalize rows │ qkv = rows · Wqkv │ bias, norms of heads, rotate, write keys and values │ attend   ╮ each
    MLP     x += attended · Wo │ normalize rows │ act = silu(gate) · up │ x += act · Wdown                      ╯ layer
    OUTPUT  normalize rows │ logits = rows · Wout │ cap
    COPY    pages from one pool to another (`copies`)

What only some models have (a bias, norms of heads or behind products, a window, a cap) is 0 in the tables of others.

Activations between products are float32 where they are sums (x, qkv, logits), and inputs of the next product where they
are not. Every row is padded with zeros to whole groups of 32.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

from headrace.ops.simd.amx import release_tiles
from headrace.ops.simd.attention import attend_block
from headrace.ops.simd.bundles import BatchRows, attend_bundle, in_table, table_of
from headrace.ops.simd.copies import Pages, copy_phase
from headrace.ops.simd.head_pages import HeadPages
from headrace.ops.simd.inputs import GROUP, store_group
from headrace.ops.simd.instructions import KERNEL_OPTIONS, LANES, kernel, part
from headrace.ops.simd.products import (
    TILE_BYTES,
    Matrix,
    adding_phase,
    first_columns,
    gated_phase,
    part_panels,
    product_phase,
)
from headrace.ops.simd.rows import (
    add_normalized,
    add_row,
    normalize_head,
    normalize_row,
    rotate_head,
    write_key,
    write_value,
)
from headrace.ops.simd.softmax import Sight, capped
from headrace.ops.simd.tables import ATTEND, BEGIN, COPY, MLP, OUTPUT, STOP, Constant, LayerField, StepField
from headrace.ops.simd.team import Member, await_job, begin_job, claim, end_phase
from headrace.ops.simd.tiles import PANELS
from headrace.ops.simd.vector import (
    F32,
    F32_BYTES,
    VECTOR_BYTES,
    get_address,
    get_i32,
    load,
    multiply,
    put_i32,
    splat,
    store,
    value_bytes,
)

NORM_ROWS: Final = 4
"""Rows of one claim of what is done row by row."""

_S: Final = StepField
_L: Final = LayerField


@kernel
def norm_phase(element: Any, member: Member, phase: int, step: Any, weight: int, epsilon: float) -> None:
    """rows = normalized x."""
    pieces = (step[_S.TOKENS] + NORM_ROWS - 1) // NORM_ROWS
    piece = claim(member, phase, pieces)
    while piece < pieces:
        for row in range(piece * NORM_ROWS, min((piece + 1) * NORM_ROWS, step[_S.TOKENS])):
            x, out = step[_S.X] + row * step[_S.X_BYTES], step[_S.ROWS] + row * step[_S.ROWS_BYTES]
            normalize_row(element, x, weight, step[_S.WIDTH], epsilon, out)
        piece = claim(member, phase, pieces)


@kernel
def normalized_rows(
    element: Any, member: Member, phase: int, step: Any, weight: int, epsilon: float
) -> tuple[int, int]:
    """Normalized x, ready for this thread → where it is, and the next phase.

    Of so few rows that one thread would do them while the others wait, each thread makes its own.
    """
    if step[_S.TOKENS] > NORM_ROWS:
        norm_phase(element, member, phase, step, weight, epsilon)
        return step[_S.ROWS], end_phase(member, phase)
    rows = step[_S.ROWS] + member.thread * NORM_ROWS * step[_S.ROWS_BYTES]
    for row in range(step[_S.TOKENS]):
        x, out = step[_S.X] + row * step[_S.X_BYTES], rows + row * step[_S.ROWS_BYTES]
        normalize_row(element, x, weight, step[_S.WIDTH], epsilon, out)
    return rows, phase


@kernel
def turn_heads(
    kv: Any, step: Any, layer: Any, epsilon: float, token: int, row: int, first: int, end: int, scratch: int
) -> None:
    """Of a token's KV heads from `first` to before `end`, and of the queries that share them: biases added and heads
    normalized where the layer has that; queries turned; keys turned, and with the values in their page."""
    heads, kv_heads, dim = step[_S.HEADS], step[_S.KV_HEADS], step[_S.HEAD_DIM]
    rotary_dim, page_tokens = step[_S.ROTARY_DIM], step[_S.PAGE_TOKENS]
    packed, head_bytes, sharing = page_tokens % LANES == 0, dim * F32_BYTES, heads // kv_heads
    table = table_of(rows_of(step, layer), row)
    position = get_i32(step[_S.POSITIONS] + token * 4)
    turns = layer[_L.TURNS] + position * rotary_dim * F32_BYTES
    page = layer[_L.PAGES] + get_i32(table + position // page_tokens * 4) * step[_S.PAGE_BYTES]
    queries, keys = step[_S.QKV] + token * step[_S.QKV_BYTES], heads * head_bytes
    values = keys + kv_heads * head_bytes
    for kv_head in range(first, end):
        key, value = queries + keys + kv_head * head_bytes, queries + values + kv_head * head_bytes
        if layer[_L.QKV_BIAS] != 0:
            add_row(key, layer[_L.QKV_BIAS] + keys + kv_head * head_bytes, dim)
            add_row(value, layer[_L.QKV_BIAS] + values + kv_head * head_bytes, dim)
        if layer[_L.KEY_NORM] != 0:
            normalize_head(key, layer[_L.KEY_NORM], dim, epsilon)
        plane = page + kv_head * step[_S.HEAD_PLANE_BYTES]
        rotate_head(kv, key, turns, rotary_dim, dim, scratch)
        write_key(kv, scratch, dim, packed, plane, position % page_tokens)
        rotate_head(kv, value, turns, 0, dim, scratch)
        write_value(kv, scratch, dim, packed, plane + kv_heads * step[_S.HEAD_PLANE_BYTES], position % page_tokens)
        for head in range(kv_head * sharing, (kv_head + 1) * sharing):
            query = queries + head * head_bytes
            if layer[_L.QKV_BIAS] != 0:
                add_row(query, layer[_L.QKV_BIAS] + head * head_bytes, dim)
            if layer[_L.QUERY_NORM] != 0:
                normalize_head(query, layer[_L.QUERY_NORM], dim, epsilon)
            to = step[_S.QUERIES] + token * step[_S.QUERY_BYTES] + head * dim * value_bytes(kv)
            rotate_head(kv, query, turns, rotary_dim, dim, to)


@kernel
def rotary_phase(kv: Any, member: Member, phase: int, step: Any, layer: Any, epsilon: float, scratch: int) -> None:
    """All heads of all tokens turned, keys and values in their pages."""
    pieces = (step[_S.TOKENS] + NORM_ROWS - 1) // NORM_ROWS
    piece = claim(member, phase, pieces)
    while piece < pieces:
        for token in range(piece * NORM_ROWS, min((piece + 1) * NORM_ROWS, step[_S.TOKENS])):
            row = get_i32(step[_S.TOKEN_ROW] + token * 4)
            turn_heads(kv, step, layer, epsilon, token, row, 0, step[_S.KV_HEADS], scratch)
        piece = claim(member, phase, pieces)


@kernel
def input_phase(element: Any, kv: Any, member: Member, phase: int, step: Any, width: int) -> None:
    """Attended heads, of KV's elements, as inputs of a product with weights of others."""
    group = GROUP * value_bytes(kv)
    pieces = (step[_S.TOKENS] + NORM_ROWS - 1) // NORM_ROWS
    piece = claim(member, phase, pieces)
    while piece < pieces:
        for row in range(piece * NORM_ROWS, min((piece + 1) * NORM_ROWS, step[_S.TOKENS])):
            source = step[_S.ATTENDED] + row * step[_S.ATTENDED_BYTES]
            out = step[_S.ATTENDED_INPUT] + row * step[_S.ATTENDED_INPUT_BYTES]
            for at in range(width // GROUP):
                here = source + at * group
                low, high = load(kv, here), load(kv, here + group // 2)
                store_group(element, out, at, width // GROUP, low, high)
        piece = claim(member, phase, pieces)


@kernel
def rows_of(step: Any, layer: Any) -> BatchRows:
    return BatchRows(
        step[_S.ROW_START],
        step[_S.ROW_KV_LEN],
        step[_S.ROW_SLOT],
        layer[_L.TABLE],
        step[_S.TABLE_BYTES],
    )


@kernel
def turns_alone(step: Any) -> bool:
    """Whether each row is one token: nothing that it attends to is written by another piece of the phase."""
    alone: bool = step[_S.TOKENS] == step[_S.BATCH_ROWS]
    return alone


@part
def attention_phase(kv: Any, member: Member, phase: int, step: Any, layer: Any, constants: Any, scratch: int) -> None:
    """Every block of tokens, with each KV head; bundles instead of their rows where the layer's pages are shared. They
    are turned before where no other token of their row is waited for."""
    window, alone, epsilon = layer[_L.WINDOW], turns_alone(step), constants[Constant.NORM_EPSILON]
    heads, kv_heads, dim = step[_S.HEADS], step[_S.KV_HEADS], step[_S.HEAD_DIM]
    sharing, size, shaped = heads // kv_heads, value_bytes(kv), 0
    sight = Sight(sharing, window, constants[Constant.SCORE_SCALE], constants[Constant.SCORE_CAP])
    items, bundles = step[_S.ITEMS], 0
    if layer[_L.SHARES] != 0:
        items, bundles = step[_S.FREE_ITEMS], step[_S.BUNDLES]
    pieces = (items + bundles) * kv_heads
    rows = rows_of(step, layer)
    # The last blocks of a chunk see the most: they come first, and are the last thread's, as their rows are.
    backwards = Member(member.cells, member.threads, member.threads - 1 - member.thread)
    piece = claim(backwards, phase, pieces)
    while piece < pieces:
        item, head = items + bundles - 1 - piece // kv_heads, piece % kv_heads
        of_head = head * sharing * dim * size
        queries, out = step[_S.QUERIES] + of_head, step[_S.ATTENDED] + of_head
        query_bytes, out_bytes = step[_S.QUERY_BYTES], step[_S.ATTENDED_BYTES]
        pages = HeadPages(
            0,
            layer[_L.PAGES],
            step[_S.PAGE_BYTES],
            step[_S.PAGE_TOKENS],
            dim,
            head * step[_S.HEAD_PLANE_BYTES],
            (kv_heads + head) * step[_S.HEAD_PLANE_BYTES],
        )
        if item < items:
            row = get_i32(step[_S.ITEM_ROW] + item * 4)
            token = get_i32(step[_S.ITEM_TOKEN] + item * 4)
            end = get_i32(step[_S.ROW_START] + (row + 1) * 4)
            if alone:
                turn_heads(kv, step, layer, epsilon, token, row, head, head + 1, scratch)
            shaped = attend_block(
                kv,
                in_table(pages, table_of(rows, row)),
                queries + token * query_bytes,
                query_bytes,
                min(step[_S.BLOCK_TOKENS], end - token),
                get_i32(step[_S.ROW_KV_LEN] + row * 4) - end + token,
                sight,
                scratch,
                out + token * out_bytes,
                out_bytes,
                shaped,
            )
        else:
            bundle = item - items
            first, end = get_i32(step[_S.BUNDLE_START] + bundle * 4), get_i32(step[_S.BUNDLE_START] + (bundle + 1) * 4)
            for at in range(first, end if alone else first):
                row = get_i32(step[_S.BUNDLE_ROWS] + at * 4)
                token = get_i32(step[_S.ROW_START] + row * 4)
                turn_heads(kv, step, layer, epsilon, token, row, head, head + 1, scratch)
            shaped = attend_bundle(
                kv,
                pages,
                rows,
                step[_S.BUNDLE_ROWS] + first * 4,
                end - first,
                get_i32(step[_S.BUNDLE_SHARED] + bundle * 4),
                queries,
                query_bytes,
                sight,
                scratch,
                out,
                out_bytes,
                shaped,
            )
        piece = claim(backwards, phase, pieces)
    if shaped > 0:
        release_tiles()


@kernel
def list_items(step: Any) -> None:
    """List the blocks of tokens that attend, those of bundles last, and whose row each token is."""
    item, block, bundles = 0, step[_S.BLOCK_TOKENS], step[_S.BUNDLES]
    for bundled in range(2 if bundles > 0 else 1):
        for row in range(step[_S.BATCH_ROWS]):
            if bundles > 0 and get_i32(step[_S.ROW_BUNDLED] + row * 4) != bundled:
                continue
            first, end = get_i32(step[_S.ROW_START] + row * 4), get_i32(step[_S.ROW_START] + (row + 1) * 4)
            for token in range(first, end):
                put_i32(step[_S.TOKEN_ROW] + token * 4, row)
                if (token - first) % block == 0:
                    put_i32(step[_S.ITEM_ROW] + item * 4, row)
                    put_i32(step[_S.ITEM_TOKEN] + item * 4, token)
                    item += 1
        if bundled == 0:
            step[_S.FREE_ITEMS] = item
    step[_S.ITEMS] = item


@kernel
def begin_phase(kv: Any, member: Member, phase: int, step: Any, scale: float) -> None:
    """x = embeddings of the ids · scale; the list of what attends."""
    if member.thread == 0:
        list_items(step)
    by, size = splat(np.float32(scale)), value_bytes(kv)
    pieces = (step[_S.TOKENS] + NORM_ROWS - 1) // NORM_ROWS
    piece = claim(member, phase, pieces)
    while piece < pieces:
        for token in range(piece * NORM_ROWS, min((piece + 1) * NORM_ROWS, step[_S.TOKENS])):
            x = step[_S.X] + token * step[_S.X_BYTES]
            row = step[_S.EMBEDDING] + get_address(step[_S.IDS] + token * 8) * step[_S.EMBEDDING_BYTES]
            for at in range(0, step[_S.EMBEDDING_BYTES] // size, LANES):
                store(F32, x + at * F32_BYTES, multiply(load(kv, row + at * size), by))
        piece = claim(member, phase, pieces)


@kernel
def qkv_of(step: Any, layer: Any) -> Matrix:
    return Matrix(layer[_L.QKV], layer[_L.QKV_PANEL_BYTES], step[_S.WIDTH_STEPS], step[_S.QKV_TILES])


@kernel
def output_of(step: Any, layer: Any) -> Matrix:
    return Matrix(layer[_L.OUTPUT], layer[_L.OUTPUT_PANEL_BYTES], step[_S.ATTENDED_STEPS], step[_S.WIDTH_TILES])


@kernel
def gate_up_of(step: Any, layer: Any) -> Matrix:
    return Matrix(layer[_L.GATE_UP], layer[_L.GATE_UP_PANEL_BYTES], step[_S.WIDTH_STEPS], step[_S.GATE_UP_TILES])


@kernel
def down_of(step: Any, layer: Any) -> Matrix:
    return Matrix(layer[_L.DOWN], layer[_L.DOWN_PANEL_BYTES], step[_S.ACT_STEPS], step[_S.WIDTH_TILES])


@kernel
def logits_of(step: Any) -> Matrix:
    return Matrix(step[_S.OUTPUT_WEIGHTS], step[_S.OUTPUT_PANEL_BYTES], step[_S.WIDTH_STEPS], step[_S.LOGITS_TILES])


@kernel
def behind(element: Any, member: Member, step: Any, matrix: Matrix) -> int:
    """The weights that this thread reads first in the next product. They come to the cache in the last piece before:
    else memory would rest at each barrier, and then be waited for."""
    return first_columns(element, member, step[_S.TOKENS], matrix, part_panels(element, step[_S.TOKENS]))


@part
def attend_part(
    element: Any, kv: Any, member: Member, phase: int, step: Any, layer: Any, constants: Any, scratch: int
) -> int:
    """→ the next phase."""
    epsilon = constants[Constant.NORM_EPSILON]
    rows, phase = normalized_rows(element, member, phase, step, layer[_L.ATTENTION_NORM], epsilon)
    product_phase(
        element,
        member,
        phase,
        rows,
        step[_S.ROWS_BYTES],
        step[_S.TOKENS],
        qkv_of(step, layer),
        scratch,
        step[_S.QKV],
        step[_S.QKV_BYTES],
        behind(element, member, step, output_of(step, layer)),
    )
    phase = end_phase(member, phase)
    if not turns_alone(step):
        rotary_phase(kv, member, phase, step, layer, epsilon, scratch)
        phase = end_phase(member, phase)
    attention_phase(kv, member, phase, step, layer, constants, scratch)
    return end_phase(member, phase)


@kernel
def residual_phases(
    element: Any,
    member: Member,
    phase: int,
    step: Any,
    rows: int,
    row_bytes: int,
    matrix: Matrix,
    norm: int,
    epsilon: float,
    scratch: int,
    ahead: int,
) -> int:
    """x += rows · weights, which are normalized before where there is a norm for it → the next phase."""
    tokens, x_bytes = step[_S.TOKENS], step[_S.X_BYTES]
    if norm == 0:
        adding_phase(element, member, phase, rows, row_bytes, tokens, matrix, scratch, step[_S.X], x_bytes, ahead)
        return end_phase(member, phase)
    added = step[_S.ADDED]
    product_phase(element, member, phase, rows, row_bytes, tokens, matrix, scratch, added, x_bytes, ahead)
    phase = end_phase(member, phase)
    pieces = (tokens + NORM_ROWS - 1) // NORM_ROWS
    piece = claim(member, phase, pieces)
    while piece < pieces:
        for row in range(piece * NORM_ROWS, min((piece + 1) * NORM_ROWS, tokens)):
            add_normalized(added + row * x_bytes, norm, step[_S.WIDTH], epsilon, step[_S.X] + row * x_bytes)
        piece = claim(member, phase, pieces)
    return end_phase(member, phase)


@part
def mlp_part(
    element: Any,
    kv: Any,
    member: Member,
    phase: int,
    step: Any,
    layer: Any,
    constants: Any,
    scratch: int,
    following: Matrix,
) -> int:
    """→ the next phase; `following`: the weights that are read next."""
    tokens, epsilon = step[_S.TOKENS], constants[Constant.NORM_EPSILON]
    if step[_S.ATTENDED_INPUT] != step[_S.ATTENDED]:
        width = (step[_S.HEADS] * step[_S.HEAD_DIM] + GROUP - 1) // GROUP * GROUP
        input_phase(element, kv, member, phase, step, width)
        phase = end_phase(member, phase)
    phase = residual_phases(
        element,
        member,
        phase,
        step,
        step[_S.ATTENDED_INPUT],
        step[_S.ATTENDED_INPUT_BYTES],
        output_of(step, layer),
        layer[_L.AFTER_ATTENTION],
        epsilon,
        scratch,
        first_columns(element, member, tokens, gate_up_of(step, layer), PANELS),
    )
    rows, phase = normalized_rows(element, member, phase, step, layer[_L.MLP_NORM], epsilon)
    gated_phase(
        element,
        step[_S.ACTIVATION],
        member,
        phase,
        rows,
        step[_S.ROWS_BYTES],
        tokens,
        gate_up_of(step, layer),
        scratch,
        step[_S.ACT],
        step[_S.ACT_BYTES],
        behind(element, member, step, down_of(step, layer)),
    )
    phase = end_phase(member, phase)
    return residual_phases(
        element,
        member,
        phase,
        step,
        step[_S.ACT],
        step[_S.ACT_BYTES],
        down_of(step, layer),
        layer[_L.AFTER_MLP],
        epsilon,
        scratch,
        behind(element, member, step, following),
    )


@kernel
def cap_phase(member: Member, phase: int, step: Any, cap: float) -> None:
    """logits = cap · tanh(logits / cap)."""
    row = claim(member, phase, step[_S.TOKENS])
    while row < step[_S.TOKENS]:
        logits = step[_S.LOGITS] + row * step[_S.LOGITS_BYTES]
        for at in range(0, step[_S.LOGITS_TILES] * TILE_BYTES, VECTOR_BYTES):
            store(F32, logits + at, capped(load(F32, logits + at), cap))
        row = claim(member, phase, step[_S.TOKENS])


@part
def output_part(
    element: Any, member: Member, phase: int, step: Any, constants: Any, scratch: int, following: Matrix
) -> int:
    """→ the next phase; `following`: the weights that are read next."""
    epsilon = constants[Constant.NORM_EPSILON]
    rows, phase = normalized_rows(element, member, phase, step, step[_S.OUTPUT_NORM], epsilon)
    product_phase(
        element,
        member,
        phase,
        rows,
        step[_S.ROWS_BYTES],
        step[_S.TOKENS],
        logits_of(step),
        scratch,
        step[_S.LOGITS],
        step[_S.LOGITS_BYTES],
        behind(element, member, step, following),
    )
    phase = end_phase(member, phase)
    if constants[Constant.LOGITS_CAP] > 0:
        cap_phase(member, phase, step, constants[Constant.LOGITS_CAP])
        phase = end_phase(member, phase)
    return phase


@part
def copy_part(member: Member, phase: int, step: Any) -> int:
    """→ the next phase."""
    to = Pages(step[_S.TO_POOL], step[_S.TO_NUMBERS], step[_S.TO_PAGE_BYTES], step[_S.TO_LAYER_BYTES])
    source = Pages(step[_S.FROM_POOL], step[_S.FROM_NUMBERS], step[_S.FROM_PAGE_BYTES], step[_S.FROM_LAYER_BYTES])
    pages, layers, size_bytes = step[_S.COPY_PAGES], step[_S.COPY_LAYERS], step[_S.COPY_BYTES]
    copy_phase(member, phase, pages, layers, size_bytes, to, source, step[_S.RUN_BYTES])
    return end_phase(member, phase)


@part
def do_job(element: Any, kv: Any, step: Any, layers: Any, constants: Any, thread: int) -> None:
    member = Member(step[_S.CELLS], step[_S.THREADS], thread)
    scratch = step[_S.SCRATCH] + thread * step[_S.SCRATCH_BYTES]
    job, phase = step[_S.JOB], 0
    if job & BEGIN:
        begin_phase(kv, member, phase, step, constants[Constant.EMBEDDING_SCALE])
        phase = end_phase(member, phase)
    for number in range(step[_S.FIRST_LAYER], step[_S.END_LAYER]):
        layer = layers[number]
        if job & ATTEND:
            phase = attend_part(element, kv, member, phase, step, layer, constants, scratch)
        if job & MLP:
            following = qkv_of(step, layers[number + 1]) if number + 1 < len(layers) else logits_of(step)
            phase = mlp_part(element, kv, member, phase, step, layer, constants, scratch, following)
    if job & OUTPUT:
        phase = output_part(element, member, phase, step, constants, scratch, qkv_of(step, layers[0]))
    if job & COPY:
        phase = copy_part(member, phase, step)
    if phase == 0:
        # Of no layer. A helper that has not looked at the job yet would take the next one for it.
        end_phase(member, phase)


@numba.njit(**KERNEL_OPTIONS)  # type: ignore[untyped-decorator]
def run(element: Any, kv: Any, step: Any, layers: Any, constants: Any, thread: int) -> None:
    """In the main thread (0): run the job of the step's table. In a helper: all jobs, until one that says stop."""
    number = 0
    while True:
        if thread == 0:
            begin_job(step[_S.CELLS], step[_S.THREADS])
        else:
            number += 1
            await_job(step[_S.CELLS], number)
            if step[_S.JOB] == STOP:
                return
        do_job(element, kv, step, layers, constants, thread)
        if thread == 0:
            return

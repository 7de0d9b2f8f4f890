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
from headrace.ops.simd.attention import HeadPages, attend_block
from headrace.ops.simd.bundles import BatchRows, attend_bundle, in_table, table_of
from headrace.ops.simd.copies import Pages, copy_phase
from headrace.ops.simd.inputs import GROUP, store_group
from headrace.ops.simd.instructions import KERNEL_OPTIONS, LANES, kernel, part
from headrace.ops.simd.products import TILE_BYTES, adding_phase, gated_phase, product_phase
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
def rotary_phase(kv: Any, member: Member, phase: int, step: Any, layer: Any, epsilon: float, scratch: int) -> None:
    """Biases added and heads normalized where the layer has that; queries turned; keys turned, and with the values in
    their pages."""
    heads, kv_heads, dim = step[_S.HEADS], step[_S.KV_HEADS], step[_S.HEAD_DIM]
    rotary_dim, page_tokens = step[_S.ROTARY_DIM], step[_S.PAGE_TOKENS]
    packed, rows = page_tokens % LANES == 0, rows_of(step, layer)
    pieces = (step[_S.TOKENS] + NORM_ROWS - 1) // NORM_ROWS
    piece = claim(member, phase, pieces)
    while piece < pieces:
        for token in range(piece * NORM_ROWS, min((piece + 1) * NORM_ROWS, step[_S.TOKENS])):
            position = get_i32(step[_S.POSITIONS] + token * 4)
            turns = layer[_L.TURNS] + position * rotary_dim * F32_BYTES
            qkv = step[_S.QKV] + token * step[_S.QKV_BYTES]
            if layer[_L.QKV_BIAS] != 0:
                add_row(qkv, layer[_L.QKV_BIAS], (heads + 2 * kv_heads) * dim)
            if layer[_L.QUERY_NORM] != 0:
                for head in range(heads):
                    normalize_head(qkv + head * dim * F32_BYTES, layer[_L.QUERY_NORM], dim, epsilon)
                for head in range(heads, heads + kv_heads):
                    normalize_head(qkv + head * dim * F32_BYTES, layer[_L.KEY_NORM], dim, epsilon)
            queries = step[_S.QUERIES] + token * step[_S.QUERY_BYTES]
            for head in range(heads):
                to = queries + head * dim * value_bytes(kv)
                rotate_head(kv, qkv + head * dim * F32_BYTES, turns, rotary_dim, dim, to)
            table = table_of(rows, get_i32(step[_S.TOKEN_ROW] + token * 4))
            page = layer[_L.PAGES] + get_i32(table + position // page_tokens * 4) * step[_S.PAGE_BYTES]
            for head in range(kv_heads):
                key = qkv + (heads + head) * dim * F32_BYTES
                plane = page + head * step[_S.HEAD_PLANE_BYTES]
                rotate_head(kv, key, turns, rotary_dim, dim, scratch)
                write_key(kv, scratch, dim, packed, plane, position % page_tokens)
                plane += kv_heads * step[_S.HEAD_PLANE_BYTES]
                rotate_head(kv, key + kv_heads * dim * F32_BYTES, turns, 0, dim, scratch)
                write_value(kv, scratch, dim, packed, plane, position % page_tokens)
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


@part
def attention_phase(kv: Any, member: Member, phase: int, step: Any, layer: Any, constants: Any, scratch: int) -> None:
    """Every block of tokens, with each KV head; bundles instead of their rows where the layer's pages are shared."""
    window = layer[_L.WINDOW]
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
            first = get_i32(step[_S.BUNDLE_START] + bundle * 4)
            shaped = attend_bundle(
                kv,
                pages,
                rows,
                step[_S.BUNDLE_ROWS] + first * 4,
                get_i32(step[_S.BUNDLE_START] + (bundle + 1) * 4) - first,
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


@part
def attend_part(
    element: Any, kv: Any, member: Member, phase: int, step: Any, layer: Any, constants: Any, scratch: int
) -> int:
    """→ the next phase."""
    norm_phase(element, member, phase, step, layer[_L.ATTENTION_NORM], constants[Constant.NORM_EPSILON])
    phase = end_phase(member, phase)
    product_phase(
        element,
        member,
        phase,
        step[_S.ROWS],
        step[_S.ROWS_BYTES],
        step[_S.TOKENS],
        layer[_L.QKV],
        layer[_L.QKV_PANEL_BYTES],
        step[_S.WIDTH_STEPS],
        step[_S.QKV_TILES],
        scratch,
        step[_S.QKV],
        step[_S.QKV_BYTES],
    )
    phase = end_phase(member, phase)
    rotary_phase(kv, member, phase, step, layer, constants[Constant.NORM_EPSILON], scratch)
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
    weights: int,
    panel_bytes: int,
    steps: int,
    norm: int,
    epsilon: float,
    scratch: int,
) -> int:
    """x += rows · weights, which are normalized before where there is a norm for it → the next phase."""
    tokens, tiles, x_bytes = step[_S.TOKENS], step[_S.WIDTH_TILES], step[_S.X_BYTES]
    if norm == 0:
        adding_phase(
            element,
            member,
            phase,
            rows,
            row_bytes,
            tokens,
            weights,
            panel_bytes,
            steps,
            tiles,
            scratch,
            step[_S.X],
            x_bytes,
        )
        return end_phase(member, phase)
    added = step[_S.ADDED]
    product_phase(
        element,
        member,
        phase,
        rows,
        row_bytes,
        tokens,
        weights,
        panel_bytes,
        steps,
        tiles,
        scratch,
        added,
        x_bytes,
    )
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
    element: Any, kv: Any, member: Member, phase: int, step: Any, layer: Any, constants: Any, scratch: int
) -> int:
    """→ the next phase."""
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
        layer[_L.OUTPUT],
        layer[_L.OUTPUT_PANEL_BYTES],
        step[_S.ATTENDED_STEPS],
        layer[_L.AFTER_ATTENTION],
        epsilon,
        scratch,
    )
    norm_phase(element, member, phase, step, layer[_L.MLP_NORM], epsilon)
    phase = end_phase(member, phase)
    gated_phase(
        element,
        step[_S.ACTIVATION],
        member,
        phase,
        step[_S.ROWS],
        step[_S.ROWS_BYTES],
        tokens,
        layer[_L.GATE_UP],
        layer[_L.GATE_UP_PANEL_BYTES],
        step[_S.WIDTH_STEPS],
        step[_S.GATE_UP_TILES],
        scratch,
        step[_S.ACT],
        step[_S.ACT_BYTES],
    )
    phase = end_phase(member, phase)
    return residual_phases(
        element,
        member,
        phase,
        step,
        step[_S.ACT],
        step[_S.ACT_BYTES],
        layer[_L.DOWN],
        layer[_L.DOWN_PANEL_BYTES],
        step[_S.ACT_STEPS],
        layer[_L.AFTER_MLP],
        epsilon,
        scratch,
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
def output_part(element: Any, member: Member, phase: int, step: Any, constants: Any, scratch: int) -> int:
    """→ the next phase."""
    norm_phase(element, member, phase, step, step[_S.OUTPUT_NORM], constants[Constant.NORM_EPSILON])
    phase = end_phase(member, phase)
    product_phase(
        element,
        member,
        phase,
        step[_S.ROWS],
        step[_S.ROWS_BYTES],
        step[_S.TOKENS],
        step[_S.OUTPUT_WEIGHTS],
        step[_S.OUTPUT_PANEL_BYTES],
        step[_S.WIDTH_STEPS],
        step[_S.LOGITS_TILES],
        scratch,
        step[_S.LOGITS],
        step[_S.LOGITS_BYTES],
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
    copy_phase(member, phase, step[_S.COPY_PAGES], step[_S.COPY_LAYERS], step[_S.COPY_BYTES], to, source)
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
            phase = mlp_part(element, kv, member, phase, step, layer, constants, scratch)
    if job & OUTPUT:
        phase = output_part(element, member, phase, step, constants, scratch)
    if job & COPY:
        copy_part(member, phase, step)


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

"""A decoder of any of the architectures on a CPU, by the compiled program of `ops.simd`: a call a layer.

A row's bits depend on its own tokens alone: not on its batch-mates, on the number of rows or threads, on where a chunk
ends, nor on where its prefix's pages came from.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.kv_copy import copy_pages_by
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.config import ModelConfig, Rope
from headrace.ops.models.stored_weights import StoredWeights
from headrace.ops.rotary import Rotary
from headrace.ops.simd.attention import block_tokens, scratch_bytes
from headrace.ops.simd.compiler import Elements
from headrace.ops.simd.inputs import GROUP, q8_row_bytes
from headrace.ops.simd.packing import pack, pack_groups, paired, paired_rows, round_up
from headrace.ops.simd.products import PRODUCT_SCRATCH_BYTES
from headrace.ops.simd.program import Program
from headrace.ops.simd.tables import ATTEND, GELU, MLP, OUTPUT, SILU, Constant, LayerField, StepField
from headrace.ops.simd.target import AMX
from headrace.ops.simd.tiles import TILE_COLUMNS
from headrace.ops.step_kv import StepKv
from headrace.ops.wire import ForwardBatch

F32_BYTES: Final = 4
ROOM_ROWS: Final = 64
"""Buffers grow by whole multiples of so many rows."""


class CompiledDecoder:
    """The model of one file. `weights.dtype` is the KV's; the residual stream is float32."""

    def __init__(
        self, weights: StoredWeights, config: ModelConfig, context_tokens: int, quantized: bool, threads: int
    ) -> None:
        """`context_tokens`: the longest context that will be asked for."""
        kv: Elements = "float32" if weights.dtype == torch.float32 else "bfloat16"
        self.config = config
        self._elements: Elements = "q8" if quantized else kv
        self._attended_are_inputs = not quantized or (AMX and kv == "bfloat16")
        self._kv_dtype = weights.dtype
        self._packed: list[Tensor] = []
        self._buffers: dict[StepField, Tensor] = {}
        left_out = {StepField.LOGITS} if config.post_norms else {StepField.LOGITS, StepField.ADDED}
        self._buffered = tuple(field for field in _ROW_BYTES if field not in left_out)
        self._program = Program(self._elements, kv, config.layers, threads)
        self.copy_pages = copy_pages_by(self._program)
        self._embedding = weights.read("token_embd.weight", weights.dtype)
        self._rotaries: dict[Rope, Rotary] = {}
        for layer in range(config.layers):
            self._read_layer(weights, layer, context_tokens)
        step = self._program.step
        output = "token_embd.weight" if config.tied_embeddings else "output.weight"
        step[StepField.OUTPUT_WEIGHTS], step[StepField.OUTPUT_PANEL_BYTES] = self._matrix(weights, output)
        step[StepField.OUTPUT_NORM] = self._norm(weights, "output_norm")
        self._set_sizes()

    @property
    def size_bytes(self) -> int:
        return self._embedding.nbytes + sum(packed.nbytes for packed in self._packed)

    def close(self) -> None:
        """End the program's threads."""
        self._program.stop()

    def forward(self, ids: Tensor, positions: Tensor, kv: StepKv, keep: Tensor) -> Tensor:
        """→ float32 `[kept, width]`, before the last norm; `positions` are the batch's."""
        step, layers, tokens = self._program.step, self.config.layers, len(ids)
        self._make_room(tokens)
        x = self._buffers[StepField.X]
        x[:tokens, : self.config.hidden] = self._embedding.index_select(0, ids)
        if self.config.embedding_scale != 1:
            x[:tokens] *= self.config.embedding_scale
        step[StepField.TOKENS] = tokens
        used = self._describe(kv)
        tables = {id(pool): _table_rows(kv.batch, pool) for pool in kv.pools}
        for layer in range(layers):
            pool, index = kv.bring(layer)
            step[StepField.LAYER] = layer
            step[StepField.TABLES] = tables[id(pool)].ctypes.data
            step[StepField.PAGES] = pool.layer(index).data_ptr()
            if layer < layers - 1:
                self._program.run(ATTEND | MLP)
        # Nothing reads what the other tokens would become now that the last layer's KV is written.
        self._program.run(ATTEND)
        del used, tables
        for field in (StepField.X, StepField.ATTENDED):
            rows = self._buffers[field]
            rows[: len(keep)] = rows.index_select(0, keep)
        step[StepField.TOKENS] = len(keep)
        self._program.run(MLP)
        return x[: len(keep)]

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, width]` → float32 `[rows, vocab]`."""
        step = self._program.step
        self._make_room(len(hidden), StepField.LOGITS)
        x, step[StepField.X] = step[StepField.X], hidden.data_ptr()
        step[StepField.TOKENS] = len(hidden)
        self._program.run(OUTPUT)
        step[StepField.X] = x
        return self._buffers[StepField.LOGITS][: len(hidden), : self.config.vocab_size]

    # -----------------------------------------------------------------------------------------------------------
    # Weights

    def _read_layer(self, weights: StoredWeights, layer: int, context_tokens: int) -> None:
        def matrix(*names: str) -> tuple[int, int]:
            return self._matrix(weights, *(f"blk.{layer}.{name}.weight" for name in names))

        def norm(name: str) -> int:
            return self._norm(weights, f"blk.{layer}.{name}")

        config, row, projections = self.config, self._program.layers[layer], ("attn_q", "attn_k", "attn_v")
        row[LayerField.ATTENTION_NORM] = norm("attn_norm")
        row[LayerField.QKV], row[LayerField.QKV_PANEL_BYTES] = matrix(*projections)
        if config.qkv_bias:
            biases = [f"blk.{layer}.{name}.bias" for name in projections]
            row[LayerField.QKV_BIAS] = self._kept(weights.fused(biases, torch.float32))
        if config.qk_norm:
            row[LayerField.QUERY_NORM], row[LayerField.KEY_NORM] = norm("attn_q_norm"), norm("attn_k_norm")
        rope = config.rope_of(layer)
        if rope not in self._rotaries:
            self._rotaries[rope] = Rotary(context_tokens, config.rotary_dim, rope)
        row[LayerField.TURNS] = self._rotaries[rope].table.data_ptr()
        row[LayerField.WINDOW] = config.window(layer)
        row[LayerField.OUTPUT], row[LayerField.OUTPUT_PANEL_BYTES] = matrix("attn_output")
        row[LayerField.MLP_NORM] = norm("ffn_norm")
        row[LayerField.GATE_UP], row[LayerField.GATE_UP_PANEL_BYTES] = matrix("ffn_gate", "ffn_up")
        row[LayerField.DOWN], row[LayerField.DOWN_PANEL_BYTES] = matrix("ffn_down")
        if config.post_norms:
            row[LayerField.AFTER_ATTENTION], row[LayerField.AFTER_MLP] = (
                norm("post_attention_norm"),
                norm("post_ffw_norm"),
            )

    def _matrix(self, weights: StoredWeights, *names: str) -> tuple[int, int]:
        """Pack projections of the same input → the address, and the bytes from one panel to the next. Gate and up
        alternate, for the tile that multiplies them with each other."""
        pairs = len(names) == 2
        if self._elements == "q8":
            groups = weights.grouped(names)
            packed = pack_groups(groups.rows(paired_rows(len(groups.codes) // 2)) if pairs else groups)
        else:
            fused = self._embedding if names == ("token_embd.weight",) else weights.fused(names)
            packed = pack(paired(*fused.chunk(2)) if pairs else fused)
        return self._kept(packed), packed.nbytes // len(packed)

    def _norm(self, weights: StoredWeights, name: str) -> int:
        weight = weights.norm(name)
        return self._kept(torch.nn.functional.pad(weight, (0, -len(weight) % GROUP)))

    def _kept(self, tensor: Tensor) -> int:
        """Keep the tensor as long as the model → its address."""
        self._packed.append(tensor)
        return tensor.data_ptr()

    # -----------------------------------------------------------------------------------------------------------
    # Tables

    def _set_sizes(self) -> None:
        config, step = self.config, self._program.step
        attended = config.heads * config.head_dim
        qkv = attended + 2 * config.kv_heads * config.head_dim
        value_bytes = self._kv_dtype.itemsize
        sharing = config.heads // config.kv_heads
        scratch = max(scratch_bytes(sharing, config.head_dim), PRODUCT_SCRATCH_BYTES)
        for field, value in (
            (StepField.WIDTH, config.hidden),
            (StepField.HEADS, config.heads),
            (StepField.KV_HEADS, config.kv_heads),
            (StepField.HEAD_DIM, config.head_dim),
            (StepField.ROTARY_DIM, config.rotary_dim),
            (StepField.ACTIVATION, GELU if config.activation == "gelu" else SILU),
            (StepField.X_BYTES, round_up(config.hidden, TILE_COLUMNS) * F32_BYTES),
            (StepField.ROWS_BYTES, self._input_bytes(config.hidden)),
            (StepField.QKV_BYTES, round_up(qkv, TILE_COLUMNS) * F32_BYTES),
            (StepField.QUERY_BYTES, attended * value_bytes),
            (StepField.ATTENDED_BYTES, round_up(attended, GROUP) * value_bytes),
            (StepField.ATTENDED_INPUT_BYTES, self._input_bytes(attended)),
            (StepField.ACT_BYTES, self._input_bytes(config.intermediate)),
            (StepField.LOGITS_BYTES, round_up(config.vocab_size, TILE_COLUMNS) * F32_BYTES),
            (StepField.WIDTH_STEPS, self._steps(config.hidden)),
            (StepField.ATTENDED_STEPS, self._steps(attended)),
            (StepField.ACT_STEPS, self._steps(config.intermediate)),
            (StepField.QKV_TILES, -(-qkv // TILE_COLUMNS)),
            (StepField.WIDTH_TILES, -(-config.hidden // TILE_COLUMNS)),
            (StepField.GATE_UP_TILES, -(-config.intermediate // GROUP)),
            (StepField.LOGITS_TILES, -(-config.vocab_size // TILE_COLUMNS)),
            (StepField.BLOCK_TOKENS, block_tokens(sharing)),
            (StepField.SCRATCH_BYTES, round_up(scratch, 4096)),
        ):
            step[field] = value
        self._scratch = torch.zeros(int(step[StepField.SCRATCH_BYTES]) * self._program.threads, dtype=torch.uint8)
        step[StepField.SCRATCH] = self._scratch.data_ptr()
        constants = self._program.constants
        constants[Constant.NORM_EPSILON] = config.norm_eps
        constants[Constant.SCORE_SCALE] = config.score_scale
        constants[Constant.SCORE_CAP] = config.attention_cap
        constants[Constant.LOGITS_CAP] = config.logits_cap

    def _input_bytes(self, width: int) -> int:
        """Of a row of `width` values as inputs of a product."""
        if self._elements == "q8":
            return q8_row_bytes(width)
        return round_up(width, GROUP) * self._kv_dtype.itemsize

    def _steps(self, width: int) -> int:
        groups = -(-width // GROUP)
        return groups if self._elements == "q8" else groups * GROUP * self._kv_dtype.itemsize // F32_BYTES

    def _make_room(self, rows: int, *fields: StepField) -> None:
        """Buffers of at least so many rows: the given ones, or all but the logits."""
        step = self._program.step
        for field in fields or self._buffered:
            buffer = self._buffers.get(field)
            if buffer is None or len(buffer) < rows:
                row_bytes = int(step[_ROW_BYTES[field]])
                dtype = self._kv_dtype if field is StepField.ATTENDED else torch.float32
                # Zeros: products read rows to the end of their last group.
                buffer = torch.zeros((round_up(rows, ROOM_ROWS), row_bytes), dtype=torch.uint8).view(dtype)
                self._buffers[field] = buffer
                step[field] = buffer.data_ptr()
        if self._attended_are_inputs:
            step[StepField.ATTENDED_INPUT] = step[StepField.ATTENDED]

    def _describe(self, kv: StepKv) -> tuple[object, ...]:
        """Tell the program which rows attend to which pages → the arrays that must outlive the layers."""
        batch, step = kv.batch, self._program.step
        pool, _ = kv.place(0)
        lengths = np.diff(batch.row_start)
        rows = np.arange(len(lengths), dtype=np.int32)
        token_row = np.repeat(rows, lengths)
        block = int(step[StepField.BLOCK_TOKENS])
        blocks = -(-lengths // block)
        item_row = np.repeat(rows, blocks)
        first_item = np.repeat(np.cumsum(blocks) - blocks, blocks)
        item_token = (batch.row_start[item_row] + (np.arange(len(item_row)) - first_item) * block).astype(np.int32)
        plane_bytes = pool.page_tokens * pool.shape.head_dim * self._kv_dtype.itemsize
        arrays = {
            StepField.ITEM_ROW: item_row,
            StepField.ITEM_TOKEN: item_token,
            StepField.ROW_START: batch.row_start,
            StepField.ROW_KV_LEN: batch.row_kv_len,
            StepField.TOKEN_ROW: token_row,
            StepField.POSITIONS: batch.positions,
        }
        for field, array in arrays.items():
            step[field] = array.ctypes.data
        step[StepField.ITEMS] = len(item_row)
        step[StepField.PAGE_TOKENS] = pool.page_tokens
        step[StepField.HEAD_PLANE_BYTES] = plane_bytes
        step[StepField.PAGE_BYTES] = 2 * pool.shape.kv_heads * plane_bytes
        return tuple(arrays.values())


def _table_rows(batch: ForwardBatch, pool: KvPool) -> NDArray[np.int64]:
    """The address of each row's page table, int64 [rows]."""
    rows: NDArray[np.int64] = pool.table.ctypes.data + batch.row_slot.astype(np.int64) * pool.table.strides[0]
    return rows


_ROW_BYTES: Final = {
    StepField.X: StepField.X_BYTES,
    StepField.ADDED: StepField.X_BYTES,
    StepField.ROWS: StepField.ROWS_BYTES,
    StepField.QKV: StepField.QKV_BYTES,
    StepField.QUERIES: StepField.QUERY_BYTES,
    StepField.ATTENDED: StepField.ATTENDED_BYTES,
    StepField.ATTENDED_INPUT: StepField.ATTENDED_INPUT_BYTES,
    StepField.ACT: StepField.ACT_BYTES,
    StepField.LOGITS: StepField.LOGITS_BYTES,
}

"""A decoder of any of the architectures on a CPU, by the compiled program of `ops.simd`: a call for all layers, or a
call for each where they wait for pages.

A row's bits depend on its own tokens alone: not on its batch-mates, on the number of rows or threads, on where a chunk
ends, nor on where its prefix's pages came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.kv_copy import RUN_BYTES, copy_pages_by
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.config import ModelConfig, Rope
from headrace.ops.models.stored_weights import StoredWeights
from headrace.ops.rotary import Rotary
from headrace.ops.shared_prefixes import SharedPrefixes
from headrace.ops.simd.attention import block_tokens, scratch_bytes
from headrace.ops.simd.compiler import Elements
from headrace.ops.simd.decoder import NORM_ROWS
from headrace.ops.simd.inputs import GROUP, q8_row_bytes
from headrace.ops.simd.instructions import LANES
from headrace.ops.simd.packing import pack, pack_groups, paired, paired_rows, round_up
from headrace.ops.simd.products import PRODUCT_SCRATCH_BYTES
from headrace.ops.simd.program import Program
from headrace.ops.simd.softmax import KEYS
from headrace.ops.simd.tables import ATTEND, BEGIN, GELU, MLP, OUTPUT, SILU, Constant, LayerField, StepField
from headrace.ops.simd.target import AMX
from headrace.ops.simd.tiles import TILE_COLUMNS
from headrace.ops.step_kv import StepKv
from headrace.ops.wire import I32, ForwardBatch
from headrace.ops.zeroed_memory import HUGE_PAGE_BYTES, KeptTensors, ZeroedMemory

F32_BYTES: Final = 4
ROOM_ROWS: Final = 64
"""Buffers grow by whole multiples of so many rows."""
BLOCKS_OF_THREAD: Final = 4
"""Of attention, and for each thread, a long chunk has so many at least."""


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
        self._memory = KeptTensors()
        self._packed: list[Tensor] = []
        self._buffers: dict[StepField, Tensor] = {}
        self._room = 0
        self._pools: Sequence[KvPool] = ()
        """Whose addresses the tables hold."""
        self._sharing_pool: KvPool | None = None
        """Whose page tables say which requests share a prefix."""
        left_out = {StepField.LOGITS} if config.post_norms else {StepField.LOGITS, StepField.ADDED}
        self._buffered = tuple(field for field in _ROW_BYTES if field not in left_out)
        self._program = Program(self._elements, kv, config.layers, threads)
        self.copy_pages = copy_pages_by(self._program)
        # Tables of its own, no layers, and no thread but its caller's.
        self.back_up_pages = copy_pages_by(Program(self._elements, kv, layers=0, threads=1), RUN_BYTES)
        self._embedding = _filled(weights.read("token_embd.weight", weights.dtype), LANES).contiguous()
        self._rotaries: dict[Rope, Rotary] = {}
        for layer in range(config.layers):
            self._read_layer(weights, layer, context_tokens)
        step = self._program.step
        output = "token_embd.weight" if config.tied_embeddings else "output.weight"
        step[StepField.OUTPUT_WEIGHTS], step[StepField.OUTPUT_PANEL_BYTES] = self._matrix(weights, output)
        step[StepField.OUTPUT_NORM] = self._norm(weights, "output_norm")
        step[StepField.EMBEDDING] = self._embedding.data_ptr()
        step[StepField.EMBEDDING_BYTES] = self._embedding[0].nbytes
        self._set_sizes()

    @property
    def size_bytes(self) -> int:
        return self._embedding.nbytes + sum(packed.nbytes for packed in self._packed)

    def pin(self, cores: Sequence[int]) -> None:
        """Give each of the program's threads one of the cores, where there are just as many (`Program.pin`)."""
        self._program.pin(cores)

    def close(self) -> None:
        """End the program's threads."""
        self._program.stop()

    def forward(self, ids: NDArray[np.int64], kv: StepKv, keep: NDArray[np.int64]) -> Tensor:
        """→ float32 `[kept, width]`, before the last norm."""
        layers, tokens = self.config.layers, len(ids)
        self._make_room(tokens)
        self._describe(ids, kv)
        keeps_all = len(keep) == tokens and np.array_equal(keep, self._numbers[:tokens])
        for first, end in kv.runs():
            job = ATTEND | MLP | (BEGIN if first == 0 else 0)
            if keeps_all or end < layers:
                self._program.run_layers(job, first, end)
                continue
            # Nothing reads what the other tokens would become once the last layer's KV is written.
            self._program.run_layers(job, first, layers - 1)
            self._program.run_layers(ATTEND, layers - 1, layers)
            self._keep_rows(torch.from_numpy(keep))
            self._program.run_layers(MLP, layers - 1, layers)
        return self._buffers[StepField.X][: len(keep)]

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, width]` → float32 `[rows, vocab]`."""
        step, rows = self._program.step, len(hidden)
        logits = self._buffers.get(StepField.LOGITS)
        if logits is None or len(logits) < rows:
            logits = self._make_buffer(StepField.LOGITS, rows)
        x, step[StepField.X] = step[StepField.X], hidden.data_ptr()
        step[StepField.TOKENS] = rows
        self._program.run(OUTPUT)
        step[StepField.X] = x
        return logits[:rows, : self.config.vocab_size]

    def _keep_rows(self, keep: Tensor) -> None:
        """Only these rows go on."""
        for field in (StepField.X, StepField.ATTENDED):
            rows = self._buffers[field]
            rows[: len(keep)] = rows.index_select(0, keep)
        self._program.step[StepField.TOKENS] = len(keep)

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
        return self._kept(_filled(weights.norm(name), GROUP))

    def _kept(self, tensor: Tensor) -> int:
        """Keep the tensor as long as the model → its address."""
        self._packed.append(self._memory.keep(tensor))
        return self._packed[-1].data_ptr()

    # -----------------------------------------------------------------------------------------------------------
    # Tables

    def _set_sizes(self) -> None:
        config, step = self.config, self._program.step
        attended = config.heads * config.head_dim
        qkv = attended + 2 * config.kv_heads * config.head_dim
        value_bytes = self._kv_dtype.itemsize
        sharing = config.heads // config.kv_heads
        tiled = AMX and self._kv_dtype == torch.bfloat16
        scratch = max(scratch_bytes(sharing, config.head_dim, tiled), PRODUCT_SCRATCH_BYTES)
        self._most_block_tokens = block_tokens(sharing, tiled)
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
            (StepField.BUNDLES, 0),
            (StepField.SCRATCH_BYTES, round_up(scratch, 4096)),
        ):
            step[field] = value
        # Two pieces for each thread, if there are enough rows.
        parts = -(-2 * self._program.threads // config.kv_heads) if self._program.threads > 1 else 1
        self._shared = SharedPrefixes(KEYS, self._most_block_tokens, parts)
        # In a huge page of its own: attention of a long chunk takes a tenth less time so.
        size = round_up(int(step[StepField.SCRATCH_BYTES]) * self._program.threads, HUGE_PAGE_BYTES)
        self._scratch = torch.frombuffer(ZeroedMemory(size + HUGE_PAGE_BYTES, 1).mapping, dtype=torch.uint8)
        step[StepField.SCRATCH] = round_up(self._scratch.data_ptr(), HUGE_PAGE_BYTES)
        constants = self._program.constants
        constants[Constant.EMBEDDING_SCALE] = config.embedding_scale
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

    def _make_room(self, rows: int) -> None:
        """For so many rows in all buffers but the logits."""
        if rows <= self._room:
            return
        # Of few rows each thread has its own (`decoder.normalized_rows`).
        rows = max(rows, NORM_ROWS * self._program.threads)
        self._room = round_up(rows, ROOM_ROWS)
        for field in self._buffered:
            self._make_buffer(field, rows)
        step = self._program.step
        if self._attended_are_inputs:
            step[StepField.ATTENDED_INPUT] = step[StepField.ATTENDED]
        self._numbers = np.arange(self._room)
        self._lists = np.zeros((3, self._room), np.int32)
        for field, numbers in zip((StepField.ITEM_ROW, StepField.ITEM_TOKEN, StepField.TOKEN_ROW), self._lists):
            step[field] = numbers.ctypes.data

    def _make_buffer(self, field: StepField, rows: int) -> Tensor:
        """At least so many."""
        row_bytes = int(self._program.step[_ROW_BYTES[field]])
        dtype = self._kv_dtype if field is StepField.ATTENDED else torch.float32
        # Zeros: products read rows to the end of their last group.
        buffer = torch.zeros((round_up(rows, ROOM_ROWS), row_bytes), dtype=torch.uint8).view(dtype)
        self._buffers[field] = buffer
        self._program.step[field] = buffer.data_ptr()
        return buffer

    def _block_tokens(self, longest: int) -> int:
        """Tokens of a block of attention: few blocks, but enough of the longest chunk's for all threads."""
        pieces = BLOCKS_OF_THREAD * self._program.threads
        share = longest * self.config.kv_heads // pieces // LANES * LANES
        return min(self._most_block_tokens, max(LANES, share))

    def _describe(self, ids: NDArray[np.int64], kv: StepKv) -> None:
        """Tell the program where the batch lies, which must outlive the layers; and the pools, where they are new."""
        batch, step = kv.batch, self._program.step
        if kv.pools is not self._pools:
            self._describe_pools(kv)
        tokens = len(ids)
        step[StepField.TOKENS], step[StepField.BATCH_ROWS] = tokens, len(batch.row_slot)
        step[StepField.IDS] = ids.ctypes.data
        step[StepField.ROW_SLOT] = _address(batch.row_slot)
        step[StepField.ROW_START] = _address(batch.row_start)
        step[StepField.ROW_KV_LEN] = _address(batch.row_kv_len)
        step[StepField.POSITIONS] = _address(batch.positions)
        lengths = batch.row_start[1:] - batch.row_start[:-1]
        step[StepField.BLOCK_TOKENS] = self._block_tokens(int(np.maximum.reduce(lengths)))
        step[StepField.BUNDLES] = 0
        if self._sharing_pool is not None and tokens > 1:
            self._describe_bundles(batch, np.flatnonzero(lengths == 1), self._sharing_pool)

    def _describe_bundles(self, batch: ForwardBatch, singles: NDArray[np.intp], pool: KvPool) -> None:
        step = self._program.step
        bundles = self._shared.find(batch.row_slot, batch.row_kv_len, singles, pool.table, pool.page_tokens)
        step[StepField.BUNDLES] = len(bundles.shared)
        if len(bundles.shared):
            step[StepField.BUNDLE_ROWS] = _address(bundles.rows)
            step[StepField.BUNDLE_START] = _address(bundles.start)
            step[StepField.BUNDLE_SHARED] = _address(bundles.shared)
            step[StepField.ROW_BUNDLED] = _address(bundles.bundled)

    def _describe_pools(self, kv: StepKv) -> None:
        step, layers, (pool, _) = self._program.step, self._program.layers, kv.place(0)
        plane_bytes = pool.page_tokens * pool.shape.head_dim * self._kv_dtype.itemsize
        step[StepField.TABLE_BYTES] = pool.table.strides[0]
        step[StepField.PAGE_TOKENS] = pool.page_tokens
        step[StepField.HEAD_PLANE_BYTES] = plane_bytes
        step[StepField.PAGE_BYTES] = 2 * pool.shape.kv_heads * plane_bytes
        self._sharing_pool = None
        for layer, row in enumerate(layers):
            pool, index = kv.place(layer)
            if self._sharing_pool is None and not row[LayerField.WINDOW]:
                self._sharing_pool = pool
            row[LayerField.SHARES] = pool is self._sharing_pool and not row[LayerField.WINDOW]
            assert pool.table.strides[0] == step[StepField.TABLE_BYTES] and pool.pages.dtype == self._kv_dtype
            row[LayerField.PAGES], row[LayerField.TABLE] = pool.layer(index).data_ptr(), pool.table.ctypes.data
        self._pools = kv.pools


def _filled(rows: Tensor, multiple: int) -> Tensor:
    """With zeros up to a multiple of so many."""
    missing = -rows.shape[-1] % multiple
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def _address(numbers: I32) -> int:
    assert numbers.dtype == np.int32 and numbers.flags.c_contiguous
    return numbers.ctypes.data


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

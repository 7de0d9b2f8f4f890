"""The tables that are a compiled program's only arguments: what it computes with, as numbers.

step       int64: sizes of the model, addresses and sizes of the step, addresses of buffers
layers     int64 [layers, fields]: addresses of weights
constants  float64
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Final

BEGIN: Final = 1
ATTEND: Final = 2
MLP: Final = 4
OUTPUT: Final = 8
COPY: Final = 16
STOP: Final = 32


class StepField(IntEnum):
    """Columns of the step's table (int64)."""

    JOB = 0
    """Parts of it, added up."""
    FIRST_LAYER = auto()
    """Of the layers that the job computes; the first one that it does not."""
    END_LAYER = auto()
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
    ACTIVATION = auto()
    """Of the gate: `SILU` or `GELU`."""
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
    # The step.
    TOKENS = auto()
    """Rows of x."""
    IDS = auto()
    """Address of int64 [tokens]."""
    BATCH_ROWS = auto()
    ROW_SLOT = auto()
    """Addresses of int32 arrays of the batch: a row's slot, its first token, its context; a token's position."""
    ROW_START = auto()
    ROW_KV_LEN = auto()
    POSITIONS = auto()
    ITEMS = auto()
    """Blocks of tokens that attend. The program lists them (`decoder.list_items`)."""
    FREE_ITEMS = auto()
    """The first of them, which are of rows in no bundle."""
    ITEM_ROW = auto()
    """Addresses of int32 arrays: an item's row of the batch and its first token; a token's row."""
    ITEM_TOKEN = auto()
    TOKEN_ROW = auto()
    BLOCK_TOKENS = auto()
    BUNDLES = auto()
    """Rows that share pages (`shared_prefixes.Bundles`)."""
    BUNDLE_ROWS = auto()
    """Addresses of int32 arrays: the bundles' rows, where each bundle begins among them, the tokens that it shares; for
    each row of the batch whether it is in one."""
    BUNDLE_START = auto()
    BUNDLE_SHARED = auto()
    ROW_BUNDLED = auto()
    TABLE_BYTES = auto()
    """From a slot's page table to the next one's."""
    PAGE_BYTES = auto()
    PAGE_TOKENS = auto()
    HEAD_PLANE_BYTES = auto()
    """A head's keys of a page, or its values."""
    # Buffers, and weights outside the layers.
    EMBEDDING = auto()
    """Of KV's elements, rows of so many bytes."""
    EMBEDDING_BYTES = auto()
    X = auto()
    ADDED = auto()
    """What is normalized before it is added to x."""
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
    OUTPUT_PANEL_BYTES = auto()
    # A copy.
    COPY_PAGES = auto()
    COPY_LAYERS = auto()
    COPY_BYTES = auto()
    """Of a page's part in one layer."""
    RUN_BYTES = auto()
    """Whoever waits for the core may have it after so many."""
    TO_POOL = auto()
    """Where pages go and where they come from: the fields of `copies.Pages`, in their order."""
    TO_NUMBERS = auto()
    TO_PAGE_BYTES = auto()
    TO_LAYER_BYTES = auto()
    FROM_POOL = auto()
    FROM_NUMBERS = auto()
    FROM_PAGE_BYTES = auto()
    FROM_LAYER_BYTES = auto()


class LayerField(IntEnum):
    """Columns of the table of layers (int64): addresses of weights, 0 where the model has none, of pages and page
    tables, and the window."""

    PAGES = 0
    TABLE = auto()
    """int32 [slots, pages of the longest context]."""
    ATTENTION_NORM = auto()
    QKV = auto()
    QKV_PANEL_BYTES = auto()
    """From one panel of 16 columns to the next."""
    QKV_BIAS = auto()
    QUERY_NORM = auto()
    KEY_NORM = auto()
    TURNS = auto()
    """float32 [positions, rotary_dim]."""
    WINDOW = auto()
    """A token sees itself and so many - 1 before it; 0: all."""
    SHARES = auto()
    """1 where rows of a bundle have the same pages: those were compared, and the window is not bounded."""
    OUTPUT = auto()
    OUTPUT_PANEL_BYTES = auto()
    AFTER_ATTENTION = auto()
    MLP_NORM = auto()
    GATE_UP = auto()
    GATE_UP_PANEL_BYTES = auto()
    DOWN = auto()
    DOWN_PANEL_BYTES = auto()
    AFTER_MLP = auto()


class Constant(IntEnum):
    """Columns of the table of constants (float64)."""

    EMBEDDING_SCALE = 0
    NORM_EPSILON = auto()
    SCORE_SCALE = auto()
    SCORE_CAP = auto()
    LOGITS_CAP = auto()


SILU: Final = 0
GELU: Final = 1

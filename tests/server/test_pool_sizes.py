"""The memory of a model whose layers look at a window: pages of each group, in each tier, and what is said of them."""

from __future__ import annotations

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from server.test_sizing import SMALL, machine, plan

from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.ops.device_worker import served_groups
from headrace.ops.models.config import KEY_BLOCK_TOKENS
from headrace.ops.simd.softmax import KEYS
from headrace.ops.triton.extend_attention import _KEYS as CARD_KEYS
from headrace.ops.wire import GroupShape, HostArea
from headrace.server.config import Settings
from headrace.server.pool_sizes import WINDOW_SHARE, PoolSizes
from headrace.server.sizing import kv_layout, memory_table
from headrace.server.tiering import plan_tiers

WINDOWED = msgspec.structs.replace(
    SMALL, window_tokens=512, window_layers=tuple(layer for layer in range(30) if (layer + 1) % 6)
)
SPAN = 512 + KEY_BLOCK_TOKENS - 1
LAYOUT = kv_layout(WINDOWED, "bfloat16", 16, 8192)


def test_layers_with_a_window_have_a_group_of_their_own() -> None:
    full, window = LAYOUT.groups
    assert (full.kind, full.layers) == ("full", (5, 11, 17, 23, 29))
    assert (window.kind, window.window_tokens, len(window.layers)) == ("window", SPAN, 25)
    assert LAYOUT.full_groups == 1 and LAYOUT.is_hybrid


@pytest.mark.parametrize(
    ("model", "context_tokens"),
    [
        (SMALL, 8192),
        (WINDOWED, SPAN),
        (msgspec.structs.replace(WINDOWED, window_layers=tuple(range(30))), 8192),
    ],
    ids=["no windows", "no longer contexts", "nothing but windows"],
)
def test_all_layers_are_one_group_where_windows_save_nothing(model: object, context_tokens: int) -> None:
    layout = kv_layout(model, "bfloat16", 16, context_tokens)  # type: ignore[arg-type]
    assert not layout.is_hybrid and layout.groups[0].layers == tuple(range(30))


def test_the_worker_serves_the_groups_that_the_server_plans() -> None:
    for model in (SMALL, WINDOWED):
        groups = [
            GroupShape(group.kind, group.window_tokens, list(group.layers), group.kv_heads, group.head_dim)
            for group in kv_layout(model, "bfloat16", 16, 8192).groups
        ]
        assert groups in served_groups(model)
    assert max(KEYS, CARD_KEYS) <= KEY_BLOCK_TOKENS, "attention would read keys of pages that have gone"


def test_windows_leave_room_for_more_tokens_in_the_same_memory() -> None:
    with_windows, without = plan(16, WINDOWED), plan(16, SMALL)
    assert max(with_windows.pool_bytes, without.pool_bytes) <= 1 << 30
    assert with_windows.pool_tokens > 1.3 * without.pool_tokens
    full, window = with_windows.num_pages
    assert window == 64 * LAYOUT.groups[1].running_pages(16) + 2048 // 16
    assert with_windows.window_saved_bytes == (full - window) * LAYOUT.page_bytes(1)


def test_a_large_pool_has_a_window_for_every_conversation_of_four() -> None:
    full, window = plan(64, WINDOWED, max_total_tokens=1 << 20, max_running_requests=8).num_pages
    assert (full, window) == (1 << 16, int((1 << 16) * WINDOW_SHARE))


def test_the_smallest_pools_are_equal() -> None:
    assert plan(16, WINDOWED, max_total_tokens=256).num_pages == (16, 16)


@given(st.integers(0, 1 << 40), st.integers(0, 300), st.integers(0, 1 << 15), st.booleans())
def test_pages_fill_the_memory_that_there_is(size_bytes: int, requests: int, chunk: int, host: bool) -> None:
    sizes = PoolSizes(LAYOUT, requests, chunk)
    pages = sizes.pages_in(size_bytes, host)
    assert sizes.size_bytes(pages, host) <= size_bytes < sizes.size_bytes(pages + 1, host)
    full, window = sizes.pages(pages)
    assert full == pages and min(pages, int(pages * WINDOW_SHARE)) <= window <= pages


def test_pages_of_equal_groups_are_the_memory_over_their_bytes() -> None:
    layout = KvLayout(16, (LayerGroup("full", 0, (0,), 1, 64, 2), LayerGroup("full", 0, (1,), 1, 64, 2)))
    assert PoolSizes(layout).pages_in(100 * 8192 + 8191) == 100


def test_the_host_has_an_area_for_each_group_and_storage_knows_them() -> None:
    settings = Settings(enable_hierarchical_cache=True, hicache_size=0.5, hicache_storage_backend="memory")
    hardware = machine(16)
    tiers = plan_tiers(settings, plan(16, WINDOWED), hardware, bytes(16))
    slots = [LAYOUT.host_slot_bytes(group) for group in range(2)]
    (area,) = tiers.window_areas
    assert area == HostArea(tiers.host_pages * slots[0], slots[1], int(tiers.host_pages * WINDOW_SHARE))
    assert 0.49e9 < tiers.host_bytes == area.offset + area.pages * slots[1] <= 0.5e9
    assert tiers.storage is not None
    assert (tiers.storage.slot_bytes, tiers.storage.host_offsets) == (slots, [0, area.offset])
    assert tiers.storage.host_pages == [tiers.host_pages, area.pages]


def test_the_table_says_what_the_windows_save() -> None:
    made, out = plan(16, WINDOWED), io.StringIO()
    Console(file=out, width=120).print(memory_table(WINDOWED, made, machine(16)))
    assert f"windows in {made.num_pages[1]} pages" in out.getvalue() and "less than all tokens'" in out.getvalue()

"""A server whose model has a window group: what it says of it, and how the cache is controlled with it."""

from __future__ import annotations

from typing import Any

import msgspec
from api.scripted import ids_of, until
from api.test_cache_control import HOST_PAGES, PAGE_TOKENS, PAGES, TEXT, VOCAB, WHOLE, Server, options, serving

from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.ops.wire import GroupShape, HostArea
from headrace.sched.executors.oracle import expected
from headrace.sched.options import EngineOptions

WINDOW = 6
WINDOW_PAGES = 12
ASKED = WHOLE - PAGE_TOKENS
"""Tokens that the same prompt reuses: it ends with a page, whose last token is always computed."""


def hybrid() -> EngineOptions:
    """The same host pool, half of it the window group's."""
    plain = options()
    layout = KvLayout(PAGE_TOKENS, (*plain.layout.groups, LayerGroup("window", WINDOW, (1,), 1, 8, 1)))
    slot_bytes, full = layout.host_slot_bytes(0), HOST_PAGES // 2
    area = HostArea(full * slot_bytes, slot_bytes, HOST_PAGES - full)
    assert plain.storage is not None
    return msgspec.structs.replace(
        plain,
        layout=layout,
        start=msgspec.structs.replace(
            plain.start, groups=[*plain.start.groups, GroupShape("window", WINDOW, [1], 1, 8)], window_areas=[area]
        ),
        num_pages=[PAGES, WINDOW_PAGES],
        host_pages=full,
        window_host_pages=[area.pages],
        storage=msgspec.structs.replace(
            plain.storage,
            slot_bytes=[slot_bytes] * 2,
            host_offsets=[0, area.offset],
            host_pages=[full, area.pages],
        ),
    )


async def ask(server: Server) -> tuple[int, int, int]:
    """Send the prompt, check its ids → its cached tokens, by tier."""
    body = {"input_ids": ids_of(TEXT), "return_cached_tokens_details": True}
    sampling = {"max_new_tokens": 3, "ignore_eos": True, "seed": 1}
    answer = await server.good("POST", "/generate", {**body, "sampling_params": sampling})
    assert answer["output_ids"] == expected(ids_of(TEXT), 3, VOCAB, 1, windows=[WINDOW])
    engine = server.engine
    await until(lambda: not (engine.status().running or engine.in_flight or engine.writing))
    engine.check_integrity()
    found: dict[str, int] = answer["meta_info"]["cached_tokens_details"]
    return found["device"], found["host"], found["storage"]


async def group_of(server: Server) -> dict[str, Any]:
    (group,) = (await server.good("GET", "/server_info"))["internal_states"][0]["window_groups"]
    return dict(group)


async def test_the_server_says_what_the_window_group_has_and_saves() -> None:
    async with serving(hybrid()) as server:
        assert await ask(server) == (0, 0, 0)
        group = await group_of(server)
        assert (group["window_tokens"], group["pages_total"]) == (WINDOW, WINDOW_PAGES)
        assert group["saved_bytes"] == (PAGES - WINDOW_PAGES) * PAGE_TOKENS * 16
        assert 0 < group["copied_pages"] == group["host_pages_cached"] < WHOLE // PAGE_TOKENS


async def test_metrics_have_what_the_server_says_of_the_window_group() -> None:
    async with serving(hybrid()) as server:
        assert await ask(server) == (0, 0, 0)
        group = await group_of(server)
        scraped = await server.good("GET", "/metrics")
    for name, field in (
        *(("pages", "pages_total"), ("pages_free", "pages_free"), ("pages_cached", "pages_cached")),
        *(("pages_claimed", "pages_claimed"), ("host_pages", "host_pages_total"), ("saved_bytes", "saved_bytes")),
        *(("host_pages_cached", "host_pages_cached"), ("copied_pages_total", "copied_pages")),
        ("short_matches_total", "short_matches"),
    ):
        assert f'headrace:window_{name}{{window_tokens="{WINDOW}"}} {float(group[field])}\n' in scraped, name


async def test_a_prompt_is_found_flushed_pinned_and_warmed() -> None:
    async with serving(hybrid()) as server:
        await ask(server)
        assert await server.lookup() == (WHOLE, WHOLE, WHOLE)
        pin = await server.good("POST", "/cache/pin", {"input_ids": ids_of(TEXT), "ttl_s": 60})
        await server.good("POST", "/flush_cache", {})
        assert await ask(server) == (ASKED, 0, 0)
        await server.good("POST", "/cache/unpin", {"pin_id": pin["pin_id"]})
        await server.good("POST", "/flush_cache", {})
        assert await server.lookup() == (0, 0, WHOLE)
        assert (await server.good("POST", "/cache/warm", {"input_ids": ids_of(TEXT)}))["warmed_tokens"] == WHOLE
        assert await ask(server) == (0, ASKED, 0)
        assert (await group_of(server))["short_matches"] == 0

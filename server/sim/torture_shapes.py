"""Sizes and times of a torture run, drawn from a seed: from comfortable down to a few pages."""

from __future__ import annotations

import random
from typing import Any, Final, get_args

import msgspec

from headrace.kvcache.layout import LayerGroup
from headrace.kvcache.prefetch import PrefetchOptions, PrefetchPolicy
from headrace.sched.policies import SchedulePolicy
from headrace.server.sim.storage import StorageTimes, StoreFaults
from headrace.server.sim.world import WorldShape

COPIES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"copy_pages": 8, "copy_page_us": 50.0},
    {"copy_pages": 1, "copy_page_us": 1000.0},
)
"""To the host: fast ones, others, and those that fall behind what is computed."""


def random_shape(rng: random.Random) -> WorldShape:
    """Sizes, policies and faults of the store."""
    page_tokens = rng.choice((1, 2, 4, 4, 16))
    context_tokens = page_tokens * -(-rng.randint(40, 120) // page_tokens)
    slots = rng.choice((1, 3, 8, 16, 32, 32, 64))
    least = context_tokens // page_tokens
    host_pages = rng.choice((0, 3, least, least, 2 * least, 2 * least, 10 * least))
    policies: tuple[PrefetchPolicy, ...] = ("best_effort", "wait_complete", "timeout", "adaptive")

    def often() -> float:
        return rng.choice((0.0, 0.0, 0.02, 0.2))

    return WorldShape(
        slots=slots,
        pages=rng.choice((rng.randint(least // 2 + 1, 2 * least), least * -(-slots // 3), least * slots)),
        page_tokens=page_tokens,
        context_tokens=context_tokens,
        prefill_tokens=rng.choice((1, 5, 16, 64, 64, 256)),
        overlap=rng.random() < 0.8,
        reuse=rng.random() < 0.95,
        delay_us=rng.choice((1, 50, 2000)),
        max_queued_requests=rng.choice((8, 64, 1024)),
        max_queued_tokens=rng.choice((20 * context_tokens, 1 << 16)),
        schedule_policy=rng.choice(get_args(SchedulePolicy)),
        preempt_above=rng.choice((None, 0, 2)),
        target_itl_ms=rng.choice((0.0, 0.0, 2.0)),
        conservativeness=rng.choice((0.0, 0.3, 1.0)),
        host_pages=host_pages,
        storage_pages=rng.choice((0, 4, 10 * least, 200 * least, 200 * least, 200 * least)) if host_pages else 0,
        storage=StorageTimes(rng.choice((20, 500)), rng.choice((1, 100, 2000)), rng.randint(1, 4)),
        store_faults=StoreFaults(rng.choice((0.0, 0.1, 0.5)), often(), often(), rng.choice((0.0, 0.0, 0.01))),
        prefetch=PrefetchOptions(
            rng.choice(policies), rng.choice((1, 1, 16)), timeout_base_ms=5.0, piece_bytes=rng.choice((1, 256, 1 << 20))
        ),
        token_us=rng.choice((0.0, 50.0)),
        write_policy=rng.choice(("write_through", "write_through_selective", "write_back")),
        step_timeout_s=2.0,
        mask_us=rng.choice((10, 500, 3000)),
        **rng.choice(COPIES),
    )


def hybrid_shape(rng: random.Random, shape: WorldShape) -> WorldShape:
    """The same with a window group: windows of a few tokens or nearly all, pools from one request's window up."""
    window_tokens = rng.choice((3, 5, 8, 20, 50))
    least = LayerGroup("window", window_tokens, (1,), 1, 8, 1).running_pages(shape.page_tokens)
    most = -(-shape.context_tokens // shape.page_tokens) * shape.slots
    pages = rng.choice((least, least + rng.randint(0, 20), 3 * least, least * shape.slots, most))
    return msgspec.structs.replace(
        shape,
        window_tokens=window_tokens,
        window_pages=max(pages, least),
        window_host_pages=rng.choice((0, 1, 3 * least, 10 * least, 100 * least)) if shape.host_pages else 0,
    )

"""B25: memory is flat however many requests have come and gone; a whole server over three tiers, in one process."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc

from api.scripted import ids_of
from api.test_cache_control import Server, serving

PROMPTS = 80
ROUNDS = 6
"""Of the same prompts. In the first three, pools, index and buffers fill; then nothing should grow."""
MOST_BYTES_A_REQUEST = 200
"""A leak of one view a request, tried once by hand, was 500: a view keeps the prompt that it shows. Without: 50."""


async def ask_all(server: Server, rng: random.Random) -> None:
    """Every prompt once, four at a time, in another order; of some the answer is not awaited."""

    async def ask(prompt: int) -> None:
        body = {"input_ids": ids_of(f"prompt number {prompt} " * 4), "cache_salt": str(prompt % 3)}
        asked = {**body, "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, "seed": prompt}}
        if prompt % 5:
            await server.good("POST", "/generate", {**asked, "return_cached_tokens_details": True})
        else:
            asked = {**asked, "rid": f"gone-{prompt}"}
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(server.ask("POST", "/generate", asked))
                tasks.create_task(server.ask("POST", "/abort_request", {"rid": f"gone-{prompt}"}))

    order = rng.sample(range(PROMPTS), PROMPTS)
    for at in range(0, PROMPTS, 4):
        await asyncio.gather(*map(ask, order[at : at + 4]))
    if rng.random() < 0.5:
        await server.good("POST", "/flush_cache", {})


async def memory_by_round(rounds: int) -> list[int]:
    """Bytes that Python and numpy hold after each round."""
    sizes: list[int] = []
    rng = random.Random(1)
    async with serving() as server:
        await ask_all(server, rng)
        tracemalloc.start()
        try:
            for _ in range(rounds):
                await ask_all(server, rng)
                await server.good("POST", "/flush_cache?tier=all", {})
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    return sizes


async def test_b25_memory_is_flat_over_requests_that_come_and_go() -> None:
    sizes = await memory_by_round(ROUNDS)
    a_request = (sizes[-1] + sizes[-2] - sizes[-3] - sizes[-4]) / (2 * 2 * PROMPTS)
    assert a_request < MOST_BYTES_A_REQUEST, sizes

"""Prompts of megabytes: they are tokenized elsewhere, and the server answers others meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from api.scripted import ScriptedEngine, Served, request_bytes, serving, until

from headrace.server.text import TextService

TEN_MEGABYTES = "The quick brown fox. " * 500_000


@asynccontextmanager
async def real_text(model_file: Path) -> AsyncIterator[tuple[Served, TextService]]:
    text = TextService.open(model_file)
    async with serving(ScriptedEngine(), text) as served:
        yield served, text


async def test_b42_ten_megabytes_are_refused_with_their_lengths_and_health_answers_meanwhile(model_file: Path) -> None:
    async with real_text(model_file) as (served, _):
        body = json.dumps({"messages": [{"role": "user", "content": TEN_MEGABYTES}]}).encode()
        long = asyncio.ensure_future(served.ask("POST", "/v1/chat/completions", body))
        waits_s = []
        while not long.done():
            begin_s = time.monotonic()
            assert (await served.ask("GET", "/health"))[0] == 200
            waits_s.append(time.monotonic() - begin_s)
        status, _, answer = await long
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert "2500" in answer["error"]["message"] and "4096" in answer["error"]["message"]
    assert sorted(waits_s)[len(waits_s) // 2] < 0.1 and max(waits_s) < 1, "on a machine that does other things too"


async def test_b35_a_client_that_leaves_while_its_long_prompt_is_tokenized_takes_the_work_with_it(
    model_file: Path,
) -> None:
    async with real_text(model_file) as (served, text):
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request_bytes("POST", "/v1/completions", json.dumps({"prompt": TEN_MEGABYTES}).encode()))
        await until(lambda: text._jobs.waiting == 1)
        writer.close()
        await until(lambda: text._jobs.waiting == 0 and len(served.api.in_flight) == 0)
        assert served.engine.submits == []


async def test_a_prompt_too_long_for_the_loop_is_served_like_a_short_one(model_file: Path) -> None:
    prompt = "Once upon a time. " * 200
    async with real_text(model_file) as (served, text):
        status, _, _ = await served.ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert status == 200
        assert served.engine.submits[0].prompt_ids.tolist() == text.tokenizer.encode(prompt).tolist()
        assert text.worker_pid is not None, "it was not short"

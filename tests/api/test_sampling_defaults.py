"""Where a request says nothing of sampling it gets the server's defaults; what it says is what it gets."""

from __future__ import annotations

from typing import Any

import pytest
from api.scripted import ScriptedEngine, serving

from headrace.sched.messages import SamplingParams
from headrace.server.sampling_defaults import SamplingDefaults

MODELS = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1)
ENDPOINTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/generate", {"text": "hi"}),
)


async def sampling(path: str, body: dict[str, Any], said: dict[str, Any], defaults: SamplingDefaults) -> SamplingParams:
    fields = {"sampling_params": said} if path == "/generate" else said
    async with serving(ScriptedEngine(), sampling_defaults=defaults) as served:
        status, _, answer = await served.ask("POST", path, {**body, **fields})
        assert status == 200, answer
        return served.engine.submits[0].sampling


def five(params: SamplingParams) -> tuple[float, ...]:
    return (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty)


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_what_is_left_out_or_null_is_the_servers(path: str, body: dict[str, Any]) -> None:
    assert five(await sampling(path, body, {}, MODELS)) == (0.6, 0.95, 20, 0.1, 1.1)
    nulls = {"temperature": None, "top_p": None, "top_k": None, "min_p": None, "repetition_penalty": None}
    assert five(await sampling(path, body, nulls, MODELS)) == (0.6, 0.95, 20, 0.1, 1.1)
    assert five(await sampling(path, body, {}, SamplingDefaults())) == (1.0, 1.0, 0, 0.0, 1.0)


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_what_a_request_says_wins_one_by_one(path: str, body: dict[str, Any]) -> None:
    off = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert five(await sampling(path, body, off, MODELS)) == (0.0, 1.0, 0, 0.0, 1.0)
    assert five(await sampling(path, body, {"top_k": 0}, MODELS)) == (0.6, 0.95, 0, 0.1, 1.1)
    assert five(await sampling(path, body, {"temperature": 0.2}, MODELS)) == (0.2, 0.95, 20, 0.1, 1.1)

"""What a request says about the KV cache, on every endpoint that generates: salt, prefetch policy, adapters."""

from __future__ import annotations

from typing import Any

import pytest
from api.scripted import ScriptedEngine, serving

from headrace.server.openai_requests import ADAPTER_FIELDS

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/generate": {"text": "hi"},
}
everywhere = pytest.mark.parametrize("path", ENDPOINTS)


@everywhere
@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout", "adaptive"])
async def test_a_prefetch_policy_reaches_the_engine(path: str, policy: str) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, _ = await served.ask("POST", path, {**ENDPOINTS[path], "prefetch_policy": policy})
        assert status == 200 and served.engine.submits[0].prefetch_policy == policy


@everywhere
@pytest.mark.parametrize("fields", [{}, {"prefetch_policy": None}])
async def test_without_a_prefetch_policy_the_servers_holds(path: str, fields: dict[str, Any]) -> None:
    async with serving(ScriptedEngine()) as served:
        await served.ask("POST", path, {**ENDPOINTS[path], **fields})
        assert served.engine.submits[0].prefetch_policy == ""


@everywhere
@pytest.mark.parametrize("policy", ["", "best", "x" * 500, 1, []])
async def test_an_unknown_prefetch_policy_is_refused_with_those_there_are(path: str, policy: Any) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", path, {**ENDPOINTS[path], "prefetch_policy": policy})
        assert served.engine.submits == []
    assert status == 400 and answer["error"]["param"] == "prefetch_policy"
    if isinstance(policy, str):
        assert "it must be best_effort, wait_complete, timeout or adaptive." in answer["error"]["message"]


@everywhere
async def test_a_salt_in_the_body_reaches_the_engine(path: str) -> None:
    async with serving(ScriptedEngine()) as served:
        await served.ask("POST", path, {**ENDPOINTS[path], "cache_salt": "mine"})
        assert served.engine.submits[0].cache_salt == "mine"


@everywhere
async def test_a_salt_in_the_body_does_not_lead_out_of_a_keys_own_cache(path: str) -> None:
    async with serving(ScriptedEngine(), api_keys=("key-one", "key-two")) as served:
        for key in ("key-one", "key-two"):
            headers = {"Authorization": f"Bearer {key}"}
            await served.ask("POST", path, {**ENDPOINTS[path], "cache_salt": "mine"}, headers)
        one, two = (submit.cache_salt for submit in served.engine.submits)
    assert one != two and one.endswith(":mine") and two.endswith(":mine")


@everywhere
@pytest.mark.parametrize("name", ADAPTER_FIELDS)
@pytest.mark.parametrize("value", ["mine", "", [], {"id": 1}])
async def test_an_adapter_is_refused_by_name(path: str, name: str, value: Any) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", path, {**ENDPOINTS[path], name: value})
        assert served.engine.submits == []
    assert (status, answer["error"]["param"]) == (400, name)
    assert answer["error"]["message"] == f"`{name}`: adapters are not supported. Leave it out."


@everywhere
async def test_adapters_that_are_null_pass(path: str) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, _ = await served.ask("POST", path, {**ENDPOINTS[path], **dict.fromkeys(ADAPTER_FIELDS)})
    assert status == 200

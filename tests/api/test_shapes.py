"""Every answer has OpenAI's shape, by the schemas that OpenAI publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from api.scripted import ScriptedEngine, saying, serving

SCHEMAS: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "openai-responses.json").read_text()
)["schemas"]
TYPES: Final[dict[str, Any]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}
HI = [{"role": "user", "content": "hi"}]


def faults(value: Any, schema: Any, at: str = "$") -> list[str]:
    """Where a value departs from the subset of JSON Schema that these schemas use."""
    if value is None and schema.get("nullable"):
        return []
    if "$ref" in schema:
        return faults(value, SCHEMAS[schema["$ref"].rsplit("/")[-1]], at)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            tries = [faults(value, one, at) for one in schema[key]]
            return [] if [] in tries else min(tries, key=len)
    if value is None:
        return [] if schema.get("type") == "null" else [f"{at} is null"]
    kind = schema.get("type")
    if kind == "null":
        return [f"{at} is not null"]
    if kind is not None and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{at} is {value!r}, no {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at} is {value!r}, none of {schema['enum']}"]
    found = [f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value]
    for name, part in schema.get("properties", {}).items():
        if isinstance(value, dict) and name in value:
            found += faults(value[name], part, f"{at}.{name}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += faults(item, schema.get("items", {}), f"{at}[{index}]")
    return found


def test_the_check_finds_what_is_missing_and_what_is_wrong() -> None:
    answer = {"id": "a", "choices": [{"index": "0"}], "created": 1, "model": "m", "object": "text_completion"}
    found = faults(answer, SCHEMAS["CreateCompletionResponse"])
    assert "$.choices[0].text is missing" in found and "$.choices[0].index is '0', no integer" in found


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 3}, {"max_tokens": 2}])
async def test_chat_completions(fields: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(saying("hé", 258))) as served:
        _, _, whole = await served.ask("POST", "/v1/chat/completions", {"messages": HI, **fields})
        body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}, **fields}
        events = await served.events("/v1/chat/completions", body)
    assert faults(whole, SCHEMAS["CreateChatCompletionResponse"]) == []
    for event in events[:-1]:
        assert faults(event, SCHEMAS["CreateChatCompletionStreamResponse"]) == []


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 3}, {"echo": True}])
async def test_completions(fields: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(saying("hé", 258))) as served:
        _, _, whole = await served.ask("POST", "/v1/completions", {"prompt": "a", **fields})
    assert faults(whole, SCHEMAS["CreateCompletionResponse"]) == []


async def test_models() -> None:
    async with serving(ScriptedEngine()) as served:
        _, _, listing = await served.ask("GET", "/v1/models")
    assert faults(listing, SCHEMAS["ListModelsResponse"]) == []


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/nothing", None),
        ("GET", "/v1/completions", None),
        ("POST", "/v1/completions", {}),
        ("POST", "/v1/completions", {"prompt": "a", "model": "other"}),
        ("POST", "/v1/chat/completions", {"messages": HI, "max_tokens": 100_000}),
    ],
)
async def test_errors(method: str, path: str, body: object) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask(method, path, body)
    assert status >= 400 and faults(answer, SCHEMAS["ErrorResponse"]) == []

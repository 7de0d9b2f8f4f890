"""Types, ranges and caps: a wrong value is a 400 that names its parameter, and nothing reaches the engine."""

from __future__ import annotations

import json
import random
from typing import Any

import aiohttp
import msgspec
import pytest
from api.scripted import END, ScriptedEngine, saying, serving

from headrace.server import api as api_module
from headrace.server import body as body_module
from headrace.server import encoding as encoding_module
from headrace.server import tokenization as tokenization_module
from headrace.server.body import decode
from headrace.server.chat import MAX_MESSAGES
from headrace.server.openai_requests import ChatRequest

HI = [{"role": "user", "content": "hi"}]

WRONG_VALUES: dict[str, list[Any]] = {
    "n": [0, -1, 129, 9, True, 1.5, "1", 2**63, []],
    "max_tokens": [-1, True, 1.5, "5", 2**63, 2**31],
    "temperature": [-0.1, 2.1, 1e-40, 1e-320, True, "1", 1e400, []],
    "top_p": [0, 1e-40, -1, 1.1, False, "1"],
    "top_k": [-2, 1.5, True, 2**63],
    "min_p": [-0.1, 1e-40, 1.1],
    "repetition_penalty": [0, -1, 0.001, 1e-40, 101],
    "frequency_penalty": [-2.1, -1e-40, 2.1, True],
    "presence_penalty": [-2.1, 1e-40, 2.1, "0"],
    "min_tokens": [-1, True, 100_000],
    "seed": [True, 1.5, 2**63, -(2**63) - 1, "7"],
    "stop": ["", [""], [1], 5, ["x"] * 65, "x" * 1025, ["x" * 1000] * 5],
    "stop_token_ids": [[-1], [259], [True], [2**63], "1", [1] * 65],
    "logit_bias": [{"259": 1}, {"-1": 1}, {"a": 1}, {"1": 101}, {"1": 1e-40}, {"1": True}, {"1": "x"}, [1]],
    "stream": [1, "true", []],
    "stream_options": [True, {"include_usage": 1}],
    "priority": [1.5, True, 2**31],
    "cache_salt": [1, "x" * 257],
    "timeout_s": [0, -1, "1", True],
    "queue_timeout_s": [0, -1, "1", True],
    "rid": ["", "a b", "a\n", "x" * 129, 1],
    "user": [1, []],
    "model": [1, [], True],
    "ignore_eos": [1, "yes"],
}
WRONG = [(name, value) for name, values in WRONG_VALUES.items() for value in values]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value)[:30])
async def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    async with serving(ScriptedEngine()) as served:
        body = json.dumps({"prompt": "hi", name: value}).replace("Infinity", "1e400").encode()
        status, _, answer = await served.ask("POST", "/v1/completions", body)
        assert served.engine.submits == []
    assert status == 400, answer
    assert answer["error"]["param"].split(".")[0].split("[")[0] == name, answer
    assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["code"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": None}, "messages"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
async def test_a_wrong_chat_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/v1/chat/completions", {"messages": HI, **fields})
        assert served.engine.submits == []
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_logprobs_beyond_twenty_are_refused() -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/v1/completions", {"prompt": "a", "logprobs": 21})
    assert (status, answer["error"]["param"]) == (400, "logprobs")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a",}',
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a"} trailing',
        b'{"x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": [' + b"[" * 5_000 + b"]" * 5_000 + b"]}",
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_a_body_that_is_no_json_of_the_right_kind_is_a_400(body: bytes) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/v1/completions", body)
    assert status == 400 and answer["error"]["message"], answer


async def test_a_missing_parameter_is_named() -> None:
    async with serving(ScriptedEngine()) as served:
        _, _, answer = await served.ask("POST", "/v1/chat/completions", {"model": "tiny"})
    assert (answer["error"]["param"], answer["error"]["code"]) == ("messages", "missing_required_parameter")


VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        0.5,
        1e308,
        -1e308,
        2**31,
        2**63,
        -(2**63),
        10**30,
        "",
        "a",
        "\x00",
        "😀",
        "x" * 3000,
    ),
    *(
        [],
        [1],
        [[]],
        [[1]],
        ["a"],
        [None],
        {},
        {"a": 1},
        {"type": "text"},
        {"1": 1},
        [{"role": "user", "content": "a"}],
    ),
]
NAMES = {
    "/v1/chat/completions": [
        *("messages", "model", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "stop", "seed"),
        *("stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice", "user", "rid"),
        *("response_format", "modalities", "chat_template_kwargs", "continue_final_message", "priority", "min_tokens"),
    ],
    "/v1/completions": [
        *("prompt", "model", "max_tokens", "n", "temperature", "stop", "seed", "stream", "echo", "logprobs", "best_of"),
        *("suffix", "logit_bias", "stop_token_ids", "add_special_tokens", "parse_special", "cache_salt", "timeout_s"),
        "queue_timeout_s",
    ],
    "/generate": ["text", "input_ids", "sampling_params", "rid", "stream", "return_logprob", "top_logprobs_num"],
    "/tokenize": ["prompt", "content", "messages", "add_special_tokens", "parse_special", "with_pieces", "tools"],
    "/detokenize": ["tokens", "skip_special_tokens", "model"],
    "/abort_request": ["rid", "abort_all", "request_id"],
}


# ---------------------------------------------------------------------------------------------------------------
# Many values in few bytes

MANY = b"[" + b"{}," * 150_000 + b"{}]"
MANY_NUMBERS = b"[" + b"1," * 250_000 + b"1]"
MANY_STRINGS = b"[" + b'"",' * 250_000 + b'""]'


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", b'{"prompt": "x", "guided_json": ' + MANY + b"}", "guided_json"),
        ("/v1/completions", b'{"prompt": "x", "stop_token_ids": ' + MANY_NUMBERS + b"}", "stop_token_ids"),
        ("/v1/completions", b'{"prompt": "x", "stop": ' + MANY_STRINGS + b"}", None),
        ("/v1/completions", b'{"guided_json": ' + MANY + b', "prompt": "x", "guided_json": 1}', None),
        ("/v1/completions", b'{"prompt": ' + MANY_STRINGS + b"}", None),
        ("/v1/completions", b'{"prompt": ["a", ' + MANY_NUMBERS[1:] + b"}", "prompt"),
        ("/v1/completions", b'{"prompt": [[1], ' + MANY_NUMBERS[1:] + b"}", "prompt[1]"),
        ("/v1/completions", b'{"prompt": [' + b"[1]," * 5000 + b"[1]]}", "prompt"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "z": ' + MANY + b"}]}", "messages"),
        ("/v1/chat/completions", b'{"messages": [], "tools": ' + MANY + b"}", "tools"),
        ("/generate", b'{"text": "x", "sampling_params": ' + MANY + b"}", "sampling_params"),
        ("/tokenize", b'{"messages": ' + MANY + b"}", "messages"),
        ("/detokenize", b'{"tokens": ' + MANY_NUMBERS[:-1] + b"," + b"1," * 50_000 + b"1]}", "tokens"),
    ],
)
async def test_a_body_of_very_many_values_is_refused_before_they_are_built(
    path: str, body: bytes, param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = []

    def watched(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[Any], at: str = "") -> Any:
        decoded = decode(data, decoder, at)
        most.append(size_of(decoded))
        return decoded

    for module in (body_module, api_module, encoding_module, tokenization_module):
        monkeypatch.setattr(module, "decode", watched)
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert max(most, default=0) <= 1024, "nothing long was decoded"


def size_of(decoded: object) -> int:
    """The longest list or object in it."""
    if isinstance(decoded, msgspec.Struct):
        return max((size_of(getattr(decoded, name)) for name in decoded.__struct_fields__), default=0)
    if isinstance(decoded, list | dict):
        values = decoded.values() if isinstance(decoded, dict) else decoded
        return max([len(decoded), *map(size_of, values)])
    return 0


@pytest.mark.parametrize("text", ["1,[{" * 70_000, '","' * 100_000, "\\" * 200_001 + '"'])
async def test_marks_in_a_text_are_no_values(text: str) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/v1/chat/completions", {"messages": HI, "user": text})
    assert status == 200, answer


async def test_all_messages_that_a_conversation_may_have_are_few_enough_values() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * MAX_MESSAGES
    await body_module.check_parts(json.dumps({"messages": messages}).encode(), ChatRequest)


@pytest.mark.parametrize("path", NAMES)
async def test_no_combination_of_odd_values_is_a_server_error(path: str) -> None:
    """Seeded: a failure shows the body that causes it."""
    rng = random.Random(path)
    usual: dict[str, Any] = {"max_tokens": 2} if path.startswith("/v1") else {}
    if path == "/v1/chat/completions":
        usual["messages"] = HI
    elif path == "/v1/completions":
        usual["prompt"] = "hi"
    seen = set()
    async with serving(ScriptedEngine(saying("ab", END))) as served, aiohttp.ClientSession() as session:
        for _ in range(250):
            body = usual | {name: rng.choice(VALUES) for name in rng.sample(NAMES[path], rng.randrange(1, 4))}
            async with session.post(served.url + path, json=body) as answer:
                text = await answer.text()
                assert answer.status < 500, (body, text)
                assert answer.status in (200, 400, 404, 409), (body, answer.status)
                assert '"error"' not in text if answer.status == 200 else json.loads(text)["error"]["message"], body
                seen.add(answer.status)
    assert 400 in seen or path == "/abort_request"

"""What clients say about the form of an answer, in everybody's words, and what the engine is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from api.scripted import ScriptedEngine, serving, until

from headrace.sched.grammar import MAX_GRAMMAR_BYTES, BadGrammar, Grammar
from headrace.sched.matching import GrammarWorkerFailed
from headrace.sched.messages import Overloaded

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def native(**sampling: Any) -> dict[str, Any]:
    return {"text": "hi", "sampling_params": sampling}


@pytest.mark.parametrize(
    ("path", "body", "grammar"),
    [
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, Grammar("json_object")),
        ("/v1/chat/completions", {**CHAT, "response_format": OPENAI}, Grammar("json_schema", SCHEMA_TEXT)),
        ("/v1/completions", {**COMPLETION, "response_format": OPENAI}, Grammar("json_schema", SCHEMA_TEXT)),
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_object", "schema": SCHEMA}},
            Grammar("json_schema", SCHEMA_TEXT),
        ),
        ("/v1/chat/completions", {**CHAT, "regex": "a+"}, Grammar("regex", "a+")),
        ("/v1/completions", {**COMPLETION, "ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ("/v1/completions", {**COMPLETION, "grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ("/generate", native(json_schema=SCHEMA_TEXT), Grammar("json_schema", SCHEMA_TEXT)),
        ("/generate", native(json_schema=SCHEMA), Grammar("json_schema", SCHEMA_TEXT)),
        ("/generate", native(regex="a|b"), Grammar("regex", "a|b")),
        ("/generate", native(ebnf='root ::= "a"'), Grammar("ebnf", 'root ::= "a"')),
    ],
)
async def test_a_grammar_is_compiled_and_then_submitted(path: str, body: dict[str, Any], grammar: Grammar) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", path, body)
        assert status == 200, answer
        assert served.engine.grammars == [grammar]
        assert [submit.sampling.grammar for submit in served.engine.submits] == [grammar]


@pytest.mark.parametrize("field", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
async def test_plain_text_needs_no_grammar(field: dict[str, Any]) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, _ = await served.ask("POST", "/v1/chat/completions", {**CHAT, **field})
        assert status == 200 and not served.engine.grammars
        assert served.engine.submits[0].sampling.grammar is None


async def test_every_choice_and_every_prompt_has_the_grammar_and_it_is_compiled_once() -> None:
    async with serving(ScriptedEngine()) as served:
        body = {"text": ["a", "b"], "sampling_params": {"regex": "x+", "n": 2}}
        status, _, _ = await served.ask("POST", "/generate", body)
        assert status == 200
        assert len(served.engine.grammars) == 1 and len(served.engine.submits) == 4
        assert {submit.sampling.grammar for submit in served.engine.submits} == {Grammar("regex", "x+")}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "xml"}}, "response_format"),
        ("/v1/chat/completions", {**CHAT, "response_format": {}}, "response_format"),
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        ("/v1/chat/completions", {**CHAT, "regex": 1}, "regex"),
        ("/v1/chat/completions", {**CHAT, "regex": "a", "response_format": OPENAI}, "regex"),
        ("/v1/completions", {**COMPLETION, "regex": "a", "ebnf": "b"}, "ebnf"),
        ("/v1/completions", {**COMPLETION, "regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "regex"),
        ("/generate", native(regex=["a"]), "sampling_params.regex"),
        ("/generate", native(json_schema=7), "sampling_params.json_schema"),
    ],
)
async def test_a_wrong_wish_is_a_400_that_names_the_parameter(path: str, body: dict[str, Any], param: str) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert not served.engine.submits


@pytest.mark.parametrize(
    ("problem", "status", "code"),
    [
        (BadGrammar("unclosed group"), 400, "invalid_grammar"),
        (GrammarWorkerFailed("it can't be started"), 500, None),
        (Overloaded("too many", 1), 503, None),
    ],
)
async def test_b33_a_grammar_that_does_not_compile_fails_that_request_alone(
    problem: Exception, status: int, code: str | None
) -> None:
    async with serving(ScriptedEngine(refuse_grammar=problem)) as served:
        got, _, answer = await served.ask("POST", "/v1/chat/completions", {**CHAT, "regex": "("})
        error = answer["error"]
        assert got == status and (code is None or error["code"] == code)
        assert str(problem) in error["message"]
        assert not served.engine.submits
        got, _, _ = await served.ask("POST", "/v1/chat/completions", CHAT)
        assert got == 200


class StuckGrammars(ScriptedEngine):
    """A grammar is never compiled."""

    async def check_grammar(self, grammar: Grammar) -> None:
        self.grammars.append(grammar)
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "regex": "a"}),
        ("/v1/completions", {**COMPLETION, "regex": "a"}),
        ("/generate", native(regex="a")),
    ],
)
@pytest.mark.parametrize(
    ("limit", "status", "code"), [("timeout_s", 504, "deadline_exceeded"), ("queue_timeout_s", 503, "overloaded")]
)
async def test_a_time_limit_ends_the_wait_for_a_grammar(
    path: str, body: dict[str, Any], limit: str, status: int, code: str
) -> None:
    async with serving(StuckGrammars()) as served:
        got, _, answer = await served.ask("POST", path, {**body, limit: 0.05})
        assert (got, answer["error"]["code"]) == (status, code)
        assert served.engine.grammars and not served.engine.submits


async def test_an_abort_ends_the_wait_for_a_grammar() -> None:
    async with serving(StuckGrammars()) as served:
        asking = asyncio.ensure_future(served.ask("POST", "/generate", {**native(regex="a"), "rid": "mine"}))
        await until(lambda: bool(served.engine.grammars))
        assert (await served.ask("POST", "/abort_request", {"rid": "mine"}))[2] == {"aborted": 1}
        status, _, answer = await asking
        assert (status, answer["error"]["code"]) == (499, "request_aborted")
        assert not served.engine.submits

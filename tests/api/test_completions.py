"""Completions: four shapes of prompts, echo and logprobs as evaluation harnesses need them, streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import openai
import pytest
from api.scripted import END, MODEL, START, ScriptedEngine, Served, ids_of, openai_client, saying, serving


@asynccontextmanager
async def client_of(engine: ScriptedEngine, **settings: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    async with serving(engine, **settings) as served, openai_client(served) as client:
        yield client, served


@pytest.mark.parametrize("prompt", ["once", ["once"], ids_of("once"), [ids_of("once")]])
async def test_a_prompt_may_be_text_or_ids_alone_or_in_a_list(prompt: Any) -> None:
    async with client_of(ScriptedEngine(saying(" upon", END))) as (client, served):
        answer = await client.completions.create(model=MODEL, prompt=prompt)
        assert served.engine.submits[0].prompt_ids.tolist() == ids_of("once")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" upon", "stop")


async def test_several_prompts_give_a_choice_each_in_their_order() -> None:
    async with client_of(ScriptedEngine(lambda submit: [*submit.prompt_ids.tolist(), END])) as (client, _):
        answer = await client.completions.create(model=MODEL, prompt=["a", "bb", "ccc"], n=2)
    assert [choice.text for choice in answer.choices] == ["a", "a", "bb", "bb", "ccc", "ccc"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 2 * (2 + 3 + 4))


async def test_without_max_tokens_there_are_sixteen() -> None:
    async with client_of(ScriptedEngine(saying("ab"))) as (client, _):
        answer = await client.completions.create(model=MODEL, prompt="once")
    assert answer.choices[0].text == "ab" * 8 and answer.choices[0].finish_reason == "length"


async def test_the_default_of_sixteen_is_cut_to_what_fits() -> None:
    async with client_of(ScriptedEngine(saying("ab"), context_tokens=8)) as (client, _):
        answer = await client.completions.create(model=MODEL, prompt="once")
    assert answer.choices[0].text == "abab"


async def test_a_stream_is_the_whole_answer_in_parts() -> None:
    async with client_of(ScriptedEngine(saying("naïve 😀", END))) as (client, _):
        stream = await client.completions.create(
            model=MODEL, prompt="x", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "naïve 😀"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


async def test_echo_with_logprobs_scores_the_prompt_and_one_more() -> None:
    """What lm-eval sends for a loglikelihood: it reads `token_logprobs[context:-1]`."""
    ids = ids_of("abc")
    async with client_of(ScriptedEngine(saying("d"))) as (client, served):
        answer = await client.completions.create(
            model=MODEL, prompt=[ids], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
        )
        assert served.engine.submits[0].sampling.prompt_logprobs == 1
    choice = answer.choices[0]
    assert choice.text == "abcd" and choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c", "d"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    token_logprobs: list[Any] = choice.logprobs.token_logprobs or []
    top_logprobs: list[Any] = choice.logprobs.top_logprobs or []
    assert token_logprobs[0] is None and top_logprobs[0] is None
    assert token_logprobs[1:] == pytest.approx([-id / 1000 for id in ids_of("bcd")])
    assert [list(top) for top in top_logprobs[1:]] == [["b"], ["c"], ["d"]]


async def test_the_end_token_counts_among_the_scored() -> None:
    async with client_of(ScriptedEngine(saying("", END))) as (client, _):
        answer = await client.completions.create(model=MODEL, prompt="abc", max_tokens=1, logprobs=0, echo=True)
    choice = answer.choices[0]
    assert choice.text == "abc" and choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c", "<|im_end|>"]


async def test_max_tokens_zero_scores_the_prompt_alone() -> None:
    async with client_of(ScriptedEngine(saying("d"))) as (client, _):
        answer = await client.completions.create(model=MODEL, prompt="abc", max_tokens=0, logprobs=1, echo=True)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("abc", "length") and choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert answer.usage is not None and answer.usage.completion_tokens == 0


async def test_tokens_that_are_no_characters_have_names_of_their_own() -> None:
    async with client_of(ScriptedEngine(saying("é!", END))) as (client, _):
        answer = await client.completions.create(model=MODEL, prompt="a", logprobs=0)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9", "!", "<|im_end|>"]
    assert answer.choices[0].logprobs.text_offset == [0, 0, 1, 2]


async def test_a_streamed_echo_is_the_whole_one() -> None:
    async with client_of(ScriptedEngine(saying("dé", END))) as (client, _):
        fields: dict[str, Any] = {"model": MODEL, "prompt": "äbc", "logprobs": 2, "echo": True}
        whole = await client.completions.create(**fields)
        chunks = [chunk async for chunk in await client.completions.create(**fields, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == "äbcdé"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(chunk.choices[0].logprobs, name) for chunk in chunks if chunk.choices[0].logprobs]
        assert list(chain.from_iterable(parts)) == getattr(whole.choices[0].logprobs, name), name


async def test_every_choice_echoes_the_prompts_scores_which_are_computed_once() -> None:
    async with client_of(ScriptedEngine(saying("d"))) as (client, served):
        answer = await client.completions.create(model=MODEL, prompt="abc", max_tokens=1, logprobs=1, echo=True, n=2)
        asked = [submit.sampling.prompt_logprobs for submit in served.engine.submits]
    assert asked == [1, -1]
    assert answer.choices[0].logprobs == answer.choices[1].logprobs


@pytest.mark.parametrize("n", [1, 2])
async def test_best_of_as_many_as_are_wanted_is_accepted(n: int) -> None:
    async with client_of(ScriptedEngine()) as (client, _):
        answer = await client.completions.create(model=MODEL, prompt="a", best_of=n, n=n)
    assert len(answer.choices) == n


async def test_best_of_fewer_than_are_wanted_is_refused_with_what_to_change() -> None:
    async with client_of(ScriptedEngine()) as (client, _):
        with pytest.raises(
            openai.BadRequestError, match="`best_of` is 1, less than `n` \\(3\\): leave it out"
        ) as error:
            await client.completions.create(model=MODEL, prompt="a", best_of=1, n=3)
    assert error.value.param == "best_of"


@pytest.mark.parametrize(("fields", "param"), [({"suffix": "end"}, "suffix"), ({"best_of": 3}, "best_of")])
async def test_what_completions_cannot_do_is_refused(fields: dict[str, Any], param: str) -> None:
    async with client_of(ScriptedEngine()) as (client, _):
        with pytest.raises(openai.BadRequestError) as error:
            await client.completions.create(model=MODEL, prompt="a", **fields)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        ([""], "prompt"),
        ([300], "prompt"),
        ([-1], "prompt"),
        ([2**63], "prompt"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ({"a": 1}, "prompt"),
        (7, "prompt"),
        (None, "prompt"),
    ],
)
async def test_a_wrong_prompt_is_a_400_that_says_where(prompt: Any, param: str) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/v1/completions", {"prompt": prompt})
        assert served.engine.submits == []
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer


async def test_b42_ids_beyond_the_context_are_refused_before_they_are_read() -> None:
    async with serving(ScriptedEngine(context_tokens=100)) as served:
        status, _, answer = await served.ask("POST", "/v1/completions", {"prompt": [1] * 5000})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert "5000" in answer["error"]["message"] and "100" in answer["error"]["message"]


async def test_control_tokens_in_a_text_count_only_when_the_client_says_so() -> None:
    async with serving(ScriptedEngine()) as served:
        for parse_special in (False, True):
            body = {"prompt": "<|im_start|>user", "parse_special": parse_special}
            assert (await served.ask("POST", "/v1/completions", body))[0] == 200
        plain, special = (submit.prompt_ids.tolist() for submit in served.engine.submits)
    assert START not in plain and special == [START, *ids_of("user")]


async def test_too_many_choices_are_refused_before_anything_is_submitted() -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/v1/completions", {"prompt": ["a"] * 300, "n": 4})
        assert served.engine.submits == []
    assert status == 400 and answer["error"]["param"] == "n"

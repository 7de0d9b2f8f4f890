"""Chat completions, asked by OpenAI's own client over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from api.scripted import (
    CONTEXT_TOKENS,
    END,
    MODEL,
    TOKENIZER,
    ScriptedEngine,
    Served,
    ids_of,
    make_text,
    openai_client,
    saying,
    serving,
)
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(engine: ScriptedEngine, **settings: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    async with serving(engine, **settings) as served, openai_client(served) as client:
        yield client, served


async def chunks_of(client: openai.AsyncOpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, **fields)
    return [chunk async for chunk in stream]


async def test_an_answer_has_text_finish_reason_and_usage() -> None:
    async with client_of(ScriptedEngine(saying("hello", END), cached_tokens=4)) as (client, served):
        answer = await client.chat.completions.create(model=MODEL, messages=HI)
        prompt = len(served.engine.submits[0].prompt_ids)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.role) == ("hello", "stop", "assistant")
    assert answer.object == "chat.completion" and answer.model == MODEL
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 6)
    assert answer.usage.total_tokens == prompt + 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_the_prompt_is_the_models_template() -> None:
    async with client_of(ScriptedEngine()) as (client, served):
        await client.chat.completions.create(model=MODEL, messages=HI)
        ids = served.engine.submits[0].prompt_ids.tolist()
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_control_tokens_in_a_message_are_plain_text() -> None:
    async with client_of(ScriptedEngine()) as (client, served):
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "<|im_end|>"}])
        ids = served.engine.submits[0].prompt_ids.tolist()
    assert ids.count(END) == 1, "the template's own"


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    async with client_of(ScriptedEngine(saying("hello", END))) as (client, _):
        chunks = await chunks_of(client)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert chunks[-1].choices[0].delta.model_dump(exclude_none=True) == {}
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_usage_chunk_comes_last_and_has_no_choices() -> None:
    async with client_of(ScriptedEngine(saying("hello", END))) as (client, _):
        chunks = await chunks_of(client, stream_options={"include_usage": True})
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_no_usage_chunk_comes_when_none_is_asked_for() -> None:
    async with client_of(ScriptedEngine()) as (client, _):
        assert all(chunk.choices for chunk in await chunks_of(client))


async def test_continuous_usage_counts_along() -> None:
    async with client_of(ScriptedEngine(saying("abc", END))) as (client, _):
        chunks = await chunks_of(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks) and counts == sorted(counts) and counts[-1] == 4


async def test_without_max_tokens_all_that_is_left_of_the_context_may_be_used() -> None:
    async with client_of(ScriptedEngine()) as (client, served):
        await client.chat.completions.create(model=MODEL, messages=HI)
        submit = served.engine.submits[0]
    assert submit.sampling.max_tokens == CONTEXT_TOKENS - len(submit.prompt_ids)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_ends_an_answer_with_length(name: str) -> None:
    async with client_of(ScriptedEngine(saying("hello", END))) as (client, _):
        limit: Any = {name: 3}
        answer = await client.chat.completions.create(model=MODEL, messages=HI, **limit)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hel", "length")


async def test_the_end_token_at_the_limit_is_a_stop() -> None:
    async with client_of(ScriptedEngine(saying("hello", END))) as (client, _):
        answer = await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=6)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hello", "stop")


async def test_ignoring_the_end_token_goes_on_to_the_limit() -> None:
    async with client_of(ScriptedEngine(saying("ab", END))) as (client, _):
        answer = await client.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=5, extra_body={"ignore_eos": True}
        )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abab", "length")
    assert answer.usage is not None and answer.usage.completion_tokens == 5


async def test_n_choices_share_the_prompt_and_differ_in_their_seeds() -> None:
    async with client_of(ScriptedEngine(saying("hello", END))) as (client, served):
        answer = await client.chat.completions.create(model=MODEL, messages=HI, n=3, seed=7, temperature=1)
        submits = served.engine.submits
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.message.content == "hello" for choice in answer.choices)
    assert len({submit.sampling.seed for submit in submits}) == 3 and submits[0].sampling.seed == 7
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(submits[0].prompt_ids), "the prompt counts once"
    assert answer.usage.completion_tokens == 18


async def test_the_same_seed_gives_the_same_seeds_to_the_choices() -> None:
    async with client_of(ScriptedEngine()) as (client, served):
        for _ in range(2):
            await client.chat.completions.create(model=MODEL, messages=HI, n=2, seed=7)
        seeds = [submit.sampling.seed for submit in served.engine.submits]
    assert seeds[:2] == seeds[2:]


async def test_without_a_seed_every_request_draws_its_own() -> None:
    async with client_of(ScriptedEngine()) as (client, served):
        for _ in range(2):
            await client.chat.completions.create(model=MODEL, messages=HI)
        assert served.engine.submits[0].sampling.seed != served.engine.submits[1].sampling.seed


async def test_streamed_choices_are_told_apart_by_their_index() -> None:
    async with client_of(ScriptedEngine(saying("hello", END))) as (client, _):
        chunks = await chunks_of(client, n=2)
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in own) == "hello"
        assert [choice.finish_reason for choice in own].count("stop") == 1


async def test_logprobs_have_token_bytes_and_alternatives() -> None:
    async with client_of(ScriptedEngine(saying("é", END))) as (client, _):
        answer = await client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [token.bytes for token in logprobs.content[:2]] == [[0xC3], [0xA9]]
    assert logprobs.content[0].logprob == pytest.approx(-ids_of("é")[0] / 1000)
    assert [len(token.top_logprobs) for token in logprobs.content] == [2, 2, 2]
    assert logprobs.refusal is None


async def test_streamed_logprobs_are_those_of_the_whole_answer() -> None:
    async with client_of(ScriptedEngine(saying("naïve 😀", END))) as (client, _):
        whole = await client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=1)
        chunks = await chunks_of(client, logprobs=True, top_logprobs=1)
    streamed = [
        token
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert whole.choices[0].logprobs is not None
    assert streamed == whole.choices[0].logprobs.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "naïve 😀"


async def test_a_stop_string_ends_the_answer_and_the_request() -> None:
    async with client_of(ScriptedEngine(saying("one two three", END))) as (client, served):
        answer = await client.chat.completions.create(model=MODEL, messages=HI, stop=[" two"])
        concludes = served.engine.concludes
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one", "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == 7
    assert [n_tokens for _, n_tokens in concludes] == [7]


async def test_a_stop_string_stays_when_asked_for() -> None:
    async with client_of(ScriptedEngine(saying("one two three", END))) as (client, _):
        answer = await client.chat.completions.create(
            model=MODEL, messages=HI, stop=" two", extra_body={"include_stop_str_in_output": True}
        )
    assert answer.choices[0].message.content == "one two"


async def test_a_stop_id_of_the_request_is_no_text() -> None:
    async with client_of(ScriptedEngine(saying("a!b"))) as (client, _):
        answer = await client.chat.completions.create(
            model=MODEL, messages=HI, extra_body={"stop_token_ids": ids_of("!")}
        )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("a", "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == 2


async def test_special_tokens_are_printed_when_asked_for() -> None:
    async with client_of(ScriptedEngine(saying("a", 256))) as (client, _):
        answer = await client.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=2, extra_body={"skip_special_tokens": False, "ignore_eos": True}
        )
    assert answer.choices[0].message.content == "a<|endoftext|>"


async def test_sampling_parameters_reach_the_engine() -> None:
    async with client_of(ScriptedEngine()) as (client, served):
        await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            temperature=0.5,
            top_p=0.9,
            frequency_penalty=0.1,
            presence_penalty=0.2,
            logit_bias={"65": -100},
            seed=-1,
            max_tokens=20,
            extra_body={"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 3},
        )
        submit = served.engine.submits[0]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.05)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.1, 0.2, 1.1)
    assert sampling.logit_bias == ((65, -100.0),)
    assert (sampling.max_tokens, sampling.min_tokens) == (20, 3)
    assert 0 <= sampling.seed < 2**63
    assert END in sampling.stop_ids


async def test_nulls_and_unknown_fields_pass() -> None:
    nothing = dict.fromkeys(
        ("seed", "logprobs", "lora_path", "stop", "n", "temperature", "stream", "tools", "max_tokens", "stream_options")
    )
    async with serving(ScriptedEngine()) as served:
        body = {"model": MODEL, "messages": HI, **nothing, "some_new_field": {"a": [1]}}
        status, _, answer = await served.ask("POST", "/chat/completions", body)
    assert status == 200 and answer["choices"][0]["message"] == {
        "content": "hello",
        "role": "assistant",
        "refusal": None,
    }


async def test_content_may_come_in_text_parts() -> None:
    async with client_of(ScriptedEngine()) as (client, served):
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        )
        text = TOKENIZER.decode(served.engine.submits[0].prompt_ids.tolist())
    assert "user\nhi" in text


async def test_an_image_is_refused_and_never_fetched() -> None:
    async with client_of(ScriptedEngine()) as (client, _):
        with pytest.raises(openai.BadRequestError, match="image_url") as error:
            await client.chat.completions.create(
                model=MODEL,
                messages=[
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}
                ],
            )
    assert error.value.param == "messages"


async def test_the_served_model_answers_to_default_too() -> None:
    async with client_of(ScriptedEngine()) as (client, _):
        answer = await client.chat.completions.create(model="default", messages=HI)
    assert answer.model == MODEL


async def test_another_model_is_not_found() -> None:
    async with client_of(ScriptedEngine()) as (client, _):
        with pytest.raises(openai.NotFoundError) as error:
            await client.chat.completions.create(model="gpt-4", messages=HI)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
        ({"extra_body": {"lora_path": "x"}}, "lora_path"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
async def test_what_is_not_built_yet_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with client_of(ScriptedEngine()) as (client, served):
        with pytest.raises(openai.BadRequestError, match="supported") as error:
            await client.chat.completions.create(model=MODEL, messages=HI, **fields)
        assert served.engine.submits == []
    assert (error.value.param, error.value.code) == (param, "unsupported_parameter")


async def test_a_text_response_format_is_fine() -> None:
    async with client_of(ScriptedEngine()) as (client, _):
        answer = await client.chat.completions.create(model=MODEL, messages=HI, response_format={"type": "text"})
    assert answer.choices[0].message.content == "hello"


async def test_the_last_message_can_be_continued() -> None:
    async with client_of(ScriptedEngine()) as (client, served):
        await client.chat.completions.create(
            model=MODEL,
            messages=[*HI, {"role": "assistant", "content": "Well"}],
            extra_body={"continue_final_message": True},
        )
        text = TOKENIZER.decode(served.engine.submits[0].prompt_ids.tolist(), skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nWell")


async def test_cached_tokens_are_told_by_tier_when_asked_for() -> None:
    async with serving(ScriptedEngine(cached_tokens=3)) as served:
        body = {"messages": HI, "return_cached_tokens_details": True}
        _, _, whole = await served.ask("POST", "/v1/chat/completions", body)
        events = await served.events("/v1/chat/completions", {**body, "stream": True})
    expected = {"device": 3, "host": 0, "storage": 0, "storage_backend": None}
    assert whole["sglext"]["cached_tokens_details"] == expected
    assert events[-2]["sglext"]["cached_tokens_details"] == expected and events[-1] == "[DONE]"
    ledger = whole["sglext"]["headrace"][0]
    assert ledger["pages"] == {"device": 3, "host": 0, "storage": 0}
    assert ledger["bytes"] == {"device": 3000, "host": 0, "storage": 0}
    assert sum(ledger["waited_ms"].values()) == ledger["first_token_ms"] == 3.0
    assert (ledger["saved_ms"], ledger["saved_by"], ledger["prefetch"]) == (12.5, "guessed", None)


async def test_a_model_without_a_template_says_what_to_do() -> None:
    async with serving(ScriptedEngine(), make_text(None)) as served:
        status, _, answer = await served.ask("POST", "/v1/chat/completions", {"messages": HI})
    assert status == 400 and "--chat-template" in answer["error"]["message"]


async def test_b42_a_prompt_longer_than_the_context_names_all_lengths() -> None:
    async with client_of(ScriptedEngine(context_tokens=32)) as (client, served):
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=20)
        await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1)
        prompt = len(served.engine.submits[0].prompt_ids)
        assert len(served.engine.submits) == 1
    assert error.value.code == "context_length_exceeded"
    assert all(f" {number}" in str(error.value) for number in (prompt, 20, 32))


async def test_a_salt_reaches_the_engine() -> None:
    async with client_of(ScriptedEngine()) as (client, served):
        await client.chat.completions.create(model=MODEL, messages=HI, extra_body={"cache_salt": "mine"})
        assert served.engine.submits[0].cache_salt == "mine"


async def test_the_shorter_time_limit_counts() -> None:
    async with client_of(ScriptedEngine(), request_timeout_s=10.0, queue_timeout_s=4.0) as (client, served):
        for asked_s in (2.5, 100.0):
            limits = {"timeout_s": asked_s, "queue_timeout_s": asked_s}
            await client.chat.completions.create(model=MODEL, messages=HI, extra_body=limits)
        limits_ms = [(submit.deadline_ms, submit.queue_deadline_ms) for submit in served.engine.submits]
        assert limits_ms == [(2500, 2500), (10_000, 4000)]


@pytest.mark.parametrize(("priorities", "reaches"), [("high first", 2), ("low first", -2), ("ignored", 0)])
async def test_a_priority_counts_where_the_server_says_so_and_as_it_says(priorities: str, reaches: int) -> None:
    async with client_of(ScriptedEngine(), priorities=priorities) as (client, served):
        await client.chat.completions.create(model=MODEL, messages=HI, extra_body={"priority": 2})
        await client.chat.completions.create(model=MODEL, messages=HI)
        assert [submit.priority for submit in served.engine.submits] == [reaches, 0]


async def test_a_priority_can_be_refused_where_it_would_mean_nothing() -> None:
    async with client_of(ScriptedEngine(), priorities="refused") as (client, _):
        with pytest.raises(openai.BadRequestError, match="--enable-priority-scheduling") as error:
            await client.chat.completions.create(model=MODEL, messages=HI, extra_body={"priority": 2})
        assert error.value.param == "priority"
        await client.chat.completions.create(model=MODEL, messages=HI, extra_body={"priority": 0})

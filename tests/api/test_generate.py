"""SGLang's native endpoint."""

from __future__ import annotations

from typing import Any

import pytest
from api.scripted import END, ScriptedEngine, ids_of, saying, serving


async def test_text_goes_in_and_text_ids_and_meta_info_come_out() -> None:
    async with serving(ScriptedEngine(saying(" upon", END), cached_tokens=2)) as served:
        body = {"text": "once", "sampling_params": {"max_new_tokens": 32, "temperature": 0}, "rid": "mine"}
        status, _, answer = await served.ask("POST", "/generate", body)
    assert status == 200
    assert answer["text"] == " upon" and answer["output_ids"] == [*ids_of(" upon"), END]
    meta = answer["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "stop", "matched": END}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 6, 2)
    assert meta["e2e_latency"] > 0


async def test_input_ids_go_in_as_they_are() -> None:
    async with serving(ScriptedEngine()) as served:
        await served.ask("POST", "/generate", {"input_ids": [1, 2, 3]})
        assert served.engine.submits[0].prompt_ids.tolist() == [1, 2, 3]


async def test_a_limit_is_told_with_its_length() -> None:
    async with serving(ScriptedEngine(saying("abc"))) as served:
        _, _, answer = await served.ask("POST", "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 4}})
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 4}


async def test_a_batch_gives_a_list_with_a_sampling_for_each() -> None:
    async with serving(ScriptedEngine(lambda submit: [*submit.prompt_ids.tolist(), END])) as served:
        body = {
            "text": ["ab", "cdef"],
            "sampling_params": [{"max_new_tokens": 8}, {"max_new_tokens": 2, "temperature": 0.5}],
        }
        _, _, answers = await served.ask("POST", "/generate", body)
        temperatures = [submit.sampling.temperature for submit in served.engine.submits]
    assert [answer["text"] for answer in answers] == ["ab", "cd"]
    assert temperatures == [1.0, 0.5]


async def test_a_batch_of_one_is_still_a_list() -> None:
    async with serving(ScriptedEngine()) as served:
        _, _, answers = await served.ask("POST", "/generate", {"input_ids": [[1, 2]]})
    assert isinstance(answers, list) and len(answers) == 1


async def test_a_stream_repeats_the_text_from_the_start() -> None:
    async with serving(ScriptedEngine(saying("abc", END))) as served:
        events = await served.events("/generate", {"text": "x", "stream": True})
    assert events[-1] == "[DONE]"
    assert [event["text"] for event in events[:-1]] == ["a", "ab", "abc", "abc"]
    assert [event["meta_info"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3, 4]
    assert [event["meta_info"]["finish_reason"] for event in events[:-2]] == [None] * 3
    assert events[-2]["output_ids"] == [*ids_of("abc"), END]


async def test_a_streamed_batch_has_indices() -> None:
    async with serving(ScriptedEngine(saying("a", END))) as served:
        events = await served.events("/generate", {"text": ["x", "y"], "stream": True})
    assert {event["index"] for event in events[:-1]} == {0, 1}


async def test_logprobs_are_triples_of_logprob_id_and_text() -> None:
    async with serving(ScriptedEngine(saying("b", END))) as served:
        body: dict[str, Any] = {"text": "xyz", "return_logprob": True, "top_logprobs_num": 2}
        _, _, plain = await served.ask("POST", "/generate", body)
        body |= {"logprob_start_len": 0, "return_text_in_logprobs": True}
        _, _, full = await served.ask("POST", "/generate", body)
    assert plain["meta_info"]["input_token_logprobs"] == []
    assert [row[1:] for row in plain["meta_info"]["output_token_logprobs"]] == [[ids_of("b")[0], None], [END, None]]
    meta = full["meta_info"]
    assert [row[2] for row in meta["input_token_logprobs"]] == ["x", "y", "z"]
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_token_logprobs"][1][0] == pytest.approx(-ids_of("y")[0] / 1000)
    assert [len(tops) for tops in meta["output_top_logprobs"]] == [2, 2]


async def test_prompt_logprobs_are_asked_for_from_their_start_on() -> None:
    async with serving(ScriptedEngine(saying("b", END))) as served:
        for start in (0, 1, 2):
            body = {"text": "xyz", "return_logprob": True, "logprob_start_len": start, "return_text_in_logprobs": True}
            _, _, answer = await served.ask("POST", "/generate", body)
            rows = answer["meta_info"]["input_token_logprobs"]
            assert [row[2] for row in rows] == ["x", "y", "z"][start:]
            assert start == 0 or all(row[0] is not None for row in rows)
    sent = [submit.sampling for submit in served.engine.submits]
    assert [sampling.prompt_logprobs_from for sampling in sent] == [1, 1, 2]


async def test_prompt_logprobs_from_behind_the_prompt_are_refused() -> None:
    async with serving(ScriptedEngine()) as served:
        body = {"text": "xyz", "return_logprob": True, "logprob_start_len": 3}
        status, _, answer = await served.ask("POST", "/generate", body)
        ignored, _, _ = await served.ask("POST", "/generate", body | {"return_logprob": False})
    assert (status, answer["error"]["param"], ignored) == (400, "logprob_start_len", 200)
    assert "the last token is number 2" in answer["error"]["message"]


async def test_a_streams_events_have_the_new_rows_of_logprobs_and_the_last_one_has_all() -> None:
    async with serving(ScriptedEngine(saying("abc", END))) as served:
        body = {"text": "xyz", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
        *events, last, done = await served.events("/generate", body | {"stream": True})
        _, _, whole = await served.ask("POST", "/generate", body)
    assert done == "[DONE]"
    rows = [event["meta_info"]["output_token_logprobs"] for event in events]
    assert [[row[1] for row in new] for new in rows] == [[id] for id in ids_of("abc")]
    assert [len(event["meta_info"]["output_top_logprobs"]) for event in events] == [1, 1, 1]
    assert [len(event["meta_info"]["input_token_logprobs"]) for event in events] == [3, 0, 0]
    for name in ("output_token_logprobs", "output_top_logprobs", "input_token_logprobs"):
        assert last["meta_info"][name] == whole["meta_info"][name], name
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"]) == ("abc", [*ids_of("abc"), END])


async def test_an_event_with_logprobs_costs_the_same_at_the_end_of_a_long_stream() -> None:
    async with serving(ScriptedEngine(saying("a"))) as served:
        body = {"text": "x", "return_logprob": True, "top_logprobs_num": 5, "stream": True}
        events = await served.events("/generate", body | {"sampling_params": {"max_new_tokens": 300}})
    rows = sum(len(event["meta_info"]["output_token_logprobs"]) for event in events[:-2])
    assert 299 <= rows <= 300


async def test_text_with_quotes_and_line_ends_is_repeated_as_it_is() -> None:
    text = '"a"\n\\é😀'
    async with serving(ScriptedEngine(saying(text, END))) as served:
        events = await served.events("/generate", {"text": "x", "stream": True})
    assert events[-2]["text"] == text


async def test_what_sglangs_benchmark_sends_is_accepted() -> None:
    body = {
        "text": "x",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    async with serving(ScriptedEngine(saying("abc"))) as served:
        events = await served.events("/generate", body)
    assert events[-2]["meta_info"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": [1, 2]}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "sampling_params": {"temperature": 1e-40}}, "temperature"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "rid": ["a", "b"]}, "rid"),
    ],
)
async def test_a_wrong_request_is_a_400_that_names_the_parameter(body: dict[str, Any], param: str) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/generate", body)
    assert status == 400 and answer["error"]["param"] == param, answer

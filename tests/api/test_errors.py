"""What clients get when something goes wrong: before a stream, in the middle of it, and around it."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from api.scripted import MODEL, ScriptedEngine, events_of, openai_client, request_bytes, saying, serving, until

from headrace.sched.messages import NeverFits, Overloaded
from headrace.server.in_flight import InFlight

HI: list[Any] = [{"role": "user", "content": "hi"}]


async def test_an_unknown_path_is_a_404_in_openais_shape() -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/v1/responses", {})
    assert status == 404 and set(answer["error"]) == {"message", "type", "param", "code"}


async def test_a_wrong_method_is_a_405_that_names_the_right_ones() -> None:
    async with serving(ScriptedEngine()) as served:
        status, fields, answer = await served.ask("GET", "/v1/chat/completions")
    assert status == 405 and fields["allow"] == "POST" and answer["error"]["code"] == "method_not_allowed"


async def test_no_cors_header_is_ever_sent() -> None:
    async with serving(ScriptedEngine()) as served:
        for method in ("OPTIONS", "POST"):
            _, fields, _ = await served.ask(
                method, "/v1/chat/completions", {"messages": HI}, {"Origin": "http://a.example"}
            )
            assert not [name for name in fields if name.startswith("access-control")]


async def test_b43_an_overloaded_engine_is_a_503_with_retry_after() -> None:
    async with serving(ScriptedEngine(refuse=Overloaded("512 requests are waiting", 7))) as served:
        status, fields, answer = await served.ask("POST", "/v1/chat/completions", {"messages": HI, "stream": True})
    assert (status, fields["retry-after"]) == (503, "7")
    assert answer["error"]["code"] == "overloaded" and "512" in answer["error"]["message"]


async def test_b43_when_one_of_several_choices_is_refused_none_stays() -> None:
    engine = ScriptedEngine()
    engine.hold()

    def plan(submit: object) -> list[int]:
        if len(engine.submits) == 3:
            raise Overloaded("full", 1)
        return [1]

    engine.plan = plan
    async with serving(engine) as served:
        status, _, _ = await served.ask("POST", "/v1/chat/completions", {"messages": HI, "n": 4})
        assert status == 503
        assert engine.running == {} and served.api.emitter.open_choices == 0


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "the prompt has 44, and an answer needs at least one. Shorten the prompt."),
        ({"max_tokens": 5}, "the prompt has 44 and max_tokens is 5, 49 together. Shorten the prompt or lower"),
    ],
)
async def test_a_prompt_that_is_too_long_is_told_what_was_asked_and_nothing_else(
    asked: dict[str, int], says: str
) -> None:
    async with serving(ScriptedEngine(context_tokens=40)) as served:
        body = {"messages": [{"role": "user", "content": "x" * 25}], **asked}
        status, _, answer = await served.ask("POST", "/v1/chat/completions", body)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["message"].startswith(f"This model's context is 40 tokens: {says}")


async def test_a_prompt_that_is_too_long_for_the_kv_cache_is_told_which_flag_says_so() -> None:
    engine = ScriptedEngine(context_tokens=32)
    engine.pages = 2
    async with serving(engine) as served:
        status, _, answer = await served.ask("POST", "/v1/completions", {"prompt": "x" * 40})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["message"].startswith("This server's KV cache (--max-total-tokens) is 32 tokens: ")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "`messages[0].content[0]` has the type 'image_url'; this model reads only 'text'.",
        ),
        ({"role": "wizard", "content": "a"}, "`messages[0].role` is 'wizard'; it must be one of "),
        ({"role": "user"}, "`messages[0]` has no content; "),
    ],
)
async def test_a_parameter_in_a_message_is_spelled_as_the_client_spells_it(message: dict[str, Any], says: str) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/v1/chat/completions", {"messages": [message]})
    assert status == 400 and answer["error"]["message"].startswith(says)


async def test_a_request_that_never_fits_is_a_400() -> None:
    async with serving(ScriptedEngine(refuse=NeverFits("it needs 9 pages of 8"))) as served:
        status, _, answer = await served.ask("POST", "/v1/completions", {"prompt": "a"})
    assert status == 400 and "9 pages" in answer["error"]["message"]


async def test_an_error_before_the_first_token_has_a_status_of_its_own() -> None:
    engine = ScriptedEngine()
    engine.hold()
    async with serving(engine) as served, openai_client(served) as client:
        task = asyncio.ensure_future(client.chat.completions.create(model=MODEL, messages=HI, stream=True))
        await until(lambda: bool(engine.running))
        engine.end(1, "error", "the device worker died; send the request again")
        with pytest.raises(openai.InternalServerError, match="send the request again"):
            await task


async def test_b40_an_error_in_mid_stream_is_an_event_and_the_stream_ends_with_its_terminator() -> None:
    engine = ScriptedEngine(saying("hello"))
    engine.hold()
    async with serving(engine) as served:
        body = {"messages": HI, "stream": True}
        task = asyncio.ensure_future(served.ask("POST", "/v1/chat/completions", body))
        await until(lambda: bool(engine.running))
        engine.step()
        engine.step()
        engine.end(1, "error", "step 2 failed on the device")
        status, _, text = await task
    assert status == 200
    events = events_of(text)
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["message"] == "step 2 failed on the device" and events[-2]["error"]["code"]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-2]) == "he"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])


async def test_a_deadline_is_a_504() -> None:
    engine = ScriptedEngine(saying("hello"))
    engine.hold()
    async with serving(engine) as served:
        task = asyncio.ensure_future(served.ask("POST", "/v1/completions", {"prompt": "a", "timeout_s": 1}))
        await until(lambda: bool(engine.running))
        engine.step()
        engine.end(1, "timeout", "the request did not end within 1000 ms")
        status, _, answer = await task
    assert status == 504 and answer["error"]["code"] == "deadline_exceeded"
    assert "Ask for fewer tokens, or give it longer: `timeout_s`" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_has_not_begun_in_time_is_a_503_that_may_be_sent_again(stream: bool) -> None:
    engine = ScriptedEngine(saying("hello"))
    engine.hold()
    async with serving(engine) as served:
        body = {"prompt": "a", "queue_timeout_s": 1, "stream": stream}
        task = asyncio.ensure_future(served.ask("POST", "/v1/completions", body))
        await until(lambda: bool(engine.running))
        engine.end(1, "queue_timeout", "the request did not begin within 1000 ms; try again later")
        status, fields, answer = await task
    assert status == 503 and int(fields["retry-after"]) >= 1 and answer["error"]["code"] == "overloaded"


@pytest.mark.parametrize("stream", [False, True])
async def test_b33_a_grammar_that_turns_out_to_be_too_much_is_the_clients_400(stream: bool) -> None:
    engine = ScriptedEngine(saying("hello"))
    engine.hold()
    async with serving(engine) as served:
        body = {"prompt": "a", "regex": "a+", "stream": stream}
        task = asyncio.ensure_future(served.ask("POST", "/v1/completions", body))
        await until(lambda: bool(engine.running))
        engine.end(1, "invalid_grammar", "at output 7: too many items")
        status, _, answer = await task
    assert status == 400 and answer["error"]["code"] == "invalid_grammar"
    assert "too many items" in answer["error"]["message"]


async def test_when_one_choice_fails_the_others_are_not_waited_for() -> None:
    engine = ScriptedEngine(saying("hello"))
    engine.hold()
    async with serving(engine) as served:
        task = asyncio.ensure_future(served.ask("POST", "/v1/completions", {"prompt": "a", "n": 2}))
        await until(lambda: len(engine.running) == 2)
        engine.end(2, "error", "broken")
        status, _, _ = await task
        assert status == 500 and engine.running == {} and 1 in engine.aborts


async def test_a_fault_of_the_servers_own_is_a_500_without_its_insides() -> None:
    async with serving(ScriptedEngine(refuse=RuntimeError("secret detail"))) as served:
        status, _, answer = await served.ask("POST", "/v1/completions", {"prompt": "a"})
        assert len(served.api.in_flight) == 0
    assert status == 500 and "secret" not in answer["error"]["message"]


async def test_a_large_body_is_a_413_whether_its_length_is_told_or_not() -> None:
    async with serving(ScriptedEngine(), max_body_bytes=1000) as served:
        told, _, answer = await served.ask("POST", "/v1/completions", {"prompt": "x" * 2000})
        chunked = request_bytes(
            "POST", "/v1/completions", headers={"Content-Length": "", "Transfer-Encoding": "chunked"}
        )
        untold = await served.raw(chunked + b"7d0\r\n" + b"x" * 2000 + b"\r\n0\r\n\r\n")
    assert told == 413 and answer["error"]["code"] == "request_too_large"
    assert untold.startswith(b"HTTP/1.1 413")


async def test_a_compressed_body_is_refused_unread() -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/v1/completions", b"\x1f\x8b", {"Content-Encoding": "gzip"})
    assert status == 415 and answer["error"]["code"] == "unsupported_encoding"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"NONSENSE\r\n\r\n",
    ],
    ids=["many headers", "a long header", "a long path", "no http"],
)
async def test_header_floods_are_a_4xx(head: bytes) -> None:
    async with serving(ScriptedEngine()) as served:
        answer = await served.raw(head)
        assert answer.split()[1][:1] == b"4", answer[:100]
        assert (await served.ask("GET", "/health"))[0] == 200


async def test_the_request_id_is_given_back_in_safe_characters() -> None:
    async with serving(ScriptedEngine()) as served:
        _, plain, _ = await served.ask("GET", "/health", headers={"X-Request-ID": "bench-1:2"})
        _, odd, _ = await served.ask("GET", "/health", headers={"X-Request-ID": 'a"<b>\tc;é' + "z" * 300})
        _, none, _ = await served.ask("GET", "/health")
    assert plain["x-request-id"] == "bench-1:2"
    assert len(odd["x-request-id"]) == 128 and not set(odd["x-request-id"]) & set('"<>\t;é')
    assert len(none["x-request-id"]) == 16


async def test_a_streams_headers_have_the_request_id_too() -> None:
    async with serving(ScriptedEngine()) as served:
        body = {"messages": HI, "stream": True}
        _, fields, _ = await served.ask("POST", "/v1/chat/completions", body, {"X-Request-ID": "abc"})
    assert fields["x-request-id"] == "abc" and fields["content-type"].startswith("text/event-stream")
    assert fields["cache-control"] == "no-cache"


async def test_b36_a_duplicate_id_is_refused_while_the_first_runs() -> None:
    engine = ScriptedEngine()
    engine.hold()
    async with serving(engine) as served:
        first = asyncio.ensure_future(served.ask("POST", "/v1/completions", {"prompt": "a", "rid": "same"}))
        await until(lambda: bool(engine.running))
        status, fields, answer = await served.ask("POST", "/generate", {"text": "a", "rid": "same"})
        assert status == 409 and answer["error"]["code"] == "duplicate_request_id"
        assert fields["x-should-retry"] == "false"
        engine.release()
        assert (await first)[0] == 200
        assert (await served.ask("POST", "/v1/completions", {"prompt": "a", "rid": "same"}))[0] == 200


async def test_a_request_can_be_aborted_by_its_id() -> None:
    engine = ScriptedEngine()
    engine.hold()
    async with serving(engine) as served:
        task = asyncio.ensure_future(served.ask("POST", "/v1/completions", {"prompt": "a", "request_id": "one"}))
        await until(lambda: bool(engine.running))
        _, _, done = await served.ask("POST", "/abort_request", {"rid": "one"})
        status, _, answer = await task
        assert done == {"aborted": 1} and engine.running == {}
    assert status == 499 and answer["error"]["code"] == "request_aborted"


async def test_b36_aborting_an_unknown_or_finished_request_does_nothing() -> None:
    async with serving(ScriptedEngine()) as served:
        await served.ask("POST", "/v1/completions", {"prompt": "a", "rid": "done"})
        for rid in ("done", "unknown"):
            status, _, answer = await served.ask("POST", "/abort_request", {"rid": rid})
            assert (status, answer) == (200, {"aborted": 0})
        assert served.engine.aborts == []


async def test_all_requests_can_be_aborted() -> None:
    engine = ScriptedEngine()
    engine.hold()
    async with serving(engine) as served:
        tasks = [asyncio.ensure_future(served.ask("POST", "/v1/completions", {"prompt": "a"})) for _ in range(3)]
        await until(lambda: len(engine.running) == 3)
        _, _, done = await served.ask("POST", "/abort_request", {"abort_all": True})
        answers = await asyncio.gather(*tasks)
    assert done == {"aborted": 3} and [status for status, _, _ in answers] == [499] * 3


async def test_too_many_requests_at_once_are_refused_before_they_are_read() -> None:
    engine = ScriptedEngine()
    engine.hold()
    async with serving(engine) as served:
        served.api.in_flight = InFlight(served.api.metrics.in_flight, max_requests=1)
        first = asyncio.ensure_future(served.ask("POST", "/v1/completions", {"prompt": "a"}))
        await until(lambda: bool(engine.running))
        status, fields, answer = await served.ask("POST", "/v1/completions", {"prompt": "a"})
        assert status == 503 and "retry-after" in fields and answer["error"]["code"] == "overloaded"
        assert (await served.ask("GET", "/health"))[0] == 200
        engine.release()
        assert (await first)[0] == 200
        assert (await served.ask("POST", "/v1/completions", {"prompt": "a"}))[0] == 200


async def test_all_bodies_together_are_bounded() -> None:
    engine = ScriptedEngine()
    engine.hold()
    async with serving(engine) as served:
        served.api.in_flight = InFlight(served.api.metrics.in_flight, max_body_bytes=3000)
        big = {"prompt": "a", "user": "x" * 2000}
        first = asyncio.ensure_future(served.ask("POST", "/v1/completions", big))
        await until(lambda: bool(engine.running))
        assert (await served.ask("POST", "/v1/completions", big))[0] == 503
        engine.release()
        assert (await first)[0] == 200
        assert (await served.ask("POST", "/v1/completions", big))[0] == 200


async def test_more_choices_than_may_ever_wait_are_a_400_with_both_numbers_and_none_is_submitted() -> None:
    async with serving(ScriptedEngine(), max_queued_requests=3) as served:
        for body in ({"prompt": "a", "n": 4}, {"prompt": ["a", "b"], "n": 2}):
            status, fields, answer = await served.ask("POST", "/v1/completions", body)
            assert status == 400 and answer["error"]["param"] == "n" and "retry-after" not in fields
            assert "4 choices" in answer["error"]["message"] and "only 3" in answer["error"]["message"]
        assert served.engine.submits == []
        assert (await served.ask("POST", "/v1/completions", {"prompt": "a", "n": 3}))[0] == 200


async def test_prompts_that_may_never_wait_together_are_a_400_with_both_numbers_but_one_alone_is_taken() -> None:
    async with serving(ScriptedEngine(), max_queued_tokens=10) as served:
        for body in ({"prompt": "a" * 6, "n": 2}, {"prompt": ["a" * 6, "b" * 6]}):
            status, fields, answer = await served.ask("POST", "/v1/completions", body)
            assert status == 400 and "retry-after" not in fields
            assert "12 tokens" in answer["error"]["message"] and "only 10" in answer["error"]["message"]
        assert served.engine.submits == []
        assert (await served.ask("POST", "/v1/completions", {"prompt": "a" * 15}))[0] == 200


async def test_a_message_that_begins_with_a_parameter_keeps_the_parameters_name() -> None:
    body = {"messages": HI, "continue_final_message": True, "add_generation_prompt": True}
    async with serving(ScriptedEngine()) as served:
        _, _, answer = await served.ask("POST", "/v1/chat/completions", body)
    assert answer["error"]["message"].startswith("`continue_final_message` and add_generation_prompt")

"""Models, metrics, server info, the tokenizer, the cache: what is asked besides generating."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import openai
import pytest
from api.scripted import (
    CHATML,
    CONTEXT_TOKENS,
    END,
    MODEL,
    START,
    ScriptedEngine,
    ids_of,
    openai_client,
    saying,
    serving,
    until,
)

HI = {"messages": [{"role": "user", "content": "hi"}]}


async def test_the_served_model_is_listed_with_its_context() -> None:
    async with serving(ScriptedEngine()) as served, openai_client(served) as client:
        models = [model async for model in client.models.list()]
        one = await client.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
    assert [model.id for model in models] == [MODEL] == [one.id]
    assert models[0].model_dump()["max_model_len"] == CONTEXT_TOKENS


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
async def test_paths_work_with_and_without_the_version(path: str) -> None:
    async with serving(ScriptedEngine()) as served:
        assert (await served.ask("GET", path))[0] == 200


async def test_metrics_count_what_happened() -> None:
    async with serving(ScriptedEngine(saying("hello", END))) as served:
        await served.ask("POST", "/v1/chat/completions", {**HI, "n": 2})
        await served.ask("GET", "/no/such/path")
        status, fields, text = await served.ask("GET", "/metrics")
    assert status == 200 and fields["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        "headrace:time_to_first_token_seconds_count 2.0",
        "headrace:inter_token_latency_seconds_count 10.0",
        "headrace:e2e_request_latency_seconds_count 2.0",
        "headrace:request_queue_time_seconds_count 2.0",
        'headrace:request_finished_total{finished_reason="stop"} 2.0',
        'headrace:http_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0',
        'headrace:http_requests_total{endpoint="none",status="404"} 1.0',
        "headrace:num_requests_running 0.0",
        "headrace:ready 1.0",
    ):
        assert f"{line}\n" in text, line


async def test_the_names_of_metrics_are_the_same_whatever_format_is_asked_for() -> None:
    async with serving(ScriptedEngine()) as served:
        _, _, plain = await served.ask("GET", "/metrics")
        _, _, fancy = await served.ask(
            "GET", "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}
        )

    def names(text: str) -> set[str]:
        return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))

    assert names(plain) <= names(fancy) and all(name.startswith("headrace:") for name in names(plain))


async def test_the_age_of_the_last_step_says_what_it_is() -> None:
    async with serving(ScriptedEngine()) as served:
        _, _, text = await served.ask("GET", "/metrics")
    about = "Time since the device last answered, while it has steps to do: a hang shows here. 0 while idle."
    assert f"# HELP headrace:last_step_age_seconds {about}\n" in text
    assert "headrace:last_step_age_seconds 0.0\n" in text


async def test_metrics_and_probes_answer_to_head() -> None:
    async with serving(ScriptedEngine()) as served:
        for path in ("/metrics", "/health", "/v1/models"):
            status, _, body = await served.ask("HEAD", path)
            assert status == 200 and not body


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_has_settings_and_state(path: str) -> None:
    engine = ScriptedEngine(worker_pid=4321, pages=64)
    async with serving(engine, public={"page_size": 16, "api_key": "(set)"}) as served:
        _, _, info = await served.ask("GET", path)
    assert info["worker_pid"] == 4321
    assert info["page_size"] == 16 and info["served_model_name"] == MODEL and info["version"]
    assert info["internal_states"][0]["phase"] == "ready" and info["max_total_num_tokens"] == 1024


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_is_what_routers_look_for(path: str) -> None:
    async with serving(ScriptedEngine()) as served:
        _, _, info = await served.ask("GET", path)
    assert info["is_generation"] is True and info["model_path"] == MODEL


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/reset_prefix_cache")]
)
async def test_b44_flushing_the_cache_says_what_it_did_and_is_harmless_twice(method: str, path: str) -> None:
    async with serving(ScriptedEngine(cached_tokens=7)) as served:
        first = await served.ask(method, path)
        second = await served.ask(method, path)
    assert first[0] == second[0] == 200
    assert (first[2]["dropped_pages"], second[2]["dropped_pages"]) == (7, 0)


async def test_b44_flushing_the_cache_names_what_requests_hold() -> None:
    engine = ScriptedEngine()
    engine.hold()
    async with serving(engine) as served:
        task = asyncio.ensure_future(served.ask("POST", "/v1/chat/completions", HI))
        await until(lambda: bool(engine.running))
        _, _, answer = await served.ask("POST", "/flush_cache")
        engine.release()
        await task
    assert answer["pinned_pages"] == 1 and "in use" in answer["message"]


async def tokens(body: dict[str, Any]) -> Any:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/tokenize", body)
    assert status == 200, answer
    return answer


async def test_a_text_is_tokenized_as_vllms_and_lm_evals_clients_ask() -> None:
    answer = await tokens({"model": MODEL, "prompt": "héllo", "add_special_tokens": False})
    assert answer == {"tokens": ids_of("héllo"), "count": 6, "max_model_len": CONTEXT_TOKENS}


async def test_a_text_is_tokenized_as_llama_cpps_clients_ask() -> None:
    answer = await tokens({"content": "é!", "with_pieces": True})
    assert [token["piece"] for token in answer["tokens"]] == [[0xC3], [0xA9], "!"]


async def test_a_conversation_is_tokenized_by_the_template() -> None:
    answer = await tokens(HI)
    assert answer["tokens"][0] == START and answer["tokens"].count(START) == 2


async def test_the_name_of_a_control_token_is_its_id_and_longer_text_is_text() -> None:
    assert (await tokens({"prompt": "<|im_end|>"}))["tokens"] == [END]
    assert END not in (await tokens({"prompt": "a<|im_end|>"}))["tokens"]
    assert (await tokens({"prompt": "a<|im_end|>", "parse_special": True}))["tokens"] == [*ids_of("a"), END]
    assert END not in (await tokens({"prompt": "<|im_end|>", "parse_special": False}))["tokens"]


async def test_ids_are_detokenized_for_vllms_and_llama_cpps_clients() -> None:
    async with serving(ScriptedEngine()) as served:
        _, _, answer = await served.ask("POST", "/detokenize", {"tokens": [*ids_of("é😀"), END]})
        _, _, long = await served.ask("POST", "/detokenize", {"tokens": ids_of("é") * 3000})
    assert answer == {"prompt": "é😀<|im_end|>", "content": "é😀<|im_end|>"}
    assert long["prompt"] == "é" * 3000, "characters that lie across slices too"


@pytest.mark.parametrize("ids", [[259], [-1], [2**63], [1.0], ["a"], [True], None])
async def test_ids_that_are_no_tokens_are_refused(ids: Any) -> None:
    async with serving(ScriptedEngine()) as served:
        status, _, answer = await served.ask("POST", "/detokenize", {"tokens": ids})
    assert status == 400 and answer["error"]["param"].startswith("tokens")


async def test_the_tokenizer_describes_itself_to_lm_eval() -> None:
    async with serving(ScriptedEngine()) as served:
        _, _, info = await served.ask("GET", "/tokenizer_info")
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|im_start|>")
    assert info["chat_template"] == CHATML and info["eos_token_id"] == END

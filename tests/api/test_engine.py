"""The API over the real engine, whose device is the oracle: what clients get is what the oracle says, page by page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from api.scripted import (
    CHATML,
    MODEL,
    TOKENIZER,
    events_of,
    ids_of,
    make_text,
    parse_answer,
    request_bytes,
    until,
)

from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.ops.wire import BatchRing, Command, GroupShape, RingGeometry, Start
from headrace.sched.batch import max_batch_bytes
from headrace.sched.engine import Engine
from headrace.sched.executors.local import LocalConnection
from headrace.sched.executors.oracle import OracleDevice, expected
from headrace.sched.options import EngineOptions
from headrace.server.api import Api, ApiSettings
from headrace.server.lifecycle import LoadedText, bind, run_server

VOCAB = TOKENIZER.vocab_size
SLOTS, CONTEXT_TOKENS, PAGE_TOKENS, CHUNK = 8, 256, 4, 32


def options(pages: int = 512, max_queued_requests: int = 64) -> EngineOptions:
    ring = RingGeometry(3, max_batch_bytes(SLOTS, CONTEXT_TOKENS, CHUNK, PAGE_TOKENS, 1), SLOTS, CHUNK, VOCAB)
    start = Start(
        model_path="",
        dtype="float32",
        quantization="none",
        threads=1,
        max_slots=SLOTS,
        max_context_tokens=CONTEXT_TOKENS,
        page_tokens=PAGE_TOKENS,
        ring=ring,
        groups=[GroupShape("full", 0, [0], 1, 8)],
    )
    return EngineOptions(
        layout=KvLayout(PAGE_TOKENS, (LayerGroup("full", 0, (0,), 1, 8, 1),)),
        start=start,
        num_pages=[pages],
        fingerprint=b"oracle",
        max_chunk_tokens=CHUNK,
        prefill_tokens=CHUNK,
        max_queued_requests=max_queued_requests,
    )


class Server:
    """A whole server but for the model, in the test's loop."""

    def __init__(self, engine: Engine, api: Api, port: int) -> None:
        self.engine, self.api, self.port = engine, api, port

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request_bytes(method, path, b"" if body is None else json.dumps(body).encode()))
        async with asyncio.timeout(30):
            answer = parse_answer(await reader.read())
        writer.close()
        return answer

    async def generate(self, prompt: list[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, **sampling}}
        status, _, payload = await self.ask("POST", "/generate", body)
        answer: dict[str, Any] = json.loads(payload)
        assert status == 200, answer
        return answer

    async def until_idle(self) -> None:
        await until(lambda: not (self.engine.status().running or self.engine.status().waiting or self.engine.in_flight))
        self.engine.check_integrity()


@asynccontextmanager
async def serving(engine_options: EngineOptions) -> AsyncIterator[Server]:
    ring = BatchRing(bytearray(engine_options.start.ring.size_bytes), engine_options.start.ring)

    def device(ring: BatchRing, reply: Any) -> Any:
        oracle = OracleDevice(ring, reply, VOCAB)

        def handle(command: Command) -> None:
            oracle.handle(command)

        return handle

    async def connect() -> LocalConnection:
        return LocalConnection(ring, device)

    async def load_text() -> LoadedText:
        return LoadedText(make_text(), CHATML)

    engine = Engine(engine_options, connect, lambda deltas: None)
    api = Api(ApiSettings(model_name=MODEL, host="127.0.0.1", max_running_requests=SLOTS), engine)
    sock = bind("127.0.0.1", 0)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def tell(line: str) -> None:
        if not ready.done():
            ready.set_result(line)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run_server(sock, api, load_text, drain_timeout_s=5, tell=tell, handle_signals=False))
        await ready
        yield Server(engine, api, sock.getsockname()[1])
        task.cancel()


async def test_clients_get_the_oracles_ids() -> None:
    prompt = ids_of("once upon a time there was")
    async with serving(options()) as server:
        answers = await asyncio.gather(*(server.generate(prompt, 20, seed=seed) for seed in range(4)))
        await server.until_idle()
    for seed, answer in enumerate(answers):
        assert answer["output_ids"] == expected(prompt, 20, VOCAB, seed)
        assert answer["text"] == TOKENIZER.decode(answer["output_ids"])


async def test_b37_a_stream_is_the_whole_answer() -> None:
    body = {"prompt": "abc", "max_tokens": 60, "seed": 3, "ignore_eos": True}
    async with serving(options()) as server:
        _, _, whole = await server.ask("POST", "/v1/completions", body)
        _, _, stream = await server.ask("POST", "/v1/completions", {**body, "stream": True})
    events = events_of(stream.decode())
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == json.loads(whole)["choices"][0]["text"]
    assert events[-1] == "[DONE]"


async def test_a_second_turn_is_cached_and_says_so() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a" * 100}], "max_tokens": 4}
    body["return_cached_tokens_details"] = True
    async with serving(options()) as server:
        first = json.loads((await server.ask("POST", "/v1/chat/completions", body))[2])
        second = json.loads((await server.ask("POST", "/v1/chat/completions", body))[2])
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached[0] == 0 and cached[1] >= 100
    assert second["sglext"]["cached_tokens_details"]["device"] == cached[1]


async def test_b44_flushing_gives_the_cached_pages_back() -> None:
    async with serving(options()) as server:
        await server.generate(ids_of("a" * 40), 4)
        await server.until_idle()
        first = json.loads((await server.ask("POST", "/flush_cache"))[2])
        second = json.loads((await server.ask("POST", "/flush_cache"))[2])
        again = await server.generate(ids_of("a" * 40), 4)
    assert first["dropped_pages"] > 0 and second["dropped_pages"] == 0
    assert again["meta_info"]["cached_tokens"] == 0


async def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    prompt = ids_of("xyz")
    ids = expected(prompt, 40, VOCAB, 5)
    text = TOKENIZER.decode(ids)
    stop = text[6:8]
    async with serving(options()) as server:
        answer = await server.generate(prompt, 200, seed=5, stop=stop)
        await server.until_idle()
        assert server.engine.status().output_tokens < 60
    assert answer["text"] == text[: text.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_b35_a_client_that_leaves_gives_everything_back_within_two_steps() -> None:
    async with serving(options()) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = {"prompt": "abc", "max_tokens": 200, "stream": True, "ignore_eos": True}
        writer.write(request_bytes("POST", "/v1/completions", json.dumps(body).encode()))
        await until(lambda: server.engine.status().running == 1)
        writer.close()
        await until(lambda: len(server.api.in_flight) == 0)
        steps = server.engine.status().steps
        await server.until_idle()
        assert server.engine.status().steps <= steps + 2


async def test_b43_a_full_queue_is_a_503_at_once_and_the_others_are_served() -> None:
    async with serving(options(max_queued_requests=2)) as server:
        body = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True}
        answers = await asyncio.gather(*(server.ask("POST", "/v1/completions", body) for _ in range(40)))
        await server.until_idle()
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 503} and statuses.count(200) >= 2
    assert all(int(fields["retry-after"]) >= 1 for status, fields, _ in answers if status == 503)


async def test_n_choices_compute_their_prompt_once() -> None:
    body = {"prompt": ids_of("a" * 64), "n": 4, "max_tokens": 4, "temperature": 1.0, "seed": 1}
    async with serving(options()) as server:
        status, _, payload = await server.ask("POST", "/v1/completions", body)
        computed = server.engine.status().computed_tokens
    assert status == 200 and computed <= 64 + 3 * PAGE_TOKENS
    assert len({choice["text"] for choice in json.loads(payload)["choices"]}) == 4


async def test_echo_with_logprobs_has_a_score_for_every_token_also_with_a_warm_cache() -> None:
    body = {"prompt": [ids_of("abcdefgh" * 6)], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1}
    async with serving(options()) as server:
        answers = [json.loads((await server.ask("POST", "/v1/completions", body))[2]) for _ in range(2)]
    for answer in answers:
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == 49 and logprobs["token_logprobs"][0] is None
        assert None not in logprobs["token_logprobs"][1:]
    assert answers[0]["choices"] == answers[1]["choices"]


async def test_b42_a_prompt_beyond_the_context_leaves_the_engine_untouched() -> None:
    async with serving(options()) as server:
        status, _, payload = await server.ask("POST", "/v1/completions", {"prompt": "a" * 300, "max_tokens": 1})
        assert server.engine.status().steps == 0
    assert status == 400 and json.loads(payload)["error"]["code"] == "context_length_exceeded"


async def test_a_deadline_ends_a_request() -> None:
    async with serving(options()) as server:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "timeout_s": 0.001}
        status, _, payload = await server.ask("POST", "/v1/completions", body)
        await server.until_idle()
    assert status == 504, payload


async def test_a_request_that_finds_no_slot_in_its_time_is_a_503_that_has_cost_nothing() -> None:
    async with serving(options()) as server:
        body = {"prompt": "abc", "max_tokens": 240, "ignore_eos": True}
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(server.ask("POST", "/v1/completions", body)) for _ in range(SLOTS)]
            await until(lambda: server.engine.status().running == SLOTS)
            late = {"prompt": "xyz", "max_tokens": 1, "queue_timeout_s": 0.001}
            computed = server.engine.status().computed_tokens
            status, fields, _ = await server.ask("POST", "/v1/completions", late)
            assert server.engine.status().computed_tokens == computed
        await server.until_idle()
    assert status == 503 and int(fields["retry-after"]) >= 1
    assert {task.result()[0] for task in others} == {200}


@pytest.mark.parametrize("clients", [64])
async def test_many_streams_at_once_all_get_their_own_text(clients: int) -> None:
    async with serving(options(pages=256)) as server:
        bodies = [
            {"prompt": f"client {index}", "max_tokens": 30, "stream": True, "seed": index, "ignore_eos": True}
            for index in range(clients)
        ]
        answers = await asyncio.gather(*(server.ask("POST", "/v1/completions", body) for body in bodies))
        await server.until_idle()
    for body, (_, _, payload) in zip(bodies, answers):
        text = "".join(event["choices"][0]["text"] for event in events_of(payload.decode())[:-1])
        assert text == TOKENIZER.decode(expected(ids_of(str(body["prompt"])), 30, VOCAB, int(str(body["seed"]))))

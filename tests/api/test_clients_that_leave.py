"""Clients that go away, read slowly or not at all: what runs for them ends, and others notice nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import numpy as np
import pytest
from api.scripted import (
    END,
    ScriptedEngine,
    Served,
    events_of,
    make_text,
    parse_answer,
    request_bytes,
    saying,
    serving,
    until,
)

from headrace.ops.wire import I32

HI = [{"role": "user", "content": "hi"}]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send(served: Served, path: str, body: Any) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request_bytes("POST", path, json.dumps(body).encode()))
    return reader, writer


async def nothing_left(served: Served) -> None:
    """The engine runs nothing, nobody emits, and no request is being answered."""
    engine, api = served.engine, served.api
    await until(lambda: not (engine.running or api.emitter.open_choices or len(api.in_flight) or len(api.running)))


@pytest.mark.parametrize("stream", [True, False])
async def test_b35_a_client_that_leaves_a_queued_request_ends_it(stream: bool) -> None:
    engine = ScriptedEngine()
    engine.hold()
    async with serving(engine) as served:
        _, writer = await send(served, "/v1/chat/completions", {"messages": HI, "stream": stream, "n": 2})
        await until(lambda: len(engine.running) == 2)
        writer.close()
        await nothing_left(served)
        assert sorted(engine.aborts) == [1, 2]


@pytest.mark.parametrize("stream", [True, False])
async def test_b35_a_client_that_leaves_a_running_request_ends_it(stream: bool) -> None:
    engine = ScriptedEngine(saying("hello"))
    engine.hold()
    async with serving(engine) as served:
        reader, writer = await send(served, "/v1/chat/completions", {"messages": HI, "stream": stream})
        await until(lambda: bool(engine.running))
        engine.step()
        if stream:
            await reader.readuntil(b'"h"')
        writer.close()
        await nothing_left(served)
        assert engine.aborts == [1]
        engine.step()
        assert (await served.ask("GET", "/health"))[0] == 200


async def test_a_client_that_resets_its_connection_is_one_that_left() -> None:
    engine = ScriptedEngine(saying("hello"))
    engine.hold()
    async with serving(engine) as served:
        reader, writer = await send(served, "/v1/chat/completions", {"messages": HI, "stream": True})
        await until(lambda: bool(engine.running))
        engine.step()
        await reader.readuntil(b'"h"')
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        writer.transport.abort()
        await nothing_left(served)


async def test_b35_a_client_that_leaves_while_its_text_is_tokenized_never_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = make_text()
    begun, left = asyncio.Event(), asyncio.Event()

    async def never(prompt: str, add_special_tokens: bool = True) -> I32:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return np.zeros(0, np.int32)

    monkeypatch.setattr(text, "encode", never)
    async with serving(ScriptedEngine(), text) as served:
        _, writer = await send(served, "/v1/completions", {"prompt": "a", "rid": "one"})
        await begun.wait()
        writer.close()
        await left.wait()
        await nothing_left(served)
        assert served.engine.submits == []


async def test_a_request_that_is_aborted_while_its_text_is_tokenized_is_not_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = make_text()
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(prompt: str, add_special_tokens: bool = True) -> I32:
        begun.set()
        await go_on.wait()
        return np.ones(1, np.int32)

    monkeypatch.setattr(text, "encode", slow)
    async with serving(ScriptedEngine(), text) as served:
        answer = asyncio.ensure_future(served.ask("POST", "/v1/completions", {"prompt": "a", "rid": "one"}))
        await begun.wait()
        await served.ask("POST", "/abort_request", {"rid": "one"})
        go_on.set()
        assert (await answer)[0] == 499
        assert served.engine.submits == []


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten() -> None:
    async with serving(ScriptedEngine()) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request_bytes("POST", "/v1/completions", headers={"Content-Length": "1000"}) + b'{"prompt"')
        await until(lambda: len(served.api.in_flight) == 1)
        writer.close()
        await nothing_left(served)


async def flood(served: Served, text: str, steps: int) -> Connection:
    """Start a stream, read nothing of it, and let it grow."""
    engine = served.engine
    reader, writer = await send(served, "/generate", {"text": "x", "stream": True, "sampling_params": BIG})
    # The reader's own buffer, and what it takes from the kernel, are kept small.
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: bool(engine.running))
    for _ in range(steps):
        engine.step()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return reader, writer


BIG = {"max_new_tokens": 4000, "ignore_eos": True}
CONTEXT = 1 << 14


async def test_a_reader_beyond_its_bytes_is_ended_and_gets_an_error_event() -> None:
    engine = ScriptedEngine(saying("hello world "), context_tokens=CONTEXT)
    engine.hold()
    async with serving(engine, max_pending_bytes=20_000) as served:
        reader, writer = await flood(served, "x", 2500)
        await until(lambda: not engine.running)
        assert engine.aborts == [1]
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(20):
            status, _, payload = parse_answer(await reader.read())
        writer.close()
        events = events_of(payload.decode())
    assert status == 200 and events[-1] == "[DONE]" and "too slowly" in events[-2]["error"]["message"]


async def test_a_reader_that_stalls_too_long_is_ended_and_cut_off() -> None:
    engine = ScriptedEngine(saying("hello world "), context_tokens=CONTEXT)
    engine.hold()
    async with serving(engine, stall_s=0.2) as served:
        _, writer = await flood(served, "x", 2500)
        await nothing_left(served)
        assert engine.aborts == [1]
        assert b"headrace:slow_reader_aborts_total 1.0" in served.api.metrics.exposition()
        writer.close()


async def test_a_slow_reader_gets_fewer_larger_events_with_the_same_text() -> None:
    engine = ScriptedEngine(saying("hello world ", END), context_tokens=CONTEXT)
    engine.hold()
    async with serving(engine) as served:
        reader, writer = await send(served, "/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 12})
        await until(lambda: bool(engine.running))
        for _ in range(12):
            engine.step()  # twelve steps in one turn of the loop: nobody can read in between
        async with asyncio.timeout(20):
            _, _, payload = parse_answer(await reader.read())
        writer.close()
    events = events_of(payload.decode())
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "hello world "
    assert len(events) < 12


async def test_a_large_answer_that_nobody_reads_is_cut_off() -> None:
    engine = ScriptedEngine(saying("hello world "), context_tokens=CONTEXT)
    async with serving(engine, stall_s=0.2) as served:
        body = {"text": "x" * 500, "sampling_params": BIG, "return_logprob": True, "top_logprobs_num": 20}
        _, writer = await send(served, "/generate", body)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: bool(engine.submits))
        await nothing_left(served)
        writer.close()


async def test_many_stalled_readers_do_not_hold_up_a_fast_one() -> None:
    engine = ScriptedEngine(saying("hello world "), context_tokens=CONTEXT)
    engine.hold()
    async with serving(engine, max_running_requests=256) as served:
        stalled = []
        for _ in range(50):
            _, writer = await send(served, "/generate", {"text": "x", "stream": True, "sampling_params": BIG})
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            stalled.append(writer)
        await until(lambda: len(engine.running) == 50)
        engine.release()
        fast = await served.events("/v1/completions", {"prompt": "y", "stream": True, "max_tokens": 50})
        for writer in stalled:
            writer.close()
        await nothing_left(served)
    assert "".join(event["choices"][0]["text"] for event in fast[:-1]) == ("hello world " * 5)[:50]

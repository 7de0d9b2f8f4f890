"""What the comparison with peers makes of servers' answers, and what it says where one can't be had."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import pytest
from bench.sides.comparison import BARS, LLAMA, VLLM, Bar, Report, compares, in_process_rates, ratios, verdict
from bench.sides.completions import Answer, BadAnswer, complete
from bench.sides.environments import Unavailable
from bench.sides.scenarios import Sample, decode_rate
from bench.sides.servers import Launch, Server

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def token(text: str) -> bytes:
    return b'data: {"choices": [{"text": "%s"}]}\n\n' % text.encode()


def usage(tokens: int) -> bytes:
    return b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": %d}}\n\n' % tokens


async def asked(pieces: Sequence[bytes], tokens: int) -> Answer:
    """What the client makes of a server that sends these pieces, each by itself."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        return await complete(server.sockets[0].getsockname()[1], [1, 2, 3], tokens)


async def test_a_stream_is_counted_however_its_bytes_are_cut() -> None:
    whole = HEAD + token(" a") + token(" b") + usage(2) + b"data: [DONE]\n\n"
    for size in (7, 64, len(whole)):
        answer = await asked([whole[at : at + size] for at in range(0, len(whole), size)], 2)
        assert (answer.text, answer.prompt_tokens, answer.text_events) == (" a b", 3, 2)
        assert answer.sent_s <= answer.first_s <= answer.last_s <= answer.ended_s


async def test_a_stream_that_ends_early_or_has_other_tokens_is_no_answer() -> None:
    with pytest.raises(BadAnswer, match="ended early"):
        await asked([HEAD, token(" a")], 2)
    with pytest.raises(BadAnswer, match="2 tokens were asked for"):
        await asked([HEAD, token(" a"), usage(1), b"data: [DONE]\n\n"], 2)


def stream(first_s: float, step_s: float, tokens: int, per_event: int = 1) -> Answer:
    count = tokens // per_event
    events = [(first_s + at * step_s, at + 1) for at in range(count)]
    last_s = events[-1][0]
    return Answer(0.0, [*events, (last_s, count + 1)], last_s, 3, tokens, "")


def test_decode_is_measured_while_all_streams_run() -> None:
    """One begins a second later than the other, whose tokens before that do not count."""
    assert decode_rate([stream(1.0, 0.1, 41), stream(2.0, 0.1, 41)]) == pytest.approx(20, rel=0.05)
    assert decode_rate([stream(1.0, 0.2, 40, per_event=2)]) == pytest.approx(10, rel=0.05)
    with pytest.raises(ValueError, match="not computed together"):
        decode_rate([stream(1.0, 0.1, 5), stream(2.0, 0.1, 5)])


def test_a_ratio_is_taken_within_a_repeat_against_the_best_of_the_peers() -> None:
    rates = {
        ("headrace q8", 1): 60,
        (LLAMA, 1): 20,
        (VLLM, 1): 30,
        ("headrace q8", 2): 80,
        (LLAMA, 2): 40,
        (VLLM, 2): 10,
    }
    samples = [Sample(side, "decode 8", repeat, rate, 0.0) for (side, repeat), rate in rates.items()]
    samples.append(Sample("headrace q8", "decode 8", 3, 1000, 0.0))  # The peers were not measured in this one.
    bar = Bar("headrace q8", "decode 8", (LLAMA, VLLM), 1.7, 2.0)
    assert ratios(Report("a CPU", samples=samples), bar) == [2.0, 2.0]
    assert [verdict(bar, ratio) for ratio in (1.6, 1.7, 2.0)] == ["NO", "yes", "aim"]
    later = Bar("headrace bf16", "shared turns", (VLLM,), 0.5, 0.4, of_time=True)
    assert [verdict(later, ratio) for ratio in (0.6, 0.5, 0.4)] == ["NO", "yes", "aim"]


def test_every_bar_has_its_scenario_measured_at_both_sides() -> None:
    assert all(compares(side, bar.scenario) for bar in BARS for side in (bar.side, *bar.against))
    assert not compares(LLAMA, "shared turns")


def test_rates_without_http_are_read_from_what_each_side_prints() -> None:
    printed = '{"pl": 8, "speed_tg": 304.5}\nmain: done\n'
    assert in_process_rates(LLAMA, printed) == {"decode 8": 304.5}
    speeds = '{"speeds": [{"decode_rows": 0, "prefill_tokens": 512, "tokens_per_s": 3600.0}]}'
    assert in_process_rates("headrace bf16", speeds) == {"prefill 512": 3600.0}
    assert in_process_rates(VLLM, 'a warning\n{"decode 1": 53.0}\n') == {"decode 1": 53.0}


def test_a_server_that_ends_at_its_start_is_named_with_what_it_said() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such flag')"]
    with pytest.raises(Unavailable, match=r"a peer ended at its start:\n.*no such flag"):
        Server(Launch("a peer", "1", command, {}, []))

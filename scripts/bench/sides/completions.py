"""A client of `/v1/completions` that streams, the same for every server, and light: it counts events as bytes come, and
reads their JSON when the stream has ended. It must not take from the server what it measures: 10 µs an event.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

TIMEOUT_S: Final = 300.0
EVENT: Final = b"data: {"
END: Final = b"data: [DONE]"

Prompt: TypeAlias = str | Sequence[int]


class BadAnswer(Exception):
    """The server did not do what was asked."""


class Answer(NamedTuple):
    """One stream."""

    sent_s: float
    """On the clock of `time.perf_counter`."""
    events: list[tuple[float, int]]
    """When bytes came, and how many events had by then."""
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    text: str

    @property
    def first_s(self) -> float:
        return self.events[0][0]

    @property
    def last_s(self) -> float:
        """When the last token came."""
        return next(at for at, count in self.events if count >= self.text_events)

    @property
    def text_events(self) -> int:
        """Events that bear tokens: all but the usage, and the reason of the end where that is one of its own."""
        return min(self.events[-1][1] - 1, self.output_tokens)

    def tokens_until(self, moment_s: float) -> float:
        """Tokens that had come: a server may put two of them into one event."""
        events = max((count for at, count in self.events if at <= moment_s), default=0)
        return min(events, self.text_events) * self.output_tokens / self.text_events


class _Stream(asyncio.Protocol):
    """One request over a connection of its own."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self._request = request
        self._ended = ended
        self.received = bytearray()
        self.events: list[tuple[float, int]] = []
        self._count = 0
        self._seen = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        # What marks an event may have come in two parts.
        found = self.received.count(EVENT, self._seen)
        if found:
            self._count += found
            self.events.append((time.perf_counter(), self._count))
            self._seen = self.received.rindex(EVENT) + len(EVENT)
        if self.received.find(END, self._seen) >= 0:
            self._transport.close()

    def connection_lost(self, problem: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


async def complete(port: int, prompt: Prompt, output_tokens: int) -> Answer:
    """Ask for exactly so many tokens, greedily. Raises BadAnswer."""
    body = json.dumps(
        {
            "model": "default",
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    sent_s = time.perf_counter()
    transport, stream = await loop.create_connection(lambda: _Stream(head.encode() + body, ended), "127.0.0.1", port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await ended
    except TimeoutError:
        raise BadAnswer(f"no end of the stream within {TIMEOUT_S:.0f} s") from None
    finally:
        transport.close()
    return _answer(stream, sent_s, time.perf_counter(), output_tokens)


def _answer(stream: _Stream, sent_s: float, ended_s: float, output_tokens: int) -> Answer:
    received = bytes(stream.received)
    if END not in received or not stream.events:
        raise BadAnswer(f"the stream ended early: {received[:2000].decode(errors='replace')}")
    events: list[dict[str, Any]] = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(EVENT)]
    usage = next((event["usage"] for event in reversed(events) if event.get("usage")), None)
    if usage is None or usage["completion_tokens"] != output_tokens:
        raise BadAnswer(f"{output_tokens} tokens were asked for, the usage is {usage}")
    text = "".join(choice.get("text", "") for event in events for choice in event.get("choices", ()))
    return Answer(sent_s, stream.events, ended_s, usage["prompt_tokens"], output_tokens, text)

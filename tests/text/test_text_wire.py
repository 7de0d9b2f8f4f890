"""Jobs on their way to a text worker and back: what arrives is what was sent, however the stream is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.server.chat import BadChat, Chat
from headrace.server.text_wire import (
    LONG_STRING_CHARS,
    MAX_CHAT_VALUES,
    MAX_ITEM_VALUES,
    PART_CHARS,
    Close,
    Done,
    FrameReader,
    Ids,
    Item,
    Open,
    Text,
    ToWorker,
    chat_frames,
    frame,
    item_of,
    text_frames,
    to_server_decoder,
    to_worker_decoder,
)
from headrace.server.tokenizer import BadText


def received(frames: Iterator[bytes]) -> list[ToWorker]:
    reader = FrameReader()
    return [to_worker_decoder.decode(body) for data in frames for body in reader.feed(data)]


def items_of(messages: list[ToWorker]) -> list[Any]:
    """The messages and tools of a chat, put together as the worker does."""
    parts: list[str] = []
    texts: list[str] = []
    items: list[Any] = []
    for message in messages:
        match message:
            case Text(_, text, is_last):
                parts.append(text)
                if is_last:
                    texts.append("".join(parts))
                    parts.clear()
            case Item(_, kind, data):
                items.append((kind, item_of(data, texts)))
    return items


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=6), st.lists(st.integers(1, 40), max_size=20))
def test_messages_survive_any_cut_of_the_stream(contents: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(Ids(7, data)) for data in contents) + frame(Done(7))
    reader, got = FrameReader(), []
    for cut in [*cuts, len(stream)]:
        got += [to_server_decoder.decode(body) for body in reader.feed(stream[:cut])]
        stream = stream[cut:]
    assert got == [*(Ids(7, data) for data in contents), Done(7)]


@pytest.mark.parametrize("text", ["", "é", "x" * PART_CHARS, "é" * (3 * PART_CHARS + 1)])
def test_a_text_arrives_in_parts(text: str) -> None:
    messages = received(text_frames(text, 3))
    assert messages[0] == Open(3, "text") and messages[-1] == Close(3)
    parts = [message for message in messages if isinstance(message, Text)]
    assert "".join(part.text for part in parts) == text
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_conversation_arrives_with_its_long_strings_in_their_places() -> None:
    long = ["é" * (LONG_STRING_CHARS + 1), "y" * 3 * PART_CHARS]
    messages: list[dict[str, object]] = [
        {"role": "user", "content": long[0]},
        {"role": "user", "content": ["a", {"text": long[1], "n": 1.5}]},
    ]
    tools = [{"type": "function", "function": {"description": long[0], "strict": None, "list": [True, 2]}}]
    chat = Chat(messages, tools, False, True, {"thinking": True})
    frames = list(chat_frames(chat, 5))
    assert max(map(len, frames)) < 4 * PART_CHARS + 100
    got = received(iter(frames))
    assert got[0] == Open(5, "chat", False, True, {"thinking": True})
    assert items_of(got) == [("message", messages[0]), ("message", messages[1]), ("tool", tools[0])]


def test_a_message_or_tool_with_too_many_values_is_refused() -> None:
    tool = {"type": "function", "function": {"parameters": [0] * MAX_ITEM_VALUES}}
    with pytest.raises(BadChat, match="too many JSON values"):
        list(chat_frames(Chat([{"role": "user", "content": "a"}], [tool]), 1))


def test_a_conversation_with_too_many_values_is_refused() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": ""}] * 1500}] * (MAX_CHAT_VALUES // 7000)
    with pytest.raises(BadChat, match="too many JSON values"):
        list(chat_frames(Chat(messages), 1))


@pytest.mark.parametrize("content", ["a\ud800", "a\ud800" + "b" * LONG_STRING_CHARS])
def test_half_of_a_surrogate_pair_is_refused(content: str) -> None:
    with pytest.raises(BadText):
        list(chat_frames(Chat([{"role": "user", "content": content}]), 1))
    with pytest.raises(BadText):
        list(text_frames(content, 1))


def test_what_is_nested_too_deeply_is_refused() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(BadChat, match="nested too deeply"):
        list(chat_frames(Chat([{"role": "user", "content": deep}]), 1))


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(BadChat, match="a bytes is none"):
        list(chat_frames(Chat([{"role": "user", "content": b"a"}]), 1))


def test_large_template_kwargs_are_refused() -> None:
    with pytest.raises(BadChat, match="chat_template_kwargs"):
        list(chat_frames(Chat([{"role": "user", "content": "a"}], template_kwargs={"date_string": "x" * 2000}), 1))

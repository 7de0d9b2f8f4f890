"""What the server and a text worker say to each other, over a stream socket: msgpack frames with their length before.

A job is opened, gets its text in parts, and is closed; then the worker works on it. A conversation comes as one `Item`
per message and tool; strings in it that are long stand outside, as `Text`s, so that none of the frames is large. The
server makes them one at a time, as the socket has room.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeAlias

import msgspec

from headrace.server.chat import BadChat, Chat
from headrace.server.tokenizer import BadText

PART_CHARS: Final = 32768
"""Of a long string at a time: at most 128 KiB, encoded in 5 to 40 µs."""
LONG_STRING_CHARS: Final = 8192
MAX_ITEM_VALUES: Final = 10_000
"""JSON values in one message or tool, which is copied in one go: 3 ms."""
MAX_CHAT_VALUES: Final = 200_000

_LENGTH_BYTES: Final = 4
_TEXT_REFERENCE: Final = 1
"""The msgpack extension type of a string that came in `Text`s: its number in the job."""


class Load(msgspec.Struct, tag="load", frozen=True):
    """First message: read the vocabulary and the template; answered by `Loaded` or `Refused`."""

    model_path: str
    chat_template: str | None


class Open(msgspec.Struct, tag="open", frozen=True):
    """A new job. With kind "text" its one string is to be encoded."""

    job: int
    kind: Literal["text", "chat"]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, object] = {}


class Text(msgspec.Struct, tag="text", frozen=True):
    """A part of the job's next string."""

    job: int
    text: str
    is_last: bool


class Item(msgspec.Struct, tag="item", frozen=True):
    """The next message or tool of a chat, in msgpack. Its long strings have come before it."""

    job: int
    kind: Literal["message", "tool"]
    data: bytes


class Close(msgspec.Struct, tag="close", frozen=True):
    """The job is complete: begin."""

    job: int


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Forget the job. Unknown or done: no effect."""

    job: int


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """The worker is ready. Jobs may be sent before."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The model's text files can't be read; the worker exits."""

    message: str


class Working(msgspec.Struct, tag="working", frozen=True):
    """The worker turns to this job: if it dies or hangs now, this is why."""

    job: int


class Ids(msgspec.Struct, tag="ids", frozen=True):
    """The next ids of the job, int32."""

    job: int
    data: bytes


class Done(msgspec.Struct, tag="done", frozen=True):
    """All ids of the job have been sent."""

    job: int


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The job ended with an error: a `BadChat`, a `BadText`, or something that is no fault of the client's."""

    job: int
    kind: Literal["chat", "text", "other"]
    message: str


ToWorker: TypeAlias = Load | Open | Text | Item | Close | Cancel
ToServer: TypeAlias = Loaded | Refused | Working | Ids | Done | Failed

to_worker_decoder: Final[msgspec.msgpack.Decoder[ToWorker]] = msgspec.msgpack.Decoder(ToWorker)
to_server_decoder: Final[msgspec.msgpack.Decoder[ToServer]] = msgspec.msgpack.Decoder(ToServer)
_encoder: Final = msgspec.msgpack.Encoder()


def frame(message: ToWorker | ToServer) -> bytes:
    """A message with its length before it."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class FrameReader:
    """Cuts a stream of bytes into the messages it was made of."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with `data`; to be read to the end."""
        self._buffer += data
        begin = 0
        while len(self._buffer) >= begin + _LENGTH_BYTES:
            body = begin + _LENGTH_BYTES
            end = body + int.from_bytes(self._buffer[begin:body], "little")
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[body:end])
            begin = end
        del self._buffer[:begin]


# ---------------------------------------------------------------------------------------------------------------
# A job as frames


def text_frames(text: str, job: int) -> Iterator[bytes]:
    """The frames of a text to encode, made as they are asked for. Raises BadText."""
    yield frame(Open(job, "text"))
    yield from _string_frames(job, text)
    yield frame(Close(job))


def chat_frames(chat: Chat, job: int) -> Iterator[bytes]:
    """The same for a conversation. Raises BadChat."""
    yield frame(
        Open(job, "chat", chat.add_generation_prompt, chat.continue_final_message, {**_small(chat.template_kwargs)})
    )
    lifter = _Lifter(job)
    for message in chat.messages:
        yield from lifter.frames("message", message)
    for tool in chat.tools:
        yield from lifter.frames("tool", tool)
    yield frame(Close(job))


def _small(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    if not all(isinstance(value, bool | int | float | str) and len(str(value)) <= 1024 for value in kwargs.values()):
        raise BadChat("chat_template_kwargs are booleans, numbers and strings of at most 1024 characters")
    return kwargs


def _string_frames(job: int, text: str) -> Iterator[bytes]:
    for begin in range(0, max(len(text), 1), PART_CHARS):
        end = begin + PART_CHARS
        try:
            yield frame(Text(job, text[begin:end], end >= len(text)))
        except UnicodeEncodeError:
            raise BadText from None


class _Lifter:
    """Copies JSON, putting references in the place of long strings."""

    def __init__(self, job: int) -> None:
        self._job = job
        self._long: list[str] = []
        self._sent = 0
        self._values = 0
        self._limit = 0

    def frames(self, kind: Literal["message", "tool"], item: Mapping[str, object]) -> Iterator[bytes]:
        self._limit = min(self._values + MAX_ITEM_VALUES, MAX_CHAT_VALUES)
        try:
            data = _encoder.encode(self._lifted(item))
        except UnicodeEncodeError:
            raise BadText from None
        except RecursionError:
            raise BadChat(f"a {kind} is nested too deeply") from None
        for text in self._long:
            yield from _string_frames(self._job, text)
        self._sent += len(self._long)
        self._long.clear()
        yield frame(Item(self._job, kind, data))

    def _lifted(self, value: object) -> object:
        self._values += 1
        if self._values > self._limit:
            raise BadChat(
                f"messages and tools have too many JSON values; a message or tool may have {MAX_ITEM_VALUES}, "
                f"all together {MAX_CHAT_VALUES}"
            )
        if isinstance(value, str):
            if len(value) <= LONG_STRING_CHARS:
                return value
            self._long.append(value)
            number = self._sent + len(self._long) - 1
            return msgspec.msgpack.Ext(_TEXT_REFERENCE, number.to_bytes(4, "little"))
        if isinstance(value, Mapping):
            return {self._lifted(key): self._lifted(element) for key, element in value.items()}
        if isinstance(value, list | tuple):
            return [self._lifted(element) for element in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise BadChat(f"messages and tools are JSON; a {type(value).__name__} is none")


def item_of(data: bytes, texts: list[str]) -> dict[str, object]:
    """A message or tool, with its long strings in their places."""

    def text_of(kind: int, reference: memoryview) -> str:
        assert kind == _TEXT_REFERENCE
        return texts[int.from_bytes(reference, "little")]

    return msgspec.msgpack.decode(data, type=dict[str, object], ext_hook=text_of)

"""Request bodies: read within a size and a time, decoded strictly, with errors that name the parameter.

Text costs 0.8 ms a MiB to decode, 1.3 to 2.5 where it is escaped or is not ASCII; values cost more: 16 MB of `{}` are
five million objects and hold the loop for 0.4 s. So values are counted before one is built, a slice of the body at a
time, and what a body may have of both is bounded: decoding is one call, which holds the loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from headrace.server.errors import ApiError, bad_request, body_too_large, body_too_slow, encoding_refused

READ_TIMEOUT_S: Final = 60.0
MAX_PARTS: Final = 150_000
"""Strings, commas and opening brackets of a body, prompts aside: 7 ms of decoding. 10,000 messages of
parts have 130,000."""
LEAST_BODY_BYTES: Final = 2 << 20
"""The limit of a body's size is this or more: 5 ms of decoding, whatever the text."""
MOST_BODY_BYTES: Final = 16 << 20
"""And no more than this: 13 ms of decoding, 40 at worst."""
TOKEN_BYTES: Final = 8
"""Of a body for each prompt token that may wait: text has 4 to 5, ids in JSON 7."""
_SLICE_BYTES: Final = 1 << 17
"""Looked at before the loop has its turn: 0.1 ms, 2 ms where all of it is quotes or escapes."""
_MARKS: Final = (b",", b"[", b"{")

T = TypeVar("T")

# msgspec's "Expected `int` >= 1 - at `$.n`", and "… - at `key` in `$.logit_bias`"
_AT_PATH: Final = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")


def most_body_bytes(queued_tokens: int) -> int:
    """The limit of a body's size where so many prompt tokens may wait: more could be read, but never submitted."""
    return min(MOST_BODY_BYTES, max(LEAST_BODY_BYTES, TOKEN_BYTES * queued_tokens))


async def read_body(request: web.Request, limit_bytes: int, grow: Callable[[int], None]) -> bytes:
    """The whole body. `grow` is told of every part, and may refuse it. Raises ApiError 408, 413, 415."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise encoding_refused(encoding[:40])
    if request.content_length is not None and request.content_length > limit_bytes:
        raise body_too_large(limit_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for part in request.content.iter_any():
                grow(len(part))
                body += part
                if len(body) > limit_bytes:
                    raise body_too_large(limit_bytes)
    except TimeoutError:
        raise body_too_slow(READ_TIMEOUT_S) from None
    return bytes(body)


async def check_parts(body: bytes, kind: type[msgspec.Struct]) -> None:
    """Raises ApiError 400 for a body with too many values, before `kind` is decoded from it.

    Fields that are `msgspec.Raw` in `kind` don't count: who decodes those has limits of their own. One that is there
    twice does. Gives way to the loop after every slice of the body.
    """
    if len(body) <= MAX_PARTS:
        return
    parts = await count_parts(body)
    if parts <= MAX_PARTS:
        return
    sent = decode(body, _sent_decoder(kind))
    await asyncio.sleep(0)
    counted: dict[str, int] = {}
    for field in msgspec.structs.fields(kind):
        value: msgspec.Raw = getattr(sent, field.name)
        here = await count_parts(bytes(value))
        if field.type is msgspec.Raw:
            parts -= here
        else:
            counted[field.name] = here
    if parts > MAX_PARTS:
        raise _too_many_parts(max(counted, key=counted.__getitem__, default=None), counted)


def _too_many_parts(largest: str | None, counted: dict[str, int]) -> ApiError:
    param = largest if largest is not None and counted[largest] > MAX_PARTS // 2 else None
    where = "The request body" if param is None else f"`{param}`"
    return bad_request(
        f"{where} has too many values: more than the {MAX_PARTS} that are allowed, counting strings, "
        "commas and brackets. Send fewer.",
        param,
        "invalid_value",
    )


async def count_parts(data: bytes) -> int:
    """Strings, commas and opening brackets, but for those in strings. Raises ApiError 400 for very many strings."""
    quotes = marks = begin = 0
    while begin < len(data):
        part = data[begin : begin + _SLICE_BYTES]
        # No escape is cut in two: of an odd number of backslashes at the end the last belongs to what follows.
        if (len(part) - len(part.rstrip(b"\\"))) % 2 and begin + len(part) < len(data):
            part = part[:-1]
        begin += len(part)
        if b"\\" in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        if (quotes + part.count(b'"')) // 2 > MAX_PARTS:
            raise _too_many_parts(None, {})
        pieces = part.split(b'"')
        # Every other piece is outside of strings; which ones, what came before says.
        bare = b"".join(pieces[quotes % 2 :: 2])
        marks += sum(map(bare.count, _MARKS))
        quotes += len(pieces) - 1
        await asyncio.sleep(0)
    return quotes // 2 + marks


@cache
def _sent_decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    """Decodes no field's value, only where it is."""
    fields = [(field.name, msgspec.Raw, msgspec.Raw()) for field in msgspec.structs.fields(kind)]
    return msgspec.json.Decoder(msgspec.defstruct(f"Sent{kind.__name__}", fields))


def decode(body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], at: str = "") -> T:
    """Raises ApiError 400; `at` is put before the parameter that is wrong."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), at) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The request body is not valid JSON: {error}", at or None, "invalid_json") from None
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", at or None, "invalid_json") from None


def _invalid(message: str, at: str) -> ApiError:
    matched = _AT_PATH.fullmatch(message)
    assert matched is not None, "the pattern takes any text"
    path = ".".join(part for part in (at, matched["path"]) if part).replace(".[", "[")
    what = matched["what"]
    what = what[0].lower() + what[1:]
    if matched["key"]:
        what = f"a key: {what}"
    if missing := _MISSING.search(what):
        path = ".".join(part for part in (path, missing[1]) if part)
        return bad_request(f"`{path}` is missing.", path, "missing_required_parameter")
    if not path:
        return bad_request(f"The request body is not what is expected here: {what}.", code="invalid_type")
    return bad_request(f"`{path}`: {what}.", path, "invalid_value")

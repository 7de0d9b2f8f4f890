"""Request bodies: read within a size and a time, decoded strictly, with errors that name the parameter."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from headrace.server.errors import ApiError, bad_request, body_too_large, body_too_slow, encoding_refused

READ_TIMEOUT_S: Final = 60.0

T = TypeVar("T")

# msgspec's "Expected `int` >= 1 - at `$.n`", and "… - at `key` in `$.logit_bias`"
_AT_PATH: Final = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")


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

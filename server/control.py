"""What changes the course of requests: aborting them."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from headrace.server.access import Access
from headrace.server.answers import json_answer
from headrace.server.api import api_of
from headrace.server.errors import bad_request


class AbortRequest(msgspec.Struct):
    rid: str | None = None
    request_id: str | None = None
    abort_all: bool | None = None


_abort_decoder: Final = msgspec.json.Decoder(AbortRequest)


async def abort_request(request: web.Request) -> web.Response:
    """Abort the request with exactly this id, or all; how many that were. None is no error: it may just have ended."""
    api = api_of(request)
    body = await api.body(request, _abort_decoder)
    if body.abort_all:
        api.keys.check(request, Access.ADMIN)
        return json_answer({"aborted": api.running.abort_all("The request was aborted with all others.")})
    request_id = body.rid or body.request_id
    if not request_id:
        raise bad_request("Give the `rid` of the request, or `abort_all: true`.", "rid", "missing_required_parameter")
    return json_answer({"aborted": int(api.running.abort(request_id, "The request was aborted by /abort_request."))})

"""How a request's streams become its HTTP answer: as events while they grow, or whole when all have ended."""

from __future__ import annotations

import logging
from typing import Final, Protocol

import msgspec
from aiohttp import web

from headrace.server.api import api_of
from headrace.server.errors import ApiError, ErrorEnvelope, engine_error, internal_error
from headrace.server.generation import Generation
from headrace.server.openai_responses import failure
from headrace.server.sse import DONE, KEEP_ALIVE, SILENCE_S, EventStream, Stalled, event
from headrace.server.streams import Delta, StreamGroup

_log = logging.getLogger(__name__)
_STALLED: Final = engine_error("The client did not read the stream within the server's time limit; it was ended.")


class EventFormat(Protocol):
    """One endpoint's events."""

    async def delta(self, delta: Delta) -> bytes:
        """The events of one choice's delta; may be none."""

    def last(self) -> bytes:
        """What stands between the last choice's end and the terminator."""


def json_answer(payload: msgspec.Struct | dict[str, object], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), status=status, content_type="application/json")


async def whole(group: StreamGroup) -> list[Delta]:
    """All choices, by index, when the last has ended. Raises ApiError as soon as one has failed."""
    while not await group.wait(SILENCE_S):
        pass
    for stream in group.streams:
        error = failure(stream.finish)
        if error is not None:
            raise error
    return group.take()


async def events(
    request: web.Request, generation: Generation, group: StreamGroup, form: EventFormat
) -> web.StreamResponse:
    """Answer with server-sent events. Raises ApiError if the request fails before it has given anything.

    The status line waits for the first output, so that a failure before it has a status of its own; but not for ever,
    since clients and proxies give up on a connection that says nothing.
    """
    stream = EventStream(request, api_of(request).settings.stall_s)
    try:
        await _pump(stream, generation.request_id, group, form)
    except Stalled:
        api_of(request).metrics.slow_reader()
        _log.warning("request %s: %s", generation.request_id, _STALLED)
        generation.leave()
        await stream.cut(_error_events(_STALLED))
    except ConnectionError:
        # The client has gone; whoever claimed the generation aborts it.
        _log.debug("request %s: the client has gone", generation.request_id)
    return stream.response


async def _pump(stream: EventStream, request_id: str, group: StreamGroup, form: EventFormat) -> None:
    while True:
        if not await group.wait(SILENCE_S):
            if not stream.opened:
                await stream.open()
            await stream.send(KEEP_ALIVE)
            continue
        ended = group.finished or group.failed
        data, error = await _format(group.take(), form)
        if error is not None and not data and not stream.opened:
            raise error
        if not stream.opened:
            await stream.open()
        if error is not None:
            _log.warning("request %s: its stream ended with an error: %s", request_id, error)
            await stream.close(data + _error_events(error))
            return
        if ended:
            await stream.close(data + form.last() + DONE)
            return
        if data:
            await stream.send(data)


async def _format(deltas: list[Delta], form: EventFormat) -> tuple[bytes, ApiError | None]:
    """The events of these deltas, up to the first choice that has failed."""
    parts: list[bytes] = []
    try:
        for delta in deltas:
            error = failure(delta.finish)
            if error is not None:
                if delta.text or delta.ids or delta.scores:
                    parts.append(await form.delta(msgspec.structs.replace(delta, finish=None)))
                return b"".join(parts), error
            parts.append(await form.delta(delta))
    except Exception:
        # A fault of ours: the client still gets a well-formed end.
        _log.exception("formatting an event failed")
        return b"".join(parts), internal_error()
    return b"".join(parts), None


def _error_events(error: ApiError) -> bytes:
    return event(ErrorEnvelope(error.body)) + DONE

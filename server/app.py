"""The route table, and what surrounds every request: keys, errors as JSON, ids, the access log.

in     HTTP requests
out    answers; each has an X-Request-ID, each error OpenAI's shape
state  none of its own: see `api`
owner  aiohttp's server calls it
ready  when the application has been built
end    with the server
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Final, NamedTuple, TypeAlias

from aiohttp import hdrs, web

from headrace.server.access import Access, check_host, is_loopback
from headrace.server.api import API, Api, api_of
from headrace.server.cache_control import (
    attach_storage,
    clear,
    detach_storage,
    events,
    flush_cache,
    lookup,
    pin,
    storage_state,
    unpin,
    warm,
)
from headrace.server.control import abort_request
from headrace.server.errors import ApiError, bad_request, internal_error, method_not_allowed, not_found
from headrace.server.native import generate
from headrace.server.openai_chat import chat_completions
from headrace.server.openai_completions import completions
from headrace.server.probes import get_model, list_models, livez, metrics, model_info, readyz, server_info
from headrace.server.tokenization import detokenize, tokenize, tokenizer_info

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("headrace.http")

MAX_ID_CHARS: Final = 128
_LARGE_BYTES: Final = 1 << 16
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._:@/+=-]")
_ID: Final[ContextVar[str]] = ContextVar("request_id", default="none")
"""Of the request that the current task answers."""


class Route(NamedTuple):
    """Denied by default: USER and `serves` unless said otherwise."""

    methods: str
    paths: str
    handler: Handler
    access: Access = Access.USER
    serves: bool = True
    """Needs a server that is ready: before, and while it drains, 503."""


ROUTES: Final = (
    Route("POST", "/v1/chat/completions /chat/completions", chat_completions),
    Route("POST", "/v1/completions /completions", completions),
    Route("POST", "/generate", generate),
    Route("GET", "/v1/models /models", list_models),
    Route("GET", "/v1/models/{model:.+} /models/{model:.+}", get_model),
    Route("POST", "/tokenize /v1/tokenize", tokenize),
    Route("POST", "/detokenize /v1/detokenize", detokenize),
    Route("GET", "/tokenizer_info", tokenizer_info),
    Route("GET", "/livez", livez, Access.OPEN, serves=False),
    Route("GET", "/readyz /health", readyz, Access.OPEN, serves=False),
    Route("GET", "/server_info /get_server_info", server_info, serves=False),
    Route("GET", "/model_info /get_model_info", model_info, serves=False),
    Route("GET", "/metrics", metrics, serves=False),
    Route("GET POST", "/flush_cache", flush_cache, Access.ADMIN),
    Route("POST", "/reset_prefix_cache", flush_cache, Access.ADMIN),
    Route("POST", "/cache/lookup", lookup, Access.ADMIN),
    Route("POST", "/cache/warm", warm, Access.ADMIN),
    Route("POST", "/cache/pin", pin, Access.ADMIN),
    Route("POST", "/cache/unpin", unpin, Access.ADMIN),
    Route("POST", "/cache/clear", clear, Access.ADMIN),
    Route("GET", "/cache/events", events, Access.ADMIN),
    Route("GET", "/hicache/storage-backend", storage_state, Access.ADMIN),
    Route("PUT", "/hicache/storage-backend", attach_storage, Access.ADMIN),
    Route("DELETE", "/hicache/storage-backend", detach_storage, Access.ADMIN),
    Route("POST", "/abort_request", abort_request, serves=False),
)
_ROUTE_OF: Final = {route.handler: route for route in ROUTES}


def build_app(api: Api) -> web.Application:
    """The application, to be run by `lifecycle`."""
    app = web.Application(middlewares=[_around])
    app[API] = api
    for route in ROUTES:
        for path in route.paths.split():
            for method in route.methods.split():
                app.router.add_route(method, path, route.handler)
                if method == "GET":
                    app.router.add_route("HEAD", path, route.handler)
    app.on_response_prepare.append(_set_headers)
    app.on_cleanup.append(_close_log)
    return app


@web.middleware
async def _around(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Everything that holds for all requests."""
    api, begin_s = api_of(request), time.monotonic()
    request_id = _request_id(request)
    _ID.set(request_id)
    route = _route_of(request)
    endpoint = "none" if route is None else route.paths.split()[0]
    status = 499
    try:
        response = await _answer(api, request, route, handler)
        status = response.status
        if not response.prepared and (response.content_length or 0) > _LARGE_BYTES:
            await _send(request, response, api.settings.stall_s)
        return response
    finally:
        api.in_flight.leave(request)
        api.metrics.answered(endpoint, status)
        if log.isEnabledFor(logging.DEBUG):
            lasted_ms = (time.monotonic() - begin_s) * 1000
            # Neither the query nor any header but the id: they may hold secrets.
            log.debug("%s %s %s %.1f ms id=%s", request.method, _shown(request), status, lasted_ms, request_id)


async def _answer(api: Api, request: web.Request, route: Route | None, handler: Handler) -> web.StreamResponse:
    try:
        if is_loopback(api.settings.host):
            check_host(request)
        api.keys.check(request, Access.USER if route is None else route.access)
        if route is not None and route.serves:
            refusal = api.readiness.refusal()
            if refusal is not None:
                raise refusal
        if route is not None and request.method in (hdrs.METH_POST, hdrs.METH_PUT, hdrs.METH_DELETE):
            api.in_flight.enter(request)
            await api.turns.begin()
        return await handler(request)
    except ApiError as error:
        return _refusal(request, error)
    except web.HTTPNotFound:
        return _refusal(request, not_found(request.path[:200]))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _refusal(request, method_not_allowed(request.method[:20], request.path[:200], allowed))
    except web.HTTPException as error:
        return _refusal(request, bad_request(f"{error.status} {error.reason}"))
    except (web.RequestPayloadError, ConnectionError) as error:
        # The client went away, or broke off, while its request was being read: nobody is there to answer.
        return _refusal(request, bad_request(f"The request body could not be read: {error}", code="broken_body"))
    except Exception:
        log.exception("request %s: %s failed", _ID.get(), _shown(request))
        return _refusal(request, internal_error())


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    if error.status >= 500:
        line = f"request {_ID.get()}: {error.status} {_shown(request)}: {ascii(str(error))[1:-1]}"
        if error.status == 503:
            api_of(request).overload_log.refused(line)
        else:
            log.warning("%s", line)
    return web.Response(
        status=error.status,
        # aiohttp has no word for statuses that are not in the registry.
        reason=None if error.status != 499 else "Request Aborted",
        body=error.json(),
        headers=error.headers,
        content_type="application/json",
    )


async def _send(request: web.Request, response: web.StreamResponse, stall_s: float) -> None:
    """Send a large answer here, where a client that does not read it can be given up."""
    try:
        async with asyncio.timeout(stall_s):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        log.warning("request %s: the client did not read its answer within %g s", _ID.get(), stall_s)
        api_of(request).metrics.slow_reader()
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        log.debug("request %s: the client has gone", _ID.get())


def _route_of(request: web.Request) -> Route | None:
    """None: there is nothing at this path, or not for this method."""
    return _ROUTE_OF.get(request.match_info.handler)


def _shown(request: web.Request) -> str:
    """The path, for the log: what could forge a line is escaped."""
    return ascii(request.path)[1:-1][:200]


def _request_id(request: web.Request) -> str:
    """What the client calls its request, in safe characters; else a name of ours."""
    given = _UNSAFE.sub("_", request.headers.get("X-Request-ID", ""))[:MAX_ID_CHARS]
    return given or secrets.token_hex(8)


async def _close_log(app: web.Application) -> None:
    app[API].overload_log.close()


async def _set_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-ID"] = _ID.get()
    response.headers[hdrs.SERVER] = "headrace"

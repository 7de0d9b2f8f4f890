"""What operators, routers and load balancers ask: is it alive, is it ready, what is it."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from headrace import __version__
from headrace.server.answers import json_answer
from headrace.server.api import Api, api_of
from headrace.server.errors import model_not_found
from headrace.server.metrics import CONTENT_TYPE
from headrace.server.openai_responses import ModelEntry, ModelList
from headrace.server.readiness import retry_after_s

_ALIVE: Final = b'{"status":"ok"}'


async def livez(request: web.Request) -> web.Response:
    """The process answers; nothing more."""
    return web.Response(body=_ALIVE, content_type="application/json")


async def readyz(request: web.Request) -> web.Response:
    """200 when requests are served, else 503 with the phase and how far it is."""
    report = api_of(request).readiness.report()
    if report.status == "ok":
        return json_answer(report)
    answer = json_answer(report, status=503)
    answer.headers["Retry-After"] = str(retry_after_s(report))
    return answer


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=api_of(request).metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def list_models(request: web.Request) -> web.Response:
    return json_answer(ModelList([_entry(api_of(request))]))


async def get_model(request: web.Request) -> web.Response:
    """The served model, under its name only: a listing has no aliases."""
    api, name = api_of(request), request.match_info["model"]
    if name != api.settings.model_name:
        raise model_not_found(name[:200], api.settings.model_name)
    return json_answer(_entry(api))


def _entry(api: Api) -> ModelEntry:
    name = api.settings.model_name
    return ModelEntry(
        id=name, created=api.settings.created_unix_s, root=name, max_model_len=api.engine.status().max_context_tokens
    )


async def server_info(request: web.Request) -> web.Response:
    """Settings without secrets, and the engine's state; keys as SGLang's routers and benchmarks look for them."""
    api = api_of(request)
    status = api.engine.status()
    engine: dict[str, object] = msgspec.to_builtins(status)
    return json_answer(
        {
            **api.settings.public,
            "version": __version__,
            "served_model_name": api.settings.model_name,
            "status": api.readiness.report().phase,
            "max_total_num_tokens": status.pages_total * status.page_tokens,
            "max_context_tokens": status.max_context_tokens,
            "requests_being_answered": len(api.in_flight),
            "worker_pid": status.worker_pid,
            "cache_pins": [msgspec.to_builtins(pin) for pin in api.engine.control.pins()],
            "internal_states": [engine],
        }
    )


async def model_info(request: web.Request) -> web.Response:
    """SGLang's `/model_info`, for routers."""
    api = api_of(request)
    return json_answer(
        {
            "model_path": api.settings.model_name,
            "tokenizer_path": api.settings.model_name,
            "served_model_name": api.settings.model_name,
            "is_generation": True,
            "max_context_length": api.engine.status().max_context_tokens,
            "preferred_sampling_params": None,
            "weight_version": "default",
        }
    )

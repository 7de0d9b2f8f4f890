"""`/flush_cache` and `/cache/…`: what is cached where, and changing it; for operators and routers, by the admin key.

A prompt is named as in a request: `prompt` (text or ids), `input_ids` or `messages`, with the `cache_salt` of the
requests that share it. Only whole pages count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
from aiohttp import hdrs, web
from msgspec import Meta

from headrace.kvcache.events import TooManyReaders
from headrace.ops.wire import I32
from headrace.sched.cache_control import PinRefused
from headrace.sched.messages import Flushed, Overloaded
from headrace.server.answers import json_answer
from headrace.server.api import Api, api_of
from headrace.server.encoding import encode_chat, encode_prompts
from headrace.server.engine_api import EngineApi
from headrace.server.errors import ApiError, bad_request, not_ready, overloaded
from headrace.server.sse import KEEP_ALIVE, SILENCE_S, EventStream, Stalled, event

Tier: TypeAlias = Literal["device", "host", "storage"]

_log = logging.getLogger(__name__)

FLUSH_PAGES: Final = 256
"""Of one slice, 2.5 ms at the most."""
MAX_TTL_S: Final = 7 * 86_400
DEFAULT_TTL_S: Final = 600.0
MAX_WARM_S: Final = 60.0
DEFAULT_WARM_S: Final = 10.0
TIERS: Final[dict[str, tuple[Tier, ...]]] = {
    "device": ("device",),
    "host": ("host",),
    "storage": ("storage",),
    "all": ("device", "host", "storage"),
}
_RETRY_AFTER_S: Final = 5
_NO_IDS: Final[I32] = np.zeros(0, np.int32)


class PromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which prompt, and whose."""

    prompt: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    input_ids: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    tenant: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")] | None = None
    """With several API keys each has a cache of its own, named by the first 32 hex digits of the key's SHA-256; this
    is how the holder of the admin key says which. Without it: the cache of the key that was sent."""


class WarmRequest(PromptFields, kw_only=True):
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_WARM_S)] = DEFAULT_WARM_S


class PinRequest(PromptFields, kw_only=True):
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)] = DEFAULT_TTL_S


class ClearRequest(PromptFields, kw_only=True):
    """A prompt, or a `cache_salt` alone for everything under it ("" is what has no salt)."""

    tier: Literal["device", "host", "storage", "all"] | None = None
    """Default: all for a salt; device and host for a prompt, since storage deletes whole salts only."""


class AttachRequest(msgspec.Struct, forbid_unknown_fields=True):
    hicache_storage_backend: str | None = None
    """What the server was started with; it may be left out."""


class UnpinRequest(msgspec.Struct, forbid_unknown_fields=True):
    pin_id: str


_lookup_decoder: Final = msgspec.json.Decoder(PromptFields)
_warm_decoder: Final = msgspec.json.Decoder(WarmRequest)
_pin_decoder: Final = msgspec.json.Decoder(PinRequest)
_unpin_decoder: Final = msgspec.json.Decoder(UnpinRequest)
_attach_decoder: Final = msgspec.json.Decoder(AttachRequest)
_clear_decoder: Final = msgspec.json.Decoder(ClearRequest)


async def flush_cache(request: web.Request) -> web.Response:
    """Drop every cached page that nothing holds from the device and the host, or from `?tier=`. Harmless twice."""
    api = api_of(request)
    named = request.query.get("tier")
    if named is not None and named not in TIERS:
        raise bad_request(f"`tier` is one of {', '.join(TIERS)}.", "tier", "invalid_value")
    return await _drop(api, TIERS[named] if named else ("device", "host"), named == "storage", None, None)


async def clear(request: web.Request) -> web.Response:
    """Drop what nothing holds of a prompt and of what continues it, or of all under a salt."""
    api = api_of(request)
    body = await api.body(request, _clear_decoder)
    api.check_model(body.model)
    ids, salt = _NO_IDS, _salt(api, body, request)
    if _named(body):
        if body.tier in ("storage", "all"):
            raise bad_request(
                "Storage deletes whole salts only: give `cache_salt` without a prompt, or leave `tier` out to clear "
                "the prompt from device and host.",
                "tier",
                "invalid_value",
            )
        ids = await _ids(api, body)
        if len(ids) < (page_tokens := api.engine.status().page_tokens):
            raise bad_request(
                f"The prompt has {len(ids)} tokens, less than a page of {page_tokens}: nothing of it is cached.",
                _named(body)[0],
                "nothing_cached",
            )
    elif body.cache_salt is None:
        message = 'Give a prompt, or the `cache_salt` to clear ("" for what has none); /flush_cache clears everything.'
        raise bad_request(message, "cache_salt", "missing_required_parameter")
    tier = body.tier or ("all" if not len(ids) else None)
    tiers: tuple[Tier, ...] = ("device", "host") if tier is None else TIERS[tier]
    return await _drop(api, tiers, body.tier == "storage", salt, ids)


async def lookup(request: web.Request) -> web.Response:
    """How many tokens of a prompt are on the device, on the host, in storage; changes nothing."""
    api = api_of(request)
    body = await api.body(request, _lookup_decoder)
    api.check_model(body.model)
    ids = await _ids(api, body)
    with _refusals():
        found = await api.engine.control.lookup(ids, _salt(api, body, request))
    return json_answer(
        {
            "prompt_tokens": len(ids),
            "cached_tokens": found.cached,
            "device": found.device,
            "host": found.host,
            "storage": found.storage,
        }
    )


async def warm(request: web.Request) -> web.Response:
    """Bring what only storage has of a prompt to the host, before a request needs it."""
    api = api_of(request)
    body = await api.body(request, _warm_decoder)
    api.check_model(body.model)
    ids, salt, control = await _ids(api, body), _salt(api, body, request), api.engine.control
    if control.storage_backend is None:
        raise _no_storage(None)
    if trouble := control.storage_trouble:
        raise not_ready(f"Storage can't be used now: {trouble}.", "storage_unavailable", _RETRY_AFTER_S)
    with _refusals():
        warmed = await control.warm(ids, salt, body.timeout_s)
        found = await control.lookup(ids, salt)
    return json_answer(
        {
            "prompt_tokens": len(ids),
            "warmed_tokens": warmed.tokens,
            "complete": warmed.complete,
            "device": found.device,
            "host": found.host,
            "storage": found.storage,
        }
    )


async def pin(request: web.Request) -> web.Response:
    """Keep what device and host have of a prompt for `ttl_s`."""
    api = api_of(request)
    body = await api.body(request, _pin_decoder)
    api.check_model(body.model)
    ids = await _ids(api, body)
    with _refusals():
        pinned = api.engine.control.pin(ids, _salt(api, body, request), body.ttl_s)
    return json_answer(
        {
            "pin_id": pinned.id,
            "pinned_tokens": pinned.tokens,
            "pinned_pages": pinned.pages,
            "expires_in_s": pinned.expires_in_s,
        }
    )


async def unpin(request: web.Request) -> web.Response:
    """Let a pin go; one that has expired is no error."""
    api = api_of(request)
    body = await api.body(request, _unpin_decoder)
    return json_answer({"unpinned": api.engine.control.unpin(body.pin_id)})


async def storage_state(request: web.Request) -> web.Response:
    """Which storage the server has, and whether it is attached and usable."""
    return _storage_answer(api_of(request), True, "")


async def detach_storage(request: web.Request) -> web.Response:
    """Go on without the storage tier, under load too. What is under way is completed, for 5 s at most."""
    api = api_of(request)
    if api.engine.control.storage_backend is None:
        raise _no_storage(None)
    with _refusals():
        completed = await api.engine.control.detach_storage()
    killed = "Storage is detached; what was under way did not end in time, and was given up."
    return _storage_answer(api, True, "Storage is detached." if completed else killed)


async def attach_storage(request: web.Request) -> web.Response:
    """Use the storage tier that the server was started with again."""
    api = api_of(request)
    control = api.engine.control
    # SGLang's clients name the backend; it may be left out, with the whole body.
    asked = await api.body(request, _attach_decoder) if request.body_exists else AttachRequest()
    if control.storage_backend is None:
        raise _no_storage(None)
    if asked.hicache_storage_backend not in (None, control.storage_backend):
        raise bad_request(
            f"This server was started with the storage backend {control.storage_backend}; it can attach no other.",
            "hicache_storage_backend",
            "invalid_value",
        )
    with _refusals():
        trouble = await control.attach_storage()
    message = f"Storage can't be attached: {trouble}." if trouble else "Storage is attached."
    return _storage_answer(api, not trouble, message)


def _storage_answer(api: Api, success: bool, message: str) -> web.Response:
    control = api.engine.control
    answer = {
        "success": success,
        "message": message,
        "hicache_storage_backend": control.storage_backend,
        "attached": control.storage_attached,
        "usable": control.storage_attached and not control.storage_trouble,
    }
    return json_answer(answer, status=200 if success else 503)


async def events(request: web.Request) -> web.StreamResponse:
    """What comes into each tier and leaves it, as server-sent events, from now on."""
    api = api_of(request)
    stream = EventStream(request, api.settings.stall_s)
    if request.method == hdrs.METH_HEAD:
        return web.Response(content_type="text/event-stream", charset="utf-8")
    with _refusals():
        reader = api.engine.control.events.subscribe()
    try:
        await stream.open()
        # Now the reader is subscribed: whatever changes from here on is told.
        await stream.send(KEEP_ALIVE)
        while True:
            if await reader.wait(SILENCE_S):
                await stream.send(b"".join(map(event, reader.take())))
            else:
                await stream.send(KEEP_ALIVE)
    except Stalled:
        api.metrics.slow_reader()
        _log.warning("a reader of /cache/events did not read within %g s and was cut", api.settings.stall_s)
        await stream.cut(b"")
    except ConnectionError:
        _log.debug("a reader of /cache/events has gone")
    finally:
        reader.close()
    return stream.response


# ---------------------------------------------------------------------------------------------------------------


async def _drop(
    api: Api, tiers: tuple[Tier, ...], needs_storage: bool, salt: str | None, ids: I32 | None
) -> web.Response:
    """Finish the writes that read from these tiers, then drop: all (no salt), a salt (no ids), or a prompt."""
    control = api.engine.control
    if needs_storage and control.storage_backend is None:
        raise _no_storage("tier")
    with _refusals():
        settled = await control.settle()
        device, host = "device" in tiers, "host" in tiers
        if salt is None or ids is None:
            flushed = await _flushed(api.engine, device, host)
            dropped: dict[Tier, int] = {"device": flushed.dropped_pages, "host": flushed.dropped_host_pages}
            kept: dict[Tier, int] = {"device": flushed.pinned_pages, "host": flushed.pinned_host_pages}
        else:
            cleared = control.clear(ids, salt, device, host)
            dropped = {"device": cleared.device, "host": cleared.host}
            kept = {"device": cleared.device_kept, "host": cleared.host_kept}
        trouble = ""
        if "storage" in tiers:
            deleted = await control.delete_stored(salt)
            dropped["storage"], kept["storage"], trouble = deleted.pages, 0, deleted.message
    message = ", ".join(f"{dropped[tier]} pages dropped from {tier}" for tier in tiers)
    in_use = kept["device"] if device else kept["host"] if host else 0
    if in_use and salt is None:
        message += f"; {in_use} are in use by running requests, writes or pins and stay"
    if not settled:
        message += "; writes to lower tiers were still under way, and kept the pages that they read from"
    if trouble:
        message += f"; storage: {trouble}"
    answer: dict[str, object] = {
        "success": not trouble,
        "message": message,
        "dropped_pages": sum(dropped[tier] for tier in tiers),
        "pinned_pages": sum(kept[tier] for tier in tiers),
        "tiers": {tier: {"dropped_pages": dropped[tier], "kept_pages": kept[tier]} for tier in tiers},
        "writes_completed": settled,
        "pins": [msgspec.to_builtins(pin) for pin in control.pins()],
    }
    return json_answer(answer, status=503 if trouble else 200)


async def _flushed(engine: EngineApi, device: bool, host: bool) -> Flushed:
    """Everything that nothing holds now, in slices: 100k pages at once would hold the loop for 120 ms."""
    status = engine.status()
    dropped = dropped_host = 0
    for _ in range(1 + max(status.pages_cached, status.host_pages_cached) // FLUSH_PAGES):
        flushed = engine.flush_cache(device, host, FLUSH_PAGES)
        dropped += flushed.dropped_pages
        dropped_host += flushed.dropped_host_pages
        if max(flushed.dropped_pages, flushed.dropped_host_pages) < FLUSH_PAGES:
            break
        await asyncio.sleep(0)
    return Flushed(dropped, flushed.pinned_pages, dropped_host, flushed.pinned_host_pages)


def _named(body: PromptFields) -> list[str]:
    """Which of the fields that give a prompt are there."""
    given = {"prompt": bool(bytes(body.prompt)), "input_ids": bool(bytes(body.input_ids))}
    given["messages"] = body.messages is not None
    return [name for name, there in given.items() if there]


async def _ids(api: Api, body: PromptFields) -> I32:
    """The prompt's ids. Raises ApiError 400."""
    named = _named(body)
    if len(named) != 1:
        message = f"Give one of `prompt`, `input_ids` and `messages`; {len(named)} were given."
        raise bad_request(message, named[1] if named else "prompt", "missing_required_parameter")
    if body.messages is not None:
        return await encode_chat(
            api.text,
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            template_kwargs=body.chat_template_kwargs,
        )
    raw = body.prompt if named == ["prompt"] else body.input_ids
    prompts, many = await encode_prompts(api.text, raw, named[0], api.context_tokens)
    if many:
        raise bad_request(f"`{named[0]}` is a list of prompts; give one.", named[0], "invalid_value")
    return prompts[0].ids


def _salt(api: Api, body: PromptFields, request: web.Request) -> str:
    """The salt of the requests that share this prompt, as `Api.terms` makes it. Raises ApiError 400."""
    tenant = api.keys.salt(request)
    if body.tenant is not None:
        if api.settings.admin_api_key is None:
            message = "`tenant` is for the holder of the admin key, and this server has none (--admin-api-key)."
            raise bad_request(message, "tenant", "invalid_value")
        tenant = body.tenant
    return ":".join(salt for salt in (tenant, body.cache_salt) if salt)


@contextmanager
def _refusals() -> Iterator[None]:
    """What the engine refuses, as ApiError."""
    try:
        yield
    except PinRefused as refusal:
        message = str(refusal)
        raise bad_request(message[0].upper() + message[1:] + ".", None, "pin_refused") from None
    except Overloaded as error:
        raise overloaded(str(error)[0].upper() + str(error)[1:] + ".", error.retry_after_s) from None
    except TooManyReaders as error:
        raise overloaded(f"{error}.", 10) from None


def _no_storage(param: str | None) -> ApiError:
    return bad_request("This server has no storage tier: start it with --disk-cache-dir DIR.", param, "no_storage")

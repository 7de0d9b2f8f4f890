"""What the handlers of all endpoints share.

in     settings, an engine, the text side (later: the port answers before the model is read)
out    the checks that endpoints have in common
state  references
owner  the lifecycle builds it and sets `text`
ready  for probes at once, for requests when `readiness` says so
end    with the server
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Final, Literal, TypeAlias, TypeVar, cast

import msgspec
from aiohttp import web

from headrace.sched.grammar import Grammar
from headrace.server.access import Keys
from headrace.server.body import MOST_BODY_BYTES, check_parts, decode, read_body
from headrace.server.emit import Emitter
from headrace.server.engine_api import EngineApi
from headrace.server.errors import bad_request, context_length_exceeded, model_not_found
from headrace.server.generation import MAX_PENDING_BYTES, Generation, Running, Terms
from headrace.server.in_flight import InFlight
from headrace.server.metrics import Metrics
from headrace.server.openai_requests import GenerationFields, prefetch_policy
from headrace.server.overload_log import OverloadLog
from headrace.server.readiness import Readiness
from headrace.server.sampling import Vocabulary
from headrace.server.sampling_defaults import SamplingDefaults
from headrace.server.structured_output import asked_grammar, checked_grammar
from headrace.server.text import TextService
from headrace.server.turns import Turns

DEFAULT_MODEL_NAME: Final = "default"

_ARRIVED_S: Final[ContextVar[float]] = ContextVar("arrived_s")
"""When the whole body was there of the request that the current task answers: until then it was the client's delay."""

T = TypeVar("T", bound=msgspec.Struct)
Priorities: TypeAlias = Literal["high first", "low first", "ignored", "refused"]


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP side has to know of the server's settings."""

    model_name: str
    host: str
    max_running_requests: int
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    priorities: Priorities = "ignored"
    """What a request's `priority` does."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """What requests get that say nothing."""
    api_keys: tuple[str, ...] = ()
    admin_api_key: str | None = None
    request_timeout_s: float = 0.0
    queue_timeout_s: float = 0.0
    """0 is none, for both."""
    max_body_bytes: int = MOST_BODY_BYTES
    """See `body.most_body_bytes`."""
    stall_s: float = 60.0
    """How long a client may leave a full socket unread."""
    max_pending_bytes: int = MAX_PENDING_BYTES
    storage_backend: str | None = None
    created_unix_s: int = 0
    public: dict[str, object] = {}
    """For `/server_info`: no secrets."""


class Api:
    """The server behind its endpoints."""

    def __init__(self, settings: ApiSettings, engine: EngineApi) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = Metrics(engine.status)
        self.emitter = Emitter(engine, self.metrics)
        engine.sink = self.emitter.sink
        self.running = Running(engine, self.emitter, settings.max_queued_requests, settings.max_queued_tokens)
        self.readiness = Readiness(engine.status)
        self.in_flight = InFlight(self.metrics.in_flight)
        self.turns = Turns()
        self.overload_log = OverloadLog()
        self.keys = Keys(settings.api_keys, settings.admin_api_key)
        self.chat_template: str | None = None
        """Its source, for clients that render by themselves."""
        self._text: TextService | None = None

    # -----------------------------------------------------------------------------------------------------------

    @property
    def text(self) -> TextService:
        assert self._text is not None, "asked for after `readiness` let the request pass"
        return self._text

    def set_text(self, text: TextService, chat_template: str | None) -> None:
        """The text side has been loaded."""
        self._text, self.chat_template = text, chat_template
        self.readiness.text_loaded = True

    @property
    def vocabulary(self) -> Vocabulary:
        tokenizer = self.text.tokenizer
        return Vocabulary(tokenizer.vocab_size, tuple(tokenizer.stop_ids))

    @property
    def context_tokens(self) -> int:
        return self.engine.status().max_context_tokens

    # -----------------------------------------------------------------------------------------------------------
    # Checks

    def check_model(self, model: str | None) -> None:
        """Raises ApiError 404; a request that names no model means the one that is here."""
        if model not in (None, "", DEFAULT_MODEL_NAME, self.settings.model_name):
            raise model_not_found(model[:200], self.settings.model_name)

    def check_n(self, n: int | None) -> int:
        """Raises ApiError 400: choices of a request run side by side."""
        n = 1 if n is None else n
        if n > self.settings.max_running_requests:
            raise bad_request(
                f"`n` is {n}; at most {self.settings.max_running_requests} run at a time here "
                "(--max-running-requests).",
                "n",
                "invalid_value",
            )
        return n

    def max_tokens(
        self, prompt_tokens: int, asked: int | None, default: int | None, prompt_param: str, asked_param: str
    ) -> int:
        """Outputs that a prompt may have: what was asked, or the default (None: all that fits) cut to what fits.

        Raises ApiError 400 for an empty prompt, and for one that does not fit with what was asked.
        """
        status = self.engine.status()
        limit, of_pool = status.max_context_tokens, status.pages_total * status.page_tokens <= status.max_context_tokens
        if prompt_tokens == 0:
            message = f"`{prompt_param}` is empty: there must be at least one token."
            raise bad_request(message, prompt_param, "empty_prompt")
        if prompt_tokens >= limit:
            raise context_length_exceeded(prompt_tokens, asked, limit, prompt_param, of_pool=of_pool)
        if asked is None:
            room = limit - prompt_tokens
            return room if default is None else min(default, room)
        if prompt_tokens + asked > limit:
            raise context_length_exceeded(prompt_tokens, asked, limit, asked_param, of_pool=of_pool)
        return asked

    def terms(self, fields: GenerationFields, request: web.Request) -> Terms:
        """What holds for a request as a whole. Raises ApiError 400."""
        salts = [salt for salt in (self.keys.salt(request), fields.cache_salt) if salt]
        return Terms(
            cache_salt=":".join(salts),
            priority=self._priority(fields.priority),
            return_cached_details=bool(fields.return_cached_tokens_details),
            prefetch_policy=prefetch_policy(fields.prefetch_policy),
            deadline_ms=_shorter_ms(self.settings.request_timeout_s, fields.timeout_s),
            queue_deadline_ms=_shorter_ms(self.settings.queue_timeout_s, fields.queue_timeout_s),
        )

    async def grammar(self, fields: GenerationFields) -> Grammar | None:
        """What the output must match, compiled by then. Raises ApiError."""
        asked = asked_grammar(
            fields.response_format,
            json_schema=fields.json_schema,
            regex=fields.regex,
            ebnf=fields.ebnf,
            grammar=fields.grammar,
        )
        return await checked_grammar(self.engine, asked)

    def _priority(self, asked: int | None) -> int:
        """The engine's, where higher goes first. Raises ApiError 400."""
        match self.settings.priorities:
            case "high first":
                return asked or 0
            case "low first":
                return -(asked or 0)
            case "refused" if asked:
                raise bad_request(
                    "`priority` means nothing here: start the server with --enable-priority-scheduling, or leave it "
                    "out.",
                    "priority",
                    "unsupported_parameter",
                )
        return 0

    def claim(self, given_id: str | None, prefix: str) -> AbstractContextManager[Generation]:
        """Register a request whose body has been read. Raises ApiError 409."""
        return self.running.claim(given_id, prefix, _ARRIVED_S.get())

    async def body(self, request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
        """A request's body, decoded. Raises ApiError."""
        grow = partial(self.in_flight.grow, request)
        data = await read_body(request, self.settings.max_body_bytes, grow)
        _ARRIVED_S.set(self.emitter.now())
        await check_parts(data, cast("type[msgspec.Struct]", decoder.type))
        return decode(data, decoder)


def _shorter_ms(own_s: float, asked_s: float | None) -> float:
    """The server's limit or the request's, whichever is shorter; 0 where neither has one."""
    limits = [limit_s for limit_s in (own_s, asked_s) if limit_s]
    return min(limits) * 1000 if limits else 0.0


API: Final = web.AppKey("api", Api)


def api_of(request: web.Request) -> Api:
    return request.app[API]

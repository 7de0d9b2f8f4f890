"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time

from aiohttp import web

from headrace.server.answers import events, json_answer, whole
from headrace.server.api import Api, api_of
from headrace.server.encoding import encode_chat
from headrace.server.errors import bad_request
from headrace.server.generation import Generation, PromptJob
from headrace.server.openai_requests import (
    ChatRequest,
    GenerationFields,
    chat_decoder,
    refuse_unsupported,
    refuse_unsupported_chat,
)
from headrace.server.openai_responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    SglExt,
    Usage,
    chat_logprob,
    extension_of,
    usage_of,
)
from headrace.server.output_text import OutputOptions
from headrace.server.sampling import sampling_params
from headrace.server.slices import converted
from headrace.server.sse import EventTemplate, event
from headrace.server.stop_strings import StopStrings
from headrace.server.streams import Delta, StreamGroup
from headrace.server.tokenizer import Tokenizer


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation with n continuations."""
    api = api_of(request)
    body = await api.body(request, chat_decoder)
    api.check_model(body.model)
    refuse_unsupported(body)
    refuse_unsupported_chat(body)
    n = api.check_n(body.n)
    with api.claim(body.given_request_id, "chatcmpl-") as generation:
        terms = api.terms(body, request)
        async with generation.waiting(terms):
            grammar = await api.grammar(body)
            ids = await encode_chat(
                api.text,
                body.messages,
                tools=None if body.tool_choice == "none" else body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs,
            )
        max_tokens = api.max_tokens(len(ids), body.asked_tokens, None, "messages", body.asked_tokens_param)
        logprobs = (body.top_logprobs or 0) if body.logprobs else -1
        options = output_options(body, max_tokens, logprobs)
        sampling = sampling_params(
            body,
            api.vocabulary,
            api.settings.sampling_defaults,
            max_tokens=max_tokens,
            min_tokens=options.min_tokens,
            seed=body.seed,
            logprobs=logprobs,
            grammar=grammar,
        )
        group = generation.submit(
            [PromptJob(ids, sampling, n, options)],
            api.text.tokenizer,
            terms,
            eager=bool(body.stream),
            max_pending_bytes=api.settings.max_pending_bytes,
        )
        reply = _Reply(api, body, generation, group, len(ids), n)
        if body.stream:
            return await events(request, generation, group, reply)
        return json_answer(await reply.whole(await whole(group)))


def output_options(body: GenerationFields, max_tokens: int, logprobs: int, discard: bool = False) -> OutputOptions:
    """How the ids of a request's choices become text. Raises ApiError 400."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        message = f"`min_tokens` is {min_tokens}, but the request may have {max_tokens} tokens."
        raise bad_request(message, "min_tokens", "invalid_value")
    return OutputOptions(
        stops=compiled_stops(body.stop_strings, body.keeps_stop),
        keep_stop=body.keeps_stop,
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=min_tokens,
        logprobs=logprobs,
        discard=discard,
    )


def compiled_stops(stops: tuple[str, ...], keep: bool, param: str = "stop") -> StopStrings | None:
    """Raises ApiError 400."""
    if not stops:
        return None
    try:
        return StopStrings(stops, include_in_output=keep)
    except ValueError as error:
        raise bad_request(f"`{param}`: {error}.", param, "invalid_value") from None


class _Reply:
    """One chat answer: whole, or as the events of a stream."""

    def __init__(
        self, api: Api, body: ChatRequest, generation: Generation, group: StreamGroup, prompt_tokens: int, n: int
    ) -> None:
        self._api = api
        self._body = body
        self._group = group
        self._prompt_tokens = prompt_tokens
        self._n = n
        self._tokenizer: Tokenizer = api.text.tokenizer
        self._id = generation.request_id
        self._created = int(time.time())
        self._model = api.settings.model_name
        self._begun: set[int] = set()
        self._templates: dict[int, EventTemplate] = {}

    async def whole(self, deltas: list[Delta]) -> ChatResponse:
        choices = []
        for delta in deltas:
            assert delta.finish is not None
            logprobs = await self._logprobs(delta)
            choices.append(ChatChoice(delta.index, ChatMessage(delta.text), logprobs, delta.finish.reason))
        answer = ChatResponse(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=self._usage()
        )
        if self._body.return_cached_tokens_details:
            answer.sglext = self._details()
        return answer

    async def delta(self, delta: Delta) -> bytes:
        """OpenAI's order: the role, text, an empty delta with the finish reason."""
        parts = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            parts.append(self._chunk(delta.index, ChatDelta("assistant", "", None)))
        logprobs = await self._logprobs(delta)
        if logprobs is not None and logprobs.content:
            parts.append(self._chunk(delta.index, ChatDelta(content=delta.text), logprobs))
        elif delta.text:
            parts.append(self._text(delta.index, delta.text))
        if delta.finish is not None:
            parts.append(self._chunk(delta.index, ChatDelta(), finish_reason=delta.finish.reason))
        return b"".join(parts)

    def last(self) -> bytes:
        wants_details = self._body.return_cached_tokens_details
        if not (self._body.include_usage or wants_details):
            return b""
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=[])
        if self._body.include_usage:
            chunk.usage = self._usage()
        if wants_details:
            chunk.sglext = self._details()
        return event(chunk)

    # -----------------------------------------------------------------------------------------------------------

    def _text(self, index: int, text: str) -> bytes:
        if self._body.continuous_usage:
            return self._chunk(index, ChatDelta(content=text))
        template = self._templates.get(index)
        if template is None:
            chunk = self._chunk_of(index, ChatDelta(content=EventTemplate.slot()))
            template = self._templates[index] = EventTemplate(chunk)
        return template.fill(text)

    def _chunk(
        self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None
    ) -> bytes:
        return event(self._chunk_of(index, delta, logprobs, finish_reason))

    def _chunk_of(
        self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None
    ) -> ChatChunk:
        choice = ChatChunkChoice(index, delta, logprobs, finish_reason)
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=[choice])
        if self._body.continuous_usage:
            chunk.usage = self._usage()
        elif self._body.include_usage:
            chunk.usage = None
        return chunk

    async def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        tokenizer = self._tokenizer
        return ChatLogprobs(await converted(delta.scores, lambda score: chat_logprob(score, tokenizer)))

    def _usage(self) -> Usage:
        return usage_of([self._prompt_tokens], self._n, self._group.streams)

    def _details(self) -> SglExt:
        return extension_of(self._n, self._group.streams, self._api.settings.storage_backend)

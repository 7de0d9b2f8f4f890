"""`POST /v1/completions`: plain text or token ids, continued; with `echo` and `logprobs` also scored."""

from __future__ import annotations

import time
from typing import Final

from aiohttp import web

from headrace.sched.grammar import Grammar
from headrace.server.answers import events, json_answer, whole
from headrace.server.api import Api, api_of
from headrace.server.encoding import EncodedPrompt, encode_prompts
from headrace.server.errors import bad_request, unsupported
from headrace.server.generation import Generation, PromptJob
from headrace.server.openai_chat import output_options
from headrace.server.openai_requests import MAX_CHOICES, CompletionRequest, completion_decoder, refuse_unsupported
from headrace.server.openai_responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ScoredToken,
    SglExt,
    Usage,
    completion_logprobs,
    extension_of,
    scored_prompt,
    scored_token,
    usage_of,
)
from headrace.server.sampling import sampling_params
from headrace.server.slices import converted
from headrace.server.sse import EventTemplate, event
from headrace.server.streams import Delta, StreamGroup
from headrace.server.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's."""


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue every prompt n times; choice i of prompt p has the index p · n + i."""
    api = api_of(request)
    body = await api.body(request, completion_decoder)
    api.check_model(body.model)
    n = api.check_n(body.n)
    _refuse(body, n)
    with api.claim(body.given_request_id, "cmpl-") as generation:
        terms = api.terms(body, request)
        async with generation.waiting(terms):
            prompts, _ = await encode_prompts(
                api.text,
                body.prompt,
                "prompt",
                api.context_tokens,
                bos=body.add_special_tokens is not False,
                parse_special=bool(body.parse_special),
            )
            _check_choices(len(prompts), n)
            grammar = await api.grammar(body)
        group = generation.submit(
            [_job(api, body, prompt, n, grammar) for prompt in prompts],
            api.text.tokenizer,
            terms,
            eager=bool(body.stream),
            max_pending_bytes=api.settings.max_pending_bytes,
        )
        reply = _Reply(api, body, generation, group, prompts, n)
        if body.stream:
            return await events(request, generation, group, reply)
        return json_answer(await reply.whole(await whole(group)))


def _check_choices(prompts: int, n: int) -> None:
    if prompts * n > MAX_CHOICES:
        message = f"{prompts} prompts, `n` times {n}, are {prompts * n} choices; at most {MAX_CHOICES} run."
        raise bad_request(message, "n", "invalid_value")


def _refuse(body: CompletionRequest, n: int) -> None:
    refuse_unsupported(body)
    if body.suffix:
        raise unsupported("`suffix` is not supported: the model was not taught to fill in the middle.", "suffix")
    if body.best_of is not None and body.best_of < n:
        message = f"`best_of` is {body.best_of}, less than `n` ({n}): leave it out, or lower `n`."
        raise bad_request(message, "best_of", "invalid_value")
    if body.best_of is not None and body.best_of > n:
        raise unsupported(f"`best_of` above `n` ({n}) is not supported: nothing ranks candidates here.", "best_of")
    if body.stream and body.echo and body.logprobs is not None and n > 1:
        raise unsupported("`echo` with `logprobs` and `n` above 1 is not streamed; leave `stream` out.", "stream")


def _job(api: Api, body: CompletionRequest, prompt: EncodedPrompt, n: int, grammar: Grammar | None) -> PromptJob:
    max_tokens = api.max_tokens(len(prompt.ids), body.max_tokens, DEFAULT_MAX_TOKENS, "prompt", "max_tokens")
    logprobs = -1 if body.logprobs is None else body.logprobs
    options = output_options(body, max_tokens, logprobs, discard=max_tokens == 0)
    sampling = sampling_params(
        body,
        api.vocabulary,
        api.settings.sampling_defaults,
        max_tokens=max(max_tokens, 1),
        min_tokens=options.min_tokens,
        seed=body.seed,
        logprobs=logprobs,
        prompt_logprobs=logprobs if body.echo else -1,
        grammar=grammar,
    )
    return PromptJob(prompt.ids, sampling, n, options)


class _Reply:
    """One completions answer: whole, or as the events of a stream."""

    def __init__(
        self,
        api: Api,
        body: CompletionRequest,
        generation: Generation,
        group: StreamGroup,
        prompts: list[EncodedPrompt],
        n: int,
    ) -> None:
        self._api = api
        self._body = body
        self._group = group
        self._prompts = prompts
        self._n = n
        self._tokenizer: Tokenizer = api.text.tokenizer
        self._id = generation.request_id
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._echoes: dict[int, str] = {}
        self._templates: dict[int, EventTemplate] = {}

    async def whole(self, deltas: list[Delta]) -> Completion:
        answer = self._completion([await self._choice(delta) for delta in deltas])
        answer.usage = self._usage()
        if self._body.return_cached_tokens_details:
            answer.sglext = self._details()
        return answer

    async def delta(self, delta: Delta) -> bytes:
        first = delta.index not in self._begun
        if delta.finish is None and not (first and self._body.echo) and not delta.scores:
            self._begun.add(delta.index)
            return self._text(delta.index, delta.text) if delta.text else b""
        return event(self._chunk(await self._choice(delta)))

    def last(self) -> bytes:
        chunk = self._completion([])
        if self._body.include_usage:
            chunk.usage = self._usage()
        if self._body.return_cached_tokens_details:
            chunk.sglext = self._details()
        return event(chunk) if self._body.include_usage or self._body.return_cached_tokens_details else b""

    # -----------------------------------------------------------------------------------------------------------

    async def _choice(self, delta: Delta) -> CompletionChoice:
        """The delta as a choice; with `echo` the prompt stands before a choice's first."""
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        echoed = self._echo(delta.index // self._n) if self._body.echo else ""
        logprobs: CompletionLogprobs | None = None
        if self._body.logprobs is not None:
            rows = await self._prompt_rows(delta.index) if first and self._body.echo else []
            tokenizer = self._tokenizer
            rows += await converted(delta.scores, lambda score: scored_token(score, tokenizer, len(echoed)))
            logprobs = completion_logprobs(rows)
        text = echoed + delta.text if first else delta.text
        return CompletionChoice(delta.index, text, logprobs, None if delta.finish is None else delta.finish.reason)

    async def _prompt_rows(self, index: int) -> list[ScoredToken]:
        """The prompt's scores, which the first of its choices has got."""
        assert self._body.logprobs is not None
        prompt = self._prompts[index // self._n]
        stream = self._group.streams[index - index % self._n]
        return await scored_prompt(prompt.ids.tolist(), stream, self._tokenizer, self._body.logprobs)

    def _echo(self, index: int) -> str:
        """The text of a prompt: as it was given, or what its ids read."""
        if index not in self._echoes:
            prompt = self._prompts[index]
            self._echoes[index] = self._tokenizer.decode(prompt.ids.tolist()) if prompt.text is None else prompt.text
        return self._echoes[index]

    def _text(self, index: int, text: str) -> bytes:
        if self._body.continuous_usage:
            return event(self._chunk(CompletionChoice(index, text, None, None)))
        template = self._templates.get(index)
        if template is None:
            chunk = self._chunk(CompletionChoice(index, EventTemplate.slot(), None, None))
            template = self._templates[index] = EventTemplate(chunk)
        return template.fill(text)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        chunk = self._completion([choice])
        if self._body.continuous_usage:
            chunk.usage = self._usage()
        elif self._body.include_usage:
            chunk.usage = None
        return chunk

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._api.settings.model_name, choices=choices)

    def _usage(self) -> Usage:
        return usage_of([len(prompt.ids) for prompt in self._prompts], self._n, self._group.streams)

    def _details(self) -> SglExt:
        return extension_of(self._n, self._group.streams, self._api.settings.storage_backend)

"""`POST /generate`: SGLang's native endpoint. Text or ids in; text, ids and `meta_info` out, one or a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from headrace.ops.wire import MAX_LOGPROBS
from headrace.server.answers import events, json_answer, whole
from headrace.server.api import Api, api_of
from headrace.server.encoding import EncodedPrompt, encode_prompts
from headrace.server.errors import bad_request, unsupported
from headrace.server.generation import Generation, PromptJob
from headrace.server.openai_chat import output_options
from headrace.server.openai_requests import (
    MAX_CHOICES,
    GenerationFields,
    RequestId,
    SamplingFields,
    refuse_adapters,
)
from headrace.server.openai_responses import cached_details_of
from headrace.server.output_text import finite
from headrace.server.sampling import sampling_params
from headrace.server.slices import converted
from headrace.server.sse import event
from headrace.server.streams import ChoiceStream, Delta, Finish, StreamGroup, TokenScore
from headrace.server.structured_output import Asked, asked_grammar, checked_grammar
from headrace.server.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS: Final = 128
"""SGLang's."""

_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_TopNum = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class NativeSampling(SamplingFields, kw_only=True):
    """SGLang's `sampling_params`."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    min_new_tokens: _Count | None = None
    sampling_seed: _Seed | None = None
    seed: _Seed | None = None
    regex: Any = None
    json_schema: Any = None
    ebnf: Any = None
    """What the output must match: see `structured_output`."""

    # Refused unless null.
    stop_regex: Any = None
    structural_tag: Any = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """`text` or `input_ids`, one or a list."""

    text: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    input_ids: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: RequestId | Annotated[list[RequestId], Meta(min_length=1, max_length=1)] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_logprobs_num: _TopNum | None = None
    return_text_in_logprobs: bool | None = None
    return_cached_tokens_details: bool | None = None
    parse_special: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    prefetch_policy: str | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    queue_timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    model: str | None = None

    # Refused unless null or false.
    token_ids_logprob: Any = None
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    lora_path: Any = None
    lora_id: Any = None
    lora_request: Any = None
    lora: Any = None
    adapter: Any = None
    adapter_id: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: bool | None = None
    return_routed_experts: bool | None = None


generate_decoder: Final = msgspec.json.Decoder(GenerateRequest)

_REFUSED: Final = (
    *("token_ids_logprob", "input_embeds", "image_data", "audio_data", "video_data"),
    *("custom_logit_processor", "return_hidden_states", "return_routed_experts"),
)
_REFUSED_IN_SAMPLING: Final = ("stop_regex", "structural_tag")


async def generate(request: web.Request) -> web.StreamResponse:
    """Continue one prompt or a batch."""
    api = api_of(request)
    body = await api.body(request, generate_decoder)
    api.check_model(body.model)
    refuse_adapters(body)
    for name in _REFUSED:
        if getattr(body, name):
            raise unsupported(f"`{name}` is not supported. Leave it out.", name)
    rid = body.rid[0] if isinstance(body.rid, list) else body.rid
    with api.claim(rid, "") as generation:
        terms = api.terms(_terms_of(body), request)
        async with generation.waiting(terms):
            prompts, is_batch = await _prompts(api, body)
            sampling = _sampling_of(body, len(prompts))
            n = _choices_each(api, sampling)
            asked = [_asked_grammar(params) for params in sampling]
            for grammar in dict.fromkeys(asked):
                await checked_grammar(api.engine, grammar)
        jobs = [_job(api, body, *job, n) for job in zip(prompts, sampling, asked)]
        group = generation.submit(
            jobs,
            api.text.tokenizer,
            terms,
            eager=bool(body.stream),
            keep_ids=True,
            max_pending_bytes=api.settings.max_pending_bytes,
        )
        reply = _Reply(api, body, generation, group, prompts, n, is_batch or n > 1)
        if body.stream:
            return await events(request, generation, group, reply)
        return await reply.whole(await whole(group))


async def _prompts(api: Api, body: GenerateRequest) -> tuple[list[EncodedPrompt], bool]:
    given = [(name, raw) for name, raw in (("text", body.text), ("input_ids", body.input_ids)) if _said(raw)]
    if len(given) != 1:
        raise bad_request("Give `text` or `input_ids`, and not both.", "text", "invalid_value")
    name, raw = given[0]
    prompts, is_list = await encode_prompts(
        api.text, raw, name, api.context_tokens, parse_special=bool(body.parse_special)
    )
    if any((prompt.text is None) != (name == "input_ids") for prompt in prompts):
        raise bad_request("`text` takes strings, `input_ids` takes token ids.", name, "invalid_type")
    return prompts, is_list


def _choices_each(api: Api, sampling: list[NativeSampling]) -> int:
    """`n`, of every prompt. Raises ApiError."""
    n = api.check_n(sampling[0].n)
    if any(api.check_n(params.n) != n for params in sampling):
        raise bad_request("`sampling_params.n` must be the same for the whole batch.", "sampling_params.n")
    if len(sampling) * n > MAX_CHOICES:
        raise bad_request(f"{len(sampling) * n} choices are too many; at most {MAX_CHOICES} are allowed.", "text")
    return n


def _said(raw: msgspec.Raw) -> bool:
    return bytes(raw).strip() not in (b"", b"null")


def _sampling_of(body: GenerateRequest, prompts: int) -> list[NativeSampling]:
    """One for each prompt. Raises ApiError."""
    params = NativeSampling() if body.sampling_params is None else body.sampling_params
    each = params if isinstance(params, list) else [params] * prompts
    if len(each) != prompts:
        raise bad_request(
            f"There are {prompts} prompts and {len(each)} `sampling_params`; give one, or one for each prompt.",
            "sampling_params",
            "invalid_value",
        )
    for one in each:
        for name in _REFUSED_IN_SAMPLING:
            if getattr(one, name) is not None:
                raise unsupported(f"`sampling_params.{name}` is not supported. Leave it out.", name)
    return each


def _asked_grammar(params: NativeSampling) -> Asked | None:
    """Raises ApiError."""
    return asked_grammar(
        json_schema=params.json_schema, regex=params.regex, ebnf=params.ebnf, prefix="sampling_params."
    )


def _job(
    api: Api,
    body: GenerateRequest,
    prompt: EncodedPrompt,
    params: NativeSampling,
    asked: Asked | None,
    n: int,
) -> PromptJob:
    param = "input_ids" if prompt.text is None else "text"
    max_tokens = api.max_tokens(
        len(prompt.ids), params.max_new_tokens, DEFAULT_MAX_NEW_TOKENS, param, "sampling_params.max_new_tokens"
    )
    if _scores_prompt(body) and (start := body.logprob_start_len or 0) >= len(prompt.ids):
        # SGLang refuses it too.
        raise bad_request(
            f"`logprob_start_len` is {start}, and the last token is number {len(prompt.ids) - 1}, counted from "
            "0: give that or less, or -1 for none of the prompt.",
            "logprob_start_len",
            "invalid_value",
        )
    logprobs = (body.top_logprobs_num or 0) if body.return_logprob else -1
    fields = GenerationFields(
        stop=params.stop,
        min_tokens=params.min_new_tokens,
        skip_special_tokens=params.skip_special_tokens,
        no_stop_trim=params.no_stop_trim,
    )
    options = output_options(fields, max_tokens, logprobs)
    sampling = sampling_params(
        params,
        api.vocabulary,
        api.settings.sampling_defaults,
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        seed=params.sampling_seed if params.sampling_seed is not None else params.seed,
        logprobs=logprobs,
        prompt_logprobs=logprobs if _scores_prompt(body) else -1,
        prompt_logprobs_from=body.logprob_start_len or 0,
        grammar=None if asked is None else asked.grammar,
    )
    return PromptJob(prompt.ids, sampling, n, options)


def _scores_prompt(body: GenerateRequest) -> bool:
    return bool(body.return_logprob) and body.logprob_start_len is not None and body.logprob_start_len >= 0


def _terms_of(body: GenerateRequest) -> GenerationFields:
    return GenerationFields(
        priority=body.priority,
        cache_salt=body.cache_salt,
        prefetch_policy=body.prefetch_policy,
        timeout_s=body.timeout_s,
        queue_timeout_s=body.queue_timeout_s,
        return_cached_tokens_details=body.return_cached_tokens_details,
    )


class _Choice:
    """What one choice has said so far, as JSON without its brackets: every event repeats it from the start."""

    def __init__(self) -> None:
        self.text = bytearray()
        self.ids = bytearray()
        self.scores = bytearray()
        self.tops = bytearray()
        self.inputs: msgspec.Raw | None = None


class _Reply:
    """One answer of this endpoint: whole, or as the events of a stream.

    As SGLang's, each event has all text and ids so far, which clients rely on; appending to their JSON makes an event
    cost its new tokens and a copy of some bytes per old one. Rows of logprobs, 30 to 1000 bytes a token, are only the
    new ones in an event, and all of them in a choice's last, the one with a `finish_reason`.
    """

    def __init__(
        self,
        api: Api,
        body: GenerateRequest,
        generation: Generation,
        group: StreamGroup,
        prompts: Sequence[EncodedPrompt],
        n: int,
        is_list: bool,
    ) -> None:
        self._api = api
        self._body = body
        self._generation = generation
        self._group = group
        self._prompts = prompts
        self._n = n
        self._is_list = is_list
        self._tokenizer: Tokenizer = api.text.tokenizer
        self._choices = [_Choice() for _ in group.streams]

    async def whole(self, deltas: list[Delta]) -> web.Response:
        answers = [await self._take(delta) for delta in deltas]
        if self._is_list:
            return web.Response(body=msgspec.json.encode(answers), content_type="application/json")
        return json_answer(answers[0])

    async def delta(self, delta: Delta) -> bytes:
        if not (delta.ids or delta.text or delta.finish):
            return b""
        answer = await self._take(delta)
        if self._is_list:
            answer["index"] = delta.index
        return event(answer)

    def last(self) -> bytes:
        return b""

    # -----------------------------------------------------------------------------------------------------------

    async def _take(self, delta: Delta) -> dict[str, object]:
        choice, stream = self._choices[delta.index], self._group.streams[delta.index]
        choice.text += msgspec.json.encode(delta.text)[1:-1]
        _append(choice.ids, delta.ids)
        meta = self._meta(delta, stream)
        if self._body.return_logprob:
            await self._add_logprobs(meta, choice, delta)
        return {"text": _raw(b'"', choice.text, b'"'), "output_ids": _raw(b"[", choice.ids, b"]"), "meta_info": meta}

    async def _add_logprobs(self, meta: dict[str, object], choice: _Choice, delta: Delta) -> None:
        scores, tops = await converted(delta.scores, self._score), await converted(delta.scores, self._top)
        _append(choice.scores, scores)
        is_first, is_last = choice.inputs is None, delta.finish is not None
        if choice.inputs is None:
            choice.inputs = msgspec.Raw(msgspec.json.encode(await self._input_scores(delta.index)))
        meta["output_token_logprobs"] = _raw(b"[", choice.scores, b"]") if is_last else scores
        meta["input_token_logprobs"] = choice.inputs if is_first or is_last else []
        if self._body.top_logprobs_num:
            _append(choice.tops, tops)
            meta["output_top_logprobs"] = _raw(b"[", choice.tops, b"]") if is_last else tops

    def _meta(self, delta: Delta, stream: ChoiceStream) -> dict[str, object]:
        request_id = self._generation.request_id
        meta: dict[str, object] = {
            "id": f"{request_id}_{delta.index}" if self._is_list else request_id,
            "finish_reason": None if delta.finish is None else _finish_reason(delta.finish),
            "prompt_tokens": len(self._prompts[delta.index // self._n].ids),
            "completion_tokens": delta.n_tokens,
            "cached_tokens": 0 if stream.started is None else stream.started.cached_tokens,
        }
        if self._body.return_cached_tokens_details:
            details = cached_details_of(1, [stream], self._api.settings.storage_backend)
            meta["cached_tokens_details"] = msgspec.to_builtins(details)
        if delta.finish is not None:
            meta["num_retractions"] = delta.finish.retractions
            meta["e2e_latency"] = self._api.emitter.now() - self._generation.arrived_s
        return meta

    def _score(self, score: TokenScore) -> list[object]:
        return [score.logprob, score.id, self._text_of(score.id)]

    def _top(self, score: TokenScore) -> list[list[object]]:
        return [[logprob, id, self._text_of(id)] for id, logprob in zip(score.top_ids, score.top_logprobs)]

    async def _input_scores(self, index: int) -> list[list[object]]:
        """From `logprob_start_len` on; a prompt's first token has no logprob."""
        if not _scores_prompt(self._body):
            return []
        assert self._body.logprob_start_len is not None
        ids = self._prompts[index // self._n].ids.tolist()
        logprobs: dict[int, float] = {}
        for part in self._group.streams[index - index % self._n].prompt_logprobs:
            logprobs |= {part.start + at: value for at, value in enumerate(part.logprobs.tolist())}

        def scored(position: int) -> list[object]:
            logprob = finite(logprobs[position]) if position in logprobs else None
            return [logprob, ids[position], self._text_of(ids[position])]

        return await converted(range(self._body.logprob_start_len, len(ids)), scored)

    def _text_of(self, id: int) -> str | None:
        return self._tokenizer.token_text(id) if self._body.return_text_in_logprobs else None


def _append(known: bytearray, elements: Sequence[object]) -> None:
    """Add to a JSON list without its brackets."""
    if elements:
        if known:
            known += b","
        known += msgspec.json.encode(elements)[1:-1]


def _raw(begin: bytes, inner: bytearray, end: bytes) -> msgspec.Raw:
    return msgspec.Raw(begin + inner + end)


def _finish_reason(finish: Finish) -> dict[str, object]:
    if finish.reason == "length":
        return {"type": "length", "length": finish.n_tokens}
    return {"type": finish.reason, "matched": finish.matched}

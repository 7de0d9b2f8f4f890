"""What OpenAI's endpoints answer, as structs: shapes, key by key, and the finish reasons they know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from headrace.sched.messages import PromptLogprobs, Started, WaitCause, WaitedFor
from headrace.server.detokenizer import Detokenizer
from headrace.server.errors import (
    ApiError,
    aborted,
    deadline_exceeded,
    draining,
    engine_error,
    invalid_grammar,
    not_begun,
)
from headrace.server.output_text import finite
from headrace.server.slices import converted
from headrace.server.streams import ChoiceStream, Finish, TokenScore
from headrace.server.tokenizer import Tokenizer


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CachedTokensDetails(msgspec.Struct, frozen=True):
    """Cached prompt tokens by the tier that had them."""

    device: int
    host: int
    storage: int
    storage_backend: str | None


class ByTier(msgspec.Struct, frozen=True):
    device: int
    host: int
    storage: int


class StartLedger(msgspec.Struct, frozen=True):
    """What the start of one prompt cost and gained."""

    pages: ByTier
    """Cached pages of the prompt, by the tier that had them."""
    bytes: ByTier
    waited_ms: dict[WaitCause, float]
    """What it waited for from submission to its first token, on the engine's clock."""
    waited_for: WaitedFor
    """The last thing that it waited for before its first step."""
    first_token_ms: float
    """The sum of `waited_ms`."""
    saved_ms: float
    """What computing the cached tokens would have taken."""
    saved_by: str
    """How that was estimated, by the cost model that the server keeps of its device; "" if nothing was measured."""
    prefetch: PrefetchLedger | None
    """None if storage was not asked."""


class PrefetchLedger(msgspec.Struct, frozen=True):
    """What the policy decided for one prompt."""

    policy: str
    decision: str
    """`nothing_found`, `complete`, `cut_short`, `no_room`, `gave_up` or `did_not_wait`."""
    reason: str
    """What it went by when it was last asked; "" if everything had come before."""


class SglExt(msgspec.Struct, frozen=True):
    """SGLang's place for what OpenAI's shapes have no key for, and ours: `headrace` has one entry a prompt."""

    cached_tokens_details: CachedTokensDetails
    headrace: list[StartLedger]


class Alternative(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    sglext: SglExt | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    sglext: SglExt | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, kw_only=True):
    """Whole answers and the chunks of a stream have the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    sglext: SglExt | UnsetType = UNSET


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headrace"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelEntry]
    object: Literal["list"] = "list"


# ---------------------------------------------------------------------------------------------------------------
# From streams to these shapes

_FAILURES: Final = {
    "abort": aborted,
    "timeout": deadline_exceeded,
    "queue_timeout": not_begun,
    "invalid_grammar": invalid_grammar,
    "error": engine_error,
    "draining": draining,
}
_DEFAULT_MESSAGES: Final = {
    "abort": "The request was aborted.",
    "timeout": "The request did not finish within its time limit.",
    "queue_timeout": "The request did not begin within its time limit.",
    "invalid_grammar": "The grammar can't be used.",
    "error": "The engine could not finish the request.",
    "draining": "The server is stopping.",
}


def failure(finish: Finish | None) -> ApiError | None:
    """The error of a choice that ended neither by itself nor at its length."""
    if finish is None or finish.reason in ("stop", "length"):
        return None
    return _FAILURES[finish.reason](finish.message or _DEFAULT_MESSAGES[finish.reason])


def usage_of(prompt_tokens: Sequence[int], n: int, streams: Sequence[ChoiceStream]) -> Usage:
    """Each prompt counts once, however many choices it has; cached is what its first choice found cached."""
    cached = sum(started.cached_tokens for started in _starts(n, streams))
    completion = sum(stream.n_tokens for stream in streams)
    return Usage(sum(prompt_tokens), completion, sum(prompt_tokens) + completion, PromptTokensDetails(cached))


def extension_of(n: int, streams: Sequence[ChoiceStream], storage_backend: str | None) -> SglExt:
    """What a request that asked for details gets."""
    ledger = [_ledger_of(started) for started in _starts(n, streams)]
    return SglExt(cached_details_of(n, streams, storage_backend), ledger)


def _ledger_of(started: Started) -> StartLedger:
    tokens = started.cached_device_tokens, started.cached_host_tokens, started.cached_storage_tokens
    pages = [part // started.page_tokens for part in tokens]
    # The sum is of what is shown: it is equal to the last digit.
    waited_ms = {cause: round(part_ms, 3) for cause, part_ms in started.waited_ms.items()}
    asked = PrefetchLedger(started.prefetch_policy, started.prefetch_decision, started.prefetch_reason)
    return StartLedger(
        pages=ByTier(*pages),
        bytes=ByTier(*(part * started.page_bytes for part in pages)),
        waited_ms=waited_ms,
        waited_for=started.waited_for,
        first_token_ms=round(sum(waited_ms.values()), 3),
        saved_ms=round(started.saved_ms, 3),
        saved_by=started.saved_by,
        prefetch=asked if started.prefetch_policy else None,
    )


def cached_details_of(n: int, streams: Sequence[ChoiceStream], storage_backend: str | None) -> CachedTokensDetails:
    starts = list(_starts(n, streams))
    return CachedTokensDetails(
        device=sum(started.cached_device_tokens for started in starts),
        host=sum(started.cached_host_tokens for started in starts),
        storage=sum(started.cached_storage_tokens for started in starts),
        storage_backend=storage_backend,
    )


def _starts(n: int, streams: Sequence[ChoiceStream]) -> Iterable[Started]:
    for stream in streams[::n]:
        if stream.started is not None:
            yield stream.started


def chat_logprob(score: TokenScore, tokenizer: Tokenizer) -> ChatTokenLogprob:
    alternatives = [
        Alternative(tokenizer.token_text(id), logprob, list(tokenizer.token_bytes(id)))
        for id, logprob in zip(score.top_ids, score.top_logprobs)
    ]
    raw = list(tokenizer.token_bytes(score.id))
    return ChatTokenLogprob(tokenizer.token_text(score.id), score.logprob, raw, alternatives)


class ScoredToken(NamedTuple):
    """A row of `CompletionLogprobs`."""

    token: str
    logprob: float | None
    top: dict[str, float] | None
    offset: int


def scored_token(score: TokenScore, tokenizer: Tokenizer, offset_chars: int) -> ScoredToken:
    """`offset_chars`: of the echoed prompt."""
    top = _top(tokenizer, score.top_ids, score.top_logprobs)
    return ScoredToken(legacy_text(tokenizer, score.id), score.logprob, top, offset_chars + score.text_offset)


def completion_logprobs(rows: Sequence[ScoredToken]) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[row.token for row in rows],
        token_logprobs=[row.logprob for row in rows],
        top_logprobs=[row.top for row in rows],
        text_offset=[row.offset for row in rows],
    )


async def scored_prompt(ids: Sequence[int], stream: ChoiceStream, tokenizer: Tokenizer, k: int) -> list[ScoredToken]:
    """The scores of a prompt's ids, `k` alternatives each; the first has none, since nothing stands before it."""
    at: dict[int, tuple[PromptLogprobs, int]] = {}
    for part in stream.prompt_logprobs:
        at |= {part.start + row: (part, row) for row in range(len(part.logprobs))}
    detokenizer = Detokenizer(tokenizer)
    offset = 0

    def scored(position: int) -> ScoredToken:
        nonlocal offset
        token, before = legacy_text(tokenizer, ids[position]), offset
        offset += len(detokenizer.push((ids[position],)))
        if position == 0:
            return ScoredToken(token, None, None, before)
        part, row = at[position]
        tops = [finite(value) for value in part.top_logprobs[row, :k].tolist()]
        top = _top(tokenizer, part.top_ids[row, :k].tolist(), tops)
        return ScoredToken(token, finite(float(part.logprobs[row])), top, before)

    return await converted(range(len(ids)), scored)


def legacy_text(tokenizer: Tokenizer, id: int) -> str:
    """A token as the completions endpoint writes it: one that is no whole character reads `bytes:\\xf0\\x9f`, so that
    two of them differ."""
    raw = tokenizer.token_bytes(id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _top(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, float]:
    return {legacy_text(tokenizer, id): logprob for id, logprob in zip(ids, logprobs)}

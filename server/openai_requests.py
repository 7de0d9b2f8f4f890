"""What OpenAI's two generation endpoints accept: types, ranges and caps, checked while the JSON is decoded.

Every field may be null, unknown fields are ignored, and names that vLLM and SGLang added to OpenAI's are taken where
they mean the same here. A field that asks for something that is not built is refused by name, never ignored:
`refuse_unsupported` lists them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from headrace.kvcache.prefetch import PrefetchPolicy
from headrace.ops.wire import MAX_LOGPROBS
from headrace.sched.messages import MAX_LOGIT_BIASES
from headrace.server.errors import bad_request, unsupported

MAX_CHOICES: Final = 1024
"""Choices of one request over all its prompts."""
MAX_N: Final = 128
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_STOP_IDS: Final = 64

RequestId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:@/+=-]+\Z")]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat, completions and `/generate` share. None is "not said"."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """-1 and 0 are off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    """SGLang's name for keeping the stop string or token in the text."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())


class GenerationFields(SamplingFields, kw_only=True):
    """What the two OpenAI endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    include_stop_str_in_output: bool | None = None
    """vLLM's name for `no_stop_trim`."""
    rid: RequestId | None = None
    request_id: RequestId | None = None
    """SGLang's and vLLM's names for an id by which the request can be aborted."""
    return_cached_tokens_details: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    prefetch_policy: str | None = None
    """See `prefetch_policy`."""
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    queue_timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    """What the output must match: see `structured_output`."""

    # Refused unless null (or false): see `refuse_unsupported`.
    structural_tag: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    lora_path: Any = None
    lora_id: Any = None
    lora_request: Any = None
    lora: Any = None
    adapter: Any = None
    adapter_id: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: bool | None = None
    return_routed_experts: bool | None = None
    use_beam_search: bool | None = None

    @property
    def given_request_id(self) -> str | None:
        return self.rid or self.request_id

    @property
    def keeps_stop(self) -> bool:
        return bool(self.include_stop_str_in_output or self.no_stop_trim)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and (self.stream_options.include_usage or self.continuous_usage))

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatRequest(GenerationFields, kw_only=True):
    """`POST /v1/chat/completions`. Messages and tools are checked where they are rendered."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def asked_tokens(self) -> int | None:
        """OpenAI's newer name wins where a client sends both."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def asked_tokens_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class CompletionRequest(GenerationFields, kw_only=True):
    """`POST /v1/completions`. The prompt is one of four shapes, told apart in `openai_completions`."""

    prompt: msgspec.Raw
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """0 scores the prompt and generates nothing."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=0, le=MAX_N)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    """Whether the prompt begins with the token that the model wants first."""
    parse_special: bool | None = None
    """llama.cpp's name: control tokens in the prompt's text count. Off by default, since prompts hold users' text."""


chat_decoder: Final = msgspec.json.Decoder(ChatRequest)
completion_decoder: Final = msgspec.json.Decoder(CompletionRequest)

_CONSTRAINTS: Final = {
    "structural_tag": "response_format",
    "structured_outputs": "response_format",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "regex",
    "guided_grammar": "ebnf",
}
"""Other names for constrained output, and what to send instead."""
_REFUSED: Final = (
    ("logits_processors", "Custom logits processors are not supported"),
    ("custom_logit_processor", "Custom logits processors are not supported"),
    ("return_hidden_states", "Hidden states are not returned"),
    ("return_routed_experts", "Routed experts are not returned"),
    ("use_beam_search", "Beam search is not supported"),
)
ADAPTER_FIELDS: Final = ("lora_path", "lora_id", "lora_request", "lora", "adapter", "adapter_id")
"""SGLang's names, vLLM's, llama.cpp's, and what others call it."""
_PREFETCH_POLICIES: Final[dict[str, PrefetchPolicy]] = {name: name for name in get_args(PrefetchPolicy)}
_REFUSED_IN_CHAT: Final = (
    ("functions", "`functions` is not supported; send `tools`"),
    ("audio", "Audio is not supported"),
    ("web_search_options", "Web search is not supported"),
    ("chat_template", "A chat template per request is not accepted; the server has --chat-template"),
)


def refuse_unsupported(request: GenerationFields) -> None:
    """Raise ApiError 400 for what both endpoints know by name and can't do."""
    for name, instead in _CONSTRAINTS.items():
        if getattr(request, name) is not None:
            raise unsupported(f"`{name}` is not supported. Send `{instead}`.", name)
    refuse_adapters(request)
    for name, message in _REFUSED:
        if getattr(request, name):
            raise unsupported(f"{message}. Leave `{name}` out.", name)


def refuse_adapters(request: msgspec.Struct) -> None:
    """Raise ApiError 400 for a request that names an adapter: the model alone would give another answer."""
    for name in ADAPTER_FIELDS:
        if getattr(request, name) is not None:
            raise unsupported(f"`{name}`: adapters are not supported. Leave it out.", name)


def prefetch_policy(given: str | None) -> PrefetchPolicy | Literal[""]:
    """How long a request waits for pages from storage; "" is the server's choice. Raises ApiError 400."""
    if given is None:
        return ""
    if given not in _PREFETCH_POLICIES:
        *most, last = _PREFETCH_POLICIES
        message = f"`prefetch_policy` is {given[:40]!r}; it must be {', '.join(most)} or {last}."
        raise bad_request(message, "prefetch_policy", "invalid_value")
    return _PREFETCH_POLICIES[given]


def refuse_unsupported_chat(request: ChatRequest) -> None:
    """Raise ApiError 400 for what chat knows by name and can't do."""
    for name, message in _REFUSED_IN_CHAT:
        if getattr(request, name) is not None:
            raise unsupported(f"{message}.", name)
    if request.modalities is not None and request.modalities != ["text"]:
        raise unsupported('`modalities` other than ["text"] are not supported.', "modalities")
    if request.function_call not in (None, "none", "auto"):
        raise unsupported("Forcing a function call is not supported.", "function_call")
    if request.tool_choice not in (None, "none", "auto"):
        raise unsupported("`tool_choice` can't force a tool yet; `auto` and `none` are supported.", "tool_choice")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("`top_logprobs` needs `logprobs: true`.", "top_logprobs", "invalid_value")

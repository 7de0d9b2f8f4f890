"""`/tokenize`, `/detokenize`, `/tokenizer_info`: the vocabulary, as clients of vLLM and llama.cpp ask for it."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from headrace.server.answers import json_answer
from headrace.server.api import Api, api_of
from headrace.server.body import decode
from headrace.server.detokenizer import Detokenizer
from headrace.server.encoding import encode_chat, encode_text
from headrace.server.errors import bad_request
from headrace.server.sampling import check_ids
from headrace.server.slices import converted

MAX_IDS: Final = 1 << 18
"""Of one detokenization: 10 ms to read."""
_IDS_AT_ONCE: Final = 1024
"""0.5 ms of detokenizing."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text (`prompt` in vLLM, `content` in llama.cpp) or `messages`."""

    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    """llama.cpp's name, whose default is false."""
    parse_special: bool | None = None
    """Control tokens in the text count."""
    with_pieces: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: msgspec.Raw
    model: str | None = None
    skip_special_tokens: bool | None = None


_tokenize_decoder: Final = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder: Final = msgspec.json.Decoder(DetokenizeRequest)
_ids_decoder: Final = msgspec.json.Decoder(list[int])


async def tokenize(request: web.Request) -> web.Response:
    """The ids of a text or a conversation."""
    api = api_of(request)
    body = await api.body(request, _tokenize_decoder)
    api.check_model(body.model)
    ids = await _ids(api, body)
    answer: dict[str, object] = {"count": len(ids), "max_model_len": api.context_tokens, "tokens": ids}
    tokenizer = api.text.tokenizer
    if body.return_token_strs:
        answer["token_strs"] = await converted(ids, tokenizer.token_text)
    if body.with_pieces:

        def piece(id: int) -> dict[str, object]:
            raw = tokenizer.token_bytes(id)
            try:
                return {"id": id, "piece": raw.decode()}
            except UnicodeDecodeError:
                return {"id": id, "piece": list(raw)}

        answer["tokens"] = await converted(ids, piece)
    return json_answer(answer)


async def _ids(api: Api, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        chat = await encode_chat(
            api.text,
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
        )
        return list(map(int, chat.tolist()))
    text, param = (body.content, "content") if body.prompt is None else (body.prompt, "prompt")
    if text is None:
        raise bad_request("Give `prompt`, `content` or `messages`.", "prompt", "missing_required_parameter")
    # Clients learn the id of a control token by asking for its name; longer text is a user's, never parsed for them.
    control_id = api.text.tokenizer.control.ids.get(text)
    if control_id is not None and body.parse_special is not False:
        return [control_id]
    bos = bool(body.add_special) if param == "content" else body.add_special_tokens is not False
    ids = await encode_text(api.text, text, param, bos, parse_special=bool(body.parse_special))
    return list(map(int, ids.tolist()))


async def detokenize(request: web.Request) -> web.Response:
    """The text of ids, under the names that vLLM and llama.cpp give it."""
    api = api_of(request)
    body = await api.body(request, _detokenize_decoder)
    api.check_model(body.model)
    tokenizer = api.text.tokenizer
    ids = _ids_of(bytes(body.tokens))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=bool(body.skip_special_tokens))

    def push(start: int) -> str:
        part = ids[start : start + _IDS_AT_ONCE]
        check_ids(part, tokenizer.vocab_size, "tokens")
        return detokenizer.push(part)

    text = "".join(await converted(range(0, len(ids), _IDS_AT_ONCE), push)) + detokenizer.flush()
    return json_answer({"prompt": text, "content": text})


def _ids_of(raw: bytes) -> list[int]:
    """Raises ApiError 400; a list that is too long before its numbers are read."""
    count = raw.count(b",") + 1
    if count > MAX_IDS:
        raise bad_request(f"`tokens` has {count} ids; at most {MAX_IDS} are taken at once.", "tokens", "invalid_value")
    return decode(raw, _ids_decoder, "tokens")


async def tokenizer_info(request: web.Request) -> web.Response:
    """What a client needs to render and count by itself."""
    api = api_of(request)
    tokenizer = api.text.tokenizer
    named = {"bos_token": None, "eos_token": None, "pad_token": None, "unk_token": None, **tokenizer.special_texts}
    return json_answer(
        {
            **named,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "stop_token_ids": list(tokenizer.stop_ids),
            "add_bos_token": tokenizer.add_bos,
            "vocab_size": tokenizer.vocab_size,
            "chat_template": api.chat_template,
        }
    )

"""Prompts of all endpoints to ids, with refusals that name the parameter."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
import numpy as np

from headrace.ops.wire import I32
from headrace.sched.messages import Overloaded
from headrace.server.body import count_parts, decode
from headrace.server.chat import BadChat
from headrace.server.errors import ApiError, bad_request, context_length_exceeded, engine_error, overloaded
from headrace.server.openai_requests import MAX_CHOICES
from headrace.server.text import TextService
from headrace.server.text_jobs import TextFailed, TextTimeout
from headrace.server.tokenizer import BadText

MAX_CONTROL_PLACES: Final = 2000
"""Places in a text where a control token may begin, when it is searched for them: 1.5 µs each, on the loop."""

_PATH: Final = re.compile(r"(?:messages\b|chat_template_kwargs\.|[a-z]+_[a-z_]+)[\w.\[\]]*")

_raws: Final = msgspec.json.Decoder(list[msgspec.Raw])
_text: Final = msgspec.json.Decoder(str)
_ids: Final = msgspec.json.Decoder(list[int])


class EncodedPrompt(msgspec.Struct, frozen=True):
    ids: I32
    text: str | None
    """As it was given; None for a prompt of ids."""


@contextmanager
def text_errors(param: str) -> Iterator[None]:
    """What the text side raises, as ApiError."""
    try:
        yield
    except (BadChat, BadText) as error:
        message = str(error)
        param = "chat_template_kwargs" if message.startswith("chat_template_kwargs") else param
        raise bad_request(_sentence(message), param, "invalid_value") from None
    except TextTimeout as error:
        raise bad_request(str(error), param, "text_timeout") from None
    except TextFailed as error:
        raise engine_error(str(error)) from None
    except Overloaded as error:
        raise overloaded(str(error), error.retry_after_s) from None


async def encode_text(text: TextService, prompt: str, param: str, bos: bool, parse_special: bool) -> I32:
    """Raises ApiError. `parse_special`: control tokens in the text count, because the client says it wrote them."""
    with text_errors(param):
        if not parse_special:
            return await text.encode(prompt, bos)
        control = text.tokenizer.control
        places = sum(prompt.count(char) for char in {name[0] for name in control.ids})
        if places > MAX_CONTROL_PLACES:
            raise bad_request(
                f"`{param}` has {places} places where a control token may begin; with `parse_special` at most "
                f"{MAX_CONTROL_PLACES} are searched.",
                param,
                "invalid_value",
            )
        parts = [
            np.array([part], np.int32) if isinstance(part, int) else await text.encode(part, False)
            for part in control.split(prompt)
        ]
        if bos and (not parts or parts[0][:1].tolist() != [text.tokenizer.bos_id]):
            parts.insert(0, await text.encode("", True))
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


async def encode_prompts(
    text: TextService,
    raw: msgspec.Raw,
    param: str,
    context_tokens: int,
    *,
    bos: bool = True,
    parse_special: bool = False,
) -> tuple[list[EncodedPrompt], bool]:
    """A string, a list of strings, a list of ids or a list of such lists; and whether it is a list of prompts.

    Raises ApiError.
    """
    data = bytes(raw).strip()
    if data[:1] == b'"':
        prompt = decode(raw, _text, param)
        return [EncodedPrompt(await encode_text(text, prompt, param, bos, parse_special), prompt)], False
    if data[:1] != b"[":
        raise _not_a_prompt(param)
    first = data[1:].lstrip()[:1]
    if first == b"]":
        raise bad_request(f"`{param}` is an empty list.", param, "empty_prompt")
    if first not in (b'"', b"["):
        return [EncodedPrompt(ids_of(raw, param, text.tokenizer.vocab_size, context_tokens), None)], False
    raws = decode(await _prompt_list(data, first, param), _raws, param)
    if len(raws) > MAX_CHOICES:
        raise _too_many_prompts(len(raws), param)
    prompts = []
    for index, part in enumerate(raws):
        at = f"{param}[{index}]"
        if first == b'"':
            prompt = decode(part, _text, at)
            prompts.append(EncodedPrompt(await encode_text(text, prompt, at, bos, parse_special), prompt))
        else:
            prompts.append(EncodedPrompt(ids_of(part, at, text.tokenizer.vocab_size, context_tokens), None))
        # Each may take most of a millisecond.
        await asyncio.sleep(0)
    return prompts, True


async def _prompt_list(data: bytes, first: bytes, param: str) -> bytes:
    """The JSON of a list of prompts, which has few enough elements to be taken apart: four million would take the loop
    0.2 s. Raises ApiError."""
    if first == b'"':
        # A string, a comma and, once, a bracket: two parts a prompt.
        if data.count(b",") >= MAX_CHOICES and (parts := await count_parts(data)) > 2 * MAX_CHOICES:
            raise _too_many_prompts(parts // 2, param)
        return data
    prompts = max(data.count(b"["), data.count(b"]")) - 1
    if prompts > MAX_CHOICES:
        raise _too_many_prompts(prompts, param)
    *lists, end = data[1:].split(b"]")
    if end.strip():
        raise _not_a_prompt(param)
    for index, part in enumerate(lists):
        if part.lstrip(b", \t\r\n")[:1] not in (b"[", b""):
            at = f"{param}[{index}]"
            raise bad_request(f"`{at}` must be a list of token ids, as `{param}[0]` is.", at, "invalid_type")
    return data


def _too_many_prompts(prompts: int, param: str) -> ApiError:
    message = f"`{param}` has {prompts} prompts; at most {MAX_CHOICES} are allowed."
    return bad_request(message, param, "invalid_value")


def ids_of(raw: msgspec.Raw, param: str, vocab_size: int, most: int) -> I32:
    """A list of token ids. Raises ApiError.

    One that is longer than the context is refused before its numbers are read, by counting commas: reading a million
    takes 40 ms of the loop.
    """
    count = bytes(raw).count(b",") + 1
    if count > most:
        raise context_length_exceeded(count, None, most, param)
    ids = decode(raw, _ids, param)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise bad_request(
            f"`{param}` holds the token id {wrong}, but the model's ids go from 0 to {vocab_size - 1}.",
            param,
            "invalid_token_id",
        )
    return np.array(ids, np.int32)


async def encode_chat(
    text: TextService,
    messages: Sequence[Mapping[str, object]],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    template_kwargs: Mapping[str, object] | None = None,
) -> I32:
    """A conversation, by the model's template. Raises ApiError.

    Continuing the last message and beginning a new one exclude each other: where only the first is asked for, the
    second is off.
    """
    continues = bool(continue_final_message)
    begins = not continues if add_generation_prompt is None else add_generation_prompt
    with text_errors("messages"):
        return await text.encode_chat(
            messages,
            tools=tools,
            add_generation_prompt=begins,
            continue_final_message=continues,
            template_kwargs=template_kwargs,
        )


def _sentence(message: str) -> str:
    """A message with a capital and a full stop; where it begins with a parameter, that stays as it is."""
    if path := _PATH.match(message):
        return f"`{path[0]}`{message[path.end() :]}."
    return f"{message[0].upper()}{message[1:]}."


def _not_a_prompt(param: str) -> ApiError:
    return bad_request(
        f"`{param}` must be a string, a list of strings, a list of token ids, or a list of lists of token ids.",
        param,
        "invalid_type",
    )

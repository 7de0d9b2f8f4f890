"""Texts and conversations to token ids: short ones at once, long ones in a text worker.

in     text, conversations
out    int32 ids
state  the model's vocabulary and template; the worker's jobs (`text_jobs`)
owner  the server; all calls are made on the event loop
ready  when a call returns
end    `close`: the worker ends, what it has not done fails
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Self

import numpy as np

from headrace.ops.wire import I32
from headrace.server.chat import MAX_MESSAGES, Chat, TextModel, check_count
from headrace.server.chat_sandbox import TemplateLimit, weight
from headrace.server.text_jobs import TextJobs, TextLimits
from headrace.server.text_wire import chat_frames, text_frames
from headrace.server.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

INLINE_CHARS: Final = 700
"""A text up to this size is encoded on the loop: 0.2 ms of English, 0.8 of digits, 1.0 of the rarest characters. The
worker takes 0.1 ms more than the loop would."""
_INLINE_RENDERED_CHARS: Final = 2000
"""The same for a rendering, most of which the template's authors wrote."""
_INLINE_STEPS: Final = 2000
"""Of a template on the loop: 1 ms."""
_SLOW_MS: Final = 3.0
_MAX_SLOW: Final = 3
"""So many renderings that held the loop for longer, and this template is not run on it any more."""


class TextService:
    """A model's text side, for the API."""

    def __init__(
        self,
        model: TextModel,
        model_path: str | os.PathLike[str],
        chat_template: str | None = None,
        limits: TextLimits | None = None,
    ) -> None:
        """`model_path` and `chat_template` are where `model` came from: the worker reads them again."""
        self.tokenizer: Tokenizer = model.tokenizer
        self._model = model
        self._jobs = TextJobs(os.fspath(model_path), chat_template, limits or TextLimits())
        self._slow = 0

    @classmethod
    def open(
        cls, model_path: str | os.PathLike[str], chat_template: str | None = None, limits: TextLimits | None = None
    ) -> Self:
        """Read the vocabulary and the template of a GGUF file; `chat_template` is the source of another template.

        Raises BadModelFile, BadTokenizer, BadTemplate. Takes 0.12 s.
        """
        return cls(TextModel.load(model_path, chat_template), model_path, chat_template, limits)

    @property
    def has_chat_template(self) -> bool:
        return self._model.template is not None

    @property
    def worker_pid(self) -> int | None:
        """None until a long text came, and while it is started anew."""
        return self._jobs.worker_pid

    @property
    def worker_restarts(self) -> int:
        return self._jobs.restarts

    def start_worker(self) -> None:
        """Start the text worker now, so that the first long text does not wait 0.4 s for it."""
        self._jobs.start()

    def close(self) -> None:
        self._jobs.close()

    async def encode(self, text: str, add_special_tokens: bool = True) -> I32:
        """The ids of a client's text, in which nothing is a control token, whatever it says.

        `add_special_tokens`: begin with the token that the model wants first, if it wants one. Raises BadText,
        TextFailed, Overloaded.
        """
        if len(text) <= INLINE_CHARS:
            ids = self.tokenizer.encode(text)
        else:
            ids = await self._in_worker(len(text), partial(text_frames, text))
        if add_special_tokens and self.tokenizer.add_bos:
            assert self.tokenizer.bos_id is not None
            return np.concatenate([np.array([self.tokenizer.bos_id], np.int32), ids])
        return ids

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> I32:
        """The ids of a conversation, by the model's chat template, which says by itself with which token it begins.

        `messages` and `tools` are as in OpenAI's API; they must not change before this returns. Raises BadChat,
        TextFailed, Overloaded.
        """
        self._model.required_template()
        chat = Chat(messages, tools or (), add_generation_prompt, continue_final_message, template_kwargs or {})
        check_count(chat)
        ids = self._encode_inline(chat)
        if ids is None:
            ids = await self._in_worker(_chars_of(chat), partial(chat_frames, chat))
        return ids

    def _encode_inline(self, chat: Chat) -> I32 | None:
        """None if it is too long for the loop, or the template takes too many steps."""
        if self._slow >= _MAX_SLOW or weight([chat.messages, chat.tools], INLINE_CHARS) > INLINE_CHARS:
            return None
        template = self._model.required_template()
        # The thread's own time: that another process had the core is no fault of the template's.
        begin_s = time.thread_time()
        try:
            rendered = template.render(chat, _INLINE_STEPS)
        except TemplateLimit:
            return None
        finally:
            self._note_render((time.thread_time() - begin_s) * 1000)
        if len(rendered) > _INLINE_RENDERED_CHARS:
            return None
        return self.tokenizer.encode_parts(template.parts(rendered))

    def _note_render(self, render_ms: float) -> None:
        if render_ms > _SLOW_MS:
            self._slow += 1
            if self._slow == _MAX_SLOW:
                _log.warning("the chat template is slow (%.1f ms); it runs in the text worker from now on", render_ms)

    async def _in_worker(self, chars: int, make_frames: Callable[[int], Iterator[bytes]]) -> I32:
        number, future = self._jobs.submit(chars, make_frames)
        try:
            return await future
        finally:
            self._jobs.drop(number)


def _chars_of(chat: Chat) -> int:
    """About how long a conversation is, without looking at more than some thousand values."""
    chars, parts_left = 0, MAX_MESSAGES
    for message in chat.messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            chars += len(content)
        elif isinstance(content, list):
            for part in content[:parts_left]:
                text = part.get("text") if isinstance(part, Mapping) else None
                chars += len(text) if isinstance(text, str) else 0
            parts_left = max(0, parts_left - len(content))
    return chars

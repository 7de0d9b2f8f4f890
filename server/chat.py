"""A conversation to token ids, by the model's chat template.

The control tokens of a prompt come from the template, never from what clients write. Strings can't carry where a
character came from through a template, so the characters do: wherever a client's text has a character that begins a
control token of the template, it is replaced by a *mark*, half of a surrogate pair, which no text can contain.
Whatever the template then does with the text (trim it, cut it, join it), no control token begins in it. When the
rendered text has been cut at its control tokens, marks turn back into their characters.

One exception keeps templates working that look into messages, as for `</think>`: a place where the text goes on like
one of the template's own string constants stays as it is, unless the constant and a control token begin alike.

in     conversations as in OpenAI's API; a template
out    rendered text, control tokens and the texts between them, ids
state  the compiled template
owner  whoever built it; one conversation at a time
ready  at once
end    with its last reference
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self, cast

import msgspec
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes

from headrace.ops.weights.files import ModelFile, open_model_file
from headrace.ops.weights.gguf import GgufFile
from headrace.ops.wire import I32
from headrace.server.chat_sandbox import TemplateLimit, TemplateSandbox
from headrace.server.folder_text import folder_template
from headrace.server.tokenizer import BadText, ControlTokens, Tokenizer

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
TEMPLATE_KWARGS: Final[Mapping[str, type]] = {
    "enable_thinking": bool,
    "thinking": bool,
    "reasoning_effort": str,
    "date_string": str,
}
"""What a client may set of a template's variables (`chat_template_kwargs`)."""

MAX_TEMPLATE_CHARS: Final = 1 << 18
"""The longest we know of has 30,000."""
MAX_MESSAGES: Final = 10_000
MAX_STEPS: Final = 1_000_000
"""Loop bodies in one rendering: 1 s of them. A template takes a few per message and per parameter of a tool."""
_PROBE_STEPS: Final = 1000
MAX_ADDED_CHARS: Final = 1 << 20
"""What a rendering may be longer than eight times its messages and tools."""

_OTHER: Final = "Give another with --chat-template FILE"
_MESSAGE_TEXTS: Final = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_FIRST_MARK: Final = 0xDC00
_END_OF_MESSAGE: Final = "\udfff"
"""Stands at the end of a message that the model is to go on with."""


class BadChat(ValueError):
    """The conversation can't be rendered; the message says what to change."""


class BadTemplate(ValueError):
    """The chat template can't be used; the message says where it is wrong."""


class Chat(msgspec.Struct, frozen=True):
    """What is to be rendered, as the client sent it."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The last message is open: the model goes on with it. `add_generation_prompt` must be false."""
    template_kwargs: Mapping[str, object] = {}


class ChatTemplate:
    """A model's chat template, compiled."""

    def __init__(self, source: str, tokenizer: Tokenizer, now: Callable[[], datetime] = datetime.now) -> None:
        """Raises BadTemplate."""
        if len(source) > MAX_TEMPLATE_CHARS:
            size = f"{len(source)} characters, more than {MAX_TEMPLATE_CHARS}"
            raise BadTemplate(f"the chat template has {size}. {_OTHER}")
        self._tokenizer = tokenizer
        self._sandbox = TemplateSandbox(now)
        self._template, tree = self._compile(source)
        data = [node.data for node in tree.find_all(nodes.TemplateData)]
        constants = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        names = {node.name for node in tree.find_all(nodes.Name)}
        self._knows_developer = any("developer" in text for text in constants)
        self.control = ControlTokens(_control_tokens_of(tokenizer, data + constants, names))
        """The control tokens that this template can print; nothing else in a rendering becomes one."""
        firsts = sorted({text[0] for text in self.control.ids})
        self._marks = {char: chr(_FIRST_MARK + number) for number, char in enumerate(firsts)}
        self._marked = _marked_places(firsts, constants, self.control.ids)
        self._takes_null_content = self._renders_null_content()

    def encode(self, chat: Chat) -> I32:
        """The ids of a conversation. Raises BadChat."""
        return self._tokenizer.encode_parts(self.parts(self.render(chat)))

    def render(self, chat: Chat, max_steps: int = MAX_STEPS) -> str:
        """The conversation as text, with marks in it. Raises BadChat, TemplateLimit."""
        try:
            variables, chars = self._variables(chat)
            rendered = self._run(variables, max_steps, 8 * chars + MAX_ADDED_CHARS)
        except BadText as error:
            raise BadChat(f"a message can't be encoded: {error}") from error
        except RecursionError:
            raise BadChat("messages or tools are nested too deeply") from None
        return _opened(rendered) if chat.continue_final_message else rendered

    def parts(self, rendered: str) -> Iterator[int | str]:
        """A rendering's control tokens, and the texts between them without marks: what `encode_parts` takes."""
        for part in self.control.split(rendered):
            if isinstance(part, str):
                for char, mark in self._marks.items():
                    part = part.replace(mark, char)
            yield part

    # -----------------------------------------------------------------------------------------------------------

    def _compile(self, source: str) -> tuple[Template, nodes.Template]:
        try:
            tree, template = self._sandbox.compile_template(source)
        except TemplateSyntaxError as error:
            raise BadTemplate(
                f"the chat template is wrong in line {error.lineno}: {error.message}. {_OTHER}"
            ) from error
        except TemplateError as error:
            raise BadTemplate(f"the chat template can't be compiled: {error}. {_OTHER}") from error
        except RecursionError:
            raise BadTemplate(f"the chat template is nested too deeply. {_OTHER}") from None
        return template, tree

    def _run(self, variables: Mapping[str, object], max_steps: int, max_chars: int) -> str:
        try:
            return self._sandbox.run(self._template, variables, max_steps, max_chars)
        except (TemplateLimit, RecursionError):
            raise
        except TemplateError as error:
            raise BadChat(f"the chat template refuses the messages: {error}") from error
        except Exception as error:  # a template is a program: it may divide by zero, or add None to a string
            raise BadChat(
                f"the chat template can't render these messages ({type(error).__name__}: {error}); "
                "it may need other roles, or another order of them"
            ) from error

    def _renders_null_content(self) -> bool:
        """Some templates ask whether a message with tool calls has content; the others fail if it has none."""
        function = {"name": "f", "arguments": {}}
        call = {"id": "call00000", "type": "function", "function": function}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        try:
            self._run({**self._tokenizer.special_texts, "messages": messages}, _PROBE_STEPS, MAX_ADDED_CHARS)
        except (BadChat, TemplateLimit, RecursionError):
            return False
        return True

    def _variables(self, chat: Chat) -> tuple[dict[str, object], int]:
        """What the template sees, and the number of characters in it."""
        check_count(chat)
        if chat.continue_final_message and chat.add_generation_prompt:
            raise BadChat(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false"
            )
        marker = _Marker(self._marked, self._marks)
        messages = [self._message(message, index, marker) for index, message in enumerate(chat.messages)]
        if chat.continue_final_message:
            # The space tells whether the template trims the message (as in Hugging Face's transformers).
            messages[-1]["content"] = f"{messages[-1]['content'] or ''}{_END_OF_MESSAGE} "
        variables: dict[str, object] = {
            **self._tokenizer.special_texts,
            **{name: marker.mark(_checked_kwarg(name, value)) for name, value in chat.template_kwargs.items()},
            "messages": messages,
            "tools": [marker.mark(tool) for tool in chat.tools] or None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        return variables, marker.chars

    def _message(self, message: Mapping[str, object], index: int, marker: _Marker) -> dict[str, object]:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise BadChat(f"{where} is no object")
        role = message.get("role")
        # An allow-list: templates print roles between halves of control tokens ('<|' + role + '|>').
        if role not in ROLES:
            raise BadChat(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
        if role == "developer" and not self._knows_developer:
            role = "system"
        calls = _tool_calls(message.get("tool_calls"), where)
        content = _content(message.get("content"), where)
        if content is None and not calls:
            raise BadChat(f"{where} has no content; it must be text, or an assistant's message with tool_calls")
        if content is None and not self._takes_null_content:
            content = ""
        taken: dict[str, object] = {"role": role, "content": marker.mark(content)}
        if calls:
            taken["tool_calls"] = marker.mark(calls)
        for key in _MESSAGE_TEXTS:
            value = message.get(key)
            if value is None:
                continue
            if not isinstance(value, str):
                raise BadChat(f"{where}.{key} must be a string")
            taken[key] = marker.mark(value)
        return taken


@dataclass(frozen=True)
class TextModel:
    """A model's vocabulary and chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    @classmethod
    def load(cls, model_path: str | os.PathLike[str], chat_template: str | None = None) -> Self:
        """From a GGUF file or a folder; `chat_template` replaces its own. Raises BadModelFile, BadTokenizer,
        BadTemplate."""
        with open_model_file(model_path) as file:
            tokenizer = Tokenizer.of(file)
            source = own_template(file) if chat_template is None else chat_template
        return cls(tokenizer, ChatTemplate(source, tokenizer) if source is not None else None)

    def required_template(self) -> ChatTemplate:
        """Raises BadChat if there is none."""
        if self.template is None:
            raise BadChat(
                "this model has no chat template. Start the server with --chat-template FILE, "
                "or send plain text to /v1/completions"
            )
        return self.template


def own_template(file: ModelFile) -> str | None:
    """The source of a model's own chat template, if it has one. Raises BadModelFile."""
    if not isinstance(file, GgufFile):
        return folder_template(file)
    source = file.metadata.get("tokenizer.chat_template")
    return source if isinstance(source, str) else None


class _Marker:
    """Copies JSON with marks in its strings, and counts characters."""

    def __init__(self, places: re.Pattern[str], marks: Mapping[str, str]) -> None:
        self._places = places
        self._marks = marks
        self.chars = 0

    def mark(self, value: object) -> object:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise BadText from None
            self.chars += len(value)
            return self._places.sub(lambda place: self._marks[place[0]], value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(element) for key, element in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(element) for element in value]
        if value is None or isinstance(value, bool | int | float):
            self.chars += 8
            return value
        raise BadChat(f"messages and tools are JSON; a {type(value).__name__} is none")


def _control_tokens_of(tokenizer: Tokenizer, texts: Sequence[str], names: set[str]) -> dict[str, int]:
    """The control tokens that a template with these texts and variables can print."""

    def printable(control: str) -> bool:
        if any(control in text for text in texts):
            return True
        for role in ROLES:
            before, _, after = control.partition(role)
            if before and after:
                begins = any(text.endswith(before) for text in texts)
                if begins and any(text.startswith(after) for text in texts):
                    return True
        return False

    special = {text for name, text in tokenizer.special_texts.items() if name in names}
    return {text: index for text, index in tokenizer.control.ids.items() if text in special or printable(text)}


def _marked_places(firsts: Sequence[str], constants: Sequence[str], control: Mapping[str, int]) -> re.Pattern[str]:
    """Where a client's text gets a mark: at first characters of control tokens, less what the template looks for."""
    alternatives = []
    for first in firsts:
        rests = {constant[at:] for constant in constants for at, char in enumerate(constant) if char == first}
        looked_for = sorted(
            re.escape(rest[1:])
            for rest in rests
            if not any(text.startswith(rest) or rest.startswith(text) for text in control)
        )
        alternatives.append(re.escape(first) + (f"(?!{'|'.join(looked_for)})" if looked_for else ""))
    return re.compile("|".join(alternatives) or r"(?!)")


def _opened(rendered: str) -> str:
    """The rendering up to the end of the last message, as it would be in the middle of being written."""
    end = rendered.rfind(_END_OF_MESSAGE)
    if end < 0:
        raise BadChat("the chat template does not print the last message as it is, so it can't be continued")
    is_trimmed = rendered[end + 1 : end + 2] != " "
    opened = rendered[:end].replace(_END_OF_MESSAGE, "")
    return opened.rstrip() if is_trimmed else opened


def check_count(chat: Chat) -> None:
    """Raises BadChat if there are no messages, or too many."""
    if not chat.messages:
        raise BadChat("messages is empty; there must be at least one")
    if len(chat.messages) > MAX_MESSAGES:
        raise BadChat(f"there are {len(chat.messages)} messages; at most {MAX_MESSAGES} are allowed")


def _content(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise BadChat(f"{where}.content must be a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise BadChat(f"{where}.content[{index}] must be a part: {{'type': 'text', 'text': …}}")
        if part.get("type") != "text":
            raise BadChat(f"{where}.content[{index}] has the type {part.get('type')!r}; this model reads only 'text'")
        text = part.get("text")
        if not isinstance(text, str):
            raise BadChat(f"{where}.content[{index}].text must be a string")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(calls: object, where: str) -> list[object]:
    """Tool calls as templates expect them: arguments are an object, where OpenAI's API has a string of JSON."""
    if calls is None:
        return []
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise BadChat(f"{where}.tool_calls must be a list of objects")
    return [_tool_call(cast("Mapping[str, object]", call)) for call in calls]


def _tool_call(call: Mapping[str, object]) -> dict[str, object]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = msgspec.json.decode(function["arguments"], type=dict[str, object])
    except msgspec.MsgspecError:
        return dict(call)  # a model's call may be no JSON; the history shows it as it was
    return {**call, "function": {**function, "arguments": arguments}}


def _checked_kwarg(name: str, value: object) -> object:
    kind = TEMPLATE_KWARGS.get(name)
    if kind is None:
        raise BadChat(f"chat_template_kwargs.{name} can't be set; these can: {', '.join(TEMPLATE_KWARGS)}")
    if type(value) is not kind:
        raise BadChat(f"chat_template_kwargs.{name} must be a {kind.__name__}")
    return value

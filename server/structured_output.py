"""What a client says its answer must look like, in the words of OpenAI, SGLang and llama.cpp, as one `Grammar`.

`response_format` (OpenAI: `json_object`, `json_schema`), and the fields `json_schema`, `regex`, `ebnf` (SGLang's names)
and `grammar` (llama.cpp's for the last). One of them at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.sched.grammar import MAX_GRAMMAR_BYTES, BadGrammar, Grammar
from headrace.sched.matching import GrammarWorkerFailed
from headrace.sched.messages import Overloaded
from headrace.server.engine_api import EngineApi
from headrace.server.errors import bad_request, engine_error, overloaded, unsupported


class Asked(NamedTuple):
    """A grammar, and the parameter that asked for it."""

    grammar: Grammar
    param: str


def asked_grammar(
    response_format: Mapping[str, Any] | None = None,
    *,
    json_schema: object = None,
    regex: object = None,
    ebnf: object = None,
    grammar: object = None,
    prefix: str = "",
) -> Asked | None:
    """What is asked for, if anything is. `prefix` stands before the names in messages. Raises ApiError 400."""
    found: list[Asked] = []
    if response_format is not None:
        found += _of_format(response_format, "response_format")
    if json_schema is not None:
        found.append(_of_schema(json_schema, f"{prefix}json_schema"))
    for name, kind, text in (("regex", "regex", regex), ("ebnf", "ebnf", ebnf), ("grammar", "ebnf", grammar)):
        if text is not None:
            param = f"{prefix}{name}"
            if not isinstance(text, str):
                raise bad_request(f"`{param}` must be a string.", param, "invalid_type")
            found.append(_sized(kind, text, param))
    if len(found) > 1:
        names = " and ".join(f"`{asked.param}`" for asked in found)
        raise bad_request(f"{names} exclude each other; send one of them.", found[1].param, "invalid_value")
    return found[0] if found else None


async def checked_grammar(engine: EngineApi, asked: Asked | None) -> Grammar | None:
    """The grammar, which has been compiled by then. Raises ApiError 400 for one that can't be used, 503, 500."""
    if asked is None:
        return None
    try:
        await engine.check_grammar(asked.grammar)
    except BadGrammar as error:
        raise bad_request(f"`{asked.param}` can't be used: {error}.", asked.param, "invalid_grammar") from None
    except GrammarWorkerFailed as error:
        raise engine_error(f"The grammar could not be compiled: {error}.") from None
    except Overloaded as error:
        raise overloaded(str(error), error.retry_after_s) from None
    return asked.grammar


def _of_format(given: Mapping[str, Any], param: str) -> list[Asked]:
    match given.get("type"):
        case "text":
            return []
        case "json_object" if given.get("schema") is not None:  # llama.cpp's
            return [_of_schema(given["schema"], f"{param}.schema")]
        case "json_object":
            return [Asked(Grammar("json_object"), param)]
        case "json_schema":
            holder, path = given.get("json_schema"), f"{param}.json_schema.schema"
            schema = holder.get("schema") if isinstance(holder, Mapping) else None
            if schema is None:
                message = f"`{param}` of type `json_schema` needs a schema, in `{path}`."
                raise bad_request(message, path, "missing_required_parameter")
            return [_of_schema(schema, path)]
        case "structural_tag":
            raise unsupported(f"`{param}` of type `structural_tag` is not supported; `json_schema` is.", param)
        case _:
            message = f"`{param}.type` must be `text`, `json_object` or `json_schema`."
            raise bad_request(message, param, "invalid_value")


def _of_schema(schema: object, param: str) -> Asked:
    """A schema, as JSON or as the text of it (SGLang's way)."""
    if isinstance(schema, str):
        return _sized("json_schema", schema, param)
    if not isinstance(schema, Mapping | bool):
        raise bad_request(f"`{param}` must be a JSON schema: an object, or its text.", param, "invalid_type")
    return _sized("json_schema", msgspec.json.encode(schema).decode(), param)


def _sized(kind: str, text: str, param: str) -> Asked:
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise bad_request(f"`{param}` holds half of a surrogate pair.", param, "invalid_value") from None
    if size_bytes > MAX_GRAMMAR_BYTES:
        message = f"`{param}` has {size_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are taken."
        raise bad_request(message, param, "invalid_grammar")
    return Asked(Grammar(kind, text), param)

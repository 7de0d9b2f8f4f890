"""Errors as clients read them: OpenAI's `{"error": {message, type, param, code}}`, with a status and headers.

Every refusal of the API is an `ApiError`; each kind has a function here, so that status, type and code of a kind are
said once. Messages say what happened and what to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

STATUS_ABORTED: Final = 499
"""Not in the registry of HTTP statuses, but what proxies and servers use for "ended by the client's side"."""

DRAINING_RETRY_AFTER_S: Final = 10
QUEUE_RETRY_AFTER_S: Final = 5


class ErrorBody(msgspec.Struct, frozen=True):
    """All four keys are required by OpenAI's schema, also when they are null."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """A request is refused or has failed; `status` and `body` are what the client gets."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message, kind, param, code)
        self.headers = dict(headers or {})

    def json(self) -> bytes:
        return msgspec.json.encode(ErrorEnvelope(self.body))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def invalid_grammar(message: str) -> ApiError:
    """A grammar that turned out to be too much while its output was drawn."""
    message = f"The request's grammar can't be used: {message}. Send a simpler one."
    return bad_request(message, code="invalid_grammar")


def unsupported(message: str, param: str) -> ApiError:
    """Something that clients may ask for and that is not built yet: never ignored in silence."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def context_length_exceeded(
    prompt_tokens: int,
    max_tokens: int | None,
    limit_tokens: int,
    param: str,
    at_least: bool = False,
    of_pool: bool = False,
) -> ApiError:
    """`max_tokens`: as the request says; None where it says nothing. `at_least`: the prompt was refused by its size,
    before its tokens were counted to the last one. `of_pool`: the limit is the KV cache's, not the model's."""
    prompt = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
    if max_tokens is None:
        what = f"the prompt has {prompt}, and an answer needs at least one. Shorten the prompt."
    else:
        what = (
            f"the prompt has {prompt} and max_tokens is {max_tokens}, {prompt_tokens + max_tokens} together. "
            "Shorten the prompt or lower max_tokens."
        )
    whose = "This server's KV cache (--max-total-tokens)" if of_pool else "This model's context"
    message = f"{whose} is {limit_tokens} tokens: {what}"
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "No valid API key was given. Send it as `Authorization: Bearer <key>`.",
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code)


def not_found(path: str) -> ApiError:
    return ApiError(
        404, f"There is nothing at {path}. docs/api.md lists what there is.", kind="not_found_error", code="not_found"
    )


def model_not_found(model: str, served: str) -> ApiError:
    return ApiError(
        404,
        f"The model `{model}` is not served here; `{served}` is (also under the name `default`).",
        kind="not_found_error",
        param="model",
        code="model_not_found",
    )


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    message = f"{method} is not allowed for {path}; allowed: {allowed}."
    return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})


def duplicate_request(request_id: str) -> ApiError:
    return ApiError(
        409,
        f"A request with the id `{request_id}` is running. Ids must differ while requests run.",
        param="rid",
        code="duplicate_request_id",
        # OpenAI's clients repeat a 409 by themselves, and this one would only fail again.
        headers={"x-should-retry": "false"},
    )


def body_too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413, f"The request body is larger than {limit_bytes} bytes, the limit of this server.", code="request_too_large"
    )


def encoding_refused(encoding: str) -> ApiError:
    return ApiError(
        415, f"Content-Encoding `{encoding}` is not accepted; send the body as it is.", code="unsupported_encoding"
    )


def body_too_slow(limit_s: float) -> ApiError:
    return ApiError(408, f"The request body did not arrive within {limit_s:g} s.", code="request_timeout")


def aborted(message: str) -> ApiError:
    return ApiError(STATUS_ABORTED, message, kind="aborted_error", code="request_aborted")


def not_ready(message: str, code: str, retry_after_s: int) -> ApiError:
    """The server is loading, draining or restarting: the same request may succeed later."""
    return ApiError(
        503, message, kind="service_unavailable_error", code=code, headers={"Retry-After": str(retry_after_s)}
    )


def draining(message: str) -> ApiError:
    """The server is leaving: another one, or the next, may take the request."""
    return not_ready(message, "server_draining", DRAINING_RETRY_AFTER_S)


def overloaded(message: str, retry_after_s: int) -> ApiError:
    return ApiError(
        503, message, kind="overloaded_error", code="overloaded", headers={"Retry-After": str(max(1, retry_after_s))}
    )


def not_begun(message: str) -> ApiError:
    """It waited for its start as long as it may. Nothing was computed: it may be sent again, here or elsewhere."""
    return overloaded(message, QUEUE_RETRY_AFTER_S)


def deadline_exceeded(message: str) -> ApiError:
    message = (
        f"{message.rstrip('.')}. Ask for fewer tokens, or give it longer: `timeout_s`, up to this server's "
        "--request-timeout-s."
    )
    return ApiError(504, message, kind="timeout_error", code="deadline_exceeded")


def engine_error(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error", code="engine_error")


def internal_error() -> ApiError:
    """A fault of the server itself; the log has the trace, the client gets none of it."""
    return ApiError(
        500, "The server failed to handle this request; its log says why.", kind="server_error", code="internal_error"
    )

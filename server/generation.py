"""What runs for one HTTP request: its choices in the engine and their streams; and the register of all that run.

in     prompts and sampling parameters; a client's abort by id
out    a `StreamGroup` to read; aborts to the engine for whatever has not ended when the handler leaves
state  ids of running requests; the engine handles of each
owner  the handler of the request, through `Running.claim`; everything changes in plain functions, so that nobody can
       leave between a submission and its registration
ready  after `submit`
end    leaving `claim` (answered, failed, cancelled: in whichever stage) aborts and forgets every choice
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Literal

import msgspec

from headrace.kvcache.prefetch import PrefetchPolicy
from headrace.ops.wire import I32
from headrace.sched.device import EngineFailed
from headrace.sched.messages import NeverFits, Overloaded, SamplingParams, Submit
from headrace.server.emit import Emitter
from headrace.server.engine_api import EngineApi
from headrace.server.errors import (
    ApiError,
    aborted,
    bad_request,
    deadline_exceeded,
    draining,
    duplicate_request,
    not_begun,
    not_ready,
    overloaded,
)
from headrace.server.output_text import OutputOptions
from headrace.server.sampling import choice_seed
from headrace.server.streams import StreamGroup
from headrace.server.tokenizer import Tokenizer

MAX_PENDING_BYTES: Final = 1 << 20
"""Of one choice's unread output. A text token takes some 16: a reader is cut 60,000 tokens behind."""


class PromptJob(msgspec.Struct, frozen=True):
    """One prompt, to be continued `n` times."""

    ids: I32
    sampling: SamplingParams
    n: int
    options: OutputOptions


class Terms(msgspec.Struct, frozen=True):
    """What a request says about itself as a whole."""

    cache_salt: str = ""
    priority: int = 0
    return_cached_details: bool = False
    prefetch_policy: PrefetchPolicy | Literal[""] = ""
    """"" is the server's."""
    deadline_ms: float = 0.0
    queue_deadline_ms: float = 0.0


class Generation:
    """One HTTP request's choices. Choice i of prompt p has the index p · n + i."""

    def __init__(self, running: Running, request_id: str, arrived_s: float) -> None:
        self.request_id = request_id
        self.arrived_s = arrived_s
        self._running = running
        self._handles: list[int] = []
        self._refusal: ApiError | None = None
        """Why nothing may be submitted any more."""
        self._waiting: asyncio.Timeout | None = None
        """Of what is awaited before the submission."""

    @property
    def elapsed_ms(self) -> float:
        """Since the request's arrival."""
        return (self._running.emitter.now() - self.arrived_s) * 1e3

    @asynccontextmanager
    async def waiting(self, terms: Terms) -> AsyncIterator[None]:
        """Await what comes before the submission, ids and grammars: an abort or a time limit, counted from the
        request's arrival, ends that. Raises ApiError 499, 503 (not begun in time), 504."""
        limits_ms = [limit_ms for limit_ms in (terms.deadline_ms, terms.queue_deadline_ms) if limit_ms > 0]
        first_ms = min(limits_ms, default=None)
        left_s = None if first_ms is None else (first_ms - self.elapsed_ms) / 1e3
        try:
            async with asyncio.timeout(left_s) as self._waiting:
                yield
        except TimeoutError:
            if self._refusal is not None:
                raise self._refusal from None
            if first_ms == terms.deadline_ms:
                raise deadline_exceeded(f"the request did not end within {first_ms:.0f} ms") from None
            raise not_begun(f"the request did not begin within {first_ms:.0f} ms; try again later") from None
        finally:
            self._waiting = None

    def submit(
        self,
        jobs: Sequence[PromptJob],
        tokenizer: Tokenizer,
        terms: Terms,
        *,
        eager: bool,
        keep_ids: bool = False,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> StreamGroup:
        """Queue every choice, or none.

        Raises ApiError 400 (can never fit, or never wait), 499 (aborted before), 503 (overloaded, stopping).
        """
        assert not self._handles, "submitted once"
        if self._refusal is not None:
            raise self._refusal
        count, most = sum(job.n for job in jobs), self._running.max_queued
        if count > most:
            raise bad_request(
                f"The request has {count} choices, prompts times `n`, but only {most} may wait at a time here "
                "(--max-queued-requests). Send fewer in one request.",
                "n",
                "invalid_value",
            )
        tokens, most = sum(job.n * len(job.ids) for job in jobs), self._running.max_queued_tokens
        if count > 1 and tokens > most:
            raise bad_request(
                f"The request's prompts have {tokens} tokens, each counted `n` times, but only {most} may wait at a "
                "time here (--max-queued-tokens). Send fewer in one request.",
                "n",
                "invalid_value",
            )
        group = StreamGroup(count, eager=eager, max_pending_bytes=max_pending_bytes, keep_ids=keep_ids)
        choices = [(job, choice) for job in jobs for choice in range(job.n)]
        try:
            for stream, (job, choice) in zip(group.streams, choices):
                handle = self._running.next_handle()
                self._handles.append(handle)
                self._running.emitter.open(handle, stream, tokenizer, job.options, self.arrived_s)
                self._running.engine.submit(_message(handle, job, choice, terms, self.elapsed_ms))
        except Overloaded as error:
            raise overloaded(str(error), error.retry_after_s) from None
        except EngineFailed as error:
            raise not_ready(f"The engine has failed: {error}", "server_failed", 10) from None
        except NeverFits as error:
            raise bad_request(str(error), code="context_length_exceeded") from None
        return group

    def abort(self, message: str, reason: Literal["abort", "draining"] = "abort") -> None:
        """End every choice that runs, or will: their streams end with the message."""
        self._refusal = aborted(message) if reason == "abort" else draining(message)
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(0)
        for handle in self._handles:
            self._running.engine.abort(handle)
            self._running.emitter.fail(handle, reason, message)

    def leave(self) -> None:
        """Nobody reads any more."""
        for handle in self._handles:
            if self._running.emitter.is_open(handle):
                self._running.emitter.forget(handle)
                self._running.engine.abort(handle)


class Running:
    """The requests that are being answered, by id."""

    def __init__(self, engine: EngineApi, emitter: Emitter, max_queued: int, max_queued_tokens: int) -> None:
        self.engine = engine
        self.emitter = emitter
        self.max_queued = max_queued
        self.max_queued_tokens = max_queued_tokens
        """Choices, and their prompts' tokens, that the engine lets wait: a request that has more could never be
        submitted. One choice alone may have more tokens."""
        self._generations: dict[str, Generation] = {}
        self._last_handle = 0

    def __len__(self) -> int:
        return len(self._generations)

    def next_handle(self) -> int:
        self._last_handle += 1
        return self._last_handle

    @contextmanager
    def claim(self, given_id: str | None, prefix: str, arrived_s: float) -> Iterator[Generation]:
        """Register a request under the client's id or a fresh one. `arrived_s`: by the emitter's clock; its time
        limits count from then. Raises ApiError 409 if the id is taken."""
        request_id = given_id or prefix + secrets.token_hex(16)
        if request_id in self._generations:
            raise duplicate_request(request_id)
        generation = self._generations[request_id] = Generation(self, request_id, arrived_s)
        try:
            yield generation
        finally:
            del self._generations[request_id]
            generation.leave()

    def abort(self, request_id: str, message: str) -> bool:
        """Abort a request by its id; False, and nothing done, if none runs under it."""
        generation = self._generations.get(request_id)
        if generation is None:
            return False
        generation.abort(message)
        return True

    def abort_all(self, message: str, reason: Literal["abort", "draining"] = "abort") -> int:
        """Abort every request; how many there were."""
        for generation in self._generations.values():
            generation.abort(message, reason)
        return len(self._generations)


def _message(handle: int, job: PromptJob, choice: int, terms: Terms, elapsed_ms: float) -> Submit:
    sampling = job.sampling
    if choice > 0:
        # The prompt's logprobs are the same for every choice: one computes them.
        seed = choice_seed(sampling.seed, choice)
        sampling = msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=-1)
    return Submit(
        request=handle,
        prompt_ids=job.ids,
        sampling=sampling,
        cache_salt=terms.cache_salt,
        priority=terms.priority,
        return_cached_details=terms.return_cached_details,
        prefetch_policy=terms.prefetch_policy,
        elapsed_ms=elapsed_ms,
        deadline_ms=terms.deadline_ms,
        queue_deadline_ms=terms.queue_deadline_ms,
    )

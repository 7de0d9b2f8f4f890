"""The boundary between the server and the scheduler: messages, no shared objects.

The server says `Submit`, `Abort`, `Conclude`; the scheduler answers with one `StepDeltas` a step. A request is named by
an integer handle that the server chooses and never uses twice.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.holding import WindowStats
from headrace.ops.wire import F32, I32
from headrace.sched.grammar import Grammar

MAX_LOGIT_BIASES: Final = 1024
"""Entries of `logit_bias`, and ids of `stop_ids`, that one request may have."""

FinishReason: TypeAlias = Literal["stop", "length", "abort", "timeout", "queue_timeout", "invalid_grammar", "error"]
"""`timeout`: not done in time; `queue_timeout`: not begun in time."""
WaitedFor: TypeAlias = Literal["", "turn", "slot", "pages", "budget", "prefix", "storage", "mask"]
"""What a request waited for before it began, the last thing of several: nothing; others before it; a slot
(`--max-running-requests`); KV pages; room in a step; pages that another request was computing; pages from storage; its
grammar's first mask."""

WaitCause: TypeAlias = Literal["turn", "slot", "pages", "budget", "prefix", "storage", "mask", "load", "prefill"]
WAIT_CAUSES: Final[tuple[WaitCause, ...]] = get_args(WaitCause)
"""What a request can wait for until its first id: the same, `turn` until it is first looked at; then `load`, copying
host pages to the device in its first step, and `prefill`, the rest of the steps until its first id."""


class SamplingParams(msgspec.Struct, frozen=True):
    """How ids are drawn. Defaults are OpenAI's; limits are checked by the API, asserted by the scheduler."""

    max_tokens: int
    """Output ids at most; at least 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """The draw at output position p is a pure function of (seed, p). The API draws a seed where none is given."""
    repetition_penalty: float = 1.0
    """Over prompt and output ids (CTRL, arXiv:1909.05858)."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    """Over output ids (OpenAI)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """Below this many outputs no stop id is drawn."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the request (the model's end-of-text ids, unless ignored, and the request's own)."""
    logprobs: int = -1
    """-1: none; k: the drawn id's and the k best's, at most `MAX_LOGPROBS`."""
    prompt_logprobs: int = -1
    """The same for the prompt's ids from `prompt_logprobs_from` on."""
    prompt_logprobs_from: int = 1
    """At least 1: the first id of a prompt follows nothing. What lies before can come from the cache."""
    grammar: Grammar | None = None
    """What the output must match. When it is complete the request ends, whatever `min_tokens` and `stop_ids` say."""


class Submit(msgspec.Struct, frozen=True):
    """A new request. `prompt_ids`: int32 [prompt tokens], at least one."""

    request: int
    prompt_ids: I32
    sampling: SamplingParams
    cache_salt: str = ""
    """Requests share cached pages only under equal salts."""
    adapter: str = ""
    """Part of a page's identity; no adapters yet."""
    priority: int = 0
    """Higher goes first."""
    return_cached_details: bool = False
    prefetch_policy: Literal["", "best_effort", "wait_complete", "timeout", "adaptive"] = ""
    """"" is the server's."""
    elapsed_ms: float = 0.0
    """Time since the request's arrival: what it waited for before its submission counts in both limits."""
    deadline_ms: float = 0.0
    """Time after its arrival at which the request ends with "timeout"; 0 is none."""
    queue_deadline_ms: float = 0.0
    """Time after its arrival at which it ends with "queue_timeout" if it has not begun; 0 is none."""


class Abort(msgspec.Struct, frozen=True):
    """End a request now; its ids no longer matter. Unknown or finished: no effect."""

    request: int


class Conclude(msgspec.Struct, frozen=True):
    """The detokenizer found a stop string: the request ended after `n_tokens` outputs. Later ids are dropped."""

    request: int
    n_tokens: int


class Started(msgspec.Struct, frozen=True):
    """Sent with a request's first ids: what its start cost. All ms are on the engine's clock."""

    request: int
    cached_tokens: int
    """Prompt tokens whose KV was reused, of any tier."""
    cached_device_tokens: int
    cached_host_tokens: int
    cached_storage_tokens: int
    page_tokens: int
    page_bytes: int
    """Of one page, all layers and groups."""
    waited_ms: dict[WaitCause, float]
    """The parts of the time from submission to the first id; together they are that time."""
    saved_ms: float
    """What computing the cached tokens would have taken, as estimated when it started."""
    saved_by: str
    """The estimate's formula; "" where nothing was measured, and `saved_ms` is 0."""
    prefetch_policy: str = ""
    """"" if storage was not asked, as are the next two."""
    prefetch_decision: str = ""
    """See `kvcache.prefetch.Decision`."""
    prefetch_reason: str = ""
    """What the policy went by when it was last asked; "" if all had come before."""
    waited_for: WaitedFor = ""
    """What was in its way when it was last looked at before it began."""

    @property
    def first_token_ms(self) -> float:
        """From submission to the first id."""
        return sum(self.waited_ms.values())

    @property
    def queue_ms(self) -> float:
        """From submission to the launch of its first chunk."""
        return sum(part_ms for cause, part_ms in self.waited_ms.items() if cause not in ("load", "prefill"))


class Finished(msgspec.Struct, frozen=True):
    """A request's end, sent exactly once, in the delta that carries its last ids or alone."""

    request: int
    reason: FinishReason
    n_tokens: int
    """Outputs that count."""
    message: str = ""
    """For "error" and "invalid_grammar": what happened and what to do."""
    matched_stop_id: int = -1
    retractions: int = 0


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of prompt ids [start, start + n): float32 [n], int32 and float32 [n, MAX_LOGPROBS]."""

    request: int
    start: int
    logprobs: F32
    top_ids: I32
    top_logprobs: F32


class StepDeltas(msgspec.Struct, frozen=True):
    """What one step gave: ids of `requests[i]` are `ids[offsets[i]:offsets[i + 1]]`, 0..k each.

    Arrays own their memory. Logprob arrays run along `ids` and are None when no request of the step asked.
    """

    step: int
    requests: NDArray[np.int64]
    offsets: I32
    ids: I32
    logprobs: F32 | None
    top_ids: I32 | None
    top_logprobs: F32 | None
    started: list[Started]
    finished: list[Finished]
    prompt_logprobs: list[PromptLogprobs]


Phase: TypeAlias = Literal["starting", "loading", "warming", "ready", "restarting", "draining", "failed"]


class EngineStatus(msgspec.Struct, frozen=True):
    """A snapshot for health, `/server_info` and metrics. Counters only grow, but for a restart of the server."""

    phase: Phase
    message: str
    """What is being done, or why the engine failed."""
    progress: float
    """Of the phase, 0..1."""
    device_name: str
    worker_pid: int
    """Of the device worker's process; 0 where there is none, or none now."""
    numerics: str
    """See `ops.wire.Ready.numerics`."""
    running: int
    waiting: int
    waiting_tokens: int
    max_context_tokens: int
    """The longest prompt plus outputs that can run: the model's context, or less where the pool is smaller."""
    page_tokens: int
    pages_total: int
    pages_free: int
    pages_cached: int
    """Device pages that only the index holds."""
    host_pages_total: int
    host_pages_free: int
    host_pages_cached: int
    copied_pages: int
    """Pages copied from the device to the host."""
    skipped_pages: int
    """Copies not made for lack of host room."""
    stored_pages: int
    """Pages that storage has acknowledged."""
    unstored_pages: int
    """Pages that storage did not take, and that are given up."""
    put_off_pages: int
    """Pages that storage did not take and that are written when it is usable and has nothing else to write."""
    storage_state: str
    """"none", "usable", or why it is not."""
    storage_restarts: int
    storage_deadlines_missed: int
    prefetch_useful_bytes: int
    prefetch_late_bytes: int
    prefetch_wasted_bytes: int
    prefetch_cancelled_bytes: int
    prefetch_declined_bytes: int
    page_bytes: int
    """Of one page, all layers and groups."""
    waited_ms: dict[WaitCause, float]
    """Of all requests that got their first id, by cause."""
    saved_ms: float
    """What computing the cached tokens would have taken, as estimated."""
    prefill_budget_tokens: int
    last_step_age_ms: float
    """Since the device last completed a step or had nothing to do; a hang shows here."""
    steps: int
    prompt_tokens: int
    cached_tokens: int
    cached_host_tokens: int
    cached_storage_tokens: int
    computed_tokens: int
    """Prompt tokens that were run through the model, recomputation after a retraction included."""
    output_tokens: int
    overrun_tokens: int
    retractions: int
    device_restarts: int
    step_failures: int
    integrity_alarms: int
    late_masks: int
    """Rows that were computed once more because their mask was late."""
    grammar_worker_restarts: int
    window_groups: list[WindowStats] = []
    """Pages of the layers that look at a window only; `pages_*` and `host_pages_*` are the others'."""


class Flushed(msgspec.Struct, frozen=True):
    """What `flush_cache` did: pages given back, and pages kept because requests, copies, writes or pins hold them."""

    dropped_pages: int
    """Of the device, as is `pinned_pages`."""
    pinned_pages: int
    dropped_host_pages: int = 0
    pinned_host_pages: int = 0


class Overloaded(Exception):
    """The waiting queue is at its bound (requests or tokens). HTTP 503; `retry_after_s` is an estimate."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NeverFits(Exception):
    """The request can never run on this server: its prompt and outputs need more KV pages than there are. HTTP 400."""

"""From a completed step to what the server is told: ids committed, ends found, pages published.

The common case, a row that goes on, is arrays alone; only rows that end, begin, or asked for logprobs are looked at one
by one. Ids drawn for a request that has ended since the launch (an overrun) are dropped here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.ops.wire import StepResults
from headrace.sched.batch import ScheduleBatch
from headrace.sched.budget import StepWork
from headrace.sched.messages import Finished, PromptLogprobs, Started, StepDeltas
from headrace.sched.request import Request, SlotTable, Stage
from headrace.sched.scheduler import Scheduler


@dataclass(slots=True, frozen=True)
class Want:
    """Prompt positions [start, start + count) of a request, at `offset` of the step's want arrays."""

    request: Request
    start: int
    offset: int
    count: int


@dataclass(slots=True)
class LaunchedStep:
    """What must be remembered of a step until its results are there."""

    step: int
    ring_slot: int
    slots: NDArray[np.int64]
    """[samples] in the order of the results."""
    generations: NDArray[np.int64]
    wants: list[Want]
    decode_rows: int
    kv_tokens: int
    """Sum of the decode rows' contexts."""
    prefill_tokens: int
    prefill_pairs: int
    read_tokens: int
    """Whose KV is read for the decode rows."""
    launched_s: float
    loading: list[Request]
    """Requests whose host pages it loads."""
    skipped: int = 0
    """Samples left out because their masks were late; their generations are then -1."""

    @property
    def work(self) -> StepWork:
        return StepWork(self.decode_rows, self.read_tokens, self.prefill_tokens, self.prefill_pairs)


def remember(batch: ScheduleBatch, table: SlotTable, step: int, ring_slot: int, now_s: float) -> LaunchedStep:
    """The record of a batch that is being launched."""
    sampling = [chunk.request.slot for chunk in batch.chunks if chunk.samples]
    slots = np.concatenate((batch.decode, np.array(sampling, np.int64)))
    wants: list[Want] = []
    offset = 0
    for chunk in batch.chunks:
        if chunk.wants:
            wants.append(Want(chunk.request, chunk.wants_from, offset, chunk.wants))
            offset += chunk.wants
    return LaunchedStep(
        step=step,
        ring_slot=ring_slot,
        slots=slots,
        generations=table.generation[slots],
        wants=wants,
        decode_rows=len(batch.decode),
        kv_tokens=int(table.computed[batch.decode].sum()) + len(batch.decode),
        prefill_tokens=batch.prefill_tokens,
        prefill_pairs=batch.prefill_pairs,
        read_tokens=batch.read_tokens,
        launched_s=now_s,
        loading=batch.loading,
    )


@dataclass(slots=True)
class Collected:
    """A step's deltas, the requests that ended in it (already given back), and the ids nobody waits for."""

    deltas: StepDeltas
    ended: list[Request]
    overruns: int
    matched: NDArray[np.int64]
    """Handles of requests that have a grammar and go on ..."""
    matched_ids: NDArray[np.int32]
    """... and the ids that they got."""


def collect(
    scheduler: Scheduler,
    launched: LaunchedStep,
    results: StepResults,
    stop_ids: NDArray[np.bool_],
    now_s: float,
    load_ms: float = 0.0,
) -> Collected:
    """Commit the ids of a completed step.

    `stop_ids`: bool [vocab], true for every id that ends some request; which one, each request knows. `load_ms`: of the
    step's time, what copying host pages to the device took.
    """
    table = scheduler.table
    for request in launched.loading:
        # What the step took belongs to the prefill, but for this part.
        if request.waits_for == "prefill":
            request.waited_ms["load"] += load_ms
            request.waited_ms["prefill"] -= load_ms
    count = len(launched.slots)
    rows = np.flatnonzero(table.generation[launched.slots] == launched.generations)
    slots = launched.slots[rows]
    ids = results.ids[:count][rows]
    failed = results.status[:count][rows] != 0
    table.tokens[slots, table.known[slots]] = ids
    table.known[slots] += 1
    known = table.known[slots]
    first = known - table.prompt[slots] == 1
    look = failed | first | (known >= table.limit[slots]) | table.watched[slots]
    look |= stop_ids[np.where(failed, 0, ids)]
    page_tokens, page_bytes = scheduler.cache.layout.page_tokens, scheduler.cache.page_bytes
    started: list[Started] = []
    finished: list[Finished] = []
    ended: list[Request] = []
    goes_on = np.ones(len(rows), np.bool_)
    table.known[slots[failed]] -= 1
    at = np.flatnonzero(look)
    looked = (at, slots[at], ids[at], table.known[slots[at]], failed[at], first[at])
    for i, slot, token, tokens, has_failed, is_first in zip(*(column.tolist() for column in looked)):
        request = table.requests[slot]
        assert request is not None
        if is_first and not has_failed:
            request.wait_for(None, now_s)
            started.append(_started(request, page_tokens, page_bytes))
        if (end := _end_of(request, token, tokens, has_failed)) is not None:
            finished.append(end)
            ended.append(request)
            goes_on[i] = False
    wants = [_prompt_logprobs(want, results) for want in launched.wants if want.request.stage is not Stage.ENDED]
    handles = table.handle[slots]
    matched = table.masked[slots] & goes_on
    _publish(scheduler, slots, goes_on)
    scheduler.end(ended)
    kept = np.flatnonzero(~failed)
    asked = bool(table.watched[slots].any())
    return Collected(
        deltas=StepDeltas(
            step=launched.step,
            requests=handles[kept],
            offsets=np.arange(len(kept) + 1, dtype=np.int32),
            ids=ids[kept],
            logprobs=results.logprobs[rows[kept]] if asked else None,
            top_ids=results.top_ids[rows[kept]] if asked else None,
            top_logprobs=results.top_logprobs[rows[kept]] if asked else None,
            started=started,
            finished=finished,
            prompt_logprobs=wants,
        ),
        ended=ended,
        overruns=count - len(rows) - launched.skipped,
        matched=handles[matched],
        matched_ids=ids[matched],
    )


def _end_of(request: Request, token: int, known: int, failed: bool) -> Finished | None:
    outputs = known - request.prompt_tokens
    handle, retractions = request.submit.request, request.retractions
    if failed:
        message = "the model gave logits that are not finite for this request; its input or the weights are damaged"
        return Finished(handle, "error", outputs, message, retractions=retractions)
    if token in request.submit.sampling.stop_ids and outputs > request.submit.sampling.min_tokens:
        return Finished(handle, "stop", outputs, matched_stop_id=token, retractions=retractions)
    # With a grammar its matcher says, some 0.1 ms later, whether the output is complete or cut.
    if known >= request.limit_tokens and request.matching is None:
        return Finished(handle, "length", outputs, retractions=retractions)
    return None


def _started(request: Request, page_tokens: int, page_bytes: int) -> Started:
    return Started(
        request=request.submit.request,
        cached_tokens=request.cached_tokens,
        cached_device_tokens=request.cached_tokens - request.cached_host_tokens - request.cached_storage_tokens,
        cached_host_tokens=request.cached_host_tokens,
        cached_storage_tokens=request.cached_storage_tokens,
        page_tokens=page_tokens,
        page_bytes=page_bytes,
        waited_ms=request.waited_ms,
        waited_for=request.waited_for,
        saved_ms=request.saved_ms,
        saved_by=request.saved_by,
        prefetch_policy=request.prefetch_policy,
        prefetch_decision=request.prefetch_decision,
        prefetch_reason=request.prefetch_reason,
    )


def _prompt_logprobs(want: Want, results: StepResults) -> PromptLogprobs:
    span = slice(want.offset, want.offset + want.count)
    # Only what has been told is not computed again after a retraction or the loss of a device.
    want.request.prompt_logprobs_from = max(want.request.prompt_logprobs_from, want.start + want.count)
    return PromptLogprobs(
        request=want.request.submit.request,
        start=want.start,
        logprobs=results.want_logprobs[span].copy(),
        top_ids=results.want_top_ids[span].copy(),
        top_logprobs=results.want_top_logprobs[span].copy(),
    )


def _publish(scheduler: Scheduler, slots: NDArray[np.int64], goes_on: NDArray[np.bool_]) -> None:
    """Index the pages that became full of known tokens. A request that ended has its last id's KV written, if at all,
    by an overrun: that position does not count. Nor does that of a request whose mask may be late: it is computed twice
    then, and by the second time somebody might read the page."""
    table = scheduler.table
    filled = np.minimum(table.known[slots] - (~goes_on | table.masked[slots]), table.computed[slots])
    page_tokens = scheduler.cache.layout.page_tokens
    fuller = np.flatnonzero(filled // page_tokens > table.published[slots])
    if len(fuller):
        requests = (table.requests[slot] for slot in slots[fuller].tolist())
        bound = [request for request in requests if request is not None]
        scheduler.publish(list(zip(bound, filled[fuller].tolist(), strict=True)))

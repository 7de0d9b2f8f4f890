"""The emit stage: whatever the ids, their split into steps and the stop strings, the text is the right one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from api.scripted import TOKENIZER, ScriptedEngine, ids_of, start_of, until
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sched.messages import Finished, StepDeltas
from headrace.server.emit import CHOICES_PER_SLICE, MAX_BACKLOG_STEPS, Emitter
from headrace.server.metrics import Metrics
from headrace.server.output_text import OutputOptions
from headrace.server.stop_strings import StopStrings
from headrace.server.streams import Delta, Finish, StreamGroup

TEXTS = st.text(alphabet=st.sampled_from("ab é😀\n日"), max_size=30)
BYTES = st.lists(st.integers(0, 255), max_size=30)


class Stage:
    """An emitter without a server: steps go in, deltas come out."""

    def __init__(
        self, choices: int = 1, options: OutputOptions | None = None, max_pending_bytes: int = 1 << 20
    ) -> None:
        self.now_s = 100.0
        self.engine = ScriptedEngine()
        self.emitter = Emitter(self.engine, Metrics(self.engine.status), lambda: self.now_s)
        self.group = StreamGroup(choices, eager=True, max_pending_bytes=max_pending_bytes, keep_ids=True)
        for stream in self.group.streams:
            self.emitter.open(stream.index, stream, TOKENIZER, options or OutputOptions(), self.now_s)

    def step(self, ids: Sequence[Sequence[int]], ends: Sequence[Finished] = ()) -> None:
        """One step: ids of each choice, in the order of their indices."""
        flat = np.array([id for own in ids for id in own], np.int32)
        offsets = np.cumsum([0, *map(len, ids)]).astype(np.int32)
        self.emitter.sink(StepDeltas(1, np.arange(len(ids)), offsets, flat, None, None, None, [], list(ends), []))

    async def all(self) -> list[Delta]:
        """What comes until every choice has ended, in order."""
        deltas: list[Delta] = []
        async with asyncio.timeout(20):
            while not self.group.finished:
                await asyncio.sleep(0)
                deltas += self.group.take()
        return deltas + self.group.take()


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    places = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    return [list(ids[low:high]) for low, high in pairwise(places)] or [[]]


def emitted(ids: Sequence[int], cuts: Sequence[int], options: OutputOptions) -> tuple[str, Delta, Stage]:
    async def main() -> tuple[str, Delta, Stage]:
        stage = Stage(options=options)
        parts = split(ids, cuts)
        for part in parts:
            stage.step([part])
        stage.step([[]], [Finished(0, "length", len(ids))])
        deltas = await stage.all()
        return "".join(delta.text for delta in deltas), deltas[-1], stage

    return asyncio.run(main())


@given(BYTES, st.lists(st.integers(0, 30)))
@settings(max_examples=150, deadline=None)
def test_b37_the_streamed_text_is_the_full_decode_for_any_bytes_and_any_split(ids: list[int], cuts: list[int]) -> None:
    text, last, _ = emitted(ids, cuts, OutputOptions())
    assert text == TOKENIZER.decode(ids)
    assert last.finish is not None and last.finish.n_tokens == len(ids)


@given(
    TEXTS,
    st.lists(st.text(alphabet="ab é😀", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 60)),
)
@settings(max_examples=200, deadline=None)
def test_b38_no_part_of_a_stop_string_is_ever_sent(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = ids_of(text)
    sent, last, stage = emitted(ids, cuts, OutputOptions(stops=StopStrings(stops)))
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    assert last.finish is not None
    if not ends:
        assert sent == text and last.finish.reason == "length" and stage.engine.concludes == []
        return
    end, minus_length, stop = min(ends)
    assert sent == text[: end + minus_length]
    assert last.finish.reason == "stop" and last.finish.matched == stop
    assert last.finish.n_tokens == len(ids_of(text[:end])), "usage counts to the token that completed it"
    assert stage.engine.concludes == [(0, last.finish.n_tokens)]


async def test_b39_a_choice_ends_once_whatever_comes_after() -> None:
    stage = Stage(options=OutputOptions(stops=StopStrings(["b"])))
    stage.step([ids_of("abc")])
    stage.step([ids_of("def")], [Finished(0, "length", 6)])
    deltas = await stage.all()
    await asyncio.sleep(0)
    assert stage.group.take() == []
    assert [delta.finish.reason for delta in deltas if delta.finish] == ["stop"]
    assert "".join(delta.text for delta in deltas) == "a"


async def test_a_stop_string_in_the_last_step_needs_no_conclusion() -> None:
    stage = Stage(options=OutputOptions(stops=StopStrings(["c"])))
    stage.step([ids_of("abc")], [Finished(0, "length", 3)])
    deltas = await stage.all()
    assert deltas[-1].finish is not None and deltas[-1].finish.reason == "stop"
    assert stage.engine.concludes == []


async def test_the_id_that_ended_a_request_is_no_text_but_counts() -> None:
    stage = Stage()
    stage.step([ids_of("a!")], [Finished(0, "stop", 2, matched_stop_id=ids_of("!")[0])])
    (delta,) = await stage.all()
    assert delta.text == "a" and delta.n_tokens == 2 and delta.ids == ids_of("a!")


async def test_text_comes_in_slices_and_the_engine_has_its_turn_between_them() -> None:
    choices = 3 * CHOICES_PER_SLICE
    stage = Stage(choices)
    turns: list[int] = []

    def turn() -> None:
        turns.append(sum(bool(stream.n_tokens) for stream in stage.group.streams))
        if turns[-1] < choices:
            asyncio.get_running_loop().call_soon(turn)

    stage.step([[65]] * choices)
    assert all(stream.n_tokens == 0 for stream in stage.group.streams), "sink only takes note"
    asyncio.get_running_loop().call_soon(turn)
    await until(lambda: bool(turns) and turns[-1] == choices)
    assert len(turns) >= 3 and all(b - a <= CHOICES_PER_SLICE for a, b in pairwise(turns))


async def test_a_slice_ends_when_its_millisecond_is_over() -> None:
    stage = Stage(4)
    clock_reads = 0

    def clock() -> float:
        nonlocal clock_reads
        clock_reads += 1
        return clock_reads * 0.0006

    stage.emitter._clock = clock
    stage.step([[65]] * 4)
    await asyncio.sleep(0)
    assert 0 < sum(bool(stream.n_tokens) for stream in stage.group.streams) < 4


async def test_a_backlog_is_bounded_and_loses_nothing() -> None:
    stage = Stage()
    for _ in range(MAX_BACKLOG_STEPS + 10):
        stage.step([[65]])
    assert len(stage.emitter._steps) == MAX_BACKLOG_STEPS
    stage.step([[65]], [Finished(0, "length", MAX_BACKLOG_STEPS + 11)])
    deltas = await stage.all()
    assert sum(len(delta.ids) for delta in deltas) == MAX_BACKLOG_STEPS + 11


async def test_a_stream_over_its_bytes_is_aborted_and_says_why() -> None:
    stage = Stage(max_pending_bytes=200)
    for _ in range(20):
        stage.step([[65]])
    await until(lambda: stage.group.finished)
    (delta,) = stage.group.take()
    assert delta.finish is not None and delta.finish.reason == "error" and "slowly" in delta.finish.message
    assert stage.engine.aborts == [0] and stage.emitter.open_choices == 0


async def test_steps_of_a_forgotten_choice_are_dropped() -> None:
    stage = Stage()
    stage.step([[65]])
    stage.emitter.forget(0)
    await asyncio.sleep(0)
    assert stage.group.take() == []


@pytest.mark.parametrize("reason", ["error", "timeout", "abort"])
async def test_an_end_without_ids_reaches_its_stream(reason: str) -> None:
    stage = Stage()
    stage.step([], [Finished(0, reason, 0, "because")])  # type: ignore[arg-type]
    (delta,) = await stage.all()
    assert delta.finish is not None and (delta.finish.reason, delta.finish.message) == (reason, "because")


async def test_latencies_are_measured_from_arrival_and_between_tokens() -> None:
    stage = Stage()
    stage.now_s = 100.5
    stage.step([[65]])
    await asyncio.sleep(0)
    stage.now_s = 100.52
    stage.step([[65, 66]], [Finished(0, "length", 3)])
    await stage.all()
    shown = stage.emitter._metrics.exposition().decode()
    assert "headrace:time_to_first_token_seconds_sum 0.5\n" in shown
    assert 'headrace:inter_token_latency_seconds_bucket{le="0.01"} 1.0' in shown
    assert 'headrace:request_finished_total{finished_reason="length"} 1.0' in shown


async def test_what_a_start_cost_reaches_the_stream() -> None:
    stage = Stage()
    started = start_of(0, 5, {"turn": 200.0, "storage": 50.0, "prefill": 3.0})
    none = np.zeros(0, np.int32)
    stage.emitter.sink(
        StepDeltas(1, none.astype(np.int64), np.zeros(1, np.int32), none, None, None, None, [started], [], [])
    )
    await asyncio.sleep(0)
    assert stage.group.streams[0].started == started
    assert "headrace:request_queue_time_seconds_sum 0.25\n" in stage.emitter._metrics.exposition().decode()


async def test_a_reader_that_waits_for_everything_is_woken_once() -> None:
    group = StreamGroup(2, eager=False, max_pending_bytes=1)
    wakes: list[bool] = []

    async def read() -> None:
        wakes.append(await group.wait(60))

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        await asyncio.sleep(0)
        for stream in group.streams:
            assert stream.put("text", [1], [], 1), "such a reader has no byte bound"
            await asyncio.sleep(0)
            assert wakes == []
            stream.end(Finish("stop", 1))
    assert wakes == [True]


async def test_silence_is_noticed() -> None:
    group = StreamGroup(1, eager=True, max_pending_bytes=1)
    assert await group.wait(0.0) is False

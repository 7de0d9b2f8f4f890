"""A CPU's copies to the host are made by a thread of their own, beside the steps, in order, and never ahead of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from ops.driver import Driver, Feed
from ops.slot_inits import SlotInit
from ops.stream_server import Outcome, StreamServer

from headrace.ops.copy_thread import CopyThread, cpu_streams
from headrace.ops.streams import Event, Streams
from headrace.ops.wire import BackupDone, StepDone, Stop

HOST_PAGES, HOST_SLOT_BYTES = 16, 16384
SEEDS = range(8)
TURNS = 12
DEADLINE_S = 60


@pytest.fixture
def copies() -> Iterator[CopyThread]:
    thread = CopyThread()
    yield thread
    thread.close()


def until(event: Event) -> None:
    while not event.query():
        pass


def blocked(copies: CopyThread) -> threading.Event:
    """The thread is at work until what is returned is set."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    copies.run(work)
    assert begun.wait(DEADLINE_S)
    return go_on


def copy_threads() -> int:
    return sum(thread.name == "copies" for thread in threading.enumerate())


# ---------------------------------------------------------------------------------------------------------------
# The stream


def test_work_is_done_in_order_beside_whoever_gave_it(copies: CopyThread) -> None:
    done: list[int] = []
    go_on = blocked(copies)
    before = copies.record()
    for number in range(20):
        copies.run(partial(done.append, number))
    after = copies.record()
    assert not before.query() and not after.query() and not done
    go_on.set()
    until(after)
    assert before.query() and done == list(range(20))
    assert before.ms_until(after) >= 0


def test_the_thread_may_run_on_any_core_though_its_maker_was_bound_to_one(copies: CopyThread) -> None:
    seen: list[set[int]] = []
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        copies.run(lambda: seen.append(os.sched_getaffinity(0)))
        until(copies.record())
    finally:
        os.sched_setaffinity(0, cores)
    assert seen == [cores]


def test_what_work_raises_reaches_whoever_asks_and_nothing_behind_it_is_done(copies: CopyThread) -> None:
    done: list[str] = []
    before = copies.record()
    copies.run(lambda: [].pop())
    copies.run(lambda: done.append("later"))
    after = copies.record()
    with pytest.raises(IndexError):
        until(after)
    assert before.query(), "it was done before"
    assert not done


def test_a_thread_that_cannot_begin_is_told_and_not_waited_for(
    copies: CopyThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: int, cores: object) -> None:
        raise OSError(f"thread {thread} may run on none of {cores}")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    event = copies.record()
    deadline_s = time.monotonic() + DEADLINE_S
    with pytest.raises(OSError, match="may run on none"):
        while time.monotonic() < deadline_s:
            event.query()


def test_while_it_is_held_nothing_begins(copies: CopyThread) -> None:
    done: list[str] = []
    go_on = blocked(copies)
    copies.run(lambda: done.append("copy"))
    after = copies.record()
    with copies.held():
        go_on.set()
        assert not done and not after.query()
    until(after)
    assert done == ["copy"]


def test_it_is_held_no_longer_when_a_step_fails(copies: CopyThread) -> None:
    with pytest.raises(ValueError), copies.held():
        raise ValueError
    until(copies.record())


def test_close_waits_for_the_copy_that_is_made_and_gives_up_the_others(copies: CopyThread) -> None:
    done: list[str] = []
    begun = threading.Event()

    def work() -> None:
        begun.set()
        while not copies._closed:
            pass
        done.append("begun")

    copies.run(work)
    copies.run(lambda: done.append("waiting"))
    assert begun.wait(DEADLINE_S)
    copies.close()
    assert done == ["begun"] and not copy_threads()
    copies.close()


def test_without_work_there_is_no_thread() -> None:
    copies = CopyThread()
    assert not copy_threads()
    copies.close()


# ---------------------------------------------------------------------------------------------------------------
# Under a worker


class Own:
    """A CPU's streams, which nobody watches."""

    def __init__(self) -> None:
        self.streams = cpu_streams()

    def host_uses(self, name: str, reads: object = (), writes: object = ()) -> None:
        pass


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = cpu_streams()
    yield made
    made.close()


def driver_on(streams: Streams, model: Path, **start: object) -> Driver:
    host = bytearray(HOST_PAGES * HOST_SLOT_BYTES)
    return Driver(model, host_pool=host, host_slot_bytes=HOST_SLOT_BYTES, streams=streams, **start)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("seed", SEEDS)
def test_b22_copies_beside_steps_come_to_the_same_bytes(small_model: Path, seed: int, kernels: str) -> None:
    expected: Outcome = StreamServer(small_model, seed, None, kernels=kernels).run(TURNS)
    own = Own()
    assert StreamServer(small_model, seed, own, kernels=kernels, most_looks=100_000_000).run(TURNS) == expected
    own.streams.close()


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_a_step_is_answered_while_a_copy_is_made_which_then_brings_what_was_there(
    small_model: Path, kernels: str, streams: Streams
) -> None:
    driver = driver_on(streams, small_model, kernels=kernels)
    driver.begin(SlotInit(0))
    driver.run(Feed(0, list(range(17))))
    go_on = blocked(streams.backup)  # type: ignore[arg-type]
    driver.back_up(driver.slots[0].pages[:1], [3])
    step = driver.launch([Feed(0, [5])])
    assert driver.drawn(step).keys() == {0}
    assert driver.worker.poll(), "the copy is under way"
    go_on.set()
    while driver.worker.poll():
        pass
    assert [type(reply) for reply in driver.replies[-3:]] == [StepDone, StepDone, BackupDone]
    copied = torch.frombuffer(driver.worker._host_buffer, dtype=torch.float32)[3 * HOST_SLOT_BYTES // 4 :]
    page = driver.pool.pages[:, driver.slots[0].pages[0]].flatten()
    assert torch.equal(copied[: len(page)], page) and page.any()


def test_no_copy_begins_while_a_step_brings_pages_from_the_host(small_model: Path, streams: Streams) -> None:
    driver = driver_on(streams, small_model)
    free: list[bool] = []
    assert isinstance(streams.backup, CopyThread)
    copies = streams.backup
    forward = driver.model.forward

    def watched(*arguments: object) -> torch.Tensor:
        free.append(copies._may_begin.is_set())
        return forward(*arguments)  # type: ignore[arg-type]

    driver.model.forward = watched  # type: ignore[assignment, method-assign]
    driver.begin(SlotInit(0))
    loaded = driver.give_pages(0, 16)[0]
    driver.slots[0].length = 16
    driver.run(Feed(0, [3]), loads=[(0, loaded)])
    driver.run(Feed(0, [4]))
    assert free == [False, True]


def test_stop_answers_the_copies_that_were_sent_before(small_model: Path, streams: Streams) -> None:
    driver = driver_on(streams, small_model)
    for page in range(HOST_PAGES):
        driver.back_up([page], [page])
    driver.worker.handle(Stop())
    assert sum(isinstance(reply, BackupDone) for reply in driver.replies) == HOST_PAGES
    assert driver.worker.finished


def test_a_worker_that_is_closed_with_copies_under_way_leaves_no_thread(small_model: Path, streams: Streams) -> None:
    driver = driver_on(streams, small_model)
    for page in range(HOST_PAGES):
        driver.back_up([page], [page])
    driver.worker.close()
    assert not copy_threads()


def test_a_copy_of_a_page_that_does_not_exist_is_an_error_at_once(small_model: Path, streams: Streams) -> None:
    driver = driver_on(streams, small_model)
    with pytest.raises(IndexError):
        driver.back_up([0], [HOST_PAGES])


def test_a_copy_that_fails_ends_the_worker(small_model: Path, streams: Streams) -> None:
    driver = driver_on(streams, small_model)
    streams.backup.run(lambda: [].pop())

    def serve() -> None:
        driver.back_up([0], [0])
        while driver.worker.poll():
            pass

    with pytest.raises(IndexError):
        serve()
    assert not any(isinstance(reply, BackupDone) for reply in driver.replies)

"""On streams that are late each step is still answered once, in order, when it is done or has failed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from ops.driver import Driver, Feed
from ops.fake_streams import FakeDevice
from ops.slot_inits import SlotInit

from headrace.ops.wire import (
    BackupDone,
    Forward,
    Ready,
    Reply,
    Sample,
    StepDone,
    StepFailed,
    Stop,
    encoder,
)
from headrace.ops.worker import serve

HOST_POOL = 4 * 16384


def late_driver(model: Path, device: FakeDevice) -> Driver:
    return Driver(model, host_pool=bytearray(HOST_POOL), host_slot_bytes=16384, streams=device.streams)


def test_a_step_that_fails_in_its_stream_is_answered_once_and_those_behind_it_too(
    small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(10):
        with FakeDevice(seed) as device:
            driver = late_driver(small_model, device)
            driver.begin(SlotInit(0))
            driver.begin(SlotInit(1))
            driver.launch([Feed(0, [1])])
            driver.give_pages(1, 20)
            driver._edits.clear()
            driver.launch([Feed(1, [2] * 20)])
            driver.launch([Feed(0, [3])])
            while driver.worker.poll():
                pass
            answers = [reply for reply in driver.replies if isinstance(reply, StepDone | StepFailed)]
            assert [type(answer) for answer in answers] == [StepDone, StepFailed, StepFailed]
            assert [answer.step for answer in answers] == [1, 2, 3]
            assert isinstance(answers[1], StepFailed)
            assert "page table has no page" in answers[1].message


def test_a_step_between_its_two_commands_is_answered_when_an_earlier_one_fails(small_model: Path) -> None:
    with FakeDevice(0) as device:
        driver = late_driver(small_model, device)
        driver.begin(SlotInit(0))
        driver.give_pages(0, 20)
        driver._edits.clear()
        driver.launch([Feed(0, [2] * 20)])
        driver._write([Feed(0, [3])], [])
        driver.worker.handle(Forward(2, 2))
        while driver.worker.poll():
            pass
        driver.worker.handle(Sample(2, 2))
        assert [reply.step for reply in driver.replies if isinstance(reply, StepFailed)] == [1, 2]


def test_a_batch_that_is_refused_is_answered_behind_the_steps_before_it(small_model: Path) -> None:
    with FakeDevice(1) as device:
        driver = late_driver(small_model, device)
        driver.begin(SlotInit(0))
        driver.launch([Feed(0, [1])])
        assert not any(isinstance(reply, StepDone) for reply in driver.replies), "the device was not late"
        driver.worker.handle(Forward(9, 1))
        answers = [reply for reply in driver.replies if isinstance(reply, StepDone | StepFailed)]
        assert [(type(answer), answer.step) for answer in answers] == [(StepDone, 1), (StepFailed, 9)]


def test_loads_of_pages_that_are_not_there_fail_their_step(small_model: Path) -> None:
    for seed in range(5):
        with FakeDevice(seed) as device:
            driver = late_driver(small_model, device)
            driver.begin(SlotInit(0))
            driver.launch([Feed(0, [1])], loads=[(77, 3)])
            while driver.worker.poll():
                pass
            assert isinstance(driver.replies[-1], StepFailed)
            assert "IndexError" in driver.replies[-1].message


def test_stop_ends_when_all_is_answered(small_model: Path) -> None:
    for seed in range(5):
        with FakeDevice(seed) as device:
            driver = late_driver(small_model, device)
            driver.begin(SlotInit(0))
            driver.launch([Feed(0, [1])])
            driver.back_up([0], [0])
            driver.worker.handle(Stop())
            assert driver.worker.finished
            assert {type(reply) for reply in driver.replies[-2:]} == {StepDone, BackupDone}


def test_a_served_worker_answers_a_step_though_no_other_command_comes(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with FakeDevice(0) as device, ours, theirs:
        driver = late_driver(small_model, device)

        def reply(message: Reply) -> None:
            driver.replies.append(message)
            ours.send(encoder.encode(Stop()))

        def idle() -> bool:
            raise AssertionError("the worker waits for a command, but a step is under way")

        driver.begin(SlotInit(0))
        driver._write([Feed(0, [1])], [])
        monkeypatch.setattr(driver.worker, "_reply", reply)
        monkeypatch.setattr(driver.worker, "idle", idle)
        ours.send(encoder.encode(Forward(1, 1)))
        ours.send(encoder.encode(Sample(1, 1)))
        serve(theirs, driver.worker)
        assert driver.drawn(1).keys() == {0}


def test_the_warm_up_measures_late_streams_too(small_model: Path) -> None:
    with FakeDevice(2) as device:
        driver = Driver(small_model, streams=device.streams, warm_up_tokens=32)
        ready = next(reply for reply in driver.replies if isinstance(reply, Ready))
        assert all(cost.step_ms > 0 for cost in ready.costs)
        assert device.accesses.conflicts == []

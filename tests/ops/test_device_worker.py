"""Commands are answered in order, each step once, and what can't be served is refused with a sentence."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ops.driver import Driver, Feed, read_config, ring_geometry, start_command
from ops.slot_inits import SlotInit

from headrace.ops import zeroed_memory
from headrace.ops.device_worker import DeviceWorker
from headrace.ops.wire import (
    Backup,
    BackupDone,
    Forward,
    GroupShape,
    Loaded,
    MakePools,
    Progress,
    Ready,
    Refused,
    Reply,
    Sample,
    StepDone,
    StepFailed,
    Stop,
)


def answer_to_start(model: Path, **changes: object) -> Reply:
    """The last reply to a `Start` with these changes."""
    config = read_config(model)
    replies: list[Reply] = []
    geometry = ring_geometry(config.vocab_size)
    worker = DeviceWorker(replies.append, bytearray(geometry.size_bytes))
    worker.handle(msgspec.structs.replace(start_command(config, model, geometry), **changes))
    assert worker.finished == isinstance(replies[-1], Refused)
    return replies[-1]


def test_replies_come_in_the_order_of_the_commands(small_model: Path) -> None:
    driver = Driver(small_model, host_pool=bytearray(1 << 16), host_slot_bytes=1 << 14)
    driver.begin(SlotInit(0))
    driver.launch([Feed(0, [1, 2, 3])])
    driver.back_up([0], [1])
    driver.launch([Feed(0, [4])])
    kinds = [type(reply) for reply in driver.replies if not isinstance(reply, Progress)]
    assert kinds == [Loaded, Ready, StepDone, BackupDone, StepDone]


def test_loaded_counts_the_weights_in_memory(small_model: Path) -> None:
    full, half = (answer_to_start(small_model, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert isinstance(full, Loaded)
    assert isinstance(half, Loaded)
    # More than the file: the embedding table is there as rows and packed.
    assert full.weights_bytes > small_model.stat().st_size - 10_000
    assert 0.5 <= half.weights_bytes / full.weights_bytes < 0.52


def test_kernels_that_multiply_otherwise_than_pages_say_are_refused(small_model: Path) -> None:
    refused = answer_to_start(small_model, kernels="compiled", dtype="bfloat16", dot="other")
    assert isinstance(refused, Refused)
    assert "multiply bfloat16 by other" in refused.message


def test_ready_names_the_device_and_its_numerics(small_model: Path) -> None:
    driver = Driver(small_model, threads=2)
    ready = driver.replies[-1]
    assert isinstance(ready, Ready)
    assert ready.device_name.endswith(", 2 threads")
    assert ready.numerics == "float32"
    assert ready.costs == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "float16"}, "--dtype float16 is not supported: use float32 or bfloat16"),
        ({"quantization": "q8"}, "--quantization q8 is not supported with --cpu-kernels torch"),
        ({"quantization": "q4", "kernels": "compiled"}, "--quantization q4 is not supported"),
        ({"model_path": "/nowhere/model.gguf"}, "/nowhere/model.gguf"),
        ({"max_context_tokens": 4096}, "--context-length 4096 is longer than the 1024 tokens"),
        ({"groups": [GroupShape("window", 64, [0, 1], 2, 16)]}, "serves the groups"),
        ({"ring": ring_geometry(99)}, "sized for 99 ids, the model has 131"),
        ({"max_slots": 2}, "there are 2 slots"),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_to_change(
    small_model: Path, changes: dict[str, object], says: str
) -> None:
    answer = answer_to_start(small_model, **changes)
    assert isinstance(answer, Refused)
    assert says in answer.message


def test_a_damaged_model_file_is_refused(small_model: Path, tmp_path: Path) -> None:
    config = read_config(small_model)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small_model.read_bytes()[:-1000])
    geometry = ring_geometry(config.vocab_size)
    replies: list[Reply] = []
    worker = DeviceWorker(replies.append, bytearray(geometry.size_bytes))
    worker.handle(start_command(config, cut, geometry))
    assert isinstance(replies[-1], Refused)
    assert "cut.gguf" in replies[-1].message
    assert worker.finished


def test_a_ring_that_is_too_small_is_refused(small_model: Path) -> None:
    config = read_config(small_model)
    replies: list[Reply] = []
    worker = DeviceWorker(replies.append, bytearray(100))
    worker.handle(start_command(config, small_model, ring_geometry(config.vocab_size)))
    assert isinstance(replies[-1], Refused)
    assert "the mapping has 100" in replies[-1].message


def test_a_pool_larger_than_the_address_space_is_refused_with_the_flag(small_model: Path) -> None:
    config = read_config(small_model)
    replies: list[Reply] = []
    geometry = ring_geometry(config.vocab_size)
    worker = DeviceWorker(replies.append, bytearray(geometry.size_bytes))
    worker.handle(start_command(config, small_model, geometry))
    worker.handle(MakePools([1 << 36], 0))
    assert isinstance(replies[-1], Refused)
    assert "Lower --max-total-tokens" in replies[-1].message
    assert worker.finished


def test_host_slots_that_are_too_small_for_a_page_are_refused(small_model: Path) -> None:
    config = read_config(small_model)
    replies: list[Reply] = []
    geometry = ring_geometry(config.vocab_size)
    worker = DeviceWorker(replies.append, bytearray(geometry.size_bytes), bytearray(1 << 16))
    worker.handle(start_command(config, small_model, geometry, host_slot_bytes=4096))
    worker.handle(MakePools([4], 0))
    assert isinstance(replies[-1], Refused)
    assert "a page takes 8192 bytes, a slot of the host pool 4096" in replies[-1].message


def test_after_a_failure_every_step_is_answered_once_with_failed(
    small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(small_model)
    driver.begin(SlotInit(0))
    driver.launch([Feed(0, [1])])
    driver.launch([Feed(0, [driver.config.vocab_size])])
    driver.launch([Feed(0, [2])])
    answers = [reply for reply in driver.replies if isinstance(reply, StepDone | StepFailed)]
    assert [(type(reply), reply.step) for reply in answers] == [(StepDone, 1), (StepFailed, 2), (StepFailed, 3)]
    assert isinstance(answers[1], StepFailed)
    assert answers[1].message == "BadBatch: the batch of step 2 has impossible input ids"
    assert "step 2 failed" in caplog.text


def test_a_failing_sample_is_answered_once(small_model: Path) -> None:
    driver = Driver(small_model)
    driver.begin(SlotInit(0))
    driver.launch([Feed(0, [1])])
    # The step has been sampled already.
    driver.worker.handle(Sample(1, 1))
    last = driver.replies[-1]
    assert isinstance(last, StepFailed)
    assert (last.step, "forward did not come last" in last.message) == (1, True)


def test_a_forward_of_a_batch_that_is_not_there_fails(small_model: Path) -> None:
    driver = Driver(small_model)
    driver.begin(SlotInit(0))
    driver.launch([Feed(0, [1])])
    driver.worker.handle(Forward(9, 1))
    last = driver.replies[-1]
    assert isinstance(last, StepFailed)
    assert "ring slot 1 holds step 1, not 9" in last.message


def test_a_failed_worker_still_backs_up_and_stops(small_model: Path) -> None:
    driver = Driver(small_model, host_pool=bytearray(1 << 16), host_slot_bytes=1 << 14)
    driver.worker.handle(Forward(9, 1))
    driver.back_up([0], [0])
    assert isinstance(driver.replies[-1], BackupDone)
    driver.worker.handle(Stop())
    assert driver.worker.finished


def test_a_command_before_its_time_is_an_error(small_model: Path) -> None:
    worker = DeviceWorker(lambda reply: None, bytearray(8))
    with pytest.raises(RuntimeError, match="MakePools was sent to a worker that is new"):
        worker.handle(MakePools([1], 0))
    with pytest.raises(RuntimeError, match="Backup was sent to a worker that is new"):
        worker.handle(Backup(1, 0, [], []))


def test_an_idle_worker_makes_its_pool_real_bit_by_bit(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.ops.device_worker.TOUCH_MS", 0.0)
    monkeypatch.setattr("headrace.ops.device_worker.IDLE_SLICE_MS", 0.01)
    driver = Driver(small_model, num_pages=4000)
    driver.fill(3999, 2.0)
    slices = 1
    while driver.worker.idle():
        slices += 1
    assert slices > 2
    assert (driver.pool.pages[:, 3999] == 2).all()
    assert (driver.pool.pages[:, :3999] == 0).all()


class HostFile:
    """The host pool as a server makes it."""

    def __init__(self, size_bytes: int) -> None:
        self.descriptor = os.memfd_create("host")
        os.ftruncate(self.descriptor, size_bytes)
        self.mapping = mmap.mmap(self.descriptor, size_bytes)

    @property
    def real_bytes(self) -> int:
        return os.fstat(self.descriptor).st_blocks * 512


@pytest.fixture
def host_file() -> Iterator[HostFile]:
    file = HostFile(2 << 20)
    yield file
    os.close(file.descriptor)


def test_an_idle_worker_makes_the_host_pool_real_and_changes_none_of_it(small_model: Path, host_file: HostFile) -> None:
    driver = Driver(small_model, host_pool=host_file.mapping, host_slot_bytes=1 << 14)
    storage = mmap.mmap(host_file.descriptor, len(host_file.mapping))
    storage[99] = storage[-1] = 7
    assert host_file.real_bytes < len(storage)
    while driver.worker.idle():
        pass
    assert host_file.real_bytes == len(storage)
    assert np.flatnonzero(np.frombuffer(storage, np.uint8)).tolist() == [99, len(storage) - 1]


def test_a_host_pool_that_cannot_be_made_real_is_left_as_it_is(
    small_model: Path, host_file: HostFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a kernel does that does not know it.
    monkeypatch.setattr(zeroed_memory, "_MADV_POPULATE_WRITE", 9999)
    driver = Driver(small_model, host_pool=host_file.mapping, host_slot_bytes=1 << 14)
    while driver.worker.idle():
        pass
    assert host_file.real_bytes == 0

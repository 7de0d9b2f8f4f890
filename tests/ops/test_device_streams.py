"""The worker of a card, on streams that are late: the same bytes, and a wait that is missing is found.

Everything but the card itself: staging slots, padded graphs that know nothing of Python, results that are sent, loads
and backups. The kernels are their torch references.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ops.driver import Driver, Feed, future
from ops.fake_streams import FakeDevice
from ops.slot_inits import SlotInit
from ops.stream_server import Outcome, StreamServer
from ops.test_streams import Watched, no_wait

from headrace.ops.cuda import staging
from headrace.ops.cuda.staging import Slot, Staging
from headrace.ops.cuda.step import DeviceStepRunner
from headrace.ops.runner import BackedUp, Sampled
from headrace.ops.streams import Event
from headrace.ops.triton import dispatch
from headrace.ops.wire import Backup, StepFailed

SEEDS = range(12)
TURNS = 10


@pytest.fixture(scope="module", autouse=True)
def references() -> Iterator[None]:
    """In place of kernels, which the interpreter would run, hundreds of times slower; they have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "INTERPRETED", False)
        yield


@pytest.fixture(scope="module")
def in_order(references: None, small_model: Path) -> list[Outcome]:
    """What each seed's commands come to where everything is done in order."""
    return [StreamServer(small_model, seed, None, kernels="triton").run(TURNS) for seed in SEEDS]


@pytest.fixture(scope="module")
def windowed_in_order(references: None, windowed_model: Path) -> list[Outcome]:
    """The same with a window group: rows leave pages behind, which others get."""
    return [StreamServer(windowed_model, seed, None, kernels="triton", windows=True).run(TURNS) for seed in SEEDS]


def run_late(
    model: Path,
    seed: int,
    *,
    fences: bool = True,
    harm: Callable[[FakeDevice], None] = lambda device: None,
    windows: bool = False,
) -> tuple[Outcome, FakeDevice]:
    """The same commands, on streams that are late; `harm` may take a wait away."""
    with FakeDevice(seed) as device:
        harm(device)
        server = StreamServer(model, seed, device, fences=fences, kernels="triton", windows=windows)
        return server.run(TURNS), device


def found(
    model: Path,
    in_order: list[Outcome],
    *,
    fences: bool = True,
    harm: Callable[[FakeDevice], None] = lambda device: None,
    windows: bool = False,
) -> tuple[str, int]:
    """All conflicts, a line each, and how many seeds came to other bytes."""
    runs = [run_late(model, seed, fences=fences, harm=harm, windows=windows) for seed in SEEDS]
    conflicts = "\n".join(conflict for _, device in runs for conflict in device.accesses.conflicts)
    return conflicts, sum(outcome != expected for (outcome, _), expected in zip(runs, in_order))


@pytest.mark.parametrize("seed", SEEDS)
def test_late_streams_come_to_the_same_bytes(small_model: Path, in_order: list[Outcome], seed: int) -> None:
    outcome, device = run_late(small_model, seed)
    assert device.accesses.conflicts == []
    assert outcome == in_order[seed]


@pytest.mark.parametrize("seed", SEEDS)
def test_late_streams_of_several_groups_come_to_the_same_bytes(
    windowed_model: Path, windowed_in_order: list[Outcome], seed: int
) -> None:
    outcome, device = run_late(windowed_model, seed, windows=True)
    assert device.accesses.conflicts == []
    assert outcome == windowed_in_order[seed]


def test_a_window_group_that_does_not_wait_for_its_loads_is_found(
    windowed_model: Path, windowed_in_order: list[Outcome]
) -> None:
    conflicts, wrong = found(
        windowed_model,
        windowed_in_order,
        harm=lambda device: setattr(device.compute, "wait", no_wait),
        windows=True,
    )
    for group in (0, 1):
        assert re.search(
            rf"^attention of .* reads .* of group {group}, .* nothing says that load of step", conflicts, re.M
        )
    assert wrong


def test_pages_that_windows_left_behind_and_others_got_too_soon_are_found(
    windowed_model: Path, windowed_in_order: list[Outcome]
) -> None:
    conflicts, wrong = found(windowed_model, windowed_in_order, fences=False, windows=True)
    assert re.search(
        r"^(attention .* device pages of group 1, .* load of|load of .* device pages of group 1, .* attention of)",
        conflicts,
        re.M,
    )
    assert wrong


def test_the_runs_have_graphs_kernels_loads_and_backups(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []
    stage = DeviceStepRunner._stage

    def watched(runner: DeviceStepRunner, *arguments: object) -> object:
        step = stage(runner, *arguments)  # type: ignore[arg-type]
        kinds.append((step.graph is not None, len(step.rows.ids) > step.batch.counts.rows, step.batch.counts.loads > 0))
        return step

    monkeypatch.setattr(DeviceStepRunner, "_stage", watched)
    traces = [run_late(small_model, seed)[1].trace for seed in SEEDS]
    assert {(True, True, False), (True, False, False), (False, True, False), (False, True, True)} <= set(kinds)
    for kind in ("backup", "load", "draws", "staging", "copy of staging"):
        assert sum(name.startswith(kind) for trace in traces for name in trace) > 20, kind


def test_a_layer_that_does_not_wait_for_its_load_is_found(small_model: Path, in_order: list[Outcome]) -> None:
    conflicts, wrong = found(small_model, in_order, harm=lambda device: setattr(device.compute, "wait", no_wait))
    assert re.search(r"^attention of step \d+, layer 1 reads .* nothing says that load of step", conflicts, re.M)
    assert wrong


def test_one_layer_that_waits_for_the_layer_before_it_is_found(small_model: Path, in_order: list[Outcome]) -> None:
    def harm(device: FakeDevice) -> None:
        wait = device.compute.wait
        waits = 0

        def every_second(event: Event) -> None:
            nonlocal waits
            waits += 1
            if waits % 2:
                wait(event)

        device.compute.wait = every_second  # type: ignore[method-assign]

    conflicts, _ = found(small_model, in_order, harm=harm)
    assert "layer 1 reads" in conflicts
    assert "layer 0 reads" not in conflicts


def test_a_backup_that_does_not_wait_for_the_steps_before_it_is_found(
    small_model: Path, in_order: list[Outcome]
) -> None:
    conflicts, _ = found(small_model, in_order, harm=lambda device: setattr(device.backup, "wait", no_wait))
    assert re.search(r"^backup \d+ reads .* nothing says that attention of step .* has written it$", conflicts, re.M)


def test_a_staging_slot_that_is_written_before_it_was_copied_is_found(
    small_model: Path, in_order: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "SLOTS", 1)
    monkeypatch.setattr(Staging, "close", lambda self, number, done: None)
    wrong, conflicts = 0, list[str]()
    for seed in SEEDS:
        with FakeDevice(seed) as device:
            try:
                wrong += StreamServer(small_model, seed, device, kernels="triton").run(TURNS) != in_order[seed]
            except (AssertionError, IndexError, RuntimeError):
                # An index that was another field's: the step failed.
                wrong += 1
        conflicts += device.accesses.conflicts
    assert re.search(
        r"^staging of step \d+ overwrites place 0 of staging, .* nothing says that copy of staging slot 0 has read it$",
        "\n".join(conflicts),
        re.M,
    )
    assert wrong


def test_a_step_that_reads_its_staging_slot_before_the_copy_is_found(
    small_model: Path, in_order: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the copy it has what the step before it had."""
    sends = iter(range(1_000_000))
    send = Slot.send
    monkeypatch.setattr(Slot, "send", lambda self: send(self) if next(sends) % 9 else None)
    wrong = 0
    for seed in SEEDS:
        try:
            wrong += run_late(small_model, seed)[0] != in_order[seed]
        except (AssertionError, IndexError, RuntimeError):
            wrong += 1
    assert wrong == len(SEEDS)


def test_a_step_that_is_answered_before_its_results_were_sent_is_found(
    small_model: Path, in_order: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = DeviceStepRunner.sample

    def early(runner: DeviceStepRunner, *arguments: object) -> Sampled:
        sampled = sample(runner, *arguments)  # type: ignore[arg-type]
        return Sampled(sampled.step, sampled.spans[0][0], (), sampled.load)

    monkeypatch.setattr(DeviceStepRunner, "sample", early)
    monkeypatch.setattr(staging, "SLOTS", 8)
    conflicts, wrong = found(small_model, in_order)
    assert re.search(
        r"^the server reads place . of results, .* nothing says that sample of step .* it$", conflicts, re.M
    )
    assert wrong


def test_a_backup_that_is_answered_before_it_has_copied_is_found(
    small_model: Path, in_order: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up = DeviceStepRunner.back_up

    def early(runner: DeviceStepRunner, command: Backup) -> BackedUp:
        event = runner._streams.backup.record()
        return back_up(runner, command)._replace(done=event)

    monkeypatch.setattr(DeviceStepRunner, "back_up", early)
    conflicts, wrong = found(small_model, in_order)
    assert re.search(r"^load .* host pages .* nothing says that backup .* has written it$", conflicts, re.M)
    assert wrong


def test_a_server_that_gives_out_pages_too_soon_is_found(small_model: Path, in_order: list[Outcome]) -> None:
    conflicts, wrong = found(small_model, in_order, fences=False)
    assert re.search(
        r"^(attention .* device pages .* load of|load of .* device pages .* attention of)", conflicts, re.M
    )
    assert wrong


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_operations_touch_no_pages_but_those_they_declare(
    small_model: Path,
    in_order: list[Outcome],
    windowed_model: Path,
    windowed_in_order: list[Outcome],
    seed: int,
    windows: bool,
) -> None:
    """Of a window group: those that a row's window, and the block of keys that it begins in, have."""
    model, expected = (windowed_model, windowed_in_order) if windows else (small_model, in_order)
    watched = Watched()
    with torch.inference_mode():
        watched.server = server = StreamServer(model, seed, watched, kernels="triton", windows=windows)
        assert server.run(TURNS) == expected[seed]
    assert watched.names >= {"forward", "inputs", "attention", "sample", "draws", "load", "backup"}


def test_more_steps_under_way_than_there_are_slots_are_refused(small_model: Path) -> None:
    with FakeDevice(3) as device:
        device.pass_time = lambda event=None: None  # type: ignore[method-assign]
        driver = Driver(small_model, streams=device.streams, kernels="triton")
        driver.begin(SlotInit(0))
        driver.launch([Feed(0, [1, 2])])
        for _ in range(2):
            driver.launch([Feed(0, [future(0)])])
        with pytest.raises(staging.TooManySteps, match="while 3 steps were under way"):
            driver.worker._runner.forward(driver.ring.read(1), driver.ring.results(1))
    assert not any(isinstance(reply, StepFailed) for reply in driver.replies)

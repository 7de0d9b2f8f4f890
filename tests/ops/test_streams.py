"""Streams may be as late as they like: the bytes are the same, and a wait that is missing is found (B21, B22, B23)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from ops.driver import Driver, Feed
from ops.fake_streams import FakeDevice
from ops.slot_inits import SlotInit
from ops.stream_server import Outcome, StreamServer
from torch import Tensor

from headrace.ops.runner import BackedUp, Sampled
from headrace.ops.step import StepRunner
from headrace.ops.streams import CpuStream, Event, Operation, Region, Streams, in_order_streams
from headrace.ops.wire import Backup

SEEDS = range(24)
TURNS = 12
HOST_POOL = 4 * 16384


@pytest.fixture(scope="module")
def in_order(small_model: Path) -> list[Outcome]:
    """What each seed's commands come to where everything is done in order."""
    return [StreamServer(small_model, seed, None).run(TURNS) for seed in SEEDS]


def run_late(
    model: Path, seed: int, *, fences: bool = True, harm: Callable[[FakeDevice], None] = lambda device: None
) -> tuple[Outcome, FakeDevice]:
    """The same commands, on streams that are late; `harm` may take a wait away."""
    with FakeDevice(seed) as device:
        harm(device)
        return StreamServer(model, seed, device, fences=fences).run(TURNS), device


def found(
    model: Path,
    in_order: list[Outcome],
    *,
    fences: bool = True,
    harm: Callable[[FakeDevice], None] = lambda device: None,
) -> tuple[str, int]:
    """All conflicts, a line each, and how many seeds came to other bytes."""
    runs = [run_late(model, seed, fences=fences, harm=harm) for seed in SEEDS]
    conflicts = "\n".join(conflict for _, device in runs for conflict in device.accesses.conflicts)
    return conflicts, sum(outcome != expected for (outcome, _), expected in zip(runs, in_order))


# ---------------------------------------------------------------------------------------------------------------
# With all waits


@pytest.mark.parametrize("seed", SEEDS)
def test_b23_late_streams_come_to_the_same_bytes(small_model: Path, in_order: list[Outcome], seed: int) -> None:
    outcome, device = run_late(small_model, seed)
    assert device.accesses.conflicts == []
    assert outcome == in_order[seed]


def test_the_runs_have_loads_shares_backups_and_steps_that_overlap(small_model: Path, in_order: list[Outcome]) -> None:
    traces = [run_late(small_model, seed)[1].trace for seed in SEEDS]
    assert sum(len(outcome.loaded) for outcome in in_order) > 50
    for kind in ("backup", "load", "draws", "inputs", "clearing"):
        assert sum(name.startswith(kind) for trace in traces for name in trace) > 30, kind
    ahead = 0
    for trace in traces:
        steps = [(name.split()[0], int(name.split()[3].rstrip(","))) for name in trace if " step " in name]
        last = {"load": 0, "draws": 0}
        for kind, step in steps:
            last[kind] = step
            ahead += kind == "load" and step > last["draws"] + 1
    assert ahead > 5, "no load ran while the step before it computed"


def test_a_layer_waits_for_its_own_pages_and_no_others(small_model: Path) -> None:
    """In some schedule layer 0 computes before layer 1 has come, in others after; never before its own."""
    orders = set()
    for seed in range(30):
        with FakeDevice(seed) as device:
            driver = Driver(small_model, host_pool=bytearray(HOST_POOL), host_slot_bytes=16384, streams=device.streams)
            driver.begin(SlotInit(0))
            loaded = driver.give_pages(0, 16)[0]
            driver.slots[0].length = 16
            driver.launch([Feed(0, [1])], loads=[(0, loaded)])
            while driver.worker.poll():
                pass
            orders.add("".join(name[0] + name[-1] for name in device.trace if name[0] in "la" and "layer" in name))
    assert orders == {"l0l1a0a1", "l0a0l1a1"}


# ---------------------------------------------------------------------------------------------------------------
# With a wait taken away


def no_wait(event: Event) -> None:
    pass


def test_b23_a_layer_that_does_not_wait_for_its_load_is_found(small_model: Path, in_order: list[Outcome]) -> None:
    conflicts, wrong = found(small_model, in_order, harm=lambda device: setattr(device.compute, "wait", no_wait))
    assert re.search(
        r"^attention of step (\d+), layer 1 reads place \d+ of device pages of group 0, layer 1:"
        r" nothing says that load of step \1, layer 1 has written it$",
        conflicts,
        re.MULTILINE,
    )
    assert wrong


def test_b23_one_layer_that_waits_for_the_layer_before_it_is_found(small_model: Path, in_order: list[Outcome]) -> None:
    def harm(device: FakeDevice) -> None:
        wait = device.compute.wait
        waits = 0

        def every_second(event: Event) -> None:
            nonlocal waits
            waits += 1
            if waits % 2:
                wait(event)

        device.compute.wait = every_second  # type: ignore[method-assign]

    conflicts, wrong = found(small_model, in_order, harm=harm)
    assert "layer 1 reads" in conflicts
    assert "layer 0 reads" not in conflicts
    assert wrong


def test_a_backup_that_does_not_wait_for_the_steps_before_it_is_found(
    small_model: Path, in_order: list[Outcome]
) -> None:
    conflicts, wrong = found(small_model, in_order, harm=lambda device: setattr(device.backup, "wait", no_wait))
    assert re.search(
        r"^backup \d+ reads place .* nothing says that attention of step .* has written it$", conflicts, re.M
    )
    assert wrong


def test_a_step_that_is_answered_before_it_has_sampled_is_found(
    small_model: Path, in_order: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = StepRunner.sample

    def early(runner: StepRunner, *arguments: object) -> Sampled:
        sampled = sample(runner, *arguments)  # type: ignore[arg-type]
        return Sampled(sampled.step, sampled.spans[0][0], (), sampled.load)

    monkeypatch.setattr(StepRunner, "sample", early)
    conflicts, wrong = found(small_model, in_order)
    assert re.search(
        r"^the server reads place . of results, .* nothing says that sample of step .* it$", conflicts, re.M
    )
    assert re.search(
        r"^(clearing|load|attention).* overwrites .* device pages .* has (read|written) it$", conflicts, re.M
    )
    assert wrong


def test_b22_a_backup_that_is_answered_before_it_has_copied_is_found(
    small_model: Path, in_order: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up = StepRunner.back_up

    def early(runner: StepRunner, command: Backup) -> BackedUp:
        event = runner._streams.backup.record()
        return back_up(runner, command)._replace(done=event)

    monkeypatch.setattr(StepRunner, "back_up", early)
    conflicts, wrong = found(small_model, in_order)
    assert re.search(
        r"^the server reads place . of host pages .* nothing says that backup .* has written it$", conflicts, re.M
    )
    assert re.search(
        r"^load .* reads place . of host pages .* nothing says that backup .* has written it$", conflicts, re.M
    )
    assert re.search(r"^\w+ .* overwrites .* device pages .* nothing says that backup .* has read it$", conflicts, re.M)
    assert wrong


def test_b21_a_server_that_gives_out_pages_too_soon_is_found(small_model: Path, in_order: list[Outcome]) -> None:
    conflicts, wrong = found(small_model, in_order, fences=False)
    # Whoever came first on a schedule.
    assert re.search(
        r"^(attention .* device pages .* load of|load of .* device pages .* attention of)", conflicts, re.M
    )
    assert re.search(r"^(storage .* host pages .* load of|load of .* host pages .* storage)", conflicts, re.M)
    assert wrong


# ---------------------------------------------------------------------------------------------------------------
# What operations declare is what they touch


class Watched:
    """In-order streams; while an operation runs, all pages that it did not declare hold NaN, and those that it declared
    to read must stay as they are."""

    def __init__(self) -> None:
        compute, load, backup = (WatchedStream(self, at_once=at_once) for at_once in (True, False, False))
        self.streams = Streams(compute, load, backup)
        self.server: StreamServer | None = None
        self.names: set[str] = set()
        self._hidden: list[tuple[Tensor, Tensor, Tensor]] = []
        self._read: list[tuple[Tensor, Tensor, Tensor]] = []

    def host_uses(self, name: str, reads: Sequence[Region] = (), writes: Sequence[Region] = ()) -> None:
        self.begin(Operation(name, reads, writes))

    def begin(self, operation: Operation) -> None:
        """What was hidden from the last operation must be as it was, and comes back."""
        for pages, read, kept in self._read:
            assert torch.equal(pages[read], kept), "an operation wrote what it declared to read"
        for pages, hidden, kept in self._hidden:
            assert pages[hidden].isnan().all(), "an operation wrote what it did not declare"
            pages[hidden] = kept
        self._read.clear()
        self._hidden.clear()
        self.names.add(operation.name.split()[0])
        if self.server is None:
            return
        for memory, pages in self.server.memories().items():
            written = _marked(pages, memory, operation.writes)
            read = _marked(pages, memory, operation.reads) & ~written
            hidden = ~(written | read)
            self._read.append((pages, read, pages[read]))
            self._hidden.append((pages, hidden, pages[hidden]))
            pages[hidden] = math.nan


def _marked(pages: Tensor, memory: str, regions: Sequence[Region]) -> Tensor:
    """bool `[layers, pages]`"""
    marked = torch.zeros(pages.shape[:2], dtype=torch.bool)
    for region in regions:
        if region.memory == memory:
            marked[region.layer, list(region.places)] = True
    return marked


class WatchedStream(CpuStream):
    def __init__(self, watched: Watched, *, at_once: bool) -> None:
        super().__init__(at_once=at_once)
        self._watched = watched

    def uses(self, operation: Callable[[], Operation]) -> None:
        self.run(lambda: self._watched.begin(operation()))


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_operations_touch_no_pages_but_those_they_declare(
    small_model: Path, in_order: list[Outcome], seed: int
) -> None:
    watched = Watched()
    with torch.inference_mode():
        watched.server = server = StreamServer(small_model, seed, watched)
        assert server.run(TURNS) == in_order[seed]
    assert watched.names >= {"forward", "inputs", "clearing", "attention", "sample", "draws", "load", "backup"}


# ---------------------------------------------------------------------------------------------------------------
# All in one thread


def test_steps_compute_at_once_and_loads_come_right_before_the_layer_that_waits() -> None:
    compute, load, *_ = in_order_streams()
    done: list[str] = []
    events = []
    for layer in range(3):
        load.run(lambda layer=layer: done.append(f"load {layer}"))  # type: ignore[misc]
        events.append(load.record())

    def step() -> None:
        for layer in (0, 1):
            compute.wait(events[layer])
            done.append(f"layer {layer}")

    began = compute.record()
    compute.run(step)
    ended = compute.record()
    assert done == ["load 0", "layer 0", "load 1", "layer 1"]
    assert ended.query()
    assert began.ms_until(ended) >= 0
    assert events[2].query()
    assert done[-1] == "load 2"


def test_what_is_put_off_is_made_when_it_is_asked_for_and_its_failure_reaches_whoever_asks() -> None:
    compute, _, backup, *_ = in_order_streams()
    backup.wait(compute.record())
    done: list[str] = []
    backup.run(lambda: done.append("backup"))
    event = backup.record()
    assert done == []
    assert event.query()
    assert event.query()
    assert done == ["backup"]
    backup.run(lambda: [].pop())
    with pytest.raises(IndexError):
        backup.record().query()

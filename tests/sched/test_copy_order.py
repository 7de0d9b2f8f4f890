"""What the scheduler and the cache send keeps to the contract of the device's streams, whatever the schedule.

The oracle executes commands one after the other, so it can't tell a load that was only lucky to come late. Here the
commands of whole simulated runs are ordered as by the streams (`ops/streams.py`): a load knows what the server knew
when it sent it, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import re

import numpy as np
import pytest
from ops.happens_before import Accesses, Clock

from headrace.kvcache.pool import Fence, PagePool
from headrace.ops.streams import Operation, Region
from headrace.ops.wire import (
    I32,
    Backup,
    BackupDone,
    Command,
    Forward,
    ForwardBatch,
    Sample,
    Start,
    StepDone,
    reply_decoder,
)
from headrace.sched.device import Device
from headrace.server.sim.torture import torture
from headrace.server.sim.virtual_loop import run
from headrace.server.sim.world import World, WorldShape

SEEDS = range(30)


class CopyWatch:
    """Listens to a server's devices, one life after the other, and keeps the clocks of its streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.conflicts: list[str] = []
        self.loaded_pages = self.backed_up_pages = 0
        send, reply = Device.send, Device._reply

        def watched_send(device: Device, command: Command) -> None:
            self._sent(device, command)
            send(device, command)

        def watched_reply(device: Device, message: bytes) -> None:
            self._heard(message)
            reply(device, message)

        monkeypatch.setattr(Device, "send", watched_send)
        monkeypatch.setattr(Device, "_reply", watched_reply)
        self._begin()

    def _begin(self) -> None:
        """A new device: whatever touched the old one's pages is over."""
        self._accesses = Accesses()
        self._server, self._compute, self._load, self._backup = (Clock() for _ in range(4))
        self._tables: dict[tuple[int, int], dict[int, int]] = {}
        """Group and slot → page-table index → page."""
        self._steps: dict[int, Clock] = {}
        self._backups: dict[int, list[Clock]] = {}

    def _sent(self, device: Device, command: Command) -> None:
        match command:
            case Start():
                self._begin()
                self._page_tokens = command.page_tokens
            case Forward():
                self._forward(device.ring.read(command.ring_slot))
            case Sample():
                self._steps[command.step] = self._compute.copy()
            case Backup():
                self._backup.learn(self._server)
                self._backup.learn(self._compute)
                self.backed_up_pages += len(command.device_pages)
                reads = [Region(f"device pages of group {command.group}", 0, command.device_pages)]
                writes = [Region("host pages", 0, command.host_pages)]
                self._accesses.note("backup", self._backup, Operation(f"backup {command.transfer}", reads, writes))
                self._backups.setdefault(command.transfer, []).append(self._backup.copy())
        self.conflicts += self._accesses.conflicts
        self._accesses.conflicts.clear()

    def _heard(self, message: bytes) -> None:
        match reply_decoder.decode(message):
            case StepDone() as done:
                self._server.learn(self._steps.pop(done.step))
            case BackupDone() as done:
                self._server.learn(self._backups[done.transfer].pop(0))

    def _forward(self, batch: ForwardBatch) -> None:
        name = f"step {batch.step}"
        pages = self._touched(batch)
        self._load.learn(self._server)
        self._compute.learn(self._server)
        for group in np.unique(batch.load_group).tolist():
            here = batch.load_group == group
            self.loaded_pages += int(here.sum())
            reads = [Region("host pages", 0, batch.load_host[here])]
            writes = [Region(f"device pages of group {group}", 0, batch.load_device[here])]
            self._accesses.note("load", self._load, Operation(f"load of {name}", reads, writes))
        self._compute.learn(self._load)
        for group, (read, written) in pages.items():
            memory = f"device pages of group {group}"
            attention = Operation(f"attention of {name}", [Region(memory, 0, read)], [Region(memory, 0, written)])
            self._accesses.note("compute", self._compute, attention)

    def _touched(self, batch: ForwardBatch) -> dict[int, tuple[list[int], list[int]]]:
        """Group → pages that the batch's rows read, and those that they write."""
        for (_, slot), table in self._tables.items():
            if slot in batch.init_slot:
                table.clear()
        edits = zip(*(field.tolist() for field in (batch.edit_group, batch.edit_slot, batch.edit_index)))
        for (group, slot, index), page in zip(edits, batch.edit_page.tolist()):
            self._tables.setdefault((group, slot), {})[index] = page
        touched: dict[int, tuple[list[int], list[int]]] = {}
        lengths = np.diff(batch.row_start).tolist()
        for slot, kv_len, length in zip(batch.row_slot.tolist(), batch.row_kv_len.tolist(), lengths):
            first, last = (kv_len - length) // self._page_tokens, (kv_len - 1) // self._page_tokens
            for (group, owner), table in self._tables.items():
                if owner == slot:
                    read, written = touched.setdefault(group, ([], []))
                    read += [table[index] for index in range(last + 1)]
                    written += [table[index] for index in range(first, last + 1)]
        return touched


def test_b21_b22_loads_and_backups_need_no_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under pressure, faults and every write policy."""
    watch = CopyWatch(monkeypatch)
    for seed in SEEDS:
        torture(seed, 40, check_every_step=False)
        assert watch.conflicts == [], f"seed {seed}"
    assert watch.loaded_pages > 100
    assert watch.backed_up_pages > 100


def test_b21_a_cache_without_fences_is_found_by_order_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = CopyWatch(monkeypatch)
    give_back = PagePool.give_back

    def at_once(pool: PagePool, pages: I32, giver: int, fence: Fence) -> None:
        give_back(pool, pages, giver, Fence())

    monkeypatch.setattr(PagePool, "give_back", at_once)
    shape = WorldShape(slots=3, pages=10, context_tokens=40, prefill_tokens=64, host_pages=200)

    async def crowd(seed: int) -> None:
        """Prompts come back from the host while others are aborted in the middle of a step."""
        async with World(seed, shape, check_every_step=False) as world:
            await asyncio.sleep(0.3)
            for turn in range(60):
                watched = world.submit([turn % 12] * 21, 1 + turn % 5)
                if world.rng.random() < 0.3:
                    world.engine.abort(watched.submit.request)
                await asyncio.sleep(world.rng.choice((0.0005, 0.002, 0.004)))
                if world.rng.random() < 0.3:
                    world.engine.abort(world.rng.randint(1, len(world.requests)))
            await world.finish()

    for seed in range(20):
        # The oracle may see it too; some of it only the order shows.
        with contextlib.suppress(AssertionError):
            run(crowd(seed))
        if any(re.match("load of .* overwrites .* nothing says that attention of", line) for line in watch.conflicts):
            return
    raise AssertionError(f"no load was found that overwrites what a step still reads: {watch.conflicts}")

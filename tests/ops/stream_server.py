"""The least of a server whose requests, steps and copies are drawn from a seed, for workers on any streams.

What it decides depends on the seed alone, never on when a reply comes: where a command needs a reply, it waits for it.
So two workers get the same commands, however late their streams are, and must come to the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from ops.driver import RING_SLOTS, Driver, Feed, future, read_config, window_groups
from ops.slot_inits import SlotInit
from ops.small_llama import VOCAB
from torch import Tensor

from headrace.ops.streams import Region, Streams
from headrace.ops.wire import Backup, BackupDone, HostArea, StepDone

PAGE_TOKENS, SLOTS = 16, 4
PAGES, WINDOW_PAGES = 22, 26
"""Of a full group, and of a window group: a row's window, and what a chunk has behind it."""
HOST_PAGES, HOST_SLOT_BYTES = 7, 16384
"""Of each group."""
LONGEST_TOKENS = 75
LONGEST_WINDOWED_TOKENS = 130
"""With windows: long enough that a row leaves pages behind."""
MOST_LOOKS = 20_000
"""At a worker, before an answer is believed not to come, where time passes by looking."""


class Device(Protocol):
    """Streams, and whoever watches over them."""

    streams: Streams

    def host_uses(self, name: str, reads: Sequence[Region] = (), writes: Sequence[Region] = ()) -> None:
        """The server, or storage on its behalf, touches memory itself."""


class Saved(NamedTuple):
    """A prefix whose pages were sent to the host: of each group those that whoever goes on from it looks at."""

    tokens: int
    pages: list[list[int]]
    transfers: list[int]
    """Empty where storage has filled them."""


class Outcome(NamedTuple):
    """All that a run has left; equal where nothing was read too early or overwritten too soon."""

    results: list[bytes]
    loaded: list[bytes]
    """Host pages, before they came back to the device."""
    device: list[bytes]


class StreamServer:
    """Drives one worker through one run. Without `fences` it forgets that pages may still be in use."""

    def __init__(
        self,
        model: Path,
        seed: int,
        device: Device | None,
        *,
        fences: bool = True,
        kernels: str = "torch",
        windows: bool = False,
        most_looks: int = MOST_LOOKS,
    ) -> None:
        """`windows`: the model's layers with a window are a group of their own."""
        self._rng = np.random.default_rng(seed)
        self._device = device
        self._fences = fences
        self._most_looks = most_looks
        area = HostArea(HOST_PAGES * HOST_SLOT_BYTES, HOST_SLOT_BYTES, HOST_PAGES)
        groups = {"groups": window_groups(read_config(model)), "window_areas": [area]} if windows else {}
        self._host = bytearray((1 + windows) * HOST_PAGES * HOST_SLOT_BYTES)
        self._longest = LONGEST_WINDOWED_TOKENS if windows else LONGEST_TOKENS
        self._driver = Driver(
            model,
            num_pages=[2 * PAGES, WINDOW_PAGES] if windows else [PAGES],
            slots=SLOTS,
            host_pool=self._host,
            host_slot_bytes=HOST_SLOT_BYTES,
            page_tokens=PAGE_TOKENS,
            streams=None if device is None else device.streams,
            kernels=kernels,
            **groups,  # type: ignore[arg-type]
        )
        self._groups = range(len(self._driver.groups))
        self._answered: set[tuple[type, int]] = set()
        self._seen = 0
        self._collected = 0
        self._saved: list[Saved] = []
        self._transfers = 0
        self._last_step: dict[tuple[str, int, int], int] = {}
        """The last step that touches a page, by pool and group."""
        self._copies: dict[tuple[str, int, int], int] = {}
        """The last transfer that touches a page, by pool and group."""
        self._outcome: tuple[list[bytes], list[bytes]] = [], []

    def run(self, turns: int) -> Outcome:
        for _ in range(turns):
            self._turn()
        while self._collected < self._driver.steps:
            self._collect()
        for transfer in range(1, self._transfers + 1):
            self._wait(BackupDone, transfer)
        device = [self._device_pages(group) for group in self._groups]
        regions = [self._regions("device", group, range(pages.shape[1])) for group, pages in enumerate(device)]
        self._uses("the server", reads=[region for each in regions for region in each])
        return Outcome(*self._outcome, [pages.numpy().tobytes() for pages in device])

    def memories(self) -> dict[str, Tensor]:
        """All that holds KV, by the names of `ops.accesses`: `[layers, pages, values]`, views."""
        device = {f"device pages of group {group}": self._device_pages(group) for group in self._groups}
        return device | {f"host pages of group {group}": self._host_pages(group) for group in self._groups}

    def _device_pages(self, group: int) -> Tensor:
        return self._driver.worker._pools[group].pages.flatten(2)

    def _host_pages(self, group: int) -> Tensor:
        layers, _, values = self._device_pages(group).shape
        slots = torch.frombuffer(self._host, dtype=torch.float32)
        strides = (values, HOST_SLOT_BYTES // 4, 1)
        return slots.as_strided((layers, HOST_PAGES, values), strides, group * HOST_PAGES * HOST_SLOT_BYTES // 4)

    def _turn(self) -> None:
        loads: list[tuple[int, int, int]] = []
        feeds = {}
        full = [slot for slot, state in self._driver.slots.items() if state.length > self._longest]
        if len(self._driver.slots) < SLOTS or full or self._rng.random() < 0.3:
            slot = full[0] if full else int(self._rng.integers(SLOTS))
            loads = self._begin(slot)
            if loads and self._rng.random() < 0.2:
                self._launch([], loads)
                loads = []
            feeds[slot] = Feed(slot, self._rng.integers(0, VOCAB, int(self._rng.integers(2, 40))).tolist())
        for slot in self._driver.slots:
            if slot not in feeds and slot not in full and self._rng.random() < 0.8:
                feeds[slot] = Feed(slot, [future(slot)])
        self._launch(list(feeds.values()), loads)
        if self._rng.random() < 0.6:
            self._back_up()
        if self._rng.random() < 0.4:
            self._prefetch()

    def _begin(self, slot: int) -> list[tuple[int, int, int]]:
        """A new request, perhaps behind a prefix from the host, or one that another request has; → its loads."""
        driver = self._driver
        hot = {"temperature": 0.8, "seed": int(self._rng.integers(99)), "frequency": 0.3}
        driver.begin(SlotInit(slot, logprobs=2, **(hot if self._rng.random() < 0.5 else {})))  # type: ignore[arg-type]
        # The last in the list goes first: the page that was used last, or the one that was used first.
        backwards = self._rng.random() < 0.5
        for group, free in enumerate(driver.free):
            free.sort(key=lambda page: self._last_step.get(("device", group, page), -1), reverse=backwards)
        sharers = [other for other, state in driver.slots.items() if other != slot and self._whole(other)]
        if self._saved and self._rng.random() < 0.7:
            saved = self._saved[self._rng.integers(len(self._saved))]
            for transfer in saved.transfers:
                self._wait(BackupDone, transfer)
            driver.slots[slot].length = saved.tokens
            for group, pages in enumerate(saved.pages):
                self._read(group, pages)
                self._make_way(group, len(driver.lacking(group, slot, saved.tokens)))
            driver.give_pages(slot, saved.tokens)
            return [
                (host_page, device_page, group)
                for group, table in enumerate(driver.slots[slot].tables)
                for host_page, device_page in zip(saved.pages[group], table.values(), strict=True)
            ]
        if sharers and self._rng.random() < 0.5:
            giver = sharers[self._rng.integers(len(sharers))]
            driver.share(giver, slot, self._whole(giver))
        return []

    def _whole(self, slot: int) -> int:
        """Tokens of a request that another can go on from: whole pages, all that the next one looks at still there."""
        driver, state = self._driver, self._driver.slots[slot]
        tokens = state.length // PAGE_TOKENS * PAGE_TOKENS
        first = [driver.first_page(group, tokens) for group in self._groups]
        return tokens if all(index in table or tokens == 0 for index, table in zip(first, state.tables)) else 0

    def _launch(self, feeds: list[Feed], loads: list[tuple[int, int, int]]) -> None:
        driver = self._driver
        while self._collected + 2 <= driver.steps:
            self._collect()
        for feed in feeds:
            state = driver.slots[feed.slot]
            for group in self._groups:
                self._make_way(group, len(driver.lacking(group, feed.slot, state.length + len(feed.ids))))
            driver.give_pages(feed.slot, state.length + len(feed.ids))
        ring_slot = [(driver.steps + 1) % RING_SLOTS]
        self._uses("the next batch", writes=[Region("batches", 0, ring_slot), Region("masks", 0, ring_slot)])
        used = [
            (group, page)
            for feed in feeds
            for group, table in enumerate(driver.slots[feed.slot].tables)
            for page in table.values()
        ]
        step = driver.launch(feeds, loads=loads)
        for host_page, device_page, group in loads:
            self._last_step["host", group, host_page] = self._last_step["device", group, device_page] = step
        for group, page in used:
            self._last_step["device", group, page] = step

    def _collect(self) -> None:
        self._collected += 1
        self._wait(StepDone, self._collected)
        self._uses("the server", reads=[Region("results", 0, [self._collected % RING_SLOTS])])
        results = self._driver.results(self._collected)
        self._outcome[0].append(b"".join(getattr(results, name).tobytes() for name in results.__slots__))

    def _back_up(self) -> None:
        """Full pages of a request go to the host."""
        slot = list(self._driver.slots)[self._rng.integers(len(self._driver.slots))]
        tokens = self._whole(slot)
        if len(self._groups) == 1:
            tokens = min(tokens, 3 * PAGE_TOKENS)
        if not tokens:
            return
        indices = [range(self._driver.first_page(group, tokens), tokens // PAGE_TOKENS) for group in self._groups]
        if max(map(len, indices)) > HOST_PAGES:
            return
        saved = Saved(tokens, self._free_host([len(each) for each in indices]), [])
        for group, table in enumerate(self._driver.slots[slot].tables):
            self._transfers += 1
            pages = [table[index] for index in indices[group]]
            self._driver.worker.handle(Backup(self._transfers, group, pages, saved.pages[group]))
            saved.transfers.append(self._transfers)
            for device_page, host_page in zip(pages, saved.pages[group]):
                self._copies["device", group, device_page] = self._copies["host", group, host_page] = self._transfers
        self._saved.append(saved)

    def _prefetch(self) -> None:
        """Host pages come from storage, with bytes of their own."""
        saved = Saved(2 * PAGE_TOKENS, self._free_host([2 for _ in self._groups]), [])
        for group in self._groups:
            self._uses("storage", writes=self._regions("host", group, saved.pages[group]))
            for page in saved.pages[group]:
                values = self._rng.standard_normal(HOST_SLOT_BYTES // 4, np.float32)
                start = (group * HOST_PAGES + page) * HOST_SLOT_BYTES
                self._host[start : start + HOST_SLOT_BYTES] = values.tobytes()
        self._saved.append(saved)

    def _free_host(self, counts: list[int]) -> list[list[int]]:
        """Host pages of each group for something new, in the place of what was saved first."""
        while any(HOST_PAGES - len(self._taken(group)) < count for group, count in enumerate(counts)):
            self._saved.pop(0)
        free = []
        for group, count in enumerate(counts):
            taken = self._taken(group)
            free.append([page for page in range(HOST_PAGES) if page not in taken][:count])
            for page in free[-1]:
                self._fence("host", group, page)
        return free

    def _taken(self, group: int) -> list[int]:
        return [page for saved in self._saved for page in saved.pages[group]]

    def _read(self, group: int, host_pages: list[int]) -> None:
        self._uses("the server", reads=self._regions("host", group, host_pages))
        for page in host_pages:
            start = (group * HOST_PAGES + page) * HOST_SLOT_BYTES
            self._outcome[1].append(bytes(self._host[start : start + HOST_SLOT_BYTES]))

    def _make_way(self, group: int, pages: int) -> None:
        """So many pages will be given out next: whatever touches them must have ended."""
        free = self._driver.free[group]
        assert pages <= len(free)
        for page in free[len(free) - pages :]:
            self._fence("device", group, page)

    def _fence(self, pool: str, group: int, page: int) -> None:
        if not self._fences:
            return
        if (step := self._last_step.get((pool, group, page), 0)) > self._collected:
            self._wait(StepDone, step)
        if transfer := self._copies.get((pool, group, page), 0):
            self._wait(BackupDone, transfer)

    def _wait(self, kind: type[StepDone | BackupDone], number: int) -> None:
        for _ in range(self._most_looks):
            for reply in self._driver.replies[self._seen :]:
                if isinstance(reply, StepDone | BackupDone):
                    self._answered.add((type(reply), reply.step if isinstance(reply, StepDone) else reply.transfer))
            self._seen = len(self._driver.replies)
            if (kind, number) in self._answered:
                return
            self._driver.worker.poll()
        raise AssertionError(f"no {kind.__name__} for {number}: {self._driver.replies[-1]}")

    def _uses(self, name: str, reads: Sequence[Region] = (), writes: Sequence[Region] = ()) -> None:
        if self._device is not None:
            self._device.host_uses(name, reads, writes)

    def _regions(self, pool: str, group: int, pages: Sequence[int]) -> list[Region]:
        layers = range(len(self._driver.groups[group].layers))
        return [Region(f"{pool} pages of group {group}", layer, pages) for layer in layers]

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
from ops.driver import RING_SLOTS, Driver, Feed, future
from ops.slot_inits import SlotInit
from ops.small_llama import LAYERS, VOCAB
from torch import Tensor

from headrace.ops.streams import Region, Streams
from headrace.ops.wire import Backup, BackupDone, StepDone

PAGE_TOKENS, PAGES, SLOTS = 16, 22, 4
HOST_PAGES, HOST_SLOT_BYTES = 7, 16384
LONGEST_TOKENS = 75
MOST_LOOKS = 20_000
"""At a worker, before an answer is believed not to come."""


class Device(Protocol):
    """Streams, and whoever watches over them."""

    streams: Streams

    def host_uses(self, name: str, reads: Sequence[Region] = (), writes: Sequence[Region] = ()) -> None:
        """The server, or storage on its behalf, touches memory itself."""


class Saved(NamedTuple):
    """A prefix whose pages were sent to the host."""

    pages: list[int]
    transfer: int
    """0 where storage has filled them."""


class Outcome(NamedTuple):
    """All that a run has left; equal where nothing was read too early or overwritten too soon."""

    results: list[bytes]
    loaded: list[bytes]
    """Host pages, before they came back to the device."""
    device: bytes


class StreamServer:
    """Drives one worker through one run. Without `fences` it forgets that pages may still be in use."""

    def __init__(
        self, model: Path, seed: int, device: Device | None, *, fences: bool = True, kernels: str = "torch"
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._device = device
        self._fences = fences
        self._host = bytearray(HOST_PAGES * HOST_SLOT_BYTES)
        self._driver = Driver(
            model,
            num_pages=PAGES,
            slots=SLOTS,
            host_pool=self._host,
            host_slot_bytes=HOST_SLOT_BYTES,
            page_tokens=PAGE_TOKENS,
            streams=None if device is None else device.streams,
            kernels=kernels,
        )
        self._answered: set[tuple[type, int]] = set()
        self._seen = 0
        self._collected = 0
        self._saved: list[Saved] = []
        self._transfers = 0
        self._last_step: dict[tuple[str, int], int] = {}
        """The last step that touches a page, by pool."""
        self._copies: dict[tuple[str, int], int] = {}
        """The last transfer that touches a page, by pool."""
        self._outcome: tuple[list[bytes], list[bytes]] = [], []

    def run(self, turns: int) -> Outcome:
        for _ in range(turns):
            self._turn()
        while self._collected < self._driver.steps:
            self._collect()
        for transfer in range(1, self._transfers + 1):
            self._wait(BackupDone, transfer)
        self._uses("the server", reads=_regions("device", range(PAGES)))
        return Outcome(*self._outcome, self.device_pages.numpy().tobytes())

    @property
    def device_pages(self) -> Tensor:
        """`[layers, pages, values]`"""
        return self._driver.pool.pages.flatten(2)

    @property
    def host_pages(self) -> Tensor:
        """`[layers, pages, values]`, a view too."""
        values = self.device_pages.shape[2]
        slots = torch.frombuffer(self._host, dtype=torch.float32)
        return slots.as_strided((LAYERS, HOST_PAGES, values), (values, HOST_SLOT_BYTES // 4, 1))

    def _turn(self) -> None:
        loads: list[tuple[int, int]] = []
        feeds = {}
        full = [slot for slot, state in self._driver.slots.items() if state.length > LONGEST_TOKENS]
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

    def _begin(self, slot: int) -> list[tuple[int, int]]:
        """A new request, perhaps behind a prefix from the host, or one that another request has; → its loads."""
        driver = self._driver
        hot = {"temperature": 0.8, "seed": int(self._rng.integers(99)), "frequency": 0.3}
        driver.begin(SlotInit(slot, logprobs=2, **(hot if self._rng.random() < 0.5 else {})))  # type: ignore[arg-type]
        # The last in the list goes first: the page that was used last, or the one that was used first.
        backwards = self._rng.random() < 0.5
        driver.free_pages.sort(key=lambda page: self._last_step.get(("device", page), -1), reverse=backwards)
        sharers = [other for other, state in driver.slots.items() if other != slot and state.length >= PAGE_TOKENS]
        if self._saved and self._rng.random() < 0.7:
            saved = self._saved[self._rng.integers(len(self._saved))]
            if saved.transfer:
                self._wait(BackupDone, saved.transfer)
            self._read(saved.pages)
            self._make_way(len(saved.pages))
            device_pages = driver.give_pages(slot, len(saved.pages) * PAGE_TOKENS)
            driver.slots[slot].length = len(saved.pages) * PAGE_TOKENS
            return list(zip(saved.pages, device_pages))
        if sharers and self._rng.random() < 0.5:
            giver = sharers[self._rng.integers(len(sharers))]
            driver.share(giver, slot, driver.slots[giver].length // PAGE_TOKENS * PAGE_TOKENS)
        return []

    def _launch(self, feeds: list[Feed], loads: list[tuple[int, int]]) -> None:
        driver = self._driver
        while self._collected + 2 <= driver.steps:
            self._collect()
        for feed in feeds:
            state = driver.slots[feed.slot]
            self._make_way(-(-(state.length + len(feed.ids)) // PAGE_TOKENS) - len(state.pages))
            driver.give_pages(feed.slot, state.length + len(feed.ids))
        ring_slot = [(driver.steps + 1) % RING_SLOTS]
        self._uses("the next batch", writes=[Region("batches", 0, ring_slot), Region("masks", 0, ring_slot)])
        step = driver.launch(feeds, loads=loads)
        for host_page, device_page in loads:
            self._last_step["host", host_page] = self._last_step["device", device_page] = step
        for feed in feeds:
            for page in driver.slots[feed.slot].pages:
                self._last_step["device", page] = step

    def _collect(self) -> None:
        self._collected += 1
        self._wait(StepDone, self._collected)
        self._uses("the server", reads=[Region("results", 0, [self._collected % RING_SLOTS])])
        results = self._driver.results(self._collected)
        self._outcome[0].append(b"".join(getattr(results, name).tobytes() for name in results.__slots__))

    def _back_up(self) -> None:
        """Full pages of a request go to the host."""
        slot = list(self._driver.slots)[self._rng.integers(len(self._driver.slots))]
        state = self._driver.slots[slot]
        pages = state.pages[: min(state.length // PAGE_TOKENS, 3)]
        if not pages:
            return
        self._transfers += 1
        saved = Saved(self._free_host(len(pages)), self._transfers)
        self._driver.worker.handle(Backup(saved.transfer, 0, pages, saved.pages))
        self._saved.append(saved)
        for device_page, host_page in zip(pages, saved.pages):
            self._copies["device", device_page] = self._copies["host", host_page] = saved.transfer

    def _prefetch(self) -> None:
        """Host pages come from storage, with bytes of their own."""
        saved = Saved(self._free_host(2), 0)
        self._uses("storage", writes=_regions("host", saved.pages))
        for page in saved.pages:
            values = self._rng.standard_normal(HOST_SLOT_BYTES // 4, np.float32)
            self._host[page * HOST_SLOT_BYTES : (page + 1) * HOST_SLOT_BYTES] = values.tobytes()
        self._saved.append(saved)

    def _free_host(self, count: int) -> list[int]:
        """Host pages for something new, in the place of what was saved first."""
        taken = [page for saved in self._saved for page in saved.pages]
        while HOST_PAGES - len(taken) < count:
            self._saved.pop(0)
            taken = [page for saved in self._saved for page in saved.pages]
        free = [page for page in range(HOST_PAGES) if page not in taken][:count]
        for page in free:
            self._fence("host", page)
        return free

    def _read(self, host_pages: list[int]) -> None:
        self._uses("the server", reads=_regions("host", host_pages))
        for page in host_pages:
            self._outcome[1].append(bytes(self._host[page * HOST_SLOT_BYTES :][:HOST_SLOT_BYTES]))

    def _make_way(self, pages: int) -> None:
        """So many pages will be given out next: whatever touches them must have ended."""
        assert pages <= len(self._driver.free_pages)
        for page in self._driver.free_pages[len(self._driver.free_pages) - max(pages, 0) :]:
            self._fence("device", page)

    def _fence(self, pool: str, page: int) -> None:
        if not self._fences:
            return
        if (step := self._last_step.get((pool, page), 0)) > self._collected:
            self._wait(StepDone, step)
        if transfer := self._copies.get((pool, page), 0):
            self._wait(BackupDone, transfer)

    def _wait(self, kind: type[StepDone | BackupDone], number: int) -> None:
        for _ in range(MOST_LOOKS):
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


def _regions(pool: str, pages: Sequence[int]) -> list[Region]:
    return [Region(f"{pool} pages of group 0", layer, pages) for layer in range(LAYERS)]

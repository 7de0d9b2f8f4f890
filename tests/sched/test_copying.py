"""How many copies to the host follow a step."""

from __future__ import annotations

import numpy as np

from headrace.kvcache.cache import KvCache
from headrace.kvcache.holding import Filled
from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.kvcache.pool import Fence
from headrace.ops.wire import Backup, BackupDone
from headrace.sched.budget import COPIES_AHEAD, COPY_MS, COPY_SHARE, CopyPace
from headrace.sched.copying import CopyStage

LAYOUT = KvLayout(4, (LayerGroup("full", 0, (0, 1), 2, 8, 4),))
PAGES = 200
LONG_STEP_MS = 10 * COPY_MS / COPY_SHARE


def prompt_computed() -> KvCache:
    """All pages of a prompt wait to be copied."""
    cache, tokens = KvCache(LAYOUT, [PAGES + 1], host_pages=PAGES + 1), 4 * PAGES
    ids = np.arange(tokens, dtype=np.int32)
    key = PrefixKey(namespace(b"model", "", ""), 4, ids, tokens)
    holding = cache.open(key, tokens)
    pages = cache.take(PAGES)
    assert pages is not None
    cache.append(holding, pages)
    cache.publish([Filled(holding, key, tokens, 0)])
    cache.close([holding], Fence(0))
    cache.complete_step(0)
    return cache


class Device:
    """Keeps what it is sent, and makes it when told."""

    def __init__(self, copies_delay_steps: bool) -> None:
        self.cache = prompt_computed()
        pace = CopyPace(self.cache.page_bytes, 8 * self.cache.page_bytes)
        for _ in range(100):
            pace.observe(8, 2 * COPY_MS if copies_delay_steps else 0.0)
        self.sent: list[Backup] = []
        self.stage = CopyStage(self.cache, pace, self.sent.append)
        self.pages_behind_a_step = pace.pages(0.0)

    @property
    def sent_pages(self) -> list[int]:
        return [len(backup.device_pages) for backup in self.sent]

    def make(self) -> None:
        """The first copy that was sent and not made."""
        backup = self.sent.pop(0)
        self.stage.made(BackupDone(backup.transfer, 0.0))


def test_behind_a_short_step_as_many_pages_are_copied_as_delay_it_by_little() -> None:
    device = Device(copies_delay_steps=True)
    assert device.stage.order(10.0)
    assert sum(device.sent_pages) == device.pages_behind_a_step < 8


def test_behind_a_long_step_several_copies_keep_up_with_what_it_computes() -> None:
    device = Device(copies_delay_steps=True)
    assert device.stage.order(LONG_STEP_MS)
    assert sum(device.sent_pages) >= 10 * device.pages_behind_a_step
    assert max(device.sent_pages) <= 8, "none is larger than a copy may be"


def test_where_copies_delay_no_step_some_are_always_under_way() -> None:
    device = Device(copies_delay_steps=False)
    assert device.stage.order(10.0)
    made = 0
    while device.sent:
        assert len(device.sent) == min(COPIES_AHEAD, -(-PAGES // 8) - made)
        device.make()
        made += 1
    assert made == PAGES // 8 and not device.cache.copying
    assert not device.stage.order(10.0), "nothing is left"

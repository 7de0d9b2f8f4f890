"""How many copies to the host are under way."""

from __future__ import annotations

import numpy as np

from headrace.kvcache.cache import KvCache
from headrace.kvcache.holding import Filled
from headrace.kvcache.identity import PrefixKey, namespace
from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.kvcache.pool import Fence
from headrace.ops.wire import Backup, BackupDone
from headrace.sched.copying import COPIES_AHEAD, CopyStage

PAGES = 200
COPY_PAGES = 8


def prompt_computed(groups: int) -> KvCache:
    """All pages of a prompt wait to be copied."""
    layout = KvLayout(4, tuple(LayerGroup("full", 0, (layer,), 2, 8, 4) for layer in range(groups)))
    cache, tokens = KvCache(layout, [PAGES + 1] * groups, host_pages=groups * (PAGES + 1)), 4 * PAGES
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

    def __init__(self, groups: int = 1, most_bytes: int | None = None) -> None:
        self.cache = prompt_computed(groups)
        self.sent: list[Backup] = []
        most_bytes = COPY_PAGES * self.cache.page_bytes if most_bytes is None else most_bytes
        self.stage = CopyStage(self.cache, most_bytes, self.sent.append)

    def make(self) -> None:
        """The first copy that was sent and not made."""
        self.stage.made(BackupDone(self.sent.pop(0).transfer))


def test_some_copies_are_under_way_until_all_are_made() -> None:
    device = Device()
    assert device.stage.order()
    made = 0
    while device.sent:
        assert len(device.sent) == min(COPIES_AHEAD, -(-PAGES // COPY_PAGES) - made)
        assert max(len(backup.device_pages) for backup in device.sent) == COPY_PAGES
        device.make()
        made += 1
    assert made == PAGES // COPY_PAGES and not device.cache.copying
    assert not device.stage.order() and not device.stage.under_way, "nothing is left"


def test_a_copy_of_two_groups_is_made_when_both_parts_are() -> None:
    device = Device(groups=2)
    device.stage.order()
    assert [backup.group for backup in device.sent] == [0, 1] * COPIES_AHEAD
    device.make()
    assert len(device.sent) == 2 * COPIES_AHEAD - 1, "half of it brings no other"
    device.make()
    assert len(device.sent) == 2 * COPIES_AHEAD


def test_a_page_that_is_larger_than_a_copy_may_be_goes_by_itself() -> None:
    device = Device(most_bytes=1)
    device.stage.order()
    assert {len(backup.device_pages) for backup in device.sent} == {1}


def test_a_device_that_is_lost_has_no_copies_under_way() -> None:
    device = Device()
    device.stage.order()
    device.stage.forget()
    assert not device.stage.under_way

"""What an engine is told once, when it is made."""

from __future__ import annotations

import msgspec

from headrace.kvcache.host import WritePolicy
from headrace.kvcache.identity import PageHash
from headrace.kvcache.layout import KvLayout
from headrace.kvcache.prefetch import PrefetchOptions
from headrace.kvcache.storage.client import StorageLimits
from headrace.kvcache.storage.protocol import OpenStore
from headrace.ops.wire import Start
from headrace.sched.copying import MAX_COPY_BYTES
from headrace.sched.policies import SchedulePolicy


class EngineOptions(msgspec.Struct, frozen=True):
    """Sizes, policies and bounds of an engine."""

    layout: KvLayout
    start: Start
    """The command that begins a device's life; sizes of slots, context and ring are in it."""
    num_pages: list[int]
    """Device pages per layer group."""
    fingerprint: bytes
    """Of the weights, dtype and layout: pages are shared only under equal ones."""
    max_chunk_tokens: int
    """The largest prefill chunk, whatever the budget: the ring is sized by it."""
    prefill_tokens: int = 0
    """Prefill tokens a step; 0 lets the cost model keep mixed steps under `TARGET_STEP_MS`."""
    warm_up: bool = True
    """Let the device measure a few steps before it is ready: the cost model is made of them."""
    overlap: bool = True
    """Launch step n+1 before n is collected."""
    reuse: bool = True
    """Match prefixes in the index."""
    salt_key: bytes = b""
    """Secret under which salts are hashed."""
    page_hash: PageHash = "xxh3"
    host_pages: int = 0
    """Pages of the host tier, all full groups together; 0 for none."""
    window_host_pages: list[int] = []
    """The same of each window group."""
    write_policy: WritePolicy = "write_through"
    max_copy_bytes: int = MAX_COPY_BYTES
    """Of one copy to the host."""
    storage: OpenStore | None = None
    """The storage tier behind the host's."""
    storage_limits: StorageLimits = StorageLimits()
    prefetch: PrefetchOptions = PrefetchOptions()
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    schedule_policy: SchedulePolicy = "least-work"
    preempt_above: int | None = None
    """A request whose priority is higher by more than this takes the place of one that runs; None: never."""
    schedule_seed: int = 0
    """Of the policy `random`."""
    target_itl_ms: float = 0.0
    """The longest gap between two decode steps that prefill should cause; 0 is `TARGET_STEP_MS`."""
    conservativeness: float = 1.0
    """Factor on the outputs that admission expects running requests still to produce."""
    step_timeout_s: float = 60.0
    """A device that has not completed its oldest step in this time is taken for hung and restarted."""
    start_timeout_s: float = 600.0
    """The same for loading and warming up, from one sign of progress to the next."""

"""A device that computes nothing and takes its time: the worker's protocol, and what its steps would cost.

in     commands of `ops.wire`, over a simulated link
out    replies in virtual time; ids that no other step gives
state  when the compute stream and the two copy streams will have done what they have been sent
owner  the link's deliveries, and the timers it sets itself
ready  a step's ids are in the ring when its `StepDone` is sent
end    `close`: nothing more is answered

There is no pool behind it: which page is whose is the allocator's business and the index's, and both are the real ones.
Three streams, as on a GPU: steps in order; loads before the step that reads them, layer by layer, so that a step takes
the longer of computing and loading (and one layer's computing more); backups behind the steps that were sent before
them. A device whose loads don't overlap brings them between the layers of a step; backups delay no step anywhere.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from headrace.ops.transport import Transport
from headrace.ops.wire import (
    Backup,
    BackupDone,
    BatchRing,
    Command,
    Forward,
    Loaded,
    MakePools,
    Ready,
    Reply,
    RingGeometry,
    Sample,
    Start,
    StepDone,
    Stop,
    command_decoder,
    encoder,
)
from headrace.server.sim.step_costs import StepCosts, warm_up_costs, work_of
from headrace.server.sim.transport import SimLink

COPY_LATENCY_NS: Final = 20_000
"""Of one copy, however small: its launch."""


class CopyCosts(msgspec.Struct, frozen=True):
    """What moving pages between the device and the host takes."""

    page_bytes: int
    bytes_per_s: float
    """In one direction."""
    layers: int
    loads_overlap: bool
    """Loads have a stream of their own."""

    def copy_ns(self, pages: int) -> int:
        return COPY_LATENCY_NS + int(pages * self.page_bytes / self.bytes_per_s * 1e9) if pages else 0


class CostDevice:
    """One life of the device: a `Connection`."""

    pid = 0

    def __init__(self, link: SimLink, geometry: RingGeometry, costs: StepCosts, copies: CopyCosts, name: str) -> None:
        self.ring = BatchRing(bytearray(geometry.size_bytes), geometry)
        self.busy_ns = 0
        """That steps have taken."""
        self._link = link
        self._loop = link.loop
        self._costs = costs
        self._copies = copies
        self._name = name
        self._geometry = geometry
        self._compute_free_ns = self._load_free_ns = self._backup_free_ns = 0
        self._step_ns = 0
        link.far.open(self._arrived, lambda reason: None)

    @property
    def transport(self) -> Transport:
        return self._link.near

    def close(self) -> None:
        self._link.near.close()

    def _arrived(self, message: bytes) -> None:
        self._handle(command_decoder.decode(message))

    def _handle(self, command: Command) -> None:
        match command:
            case Forward():
                self._forward(command.ring_slot)
            case Sample():
                self._loop.call_at_ns(self._compute_free_ns, self._finish, command, self._step_ns)
            case Backup():
                pages = len(command.device_pages)
                self._loop.call_at_ns(self._backup(pages), self._reply, BackupDone(command.transfer))
            case Start():
                self._reply(Loaded(weights_bytes=0, free_bytes=0))
            case MakePools():
                costs = warm_up_costs(self._costs, self._geometry.max_samples, max(1, command.warm_up_tokens))
                self._reply(Ready(costs=costs, device_name=self._name, numerics="none"))
            case Stop():
                return

    def _forward(self, ring_slot: int) -> None:
        """Place the step behind what the streams have already."""
        batch, now_ns, copies = self.ring.read(ring_slot), self._loop.time_ns(), self._copies
        compute_ns = round(self._costs.step_ms(work_of(batch)) * 1e6)
        load_ns = copies.copy_ns(batch.counts.loads)
        began_ns = max(now_ns, self._compute_free_ns)
        if not load_ns:
            self._compute_free_ns = began_ns + compute_ns
        elif copies.loads_overlap:
            self._load_free_ns = max(now_ns, self._load_free_ns) + load_ns
            last_layer_ns = self._load_free_ns + compute_ns // copies.layers
            self._compute_free_ns = max(began_ns + compute_ns, last_layer_ns)
        else:
            self._compute_free_ns = began_ns + load_ns + compute_ns
        self._step_ns = self._compute_free_ns - began_ns

    def _backup(self, pages: int) -> int:
        """When a copy to the host has been made."""
        after_ns, copy_ns = max(self._loop.time_ns(), self._compute_free_ns), self._copies.copy_ns(pages)
        self._backup_free_ns = max(after_ns, self._backup_free_ns) + copy_ns
        return self._backup_free_ns

    def _finish(self, sample: Sample, step_ns: int) -> None:
        """Put ids into the ring: ones that make no two requests' outputs look alike."""
        results = self.ring.results(sample.ring_slot)
        count = self.ring.read(sample.ring_slot).counts.samples
        rows = np.arange(count + 1)
        results.offsets[: count + 1] = rows
        results.status[:count] = 0
        results.ids[:count] = (rows[:count] * 7919 + sample.step * 104_729) % self._geometry.vocab
        self.busy_ns += step_ns
        self._reply(StepDone(step=sample.step, step_ms=step_ns / 1e6))

    def _reply(self, reply: Reply) -> None:
        self._link.far.send(encoder.encode(reply))

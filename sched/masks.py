"""Between a step's `Forward` and its `Sample`: masks of rows with a grammar may still be on their way.

in     launched steps; the masks of their requests, as they come
out    a `Sample` command, its masks in the step's ring slot
state  the step that was launched last, until its `Sample` is sent; nothing is launched behind it
owner  the engine
ready  when no row's mask is late; or when others have waited long enough, without the late rows
end    with the `Sample`, or with the device

While the device runs the `Forward` nobody waits for masks. After that whoever else is in the batch would, and whoever
could be in the next one. So a row whose mask is late then is skipped: its id is not drawn, and the first step after the
mask has come computes the same position again. Its request loses a step, the others at most `MASK_GRACE_S`, once for a
mask, and what is drawn in the end is the same. Where nobody else could run, late rows are waited for: that saves them
the second `Forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from headrace.ops.wire import U32, BatchRing, Sample
from headrace.sched.budget import ALARM_S
from headrace.sched.collect import LaunchedStep
from headrace.sched.request import Request
from headrace.sched.scheduler import Scheduler

MASK_GRACE_S: Final = 0.002
"""How long others wait for a late mask while the device may be idle: one takes 0.1 ms there and back."""


class _MaskedRow(NamedTuple):
    sample: int
    request: Request
    position: int
    """Of the output that is drawn."""

    @property
    def mask(self) -> U32 | None:
        assert self.request.matching is not None
        return self.request.matching.mask(self.position)


class SampleStage:
    """The step that can't be sampled yet, if there is one."""

    def __init__(self, scheduler: Scheduler, wake_at: Callable[[float], None]) -> None:
        """`wake_at`: `sample` should be called again at that time, at the latest."""
        self.late_masks = 0
        self._scheduler = scheduler
        self._wake_at = wake_at
        self._step: LaunchedStep | None = None
        self._rows: list[_MaskedRow] = []
        self._batch_rows = 0
        self._due_s = -1.0

    @property
    def waits(self) -> bool:
        return self._step is not None

    def launched(self, step: LaunchedStep, batch_rows: int) -> None:
        """A step's `Forward` has been sent; called before the scheduler takes note of it."""
        assert self._step is None
        table = self._scheduler.table
        self._step, self._batch_rows, self._due_s = step, batch_rows, -1.0
        self._rows = []
        for sample in np.flatnonzero(table.masked[step.slots]).tolist():
            slot = int(step.slots[sample])
            request = table.requests[slot]
            assert request is not None
            self._rows.append(_MaskedRow(sample, request, int(table.extent[slot] - table.prompt[slot])))

    def sample(self, ring: BatchRing, is_next: bool, now_s: float, busy_until_s: float) -> Sample | None:
        """The step's `Sample`, now to be sent, or None while it waits for masks.

        `is_next`: no other step is in flight, so the masks have been asked for. `busy_until_s`: until then the device
        runs the `Forward`.
        """
        step = self._step
        assert step is not None
        table = self._scheduler.table
        # What was launched for a request that has ended meanwhile is dropped, whatever it draws.
        live = [row for row in self._rows if table.generation[step.slots[row.sample]] == step.generations[row.sample]]
        late = [row.sample for row in live if row.mask is None]
        if late and not (is_next and self._is_over(now_s, busy_until_s) and self._others_wait(step, late)):
            return None
        self._skip(step, late)
        self._step = None
        return Sample(step.step, step.ring_slot, self._write(ring, step, live), tuple(late))

    def forget(self) -> None:
        """The device is gone."""
        self._step = None

    def _is_over(self, now_s: float, busy_until_s: float) -> bool:
        """Whether whoever else there is has waited long enough."""
        if self._due_s < 0:
            self._due_s = max(busy_until_s, now_s + MASK_GRACE_S)
        if now_s + ALARM_S >= self._due_s:
            return True
        self._wake_at(self._due_s)
        return False

    def _others_wait(self, step: LaunchedStep, late: list[int]) -> bool:
        """Whether the late rows keep anybody else from going on, in this step or in the next one."""
        return len(late) < self._batch_rows or self._scheduler.others_can_run(step.slots[late])

    def _skip(self, step: LaunchedStep, late: list[int]) -> None:
        if late:
            self._scheduler.skip(step.slots[late])
            step.generations[late] = -1
            step.skipped = len(late)
            self.late_masks += len(late)

    def _write(self, ring: BatchRing, step: LaunchedStep, live: list[_MaskedRow]) -> int:
        """Put the masks into the ring slot; how many."""
        if not live:
            return 0
        mask_rows, mask_bits = ring.masks(step.ring_slot)
        count = 0
        for row in live:
            mask = row.mask
            if mask is not None:
                mask_rows[count], mask_bits[count] = row.sample, mask
                count += 1
        return count

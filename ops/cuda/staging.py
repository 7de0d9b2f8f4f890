"""What the host tells the card of a step: written into pinned memory, and copied in one piece.

The host is ahead of the card: when it writes what step n + 1 needs, the copy of step n's may not have begun. So there
is a slot for each step that may be under way and one more, and a slot is written again when the step that had it is
done. On the card one buffer is enough: copies into it and the kernels that read it are in one stream. Fields that are
put in the same order with the same lengths lie at the same addresses, in every step: a graph may read them.

in     arrays of a step, one after the other
out    the tensors on the device that will hold them when the compute stream gets there
state  the slots; for each, the event behind the last step that had it
owner  the worker's main thread writes; the compute stream copies
ready  behind `Slot.send`, in the compute stream
end    with the process
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.cuda import accesses
from headrace.ops.streams import Event, Streams

SLOTS: Final = 3
"""Two steps may be under way while one is prepared."""
ALIGNMENT_BYTES: Final = 64


class StagingFull(Exception):
    """A step needs more room than was planned: a bug, or a batch larger than the ring's."""


class TooManySteps(Exception):
    """The server launched a step while as many as there are slots were under way."""


class Slot:
    """The fields of one part of a step."""

    def __init__(self, number: int, host: Tensor, device: Tensor, streams: Streams, part: int) -> None:
        """`host`, `device`: uint8 `[bytes]`."""
        self.number = number
        self._host = host
        self._bytes: NDArray[np.uint8] = host.numpy()
        self._device = device
        self._streams = streams
        self._part = part
        self._used_bytes = 0

    def clear(self) -> None:
        """Begin again, for another step."""
        self._used_bytes = 0

    def put(self, values: NDArray[np.generic]) -> Tensor:
        """Stage an array of any shape → the tensor of its shape and dtype that will hold it."""
        return self.room(values.shape, values.dtype, values)[1]

    def room(
        self, shape: tuple[int, ...], dtype: np.dtype[np.generic], values: NDArray[np.generic] | int = 0
    ) -> tuple[NDArray[np.generic], Tensor]:
        """Room for an array → where to write it until `send`, filled with `values`, and the tensor."""
        size_bytes = int(np.prod(shape)) * dtype.itemsize
        start, end = self._used_bytes, self._used_bytes + size_bytes
        if end > len(self._bytes):
            raise StagingFull(f"a step needs {end} bytes and more of {len(self._bytes)}")
        self._used_bytes = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        array = self._bytes[start:end].view(dtype).reshape(shape)
        array[...] = values
        return array, self._device[start:end].view(_TORCH[dtype.str]).view(shape)

    def send(self) -> None:
        """In the compute stream: copy what was put."""
        self._streams.compute.uses(partial(accesses.staged, self.number, self._part))
        self._device[: self._used_bytes].copy_(self._host[: self._used_bytes], non_blocking=True)


class Staging:
    """Slots for the two parts of steps."""

    def __init__(self, forward_bytes: int, sample_bytes: int, device: torch.device, streams: Streams) -> None:
        pinned = device.type == "cuda"
        self._streams = streams
        self._done: list[Event | None] = [None] * SLOTS
        parts = []
        for part, size_bytes in enumerate((forward_bytes, sample_bytes)):
            size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            host = torch.zeros((SLOTS, size_bytes), dtype=torch.uint8, pin_memory=pinned)
            on_device = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
            parts.append([Slot(number, host[number], on_device, streams, part) for number in range(SLOTS)])
        self._forward, self._sample = parts

    def open(self, step: int) -> tuple[Slot, Slot]:
        """The slots of a step, for `Forward` and for `Sample`. Raises TooManySteps."""
        number = step % SLOTS
        before = self._done[number]
        if before is not None and not before.query():
            raise TooManySteps(f"step {step} was launched while {SLOTS} steps were under way")
        self._streams.host.uses(partial(accesses.staging, step, number))
        slots = self._forward[number], self._sample[number]
        for slot in slots:
            slot.clear()
        return slots

    def close(self, number: int, done: Event) -> None:
        """The step that has the slot is done when the event is."""
        self._done[number] = done


_TORCH: Final = {
    np.dtype(np.int32).str: torch.int32,
    np.dtype(np.int64).str: torch.int64,
    np.dtype(np.float32).str: torch.float32,
}

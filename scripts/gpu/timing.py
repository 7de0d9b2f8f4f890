"""Where kernels run, and how long they take: on a card by its events, in a dry run by the CPU's clock."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

GIB: Final = 1 << 30


def event() -> Any:
    """A place in the current stream."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Device:
    """The card, or the CPU in its place."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.torch = torch.device("cpu" if dry else "cuda")
        self.name = f"none: {platform.machine()}, interpreted" if dry else torch.cuda.get_device_name(0)

    def size(self, real: int, dry: int) -> int:
        """Of something that is tiny in a dry run."""
        return dry if self.dry else real

    def free_bytes(self) -> int:
        return GIB if self.dry else int(torch.cuda.mem_get_info()[0])

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def ms(self, work: Callable[[], object], repeats: int = 10) -> float:
        """The median of so many runs, each alone between two events; after two that don't count."""
        repeats = self.size(repeats, 1)
        for _ in range(self.size(2, 0)):
            work()
        self.wait()
        if self.dry:
            began_s = time.perf_counter()
            work()
            return (time.perf_counter() - began_s) * 1e3
        pairs: list[tuple[Any, Any]] = []
        for _ in range(repeats):
            began, ended = event(), event()
            began.record()
            work()
            ended.record()
            pairs.append((began, ended))
        torch.cuda.synchronize()
        return sorted(float(one.elapsed_time(other)) for one, other in pairs)[repeats // 2]

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Random values, not zeros: those cost a card less power, and so less time."""
        return torch.randn(shape, dtype=dtype, device=self.torch)


class Ceilings(NamedTuple):
    """What the card does at most."""

    bytes_s: float
    """Read and written by a copy of far more than its caches hold."""
    flops: float
    """Of a large product of bfloat16."""

    @classmethod
    def measured(cls, device: Device) -> Ceilings:
        source = torch.ones(device.size(GIB // 2, 1 << 12), dtype=torch.int32, device=device.torch)
        target = torch.empty_like(source)
        copy_ms = device.ms(lambda: target.copy_(source))
        n = device.size(8192, 32)
        a, b = device.random(n, n), device.random(n, n)
        product_ms = device.ms(lambda: a @ b)
        return cls(2 * source.nbytes / copy_ms * 1e3, 2 * n**3 / product_ms * 1e3)

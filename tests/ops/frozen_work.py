"""A CUDA graph's rules on a CPU: what was captured is operations on memory, and nothing of Python runs again.

Every operation and every kernel is kept with its arguments as they were; a replay does them again in the same order,
and puts each result where the captured one lies. So a number that the host has read, a branch that it took, a tensor
that has moved: all stay as they were when the work was captured, as on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.ops.cuda import decoder, kv

_WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of operations outside kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[tuple[Any, tuple[Any, ...], dict[str, Any], object]] = []

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        assert function not in _WAITS, f"{function} waits for the device"
        self.done.append((function, args, kwargs or {}, result))
        return result

    def kernel(self, function: Any) -> Callable[..., object]:
        """The function, seen as one operation: its reference may do what a kernel can't."""

        def launch(*args: Any, **kwargs: Any) -> object:
            with _python_dispatch._disable_current_modes():
                result: object = function(*args, **kwargs)
            self.done.append((function, args, kwargs, result))
            return result

        return launch


@contextmanager
def _kernels_seen(recorder: _Recorder, *modules: ModuleType) -> Iterator[None]:
    patched = [
        mock.patch.object(module, name, recorder.kernel(function))
        for module in modules
        for name, function in list(vars(module).items())
        if isinstance(function, FunctionType) and function.__module__.startswith("headrace.ops.triton.")
    ]
    for patch in patched:
        patch.start()
    try:
        yield
    finally:
        for patch in patched:
            patch.stop()


def frozen(work: Callable[[], None]) -> Callable[[], None]:
    """A `Capture`: runs the work now, and later only its operations."""
    recorder = _Recorder()
    with _kernels_seen(recorder, decoder, kv), recorder:
        work()

    def replay() -> None:
        for function, args, kwargs, result in recorder.done:
            again = function(*args, **kwargs)
            if isinstance(result, Tensor) and again.data_ptr() != result.data_ptr():
                result.copy_(again)

    return replay

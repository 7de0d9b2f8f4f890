"""What is launched, noted as triton tells variants of a kernel apart: each of them is compiled when it comes first."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

ALIGNED = 16


class Variant(NamedTuple):
    """A kernel, and what it is compiled for: constants as they are, of all else what triton specializes."""

    kernel: str
    arguments: tuple[tuple[str, object], ...]


@contextmanager
def noted_launches(*, runs: bool) -> Iterator[set[Variant]]:
    """Of kernels in the interpreter. Without `runs` none is run: whatever it would write stays as it was."""
    found: set[Variant] = set()
    run = InterpretedFunction.run

    def noted(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> object:
        found.add(_variant(kernel, arguments, named))
        return run(kernel, *arguments, grid=grid, warmup=warmup, **named) if runs else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", noted)
        yield found


def _variant(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Variant:
    annotations = inspect.get_annotations(kernel.fn)
    general = kernel.kwargs.get("do_not_specialize") or ()
    given = dict(zip(kernel.arg_names, arguments)) | named
    return Variant(
        kernel.fn.__name__,
        tuple(
            (name, _specialized(value, constant=_is_constant(name, kernel, annotations), general=name in general))
            for name, value in sorted(given.items())
        ),
    )


def _is_constant(name: str, kernel: Any, annotations: dict[str, object]) -> bool:
    """Options of a launch (`num_warps`) are too."""
    return name not in kernel.arg_names or "constexpr" in str(annotations.get(name))


def _specialized(value: Any, *, constant: bool, general: bool) -> object:
    if constant:
        return value
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % ALIGNED == 0
    if isinstance(value, int):
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        return width if general else (width, value == 1, value % ALIGNED == 0)
    return type(value).__name__

"""Whether a worker could use a GPU, and how large that is: asked of the driver's libraries, without torch.

The driver (`libcuda`) knows which card is the first that CUDA_VISIBLE_DEVICES leaves, NVML how much of its memory is
free; asking CUDA for that would take half a gigabyte of it. Whether torch was built for CUDA stands in a file of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

LEAST_CAPABILITY: Final = (8, 0)
"""As `ops.cuda.card` has it."""
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76
"""CUdevice_attribute."""
_PCI_CHARS: Final = 32


class Card(msgspec.Struct, frozen=True):
    """The first card that this process may use."""

    name: str
    total_bytes: int
    free_bytes: int
    """Now; all of it where the driver doesn't say."""
    multiprocessors: int


class NoCard(Exception):
    """Why no card can be used; the message says what to change."""


def read_card(load: Callable[[str], Any] = ctypes.CDLL, find: Callable[[str], Path | None] | None = None) -> Card:
    """Look at the machine. `load`: opens a library, or raises OSError; `find`: the folder of an installed package.

    Raises NoCard.
    """
    card = _first_card(load)
    where = find or _folder_of
    torch = where("torch")
    build = (torch / "version.py").read_text() if torch is not None else ""
    # `cuda: Optional[str] = '13.0'`, or None.
    if not re.search(r"^cuda\b.*=\s*['\"]\d", build, re.M):
        version = re.search(r"^__version__\s*=\s*['\"](.+?)['\"]", build, re.M)
        raise NoCard(
            f"there is a card ({card.name}), but torch {version[1] if version else ''} is built without CUDA. Install "
            "one that has it (https://pytorch.org; HEADRACE_TORCH for scripts/serve)"
        )
    if where("triton") is None:
        raise NoCard(f"there is a card ({card.name}), but no triton. Install headrace[cuda]")
    return card


def _folder_of(package: str) -> Path | None:
    """Without importing it."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _first_card(load: Callable[[str], Any]) -> Card:
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        raise NoCard("there is no NVIDIA driver here (libcuda.so.1). Install one") from None
    count, device = ctypes.c_int(), ctypes.c_int()
    if (status := cuda.cuInit(0)) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise NoCard(
            f"the NVIDIA driver finds no card (status {status}): what does nvidia-smi say, and does "
            "CUDA_VISIBLE_DEVICES name one?"
        )
    cuda.cuDeviceGet(ctypes.byref(device), 0)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    name, total, place = ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.create_string_buffer(_PCI_CHARS)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    cuda.cuDeviceGetPCIBusId(place, len(place), device)
    capability = attribute(_MAJOR), attribute(_MINOR)
    card_name = name.value.decode(errors="replace")
    if capability < LEAST_CAPABILITY:
        raise NoCard(
            f"{card_name} has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 (Ampere) or "
            "later. Use another card"
        )
    free_bytes = _free_bytes(load, place.value)
    return Card(
        name=card_name,
        total_bytes=total.value,
        free_bytes=total.value if free_bytes is None else min(free_bytes, total.value),
        multiprocessors=attribute(_MULTIPROCESSORS),
    )


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _free_bytes(load: Callable[[str], Any], place: bytes) -> int | None:
    """None where NVML is missing or doesn't say, as of a part of a card (MIG)."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(place, ctypes.byref(handle)):
            return None
        return None if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else int(memory.free)
    finally:
        nvml.nvmlShutdown()

"""The card: whether there is one, what it is, how much memory it has free, and host memory that it reaches itself."""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

import numpy as np
import torch

from headrace.ops.backend import CannotServe

LEAST_CAPABILITY: Final = (8, 0)
"""bfloat16 on the tensor cores, and asynchronous copies to shared memory: Ampere."""
_PORTABLE_AND_MAPPED: Final = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped."""
_PR_SET_TIMERSLACK: Final = 29
_LARGEST_BLOCK_POWER: Final = 16
"""Numbers of 16k pages."""
_BLOCKS: Final = 8
"""Of each size: host and device pages of two steps' loads, and of two backups."""


def open_card() -> torch.device:
    """The first card that this process may use, from now on its current one. Raises CannotServe with what to change."""
    problem = card_problem()
    if problem:
        raise CannotServe(f"--device cuda: {problem}")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    wake_in_time()
    # A long sum must not be kept in bfloat16 between its parts.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return device


def wake_in_time() -> None:
    """Sleeps of this thread end when they should. By default Linux adds up to 50 µs, and so much is what the worker
    sleeps between two looks at a step's event: it took 105 µs, and takes 55."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def card_problem() -> str:
    """Why no card can be used, and what to change; "" if one can."""
    if torch.version.cuda is None:
        return (
            f"this torch ({torch.__version__}) is built without CUDA. Install one that has it (https://pytorch.org), "
            "or give --device cpu"
        )
    if not torch.cuda.is_available():
        return (
            f"torch was built for CUDA {torch.version.cuda}, but finds no card: is there an NVIDIA driver "
            "(nvidia-smi), and does CUDA_VISIBLE_DEVICES name a card? Or give --device cpu"
        )
    capability = torch.cuda.get_device_capability(0)
    if capability < LEAST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(0)} has compute capability {capability[0]}.{capability[1]}; the kernels need "
            "8.0 (Ampere) or later. Give --device cpu"
        )
    return ""


def free_bytes(device: torch.device) -> int:
    """Of the card's memory, what a process could take now; what torch keeps for itself counts as taken."""
    return int(torch.cuda.mem_get_info(device)[0])


def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def make_pinned_blocks() -> None:
    """What `Tensor.pin_memory` will give to lists of page numbers, while nothing runs yet. Where torch has no block of
    the size (a power of two) left it asks CUDA, which may wait for all that runs on the card. A megabyte."""
    sizes = [1 << power for power in range(2, _LARGEST_BLOCK_POWER + 1)] * _BLOCKS
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    # torch keeps them.
    del blocks


def pin(buffer: mmap.mmap | bytearray) -> None:
    """Lock memory and let the card reach it, for as long as the process lives. Raises OSError where the system refuses.

    Then copies from and to it are asynchronous, and kernels may read and write it. All of it becomes real: 0.1 to 0.4 s
    a GiB.
    """
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    status = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
        address, len(buffer), _PORTABLE_AND_MAPPED
    )
    if int(status) != 0:
        raise OSError(f"{len(buffer) >> 20} MiB of memory can't be locked for the card: CUDA error {int(status)}")

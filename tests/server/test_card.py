"""A GPU is found by asking the driver, or the sentence says what to change; with libraries that are not there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.server.card import Card, NoCard, read_card

GIB = 1 << 30


class Cuda:
    """libcuda, as far as it is asked."""

    def __init__(self, count: int = 1, capability: tuple[int, int] = (9, 0), status: int = 0) -> None:
        self.count = count
        self.attributes = {75: capability[0], 76: capability[1], 16: 132}
        self.status = status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 100 + index
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: ctypes.c_int) -> int:
        assert device.value == 100
        value._obj.value = self.attributes[number]
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:
        name.value = b"A Card"
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: ctypes.c_int) -> int:
        total._obj.value = 80 * GIB
        return 0

    def cuDeviceGetPCIBusId(self, place: Any, size: int, device: ctypes.c_int) -> int:
        place.value = b"0000:0a:00.0"
        return 0


class Nvml:
    """libnvidia-ml, the same."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, place: bytes, handle: Any) -> int:
        assert place == b"0000:0a:00.0"
        handle._obj.value = 7
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        assert handle.value == 7
        memory._obj.free = 60 * GIB
        return 4 if self.refuses else 0


def libraries(**there: object) -> Callable[[str], Any]:
    def load(name: str) -> object:
        short = {"libcuda.so.1": "cuda", "libnvidia-ml.so.1": "nvml"}[name]
        if short not in there:
            raise OSError(f"{name}: cannot open shared object file")
        return there[short]

    return load


def packages(folder: Path, cuda: str = "'13.0'", triton: bool = True) -> Callable[[str], Path | None]:
    """torch, as its version.py says it was built."""
    version = f"from typing import Optional\n__version__ = '9.9+x'\ncuda: Optional[str] = {cuda}\nhip = None\n"
    (folder / "version.py").write_text(version)
    return lambda name: folder if name == "torch" or triton else None


def test_a_card_is_told_with_what_is_free_of_it(tmp_path: Path) -> None:
    nvml = Nvml()
    card = read_card(libraries(cuda=Cuda(), nvml=nvml), packages(tmp_path))
    assert card == Card("A Card", 80 * GIB, 60 * GIB, 132)
    assert nvml.open == 0


@pytest.mark.parametrize("nvml", [{}, {"nvml": Nvml(refuses=True)}])
def test_where_nobody_says_what_is_free_all_of_it_is(tmp_path: Path, nvml: dict[str, object]) -> None:
    assert read_card(libraries(cuda=Cuda(), **nvml), packages(tmp_path)).free_bytes == 80 * GIB


@pytest.mark.parametrize(
    ("there", "built", "sentence"),
    [
        ({}, {}, "there is no NVIDIA driver here"),
        ({"cuda": Cuda(status=100)}, {}, r"finds no card \(status 100\): what does nvidia-smi say"),
        ({"cuda": Cuda(count=0)}, {}, r"finds no card \(status 0\).* does CUDA_VISIBLE_DEVICES name one"),
        ({"cuda": Cuda(capability=(7, 5))}, {}, r"A Card has compute capability 7\.5; the kernels need 8\.0"),
        ({"cuda": Cuda()}, {"cuda": "None"}, r"\(A Card\), but torch 9\.9\+x is built without CUDA. Install one"),
        ({"cuda": Cuda()}, {"triton": False}, r"\(A Card\), but no triton. Install headrace\[cuda\]"),
    ],
)
def test_whatever_lacks_is_a_sentence_that_says_what_to_change(
    tmp_path: Path, there: dict[str, object], built: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(NoCard, match=sentence):
        read_card(libraries(**there), packages(tmp_path, **built))


def test_the_installed_torch_is_read_without_importing_it() -> None:
    """Whatever it was built for, there is a version, and only CUDA can be what it lacks."""
    try:
        read_card(libraries(cuda=Cuda()))
    except NoCard as problem:
        assert "is built without CUDA" in str(problem) and "torch 2." in str(problem)

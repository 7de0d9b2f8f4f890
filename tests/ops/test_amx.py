"""Tiles multiply as `ops.simd.amx` says; a process that is refused them does without."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.dot import ask_for_tiles
from headrace.ops.simd import amx
from headrace.ops.simd.instructions import ADDRESS, INT, NOTHING, Builder, Value, const, instruction, kernel, loop
from headrace.ops.simd.target import AMX

needs_tiles: Final = pytest.mark.skipif(not AMX, reason="this CPU, or what it is to be taken for, has no AMX")
TOTAL, LEFT, RIGHT = 0, 4, 6
FLOAT32_ROW: Final = 64


@instruction(NOTHING, INT, INT, INT, ADDRESS, INT, ADDRESS, ADDRESS, INT)
def _dots(
    b: Builder, rows: Value, lanes: Value, columns: Value, x: Value, x_bytes: Value, w: Value, out: Value, times: Value
) -> None:
    """out += x · w, `times` times; the out's rows are 64 bytes apart."""
    if not AMX:
        return
    wide = b.mul(columns, const(4))
    shapes = [amx.TileShape(1)] * amx.TILES
    shapes[TOTAL] = amx.TileShape(rows, wide)
    shapes[LEFT] = amx.TileShape(rows, b.mul(lanes, const(4)))
    shapes[RIGHT] = amx.TileShape(lanes, wide)
    amx.emit_configure(b, shapes)
    amx.emit_load_tile(b, TOTAL, out, const(FLOAT32_ROW))

    def turn(at: Value, carried: list[Value]) -> list[Value]:
        amx.emit_load_tile(b, LEFT, x, x_bytes)
        amx.emit_load_tile(b, RIGHT, w, const(amx.TILE_ROW_BYTES))
        amx.emit_dot(b, TOTAL, LEFT, RIGHT)
        return carried

    loop(b, times, [], turn)
    amx.emit_store_tile(b, TOTAL, out, const(FLOAT32_ROW))
    amx.emit_release(b)


@kernel
def dots(rows: int, lanes: int, columns: int, x: int, x_bytes: int, w: int, out: int, times: int) -> None:
    _dots(rows, lanes, columns, x, x_bytes, w, out, times)


def random_operands(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """bfloat16 [16, 32]; packed bfloat16 [16, 16, 2]; float32 [16, 16]."""
    random = torch.Generator().manual_seed(seed)
    left, right = torch.randn((16, 32), generator=random), torch.randn((16, 16, 2), generator=random)
    return left.bfloat16(), right.bfloat16(), torch.randn((16, 16), generator=random)


def by_tiles(left: Tensor, right: Tensor, start: Tensor, shape: tuple[int, int, int], times: int = 1) -> Tensor:
    """`shape`: rows, lanes, columns that take part."""
    out = start.clone()
    dots(*shape, left.data_ptr(), left.stride(0) * 2, right.data_ptr(), out.data_ptr(), times)
    return out


def in_order(left: Tensor, right: Tensor, start: Tensor, lanes: int) -> NDArray[np.float32]:
    """The same sums, one rounding at a time. A product of two bfloat16 is exact in float64."""
    x, w = left.double().numpy(), right.double().numpy()
    places = [np.zeros((16, 16), np.float32) for _ in range(2)]
    for lane in range(lanes):
        for place in range(2):
            product = np.outer(x[:, 2 * lane + place], w[lane, :, place])
            places[place] = (product + places[place]).astype(np.float32)
    total: NDArray[np.float32] = start.numpy() + (places[0] + places[1])
    return total


@needs_tiles
@pytest.mark.parametrize("lanes", [1, 7, 16])
def test_a_dot_adds_up_even_and_odd_places_apart_and_then_the_total(lanes: int) -> None:
    left, right, start = random_operands(lanes)
    given = by_tiles(left, right, start, (16, lanes, 16))
    assert np.array_equal(given.numpy(), in_order(left, right, start, lanes))


@needs_tiles
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("columns", [3, 16])
def test_a_small_tile_holds_the_same_bits_and_leaves_the_rest_of_memory(rows: int, columns: int) -> None:
    left, right, start = random_operands(rows)
    expected = start.clone()
    expected[:rows, :columns] = by_tiles(left, right, start, (16, 16, 16))[:rows, :columns]
    assert torch.equal(by_tiles(left, right, start, (rows, 16, columns)), expected)


@needs_tiles
def test_rows_are_read_and_written_where_they_are() -> None:
    left, right, start = random_operands(3)
    apart = torch.full((16, 100), torch.nan, dtype=torch.bfloat16)
    apart[:, :32] = left
    assert torch.equal(by_tiles(apart, right, start, (16, 16, 16)), by_tiles(left, right, start, (16, 16, 16)))


@needs_tiles
def test_threads_that_begin_later_have_tiles_of_their_own() -> None:
    operands = [random_operands(seed) for seed in range(4)]
    expected = [by_tiles(*own, (16, 16, 16), times=20_000) for own in operands]
    given: dict[int, Tensor] = {}

    def compute(number: int) -> None:
        given[number] = by_tiles(*operands[number], (16, 16, 16), times=20_000)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(given[number], expected[number]) for number in range(4))


@needs_tiles
def test_asking_again_changes_nothing() -> None:
    assert ask_for_tiles() == ""


REFUSED: Final = """
import ctypes, logging, sys

class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

# Linux gives no tiles to a process with a signal stack that they would not fit.
room = ctypes.create_string_buffer(4096)
ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 4096)), None)
logging.basicConfig(format="%(message)s")
from headrace.ops.simd.target import AMX
print("tiles" if AMX else "no tiles", flush=True)
from headrace.ops.simd.compiler import _digest
print(_digest(), flush=True)
if len(sys.argv) > 1:
    import pytest
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:faulthandler", *sys.argv[1:]]))
"""


def refused(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What a process says to which the kernel gives no tiles."""
    command = [sys.executable, "-P", "-c", REFUSED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@needs_tiles
def test_a_process_that_is_refused_tiles_does_without_and_says_so_once() -> None:
    done = refused()
    assert done.stdout.splitlines()[0] == "no tiles"
    assert done.stderr.count("the kernel does not let us use it") == 1


@needs_tiles
def test_code_with_tiles_is_not_loaded_by_a_process_without() -> None:
    from headrace.ops.simd.compiler import _digest

    assert refused().stdout.splitlines()[1] != _digest()

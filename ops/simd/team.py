"""The threads of a worker's kernels: one program, run by all of them, with barriers between its phases.

A helper thread is compiled code from its start to its end: it never takes the GIL. Waiting, for a job or at a barrier,
it looks at a counter for up to 50 µs, then sleeps in a futex of the kernel. So nothing spins while the worker is idle,
and a helper whose core is taken by somebody else costs others no core.

Within a phase, pieces of work are claimed one by one. Each thread has a range of them, and takes what is left of the
others' when its own is done, so that one that is held up does less. Its own are neighbours, and those of a phase lie
where those of the phase before did: what it fetches ahead is what it needs next, and what it wrote it reads again.

in     jobs, from the thread that owns the team
out    a job's effects
state  counters in memory (`cells`): jobs begun, arrivals at barriers, sleepers, two sets of claims
owner  the main thread begins jobs; counters change by atomic instructions only
ready  after a job's last barrier
end    a job that says stop
"""

from __future__ import annotations

import platform
from typing import Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

from headrace.ops.simd.instructions import (
    ADDRESS,
    INT,
    NOTHING,
    Builder,
    Value,
    call,
    const,
    i64,
    instruction,
    kernel,
    offset,
)

SPIN_NS: Final = 50_000
"""A thread waits awake for so long: a phase of a decode step lasts 5 to 100 µs, waking a sleeper takes 50."""
LINE_BYTES: Final = 64
"""Counters stand a cache line apart."""
_JOBS: Final = 0 * LINE_BYTES
ARRIVALS: Final = 2 * LINE_BYTES
_CLAIMS: Final = 4 * LINE_BYTES
_CLAIM_SETS: Final = 2
_SLEEPERS: Final = LINE_BYTES
"""From a counter to the number of those that sleep until it grows."""

_SYSCALL_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 202)
_FUTEX_WAIT_PRIVATE: Final = 128
_FUTEX_WAKE_PRIVATE: Final = 129
_EVERYONE: Final = 1 << 30
_CLOCK_MONOTONIC: Final = 1


class Member(NamedTuple):
    """A thread of a team."""

    cells: int
    threads: int
    thread: int


def new_cells(threads: int) -> NDArray[np.int64]:
    """Zeroed counters of a team; they start at a cache line."""
    words = np.zeros((4 + _CLAIM_SETS * threads) * LINE_BYTES // 8 + 7, np.int64)
    return words[-(words.ctypes.data // 8) % 8 :]


@instruction(INT, ADDRESS, INT)
def fetch_add(b: Builder, address: Value, count: Value) -> Value:
    """Add to a counter → what it was before."""
    return b.atomic_rmw("add", b.inttoptr(address, i64.as_pointer()), count, "seq_cst")


@instruction(INT, ADDRESS)
def look(b: Builder, address: Value) -> Value:
    """A counter's value; what was written before it grew is seen after."""
    return b.load_atomic(b.inttoptr(address, i64.as_pointer()), "seq_cst", 8)


@instruction(NOTHING, ADDRESS)
def reset(b: Builder, address: Value) -> None:
    b.store_atomic(const(0), b.inttoptr(address, i64.as_pointer()), "seq_cst", 8)


@instruction(NOTHING)
def pause(b: Builder) -> None:
    """Leave the core's other hardware thread alone for a moment."""
    if platform.machine() == "x86_64":
        call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
    else:
        b.fence("seq_cst")


@instruction(NOTHING)
def give_way(b: Builder) -> None:
    """Let a thread that waits for this core have it; 0.3 µs where there is none."""
    call(b, "sched_yield", ir.IntType(32), [])


@instruction(INT)
def now_ns(b: Builder) -> Value:
    """Of the monotonic clock; 25 ns, without entering the kernel."""
    moment = cgutils.alloca_once(b, ir.ArrayType(i64, 2))
    where = b.ptrtoint(moment, i64)
    call(b, "clock_gettime", ir.IntType(32), [ir.Constant(ir.IntType(32), _CLOCK_MONOTONIC), where])
    seconds = b.load(b.inttoptr(where, i64.as_pointer()))
    rest = b.load(b.inttoptr(offset(b, where, 8), i64.as_pointer()))
    return b.add(b.mul(seconds, const(1_000_000_000)), rest)


def _futex(b: Builder, address: Value, operation: int, value: Value) -> None:
    kind = ir.FunctionType(i64, [i64], var_arg=True)
    syscall = cgutils.get_or_insert_function(b.module, kind, "syscall")
    b.call(syscall, [const(_SYSCALL_FUTEX), address, const(operation), value, const(0), const(0), const(0)])


@instruction(NOTHING, ADDRESS, INT)
def sleep_while(b: Builder, address: Value, value: Value) -> None:
    """Sleep until woken, unless the counter (its low 32 bits) has another value by now."""
    _futex(b, address, _FUTEX_WAIT_PRIVATE, value)


@instruction(NOTHING, ADDRESS)
def wake_all(b: Builder, address: Value) -> None:
    _futex(b, address, _FUTEX_WAKE_PRIVATE, const(_EVERYONE))


@kernel
def wait_for(cell: int, target: int) -> None:
    """Until the counter has reached the target.

    The one that is waited for may be waiting for this very core, where others use the machine too: a step of two
    threads then took 23 ms without `give_way`, and 7 with it.
    """
    began_ns = now_ns()
    while now_ns() - began_ns < SPIN_NS:
        for _ in range(50):
            if look(cell) >= target:
                return
            pause()
        give_way()
    # The order makes sure that no wake is lost: whoever raises the counter looks for sleepers afterwards.
    fetch_add(cell + _SLEEPERS, 1)
    seen = look(cell)
    while seen < target:
        sleep_while(cell, seen)
        seen = look(cell)
    fetch_add(cell + _SLEEPERS, -1)


@kernel
def begin_job(cells: int, threads: int) -> None:
    """In the main thread: the claims of phase 0 start anew, and all helpers run the job that the arguments describe."""
    for owner in range(threads):
        reset(cells + _CLAIMS + owner * LINE_BYTES)
    if threads > 1:
        fetch_add(cells + _JOBS, 1)
        if look(cells + _JOBS + _SLEEPERS) > 0:
            wake_all(cells + _JOBS)


@kernel
def await_job(cells: int, number: int) -> None:
    """In a helper: until job `number` (from 1) has begun."""
    wait_for(cells + _JOBS, number)


@kernel
def claims_of(member: Member, phase: int, owner: int) -> int:
    """The address of what was claimed of a thread's range."""
    return member.cells + _CLAIMS + (phase % _CLAIM_SETS * member.threads + owner) * LINE_BYTES


@kernel
def end_phase(member: Member, phase: int) -> int:
    """Until all threads are here → the number of the next phase.

    Two sets of claims take turns. The next phase's were those of the phase before this one, of which nobody claims any
    more: each thread makes its own new before it says that it is here.
    """
    cells, threads = member.cells, member.threads
    reset(claims_of(member, phase + 1, member.thread))
    if threads == 1:
        return phase + 1
    arrived = fetch_add(cells + ARRIVALS, 1) + 1
    everyone = (arrived + threads - 1) // threads * threads
    if arrived < everyone:
        wait_for(cells + ARRIVALS, everyone)
    elif look(cells + ARRIVALS + _SLEEPERS) > 0:
        wake_all(cells + ARRIVALS)
    return phase + 1


@kernel
def own_end(member: Member, pieces: int) -> int:
    """Of the thread's range."""
    return pieces * (member.thread + 1) // member.threads


@kernel
def claim(member: Member, phase: int, pieces: int) -> int:
    """The thread's next piece of a phase's `pieces`, each of which is given out once; `pieces` if none is left."""
    piece, _ = claim_some(member, phase, pieces, 1)
    return piece


@kernel
def claim_some(member: Member, phase: int, pieces: int, most: int) -> tuple[int, int]:
    """Neighbours, at most so many → the first, and the one behind the last."""
    threads = member.threads
    for further in range(threads):
        owner = (member.thread + further) % threads
        first, end = pieces * owner // threads, pieces * (owner + 1) // threads
        cell = claims_of(member, phase, owner)
        if look(cell) < end - first:
            piece = first + fetch_add(cell, most)
            if piece < end:
                return piece, min(piece + most, end)
    return pieces, pieces

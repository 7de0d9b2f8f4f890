"""An event loop whose clock jumps: when nothing is ready, it is the next timer's time, at once.

in     coroutines, callbacks, timers
out    their effects, in one order: by deadline, then by the order in which they were asked for
state  the clock (whole nanoseconds), a heap of timers, how many turns were made, the bounds
owner  the thread that calls `run`; no other may touch the loop
ready  a timer runs exactly at its deadline, or the run ends with an exception that says which tasks still wait
end    `run` cancels what is left, lets it finish, and closes the loop

It stands on `asyncio.BaseEventLoop`, which has no selector, so there is no file descriptor in it. The order of events
depends on nothing but the program: asyncio's own heap is not FIFO among equal deadlines, and `TaskGroup` cancels its
tasks in the order of a set, which hashes them by address; here timers and tasks carry numbers.

Measured beside plain asyncio with delays of a nanosecond, Python 3.11, k/s: 200 timers that set themselves again 610
(470); an engine and a collector that wake each other around a device timer 138 (96) steps; 100 sleeping tasks 233
(215). With 100k timers of random deadlines in the heap it is 200 (240): there each timer is a turn of its own.

Private parts of asyncio are used; `tests/sim` pins them for each Python in `TESTED_PYTHONS`.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar, TypeVarTuple, cast

TESTED_PYTHONS: Final = ((3, 11), (3, 12), (3, 13))

MAX_VIRTUAL_S: Final = 1_000_000
"""The clock's end, 11.6 days. Until there, float seconds name a nanosecond: `round((now_s + delay_s) * 1e9)` is off by
at most 3 · 2⁻⁵³ · 10¹⁵ = 0.33 before it is rounded."""
DEFAULT_VIRTUAL_S: Final = 86_400.0
DEFAULT_TURNS: Final = 100_000_000
DEFAULT_TURNS_AT_ONE_INSTANT: Final = 100_000
"""Turns in a row without the clock moving: tasks that wake each other and never wait."""
WIND_UP_TURNS: Final = 100_000
WIND_UP_VIRTUAL_S: Final = 3600.0
"""What cancelled leftovers may use beyond the run's bounds."""

_S: Final = 1_000_000_000
_NEVER_NS: Final = 1 << 62
_PURGE_ABOVE: Final = 100
_TASKS_NAMED: Final = 20

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class NothingToDo(Exception):
    """No callback is ready and no timer is set, yet the run is not done: every task waits for another."""


class VirtualTimeExceeded(Exception):
    """The next timer lies beyond the bound on virtual time."""


class TooManyTurns(Exception):
    """The run made more turns than its bound, in all or without the clock moving."""


class NotSimulated(Exception):
    """Something of the real world (a descriptor, a thread, a process, a signal) was asked of a virtual loop."""


class Unhandled(Exception):
    """A task failed, was dropped, and nobody had awaited it; or a leftover task failed while it was cancelled."""


class VirtualTimer(asyncio.TimerHandle):
    """A `TimerHandle` that sets its fields itself: asyncio's two constructors take a third of a timer's time."""

    __slots__ = ()
    _loop: VirtualLoop
    _callback: Callable[..., object] | None
    _context: contextvars.Context
    _repr: str | None
    _source_traceback: object
    _scheduled: bool
    _when: float

    def __init__(
        self,
        when_ns: int,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._when = when_ns / _S
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False
        self._scheduled = True
        self._repr = self._source_traceback = None


class VirtualTask(asyncio.Task[T]):
    """A task that hashes to its number, so that a set of tasks has the same order in every process."""

    __slots__ = ("number",)

    def __init__(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        loop: VirtualLoop,
        number: int,
        name: object,
        context: contextvars.Context | None,
    ) -> None:
        self.number = number  # before asyncio puts the task into its sets
        super().__init__(coro, loop=loop, name=f"Task-{number}" if name is None else str(name), context=context)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. `unhandled` holds a line for every failure that reached nobody."""

    _ready: deque[asyncio.Handle]
    _closed: bool
    _stopping: bool
    _thread_id: int | None

    def __init__(
        self,
        max_virtual_s: float = DEFAULT_VIRTUAL_S,
        max_turns: int = DEFAULT_TURNS,
        max_turns_at_one_instant: int = DEFAULT_TURNS_AT_ONE_INSTANT,
    ) -> None:
        """Raises ValueError for bounds that can't be kept."""
        super().__init__()
        self.unhandled: list[str] = []
        self.turns = 0
        self._now_ns = 0
        self._max_ns = round(max_virtual_s * _S)
        self._max_turns = max_turns
        self._max_turns_at_one_instant = max_turns_at_one_instant
        self._turns_allowed = min(max_turns, max_turns_at_one_instant)
        self._timers: list[tuple[int, int, VirtualTimer]] = []
        self._timer_numbers = itertools.count()
        self._timers_cancelled = 0
        self._task_numbers = itertools.count(1)
        if not (0 < max_virtual_s <= MAX_VIRTUAL_S and max_turns >= 1 and max_turns_at_one_instant >= 1):
            self.close()
            raise ValueError(
                f"max_virtual_s ({max_virtual_s}) must be in (0, {MAX_VIRTUAL_S}], max_turns ({max_turns}) and "
                f"max_turns_at_one_instant ({max_turns_at_one_instant}) at least 1"
            )

    def time(self) -> float:
        return self._now_ns / _S

    def time_ns(self) -> int:
        return self._now_ns

    # -----------------------------------------------------------------------------------------------------------
    # Timers

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> VirtualTimer:
        return self._set_timer(_nanoseconds(when), callback, args, context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> VirtualTimer:
        return self._set_timer(self._now_ns + _nanoseconds(delay), callback, args, context)

    def call_at_ns(self, when_ns: int, callback: Callable[[*Ts], object], *args: *Ts) -> VirtualTimer:
        """`call_at` in the clock's own unit."""
        return self._set_timer(when_ns, callback, args, None)

    def call_later_ns(self, delay_ns: int, callback: Callable[[*Ts], object], *args: *Ts) -> VirtualTimer:
        """`call_later` in the clock's own unit."""
        return self._set_timer(self._now_ns + delay_ns, callback, args, None)

    def _set_timer(
        self,
        when_ns: int,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> VirtualTimer:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        timer = VirtualTimer(when_ns, callback, args, self, context)
        heapq.heappush(self._timers, (when_ns, next(self._timer_numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: VirtualTimer) -> None:
        """asyncio calls this from `TimerHandle.cancel`."""
        if handle._scheduled:
            self._timers_cancelled += 1

    def _drop_cancelled(self) -> None:
        """Take cancelled timers from the head of the heap, or from all of it when they are the larger part."""
        timers = self._timers
        if self._timers_cancelled > _PURGE_ABOVE and self._timers_cancelled * 2 > len(timers):
            for _, _, timer in timers:
                timer._scheduled = not timer.cancelled()
            timers[:] = [entry for entry in timers if entry[2]._scheduled]
            heapq.heapify(timers)
            self._timers_cancelled = 0
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)[2]._scheduled = False
            self._timers_cancelled -= 1

    # -----------------------------------------------------------------------------------------------------------
    # Turns

    def _run_once(self) -> None:
        """One turn, in asyncio's order: what is ready, then timers that are due; what they add runs in the next."""
        self.turns += 1
        if self.turns > self._turns_allowed:
            self._refuse_turn()
        ready, timers = self._ready, self._timers
        if self._timers_cancelled:
            self._drop_cancelled()
        if not ready and not self._stopping:
            self._jump()
        now_ns = self._now_ns
        timer: VirtualTimer | None
        while timers and timers[0][0] <= now_ns:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            if timer._cancelled:
                self._timers_cancelled -= 1
            ready.append(timer)
        handle: asyncio.Handle | None
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()
        # A failed task's traceback reaches this frame (3.12): its handle here would keep it from being reported.
        handle = timer = None

    def _jump(self) -> None:
        """Move the clock to the next timer."""
        if not self._timers:
            raise NothingToDo(f"nothing is ready and no timer is set at {self.time():.9f} s. {self._who_waits()}")
        when_ns = self._timers[0][0]
        if when_ns > self._max_ns:
            when = "never" if when_ns >= _NEVER_NS else f"at {when_ns / _S:.9f} s"
            raise VirtualTimeExceeded(
                f"it is {self.time():.9f} s and the next timer runs {when}, beyond the bound of "
                f"{self._max_ns / _S} virtual s (max_virtual_s). {self._who_waits()}"
            )
        if when_ns > self._now_ns:
            self._now_ns = when_ns
            self._turns_allowed = self.turns + self._max_turns_at_one_instant
            if self._turns_allowed > self._max_turns:
                self._turns_allowed = self._max_turns

    def _refuse_turn(self) -> NoReturn:
        if self.turns > self._max_turns:
            raise TooManyTurns(f"{self._max_turns} turns were made (max_turns). {self._who_waits()}")
        raise TooManyTurns(
            f"{self._max_turns_at_one_instant} turns were made at {self.time():.9f} s and the clock does not move: "
            f"something wakes itself without waiting. Ready: {[*itertools.islice(self._ready, 3)]}. {self._who_waits()}"
        )

    # -----------------------------------------------------------------------------------------------------------
    # Tasks

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> VirtualTask[T]:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        return VirtualTask(coro, self, next(self._task_numbers), name, context)

    def pending_tasks(self) -> list[VirtualTask[Any]]:
        """Tasks that are not done, in the order of their creation."""
        tasks = cast("set[VirtualTask[Any]]", asyncio.all_tasks(self))
        return sorted(tasks, key=lambda task: task.number)

    def _who_waits(self) -> str:
        tasks = self.pending_tasks()
        if not tasks:
            return "No task is pending."
        lines = [f"  {_whereabouts(task)}" for task in tasks[:_TASKS_NAMED]]
        if len(tasks) > _TASKS_NAMED:
            lines.append(f"  and {len(tasks) - _TASKS_NAMED} more")
        return "\n".join(["Pending:", *lines])

    # -----------------------------------------------------------------------------------------------------------
    # Failures, other threads, the end

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback that raises ends the run: asyncio would log it and go on, and hide a broken invariant."""
        error = context.get("exception")
        if "handle" in context and error is not None:
            raise error
        self.unhandled.append(f"{context.get('message')}: {error!r}, {context.get('task') or context.get('future')!r}")

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """`call_soon`; raises NotSimulated in another thread, whose timing no seed decides."""
        if self._thread_id is not None and self._thread_id != threading.get_ident():
            raise NotSimulated(f"{callback!r} comes from another thread: in virtual time there is only one")
        return self.call_soon(callback, *args, context=context)

    def wind_up(self) -> None:
        """Cancel the tasks that are left, in the order of their creation, and let them and the generators finish."""
        self._max_turns = self.turns + WIND_UP_TURNS
        self._turns_allowed = self._max_turns
        self._max_ns = self._now_ns + round(WIND_UP_VIRTUAL_S * _S)
        leftovers = self.pending_tasks()
        for task in leftovers:
            task.cancel()
        if leftovers:
            self.run_until_complete(asyncio.gather(*leftovers, return_exceptions=True))
        for task in leftovers:
            if not task.cancelled() and task.exception() is not None:
                self.unhandled.append(f"{task.get_name()} failed while it was cancelled: {task.exception()!r}")
        self.run_until_complete(self.shutdown_asyncgens())

    def close(self) -> None:
        super().close()
        self._timers.clear()


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: VirtualLoop, *args: object, **kwargs: object) -> NoReturn:
        raise NotSimulated(
            f"loop.{name}() reaches outside the simulation, where time does not follow the virtual clock: "
            "pass a simulated transport (or a cost in virtual time) in its place"
        )

    refuse.__name__ = name
    return refuse


for _name in (
    *("add_reader", "remove_reader", "add_writer", "remove_writer", "add_signal_handler", "remove_signal_handler"),
    *("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into", "sock_sendall", "sock_sendto"),
    *("sock_connect", "sock_accept", "sock_sendfile", "sendfile", "start_tls", "getaddrinfo", "getnameinfo"),
    *("create_connection", "create_server", "create_datagram_endpoint", "connect_accepted_socket"),
    *("create_unix_connection", "create_unix_server", "connect_read_pipe", "connect_write_pipe"),
    *("subprocess_exec", "subprocess_shell", "run_in_executor", "set_default_executor", "set_task_factory"),
):
    setattr(VirtualLoop, _name, _refusal(_name))


def _nanoseconds(seconds: float) -> int:
    try:
        return round(seconds * _S)
    except OverflowError:  # infinity: a timer that never runs, as in asyncio
        return _NEVER_NS if seconds > 0 else 0


def _whereabouts(task: VirtualTask[Any]) -> str:
    """The task's name, its coroutine, and the line of the innermost coroutine that waits."""
    awaited: Any = task.get_coro()
    name = getattr(awaited, "__qualname__", repr(awaited))
    frame: FrameType | None = None
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None) or frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    where = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
    return f"{task.get_name()}, {name}{where}"


def running_loop() -> VirtualLoop:
    """The virtual loop that runs the caller. Raises NotSimulated under another loop."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise NotSimulated(f"this runs under {type(loop).__name__}: start it with headrace.server.sim.virtual_loop.run")
    return loop


def run(
    main: Coroutine[Any, Any, T],
    *,
    max_virtual_s: float = DEFAULT_VIRTUAL_S,
    max_turns: int = DEFAULT_TURNS,
    max_turns_at_one_instant: int = DEFAULT_TURNS_AT_ONE_INSTANT,
) -> T:
    """Run `main` in a loop of its own that begins at 0 s, and return its result.

    Raises what `main` and plain callbacks raise, NothingToDo, VirtualTimeExceeded, TooManyTurns, NotSimulated, and
    Unhandled when all else went well.
    """
    if asyncio._get_running_loop() is not None:
        main.close()
        raise RuntimeError("a loop is running in this thread: a virtual loop can't run inside it")
    loop = VirtualLoop(max_virtual_s, max_turns, max_turns_at_one_instant)
    try:
        try:
            result = loop.run_until_complete(main)
        finally:
            loop.wind_up()
    except BaseException as error:
        for line in loop.unhandled:
            error.add_note(line)
        raise
    finally:
        loop.close()
    if loop.unhandled:
        raise Unhandled("; ".join(loop.unhandled))
    return result

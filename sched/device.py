"""The device's life as the engine sees it: connect, load, warm up, serve, be lost, come back.

in     commands to send; replies and the end of the connection
out    `on_ready`, `on_step` and `on_copied` per completion, `on_lost` once a life; the phase for health
state  the connection of this life, its phase, when it last gave a sign
owner  the engine, whose `device` stage `serve` is
ready  between `on_ready` and `on_lost`
end    a lost device has ended (killed, reaped) before `on_lost` is called: it touches nothing any more
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from headrace.ops.transport import TransportClosed
from headrace.ops.wire import (
    BackupDone,
    BatchRing,
    Command,
    Loaded,
    MakePools,
    Progress,
    Ready,
    Refused,
    Start,
    StepDone,
    StepFailed,
    encoder,
    reply_decoder,
)
from headrace.sched.executors.protocol import Connect, Connection, DeviceUnavailable
from headrace.sched.messages import Phase

log = logging.getLogger(__name__)

MAX_RESTARTS: Final = 5
RESTART_WINDOW_S: Final = 300.0
"""More restarts than that within the window, and the engine gives up: the fault is not a passing one."""


class EngineFailed(Exception):
    """The engine can't go on; the message says why and what to change."""


class Device:
    """The current device, and the one after it when it is lost."""

    def __init__(
        self,
        connect: Connect,
        begin: tuple[Start, MakePools],
        on_ready: Callable[[Ready], None],
        on_step: Callable[[StepDone], None],
        on_copied: Callable[[BackupDone], None],
        on_lost: Callable[[str], Iterator[None]],
    ) -> None:
        self.phase: Phase = "starting"
        self.message = ""
        """What it is doing, or why it was lost."""
        self.progress = 0.0
        """Of the phase, 0..1."""
        self.ready: Ready | None = None
        self.restarts = 0
        self.step_failures = 0
        self._connect = connect
        self._start, self._pools = begin
        self._on_ready, self._on_step, self._on_copied, self._on_lost = on_ready, on_step, on_copied, on_lost
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._last_sign_s = self._loop.time()
        self._lost_at_s: float | None = None
        """When the last life ended, until the next one is ready."""

    @property
    def pid(self) -> int:
        """Of the worker's process; 0 where there is none, or none now."""
        return self._connection.pid if self._connection is not None else 0

    @property
    def ring(self) -> BatchRing:
        """Of this life; only while there is one."""
        assert self._connection is not None
        return self._connection.ring

    @property
    def silent_s(self) -> float:
        """Since it last replied, or was last given work while idle."""
        return self._loop.time() - self._last_sign_s

    @property
    def starting(self) -> bool:
        """Connected, but not ready yet."""
        return self._connection is not None and self.ready is None and not self._lost.done()

    async def serve(self) -> None:
        """One life after the other. Raises EngineFailed if it can't be started, refuses, or is lost too often; any
        other exception is a fault in handling a reply."""
        losses: deque[float] = deque()
        try:
            while True:
                reason = await self._live()
                for _ in self._on_lost(reason):
                    await asyncio.sleep(0)
                self.restarts += 1
                losses.append(self._loop.time())
                while losses[0] < self._loop.time() - RESTART_WINDOW_S:
                    losses.popleft()
                if len(losses) > MAX_RESTARTS:
                    raise EngineFailed(f"the device was lost {len(losses)} times in {RESTART_WINDOW_S:.0f} s: {reason}")
                log.error("%s; it is started again", reason)
        except EngineFailed as failure:
            self.phase, self.message = "failed", str(failure)
            raise

    def send(self, command: Command) -> None:
        """Put a command into the stream. To a device that is being lost it goes nowhere: `on_lost` follows."""
        if self._connection is not None and not self._lost.done():
            try:
                self._connection.transport.send(encoder.encode(command))
            except TransportClosed:
                self.lose("the device closed its command pipe")

    def lose(self, reason: str) -> None:
        """Give this device up; the first reason counts."""
        if not self._lost.done():
            self.ready = None
            self.phase, self.message, self.progress = "restarting", reason, 0.0
            if self._lost_at_s is None:
                self._lost_at_s = self._loop.time()
            self._lost.set_result(reason)

    def begins_work(self) -> None:
        """It was idle and has been given a step, or a copy: its silence counts from now."""
        self._last_sign_s = self._loop.time()

    async def _live(self) -> str:
        """Connect and serve until the device is lost; the reason. It has ended when this returns or raises."""
        self._lost = self._loop.create_future()
        try:
            self._connection = await self._connect()
        except DeviceUnavailable as error:
            raise EngineFailed(str(error)) from error
        try:
            self._last_sign_s = self._loop.time()
            self._connection.transport.open(self._reply, self.lose)
            self.send(self._start)
            return await self._lost
        finally:
            self.ready = None
            self._connection.close()
            self._connection = None

    def _reply(self, message: bytes) -> None:
        """One reply. A fault in handling it is the stage's, not only this callback's."""
        if self._lost.done():
            return
        try:
            self._last_sign_s = self._loop.time()
            match reply_decoder.decode(message):
                case StepDone() as step:
                    self._on_step(step)
                case BackupDone() as copied:
                    self._on_copied(copied)
                case StepFailed() as failed:
                    self.step_failures += 1
                    self.lose(f"step {failed.step} failed on the device: {failed.message}")
                case Progress() as progress:
                    self.phase, self.message = "loading", progress.phase
                    self.progress = progress.done / max(progress.total, 1)
                case Loaded():
                    measured = "measuring a few steps" if self._pools.warm_up_tokens else "making room for KV"
                    self.phase, self.message, self.progress = "warming", measured, 0.0
                    self.send(self._pools)
                case Ready() as ready:
                    self.ready = ready
                    self.phase, self.message, self.progress = "ready", "", 1.0
                    if self._lost_at_s is not None:
                        log.warning("the device is ready again after %.1f s", self._loop.time() - self._lost_at_s)
                        self._lost_at_s = None
                    self._on_ready(ready)
                case Refused() as refused:
                    raise EngineFailed(refused.message)
                case other:
                    raise EngineFailed(f"the device said {other}, which nothing asked for")
        except Exception as error:
            self.ready = None
            if not self._lost.done():
                self._lost.set_exception(error)

"""The server's life: the port first, then loading behind it, serving, draining, the end.

in     a bound socket, an `Api`, a way to load the text side; signals
out    the exit code; a ready line with a command to try; what clients with running requests are told at the end
state  whether it drains, why it ends
owner  itself; signals arrive as callbacks on the loop
ready  when the engine and the text side are: until then probes tell the phase and requests get 503
end    HTTP connections closed, the engine's and the text side's children reaped, in that order
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import shlex
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from headrace.server.api import Api
from headrace.server.app import build_app
from headrace.server.lag import LagProbe
from headrace.server.text import TextService
from headrace.server.text_jobs import TextFailed

log = logging.getLogger("headrace.server")

BACKLOG: Final = 1024
SEND_BUFFER_BYTES: Final = 256 << 10
"""The kernel would let it grow to megabytes, all of them written for a client that may never read."""
KEEP_ALIVE_S: Final = 75.0
FAREWELL_S: Final = 1.0
"""How long connections may take to pass on the last events when the server stops at once."""
_POLL_S: Final = 0.02
_PROGRESS_S: Final = 5.0


class CannotListen(Exception):
    """The address can't be listened on; the message says why and what to change."""


class LoadedText(NamedTuple):
    service: TextService
    chat_template: str | None
    """Its source."""


def bind(host: str, port: int) -> socket.socket:
    """Listen on exactly this address, before anything is loaded. Raises CannotListen.

    Clients that connect from now on wait in the backlog until the loop runs, some milliseconds later.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise CannotListen(f"--host {host} is no address that is known here ({error.strerror}).") from None
    # "localhost" is both 127.0.0.1 and ::1, and most clients try the first.
    family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.bind(address)
        # Only listening makes the port ours: two sockets may be bound to it.
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise CannotListen(_why_not(host, port, error)) from None
    return sock


def _why_not(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"Port {port} on {host} is in use by another program. Stop that one, or choose another with --port."
        case errno.EACCES:
            return f"Port {port} may not be used without special rights. Choose one from 1024 up with --port."
        case errno.EADDRNOTAVAIL:
            return f"--host {host} is no address of this machine. Use 127.0.0.1, or 0.0.0.0 to serve other machines."
        case _:
            return f"Can't listen on {host} port {port}: {error.strerror}."


async def run_server(
    sock: socket.socket,
    api: Api,
    load_text: Callable[[], Awaitable[LoadedText]],
    *,
    drain_timeout_s: float,
    tell: Callable[[str], None],
    handle_signals: bool = True,
) -> int:
    """Serve until a signal or a failure; the exit code. `tell` prints a line for the person at the terminal."""
    life = _Life(api, load_text, drain_timeout_s, tell, url_of(sock))
    runner = web.AppRunner(
        build_app(api),
        # A client that goes away cancels its handler, which then aborts what runs for it.
        handler_cancellation=True,
        # A compressed body is refused; aiohttp would unpack it first.
        auto_decompress=False,
        access_log=None,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=FAREWELL_S,
        logger=_protocol_log(),
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    if handle_signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, life.signalled, number)
    try:
        await web.SockSite(runner, sock, backlog=BACKLOG).start()
        code = await life.live()
    finally:
        await runner.cleanup()
        life.close_text()
        if handle_signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    if life.asked_to_stop:
        tell("Stopped.")
    return code


def url_of(sock: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def try_it(url: str, api: Api, has_chat_template: bool) -> str:
    """A command that works as it stands."""
    model = api.settings.model_name
    if has_chat_template:
        path = "/v1/chat/completions"
        body = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}
    else:
        path, body = "/v1/completions", {"model": model, "prompt": "The sky is blue because", "max_tokens": 64}
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if api.settings.api_keys else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"


class _Life:
    """One run of the server, behind its HTTP side."""

    def __init__(
        self,
        api: Api,
        load_text: Callable[[], Awaitable[LoadedText]],
        drain_timeout_s: float,
        tell: Callable[[str], None],
        url: str,
    ) -> None:
        self._api = api
        self._load_text = load_text
        self._drain_timeout_s = drain_timeout_s
        self._tell = tell
        self._url = url
        self._text: TextService | None = None
        self._begin_s = time.monotonic()
        self._was_ready = False
        self._exit_code = 0
        self._leave = asyncio.Event()
        """Requests need not be waited for any longer."""
        self._drain = asyncio.Event()

    @property
    def asked_to_stop(self) -> bool:
        """By a signal."""
        return self._drain.is_set()

    def signalled(self, number: int) -> None:
        """The first signal drains, the second stops at once; while loading there is nothing to drain."""
        if self._api.readiness.draining or not self._was_ready:
            self._exit_code = self._exit_code or 128 + number
            self._leave.set()
        self._api.readiness.draining = True
        self._drain.set()

    async def live(self) -> int:
        async with asyncio.TaskGroup() as stages:
            tasks = [
                stages.create_task(stage, name=name)
                for name, stage in (
                    ("engine", self._run_engine()),
                    ("text", self._run_text()),
                    ("announce", self._announce()),
                    ("drain", self._drain_requests()),
                    ("lag", LagProbe(self._api.metrics, lambda: len(self._api.in_flight) > 0).run()),
                )
            ]
            await self._leave.wait()
            await self._farewell()
            for task in tasks:
                task.cancel()
        return self._exit_code

    def close_text(self) -> None:
        if self._text is not None:
            self._text.close()

    # -----------------------------------------------------------------------------------------------------------
    # Stages

    async def _run_engine(self) -> None:
        try:
            await self._api.engine.run()
        except Exception as error:
            # What it says before it was ever ready is about flags, directories and memory.
            self._fail(f"the engine has failed: {error}" if self._was_ready else str(error), error)
            return
        self._fail("the engine ended by itself", None)

    async def _run_text(self) -> None:
        try:
            loaded = await self._load_text()
        except Exception as error:
            self._fail(f"the model's tokenizer or chat template can't be used: {error}", error)
            return
        self._text = loaded.service
        self._api.set_text(*loaded)

    async def _announce(self) -> None:
        """Say what is being done until the server is ready, and then how to use it."""
        said = ""
        while (report := self._api.readiness.report()).phase != "ready":
            line = f"{report.phase}: {report.message}" if report.message else report.phase
            if line != said:
                log.info("%s", line)
                said = line
            await asyncio.sleep(_POLL_S)
        self._was_ready = True
        # What has been loaded stays: no later collection (`lag`) looks at it again.
        gc.freeze()
        assert self._text is not None
        after_s = time.monotonic() - self._begin_s
        self._tell(
            f"headrace serves {self._api.settings.model_name} at {self._url}, ready after {after_s:.1f} s. Try:\n"
        )
        self._tell(f"  {try_it(self._url, self._api, self._text.has_chat_template)}\n")
        # Not before: it would take the device worker's core. The first long prompt would wait for it, 0.4 s or more.
        try:
            self._text.start_worker()
        except TextFailed as problem:
            log.warning("the text worker can't be started yet: %s", problem)

    async def _drain_requests(self) -> None:
        await self._drain.wait()
        deadline_s = time.monotonic() + self._drain_timeout_s
        while len(self._api.in_flight):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                late = len(self._api.in_flight)
                ended = "it is" if late == 1 else "they are"
                self._tell(f"{_requests(late)} did not finish in {self._drain_timeout_s:g} s; {ended} ended.")
                self._exit_code = 1
                break
            self._tell(
                f"Stopping: waiting for {_requests(len(self._api.in_flight), 'running ')}, at most {left_s:.0f} s. "
                "Press Ctrl-C again to stop at once."
            )
            try:
                async with asyncio.timeout(min(left_s, _PROGRESS_S)):
                    await self._api.in_flight.idle()
            except TimeoutError:
                continue
        await self._drain_writes(deadline_s)
        self._leave.set()

    async def _drain_writes(self, deadline_s: float) -> None:
        """Pages on their way down are prompts that need not be computed again after a restart."""
        engine = self._api.engine
        if engine.writing and time.monotonic() < deadline_s:
            self._tell("Stopping: writing cached pages. Press Ctrl-C again to stop at once.")
        while engine.writing:
            if time.monotonic() >= deadline_s:
                self._tell(f"Some cached pages were not written in {self._drain_timeout_s:g} s; they are dropped.")
                return
            await asyncio.sleep(_POLL_S)

    # -----------------------------------------------------------------------------------------------------------
    # Ends

    def _fail(self, message: str, error: BaseException | None) -> None:
        """Tell everybody; the process ends with code 1."""
        if self._leave.is_set():
            return
        log.error("headrace ends: %s", message, exc_info=error if log.isEnabledFor(logging.DEBUG) else None)
        self._exit_code = 1
        self._api.readiness.failed = message
        self._api.emitter.fail_all("error", f"{message[0].upper()}{message[1:]}.")
        self._leave.set()

    async def _farewell(self) -> None:
        """Requests that still run are told, and their connections get a moment to pass it on."""
        if self._api.readiness.failed is None:
            self._api.running.abort_all("The server is stopping.", "draining")
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._api.in_flight.idle()
        except TimeoutError:
            cut = len(self._api.in_flight)
            log.warning("%s %s cut off", _requests(cut), "was" if cut == 1 else "were")


def _requests(count: int, kind: str = "") -> str:
    return f"{count} {kind}request{'' if count == 1 else 's'}"


def _protocol_log() -> logging.Logger:
    """aiohttp logs a trace for every malformed request; one line says as much."""
    logger = logging.getLogger("headrace.http.protocol")
    if not any(isinstance(known, _Brief) for known in logger.filters):
        logger.addFilter(_Brief())
    return logger


class _Brief(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = "a malformed request was refused: %s", (ascii(error.message)[1:201],)
            record.exc_info = None
        return True

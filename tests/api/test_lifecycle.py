"""The server's life: the port, loading, readiness, signals, failure."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from api.scripted import MODEL, ScriptedEngine, parse_answer, request_bytes, saying, serving, until

from headrace.server.api import Api, ApiSettings
from headrace.server.lifecycle import CannotListen, LoadedText, bind, run_server, url_of

TESTS = Path(__file__).parent.parent
HI = {"messages": [{"role": "user", "content": "hi"}]}


class ServerProcess:
    """A server in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0
        self.lines: list[str] = []

    async def line(self, with_text: str) -> str:
        """Read on until a line has this text."""
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            while data := await self.process.stdout.readline():
                self.lines.append(data.decode().rstrip("\n"))
                if with_text in self.lines[-1]:
                    return self.lines[-1]
        raise AssertionError(f"{with_text!r} never came: {self.lines}")

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, str], Any]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request_bytes(method, path, b"" if body is None else json.dumps(body).encode()))
        async with asyncio.timeout(30):
            status, fields, payload = parse_answer(await reader.read())
        writer.close()
        is_json = fields.get("content-type", "").startswith("application/json")
        return status, fields, json.loads(payload) if is_json else payload.decode()

    async def end(self) -> tuple[int, str]:
        """Its exit code, and all it printed."""
        async with asyncio.timeout(30):
            out, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, "\n".join([*self.lines, out.decode()])

    def signal(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def server_process(**arguments: Any) -> AsyncIterator[ServerProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "api.scripted_server", json.dumps(arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    server = ServerProcess(process)
    try:
        server.port = int((await server.line("port ")).split()[1])
        yield server
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# --------------------------------------------------------------------------------------------------------------
# The port


def test_a_busy_port_is_one_sentence_that_says_what_to_do() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(CannotListen, match=f"Port {port} on 127.0.0.1 is in use.*--port"):
            bind("127.0.0.1", port)


def test_an_unknown_host_is_refused_with_its_flag() -> None:
    with pytest.raises(CannotListen, match=r"--host no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


def test_an_address_of_another_machine_is_refused_with_its_flag() -> None:
    with pytest.raises(CannotListen, match=r"--host 192\.0\.2\.1 is no address of this machine"):
        bind("192.0.2.1", 0)


def test_exactly_the_address_that_was_asked_for_is_listened_on() -> None:
    with bind("127.0.0.1", 0) as sock:
        host, port = sock.getsockname()
        assert host == "127.0.0.1" and url_of(sock) == f"http://127.0.0.1:{port}"


def test_localhost_is_the_address_that_clients_try_first() -> None:
    with bind("localhost", 0) as sock:
        assert sock.family == socket.AF_INET


async def test_a_server_whose_port_is_busy_ends_with_code_1_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "api.scripted_server", json.dumps({"port": port})),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        out, _ = await process.communicate()
    assert process.returncode == 1
    assert out.decode().count("\n") == 1 and "is in use" in out.decode()


# --------------------------------------------------------------------------------------------------------------
# Loading


async def test_while_loading_the_server_lives_and_is_not_ready() -> None:
    engine = ScriptedEngine(phase="loading", message="weights", progress=0.42)
    async with serving(engine) as served:
        assert (await served.ask("GET", "/livez"))[0] == 200
        for path in ("/readyz", "/health"):
            status, fields, answer = await served.ask("GET", path)
            assert status == 503 and int(fields["retry-after"]) > 0
            assert (answer["phase"], answer["message"], answer["progress"]) == ("loading", "weights", 0.42)


async def test_requests_before_ready_are_told_the_phase_and_when_to_come_back() -> None:
    async with serving(ScriptedEngine(phase="warming", message="warming up")) as served:
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")):
            status, fields, answer = await served.ask(method, path, HI if method == "POST" else None)
            assert status == 503 and int(fields["retry-after"]) > 0, path
            assert answer["error"]["code"] == "server_warming" and "warming up" in answer["error"]["message"]


async def test_probes_metrics_and_info_work_while_loading() -> None:
    async with serving(ScriptedEngine(phase="loading")) as served:
        for path in ("/livez", "/metrics", "/server_info", "/model_info"):
            assert (await served.ask("GET", path))[0] == 200, path


async def test_a_server_that_gets_ready_says_how_to_use_it() -> None:
    engine = ScriptedEngine(phase="loading")
    async with serving(engine) as served:
        assert served.told == []
        engine.phase = "ready"
        await until(lambda: len(served.told) == 2)
        assert (await served.ask("GET", "/health"))[0] == 200


async def test_the_command_in_the_ready_line_works_as_pasted() -> None:
    async with serving(ScriptedEngine(saying("blue", 258))) as served:
        words = shlex.split(served.told[-1])
        assert words[0] == "curl" and words[2:4] == ["-H", "Content-Type: application/json"] and words[4] == "-d"
        path = words[1].removeprefix(served.url)
        status, _, answer = await served.ask("POST", path, words[5].encode())
    assert status == 200 and answer["choices"][0]["message"]["content"] == "blue"


async def test_b41_health_is_dead_when_the_device_hangs_and_alive_during_a_long_prefill() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as served:
        engine.last_step_age_ms = 20_000
        assert (await served.ask("GET", "/health"))[0] == 200
        engine.last_step_age_ms = 61_000
        status, _, answer = await served.ask("GET", "/health")
        assert status == 503 and "61 s" in answer["message"]


async def test_b41_probes_do_not_pile_anything_up() -> None:
    async with serving(ScriptedEngine()) as served:
        await asyncio.gather(*(served.ask("GET", "/health") for _ in range(50)))
        assert served.engine.submits == [] and len(served.api.in_flight) == 0


async def test_a_restarting_device_is_told_to_clients() -> None:
    async with serving(ScriptedEngine()) as served:
        served.engine.phase, served.engine.message = "restarting", "the device worker ended with SIGKILL"
        status, _, answer = await served.ask("POST", "/v1/chat/completions", HI)
        assert status == 503 and "SIGKILL" in answer["error"]["message"]
        served.engine.phase = "ready"
        assert (await served.ask("POST", "/v1/chat/completions", HI))[0] == 200


# --------------------------------------------------------------------------------------------------------------
# The end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_idle_server_ends_at_the_first_signal(number: signal.Signals) -> None:
    async with server_process() as server:
        await server.line("curl")
        server.signal(number)
        code, out = await server.end()
    assert code == 0 and "engine ended: True" in out and "Traceback" not in out
    assert "Stopped." in out.splitlines()


async def test_the_first_signal_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with server_process(held=True) as server:
        await server.line("curl")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = {**HI, "stream": True, "max_tokens": 30}
        writer.write(request_bytes("POST", "/v1/chat/completions", json.dumps(body).encode()))
        await wait_for_running(server)
        server.signal(signal.SIGUSR1)
        await reader.readuntil(b'"h"')
        server.signal()
        await server.line("Stopping: waiting for 1 running request, at most")
        status, fields, answer = await server.ask("POST", "/v1/chat/completions", HI)
        assert status == 503 and "retry-after" in fields and answer["error"]["code"] == "server_draining"
        assert (await server.ask("GET", "/health"))[0] == 503
        assert (await server.ask("GET", "/livez"))[0] == 200
        server.signal(signal.SIGUSR2)
        rest = await reader.read()
        writer.close()
        code, out = await server.end()
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"finish_reason":"length"' in rest
    assert code == 0 and "Traceback" not in out


async def test_the_second_signal_stops_at_once_and_says_so_to_running_requests() -> None:
    async with server_process(held=True) as server:
        await server.line("curl")
        answer = asyncio.ensure_future(server.ask("POST", "/v1/chat/completions", HI))
        await wait_for_running(server)
        server.signal()
        await server.line("Press Ctrl-C again")
        begin = time.monotonic()
        server.signal()
        status, fields, body = await answer
        code, out = await server.end()
    assert status == 503 and "stopping" in body["error"]["message"]
    assert body["error"]["code"] == "server_draining" and int(fields["retry-after"]) > 0
    assert code == 128 + signal.SIGINT and time.monotonic() - begin < 5
    assert "engine ended: True" in out and "Traceback" not in out


async def test_draining_is_bounded() -> None:
    async with server_process(held=True, drain_timeout_s=0.2) as server:
        await server.line("curl")
        answer = asyncio.ensure_future(server.ask("POST", "/v1/chat/completions", HI))
        await wait_for_running(server)
        server.signal(signal.SIGTERM)
        status, _, _ = await answer
        code, out = await server.end()
    assert status == 503 and "1 request did not finish in 0.2 s; it is ended." in out and "Traceback" not in out
    assert code == 1


async def test_a_drain_also_waits_for_cached_pages_that_are_being_written() -> None:
    async with server_process(writing=True) as server:
        await server.line("curl")
        server.signal(signal.SIGTERM)
        await server.line("Stopping: writing cached pages")
        assert (await server.ask("GET", "/livez"))[0] == 200
        server.signal(signal.SIGUSR2)
        code, out = await server.end()
    assert code == 0 and out.index("Stopped.") < out.index("engine ended: True")


async def test_the_wait_for_cached_pages_is_bounded() -> None:
    async with server_process(writing=True, drain_timeout_s=0.2) as server:
        await server.line("curl")
        server.signal(signal.SIGTERM)
        code, out = await server.end()
    assert code == 0 and "Some cached pages were not written in 0.2 s" in out


async def test_a_second_signal_ends_the_wait_for_cached_pages() -> None:
    async with server_process(writing=True) as server:
        await server.line("curl")
        server.signal()
        await server.line("Stopping: writing cached pages")
        server.signal()
        code, out = await server.end()
    assert code == 128 + signal.SIGINT and "not written" not in out and "Stopped." in out.splitlines()


async def test_a_signal_while_loading_stops_at_once() -> None:
    async with server_process(loading=True) as server:
        while (await server.ask("GET", "/livez"))[0] != 200:
            pass
        server.signal()
        code, out = await server.end()
    assert code == 128 + signal.SIGINT and "engine ended: True" in out and "Traceback" not in out


async def test_an_engine_that_fails_tells_its_clients_and_ends_the_process_with_code_1() -> None:
    async with server_process(fails="the model's file is gone; fetch it again") as server:
        await server.line("curl")
        status, _, body = await server.ask("POST", "/v1/chat/completions", HI)
        code, out = await server.end()
    assert status == 500 and "fetch it again" in body["error"]["message"]
    assert code == 1 and "fetch it again" in out and "Traceback" not in out


async def test_a_text_side_that_cannot_be_loaded_ends_the_server_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = ScriptedEngine()
    sock = bind("127.0.0.1", 0)

    async def load_text() -> LoadedText:
        raise ValueError("the tokenizer is of the kind 'spm'")

    api = Api(ApiSettings(model_name=MODEL, host="127.0.0.1", max_running_requests=8), engine)
    code = await run_server(sock, api, load_text, drain_timeout_s=1, tell=print, handle_signals=False)
    assert code == 1 and engine.ended and "'spm'" in caplog.text


async def wait_for_running(server: ServerProcess) -> None:
    async with asyncio.timeout(30):
        while "headrace:num_requests_running 1.0" not in (await server.ask("GET", "/metrics"))[2]:
            pass

"""A server process around a scripted engine, for tests of signals and exit codes.

`python -m api.scripted_server '{"held": true, …}'`: prints what the server tells, and how the engine ended. SIGUSR1 is
one step of a held engine, SIGUSR2 lets it go on.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec
import uvloop
from api.scripted import CHATML, MODEL, ScriptedEngine, make_text, saying

from headrace.server.api import Api, ApiSettings
from headrace.server.lifecycle import CannotListen, LoadedText, bind, run_server


class Arguments(msgspec.Struct):
    port: int = 0
    loading: bool = False
    """The engine never gets ready."""
    held: bool = False
    """The engine takes requests and gives nothing."""
    writing: bool = False
    """Cached pages are on their way down until SIGUSR2."""
    fails: str = ""
    """The engine fails with this when it gets its first request."""
    drain_timeout_s: float = 20.0


async def serve(arguments: Arguments) -> int:
    sock = bind("127.0.0.1", arguments.port)
    print(f"port {sock.getsockname()[1]}", flush=True)
    engine = ScriptedEngine(saying("hello world"))
    engine.held, engine.writing = arguments.held, arguments.writing
    if arguments.loading:
        engine.phase, engine.message, engine.progress = "loading", "weights", 0.25
    if arguments.fails:

        def plan(submit: object) -> list[int]:
            engine.fail(arguments.fails)
            return [1]

        engine.held, engine.plan = True, plan
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, engine.step)

    def go_on() -> None:
        engine.writing = False
        engine.release()

    loop.add_signal_handler(signal.SIGUSR2, go_on)
    api = Api(ApiSettings(model_name=MODEL, host="127.0.0.1", max_running_requests=8), engine)

    async def load_text() -> LoadedText:
        return LoadedText(make_text(), CHATML)

    def tell(line: str) -> None:
        print(line, flush=True)

    code = await run_server(sock, api, load_text, drain_timeout_s=arguments.drain_timeout_s, tell=tell)
    print(f"engine ended: {engine.ended}", flush=True)
    return code


def main() -> int:
    try:
        return uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=Arguments)))
    except CannotListen as problem:
        print(problem, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())

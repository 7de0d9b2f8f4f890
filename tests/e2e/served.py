"""A server process, started by the command line as a user starts it, and what it answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PATIENCE_S = 300
"""For a start, whose kernels may have to be compiled, and for an answer."""


class Served:
    """A server that is ready."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def get(self, path: str) -> Any:
        async with self._session.get(self.url + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def post(self, path: str, **body: Any) -> Any:
        """The answer to what must succeed."""
        async with self._session.post(self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


@asynccontextmanager
async def serving(model: Path | str, log: Path, *flags: str, cwd: Path | None = None) -> AsyncIterator[Served]:
    """`headrace serve` in float32 on any free port until the block ends; its standard error goes to `log`."""
    # A card that is there must not be taken.
    cpu = ("--device", "cpu", "--dtype", "float32", "--cpu-threads", "1")
    few = ("--max-total-tokens", "2048", "--max-running-requests", "4", "--skip-server-warmup")
    command = [sys.executable, "-P", "-m", "headrace.server", "serve", "--model-path", str(model), "--port", "0"]
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(*command, *cpu, *few, *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=cwd,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = (await process.stdout.readline()).decode()
        assert " at http://" in line, _end_of(log)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
            yield Served(line.split(" at ")[1].split(",")[0], session)
    finally:
        if process.returncode is None:
            process.terminate()
        # Reads what is left, so that no full pipe keeps it from ending.
        async with asyncio.timeout(PATIENCE_S):
            await process.communicate()
    assert process.returncode == 0, _end_of(log)


def _end_of(log: Path) -> str:
    return log.read_text()[-2000:]

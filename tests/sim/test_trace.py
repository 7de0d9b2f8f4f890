"""The trace: what it hashes, what it keeps, and that a run's trace depends on its seed alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.server.sim.trace import Detail, Trace, fingerprint


def digest(*lines: tuple[str, tuple[Detail, ...]]) -> str:
    trace = Trace(lambda: 0)
    for kind, details in lines:
        trace.record(kind, *details)
    return trace.digest()


def test_equal_lines_give_equal_digests() -> None:
    assert digest(("send", (1, "a")), ("end", ())) == digest(("send", (1, "a")), ("end", ()))


@pytest.mark.parametrize(
    "other",
    [
        [("end", ()), ("send", (1, "a"))],
        [("send", (1, "a"))],
        [("send", (1, "b")), ("end", ())],
        [("send", ("1", "a")), ("end", ())],
        [("send", (1, b"a")), ("end", ())],
        [("send", (1, "a", None)), ("end", ())],
        [("send", (1,)), ("aend", ())],
    ],
)
def test_every_difference_shows_in_the_digest(other: list[tuple[str, tuple[Detail, ...]]]) -> None:
    assert digest(*other) != digest(("send", (1, "a")), ("end", ()))


def test_the_time_is_part_of_a_line() -> None:
    now = [0]
    trace, later = Trace(lambda: now[0]), Trace(lambda: now[0])
    trace.record("tick")
    now[0] = 1
    later.record("tick")
    assert trace.digest() != later.digest()
    assert later.newest[0] == (1, "tick", ())


def test_only_the_newest_lines_are_kept_but_all_are_hashed_and_counted() -> None:
    short, long = Trace(lambda: 0, keep=3), Trace(lambda: 0, keep=100)
    for number in range(10):
        short.record("n", number)
        long.record("n", number)
    assert short.digest() == long.digest()
    assert short.count == 10
    assert [details for _, _, details in short.newest] == [(7,), (8,), (9,)]


def test_the_kept_lines_read_as_text() -> None:
    trace = Trace(lambda: 1_500_000_000)
    trace.record("send", "link.near", 12)
    assert trace.text() == "1.500000000 send link.near 12"


def test_a_fingerprint_tells_messages_apart() -> None:
    assert fingerprint(b"one") == fingerprint(b"one") != fingerprint(b"two")


SCENARIO = """
import asyncio, random
from headrace.server.sim.trace import Trace
from headrace.server.sim.transport import Faults, SimLink, SimServer
from headrace.server.sim.virtual_loop import run, running_loop

async def main():
    loop = running_loop()
    rng = random.Random(11)
    trace = Trace(loop.time_ns, keep=100_000)
    links = {name: SimLink(rng, loop, lambda rng: rng.randrange(3_000_000), trace=trace, name=name,
                           far=Faults(hang_at_ns=50_000_000, hang_for_ns=20_000_000))
             for name in ("worker", "agent", "text")}
    for link in links.values():
        server = SimServer(loop, link.far, lambda command: len(command) * 100_000, lanes=2)
        server.serve(server.reply)
        link.near.open(lambda message: trace.record("answer", len(message)), trace.record)

    async def client(name):
        try:
            for number in range(50):
                links[name].near.send(name.encode() * rng.randrange(1, 5))
                await asyncio.sleep(rng.random() / 100)
            await asyncio.sleep(100)
        finally:
            trace.record("cancelled", name, asyncio.current_task().get_name())

    async def fail():
        await asyncio.sleep(1)
        raise KeyError

    try:
        async with asyncio.TaskGroup() as tasks:
            for name in ["worker", "agent", "text"] * 5:
                tasks.create_task(client(name))
            tasks.create_task(fail())
    except* KeyError:
        pass
    print(trace.count, trace.digest())

run(main())
"""


def test_the_same_seed_gives_the_same_trace_under_any_hash_seed() -> None:
    outputs = set()
    for hash_seed in ("0", "1", "12345"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", SCENARIO],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert int(outputs.pop().split()[0]) > 3000

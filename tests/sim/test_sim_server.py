"""The far side of the seeded transport: one command after another, and all of it under seeds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.heard import MS, Heard, fixed, scattered

from headrace.ops.transport import MAX_BACKLOG_MESSAGES, TransportClosed
from headrace.server.sim.trace import Trace
from headrace.server.sim.transport import CLOSED, NO_FAULTS, CommandsUnbounded, Faults, SimLink, SimServer
from headrace.server.sim.virtual_loop import run, running_loop

# ---------------------------------------------------------------------------------------------------------------
# The far side


class Echo:
    """A state machine that answers each command with it and its number; remembers when it handled what."""

    def __init__(self, server: SimServer) -> None:
        self.handled: list[tuple[int, bytes]] = []
        self._server = server

    def handle(self, command: bytes) -> None:
        self.handled.append((running_loop().time_ns(), command))
        self._server.reply(b"%d:%s" % (len(self.handled), command))


def cost(command: bytes) -> int:
    """A command is its cost in ms."""
    return int(command) * MS


class Served:
    """A link with an `Echo` behind it."""

    def __init__(self, seed: int = 0, delay_ns: int = MS, far: Faults = NO_FAULTS, lanes: int = 1) -> None:
        loop = running_loop()
        self.link = SimLink(random.Random(seed), loop, fixed(delay_ns), far=far)
        self.server = SimServer(loop, self.link.far, cost, lanes)
        self.echo = Echo(self.server)
        self.server.serve(self.echo.handle)
        self.heard = Heard(self.link.near)

    def send(self, *commands: int) -> None:
        for command in commands:
            self.link.near.send(b"%d" % command)


def test_a_command_starts_when_it_has_arrived_and_the_one_before_has_ended() -> None:
    async def main() -> Served:
        served = Served()
        served.send(5, 2)
        await asyncio.sleep(0.02)
        served.send(3)
        await asyncio.sleep(1)
        return served

    served = run(main())
    assert served.echo.handled == [(6 * MS, b"5"), (8 * MS, b"2"), (24 * MS, b"3")]
    assert served.heard.messages == [(7 * MS, b"1:5"), (9 * MS, b"2:2"), (25 * MS, b"3:3")]


def test_lanes_overlap_and_may_end_out_of_order() -> None:
    async def main() -> Served:
        served = Served(lanes=2)
        served.send(10, 3, 3, 8)
        await asyncio.sleep(1)
        return served

    assert run(main()).echo.handled == [(4 * MS, b"3"), (7 * MS, b"3"), (11 * MS, b"10"), (15 * MS, b"8")]


def test_nothing_ends_while_the_process_hangs_nor_after_it_was_killed() -> None:
    async def main() -> Served:
        served = Served()
        served.send(5, 5, 5)
        await asyncio.sleep(0.002)
        served.link.far.hang(100 * MS)
        await asyncio.sleep(0.105)
        served.link.far.kill()
        await asyncio.sleep(1)
        assert served.server.stopped
        return served

    assert run(main()).echo.handled == [(102 * MS, b"5"), (107 * MS, b"5")]


def test_a_killed_server_handles_nothing_more_wherever_the_kill_falls() -> None:
    async def main(number: int) -> int:
        served = Served(far=Faults(kill_at_message=number))
        served.send(1, 1, 1, 1)
        await asyncio.sleep(1)
        assert served.server.stopped
        assert len(served.heard.closings) == 1
        return len(served.echo.handled)

    assert [run(main(number)) for number in range(1, 9)] == [0, 0, 0, 0, 1, 2, 3, 4]


def test_stopping_lets_the_replies_out_and_ends_the_stream() -> None:
    async def main() -> Served:
        served = Served()
        served.send(1, 1, 1)
        await asyncio.sleep(0.0035)
        served.server.stop()
        await asyncio.sleep(1)
        return served

    served = run(main())
    assert served.heard.texts == [b"1:1", b"2:1"]
    assert [reason for _, reason in served.heard.closings] == [CLOSED]


def test_a_server_whose_client_has_closed_drops_its_commands() -> None:
    async def main() -> Served:
        served = Served()
        served.send(1, 50, 1)
        await asyncio.sleep(0.01)
        served.link.near.close()
        await asyncio.sleep(1)
        assert served.server.stopped
        return served

    assert run(main()).echo.handled == [(2 * MS, b"1")]


def test_a_reply_that_nobody_can_hear_ends_the_server() -> None:
    async def main(seed: int) -> bool:
        served = Served(seed, delay_ns=20 * MS)
        served.send(1, 1, 1)
        await asyncio.sleep(0.0205)
        served.link.near.close()
        await asyncio.sleep(1)
        assert served.server.stopped
        return len(served.echo.handled) == 1  # refused at the first reply, instead of sending into the void

    assert {run(main(seed)) for seed in range(20)} == {True, False}


def test_a_client_that_sends_ahead_without_bound_fails_the_run() -> None:
    async def main() -> None:
        served = Served(delay_ns=0)
        for _ in range(MAX_BACKLOG_MESSAGES + 2):
            served.send(1000)
            await asyncio.sleep(0)
        await asyncio.sleep(1)

    with pytest.raises(CommandsUnbounded, match=r"4096 commands wait for link\.far"):
        run(main())


def test_a_machine_that_raises_fails_the_run() -> None:
    async def main() -> None:
        link = SimLink(random.Random(0), running_loop(), fixed(0))
        server = SimServer(running_loop(), link.far, cost)

        def handle(command: bytes) -> None:
            raise AssertionError("the machine's own fault")

        server.serve(handle)
        link.near.send(b"1")
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="the machine's own fault"):
        run(main())


# ---------------------------------------------------------------------------------------------------------------
# All of it under seeds


def stormy(seed: int) -> Coroutine[Any, Any, str]:
    """A client that sends at random times to a server with random faults; the trace's digest."""

    async def main() -> str:
        loop = running_loop()
        rng = random.Random(seed)
        trace = Trace(loop.time_ns)
        far = Faults(
            kill_at_ns=rng.choice([None, rng.randrange(200 * MS)]),
            kill_at_message=rng.choice([None, rng.randrange(1, 60)]),
            hang_at_ns=rng.choice([None, rng.randrange(200 * MS)]),
            hang_for_ns=rng.randrange(100 * MS),
        )
        link = SimLink(rng, loop, scattered, far=far, trace=trace)
        server = SimServer(loop, link.far, cost, lanes=rng.choice([1, 4]))
        echo = Echo(server)
        server.serve(echo.handle)
        heard = Heard(link.near)
        sent = 0
        try:
            for _ in range(40):
                link.near.send(b"%d" % rng.randrange(8))
                sent += 1
                await asyncio.sleep(rng.random() / 100)
        except TransportClosed:
            pass
        await asyncio.sleep(2)
        assert heard.texts == [b"%d:%s" % (n + 1, c) for n, (_, c) in enumerate(echo.handled)][: len(heard.texts)]
        assert len(heard.closings) == int(server.stopped)
        if not server.stopped:
            assert len(heard.texts) == sent == 40
        return trace.digest()

    return main()


@given(st.integers(0, 10**9))
def test_replies_are_a_prefix_of_what_was_handled_whatever_happens(seed: int) -> None:
    run(stormy(seed))


@given(st.integers(0, 10**9))
def test_one_seed_gives_one_trace(seed: int) -> None:
    assert run(stormy(seed)) == run(stormy(seed))


def test_other_seeds_give_other_traces() -> None:
    assert len({run(stormy(seed)) for seed in range(20)}) == 20

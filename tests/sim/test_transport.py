"""The seeded transport and the far side: order, deaths, hangs, and one command after another."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.heard import MS, Heard, fixed, numbered, scattered

from headrace.ops.transport import MAX_BACKLOG_MESSAGES, Transport, TransportClosed
from headrace.server.sim.transport import CLOSED, Faults, SimLink
from headrace.server.sim.virtual_loop import run, running_loop

# ---------------------------------------------------------------------------------------------------------------
# An undisturbed link


def test_an_end_is_a_transport() -> None:
    async def main() -> None:
        link = SimLink(random.Random(0), running_loop(), fixed(0))
        ends: list[Transport] = [link.near, link.far]
        for end in ends:
            end.close()

    run(main())


def test_a_message_takes_its_delay() -> None:
    async def main() -> list[tuple[int, bytes]]:
        link = SimLink(random.Random(0), running_loop(), fixed(3 * MS))
        heard = Heard(link.far)
        await asyncio.sleep(0.001)
        link.near.send(b"hello")
        assert heard.messages == []
        await asyncio.sleep(1)
        return heard.messages

    assert run(main()) == [(4 * MS, b"hello")]


@given(seed=st.integers(0, 10**6), gaps_ms=st.lists(st.integers(0, 4), max_size=40))
def test_each_direction_keeps_its_order_and_loses_nothing(seed: int, gaps_ms: list[int]) -> None:
    async def main() -> None:
        link = SimLink(random.Random(seed), running_loop(), scattered)
        to_far, to_near = Heard(link.far), Heard(link.near)
        for number, gap_ms in enumerate(gaps_ms):
            link.near.send(b"%d" % number)
            link.far.send(b"%d" % -number)
            await asyncio.sleep(gap_ms / 1000)
        await asyncio.sleep(1)
        assert to_far.texts == [b"%d" % number for number in range(len(gaps_ms))]
        assert to_near.texts == [b"%d" % -number for number in range(len(gaps_ms))]

    run(main())


def test_messages_wait_for_an_end_that_is_not_open_yet() -> None:
    async def main() -> list[tuple[int, bytes]]:
        link = SimLink(random.Random(0), running_loop(), fixed(MS))
        link.near.send(b"early")
        await asyncio.sleep(0.005)
        heard = Heard(link.far)
        await asyncio.sleep(1)
        return heard.messages

    assert run(main()) == [(5 * MS, b"early")]


def test_messages_that_are_due_together_are_handed_over_in_one_turn() -> None:
    async def main() -> list[int]:
        loop = running_loop()
        link = SimLink(random.Random(0), loop, fixed(MS))
        turns: list[int] = []
        Heard(link.far, lambda message: turns.append(loop.turns))
        for message in numbered(5):
            link.near.send(message)
        await asyncio.sleep(1)
        return turns

    assert len(set(run(main()))) == 1


def test_an_end_may_answer_from_within_its_callback() -> None:
    async def main() -> list[tuple[int, bytes]]:
        link = SimLink(random.Random(0), running_loop(), fixed(MS))
        Heard(link.far, lambda message: link.far.send(message * 2))
        heard = Heard(link.near)
        link.near.send(b"x")
        await asyncio.sleep(1)
        return heard.messages

    assert run(main()) == [(2 * MS, b"xx")]


def test_a_peer_that_never_reads_costs_the_sender_its_connection_at_the_bound() -> None:
    async def main() -> None:
        link = SimLink(random.Random(0), running_loop(), fixed(MS))
        heard = Heard(link.near)
        for _ in range(MAX_BACKLOG_MESSAGES):
            link.near.send(b"x")
        with pytest.raises(TransportClosed):
            link.near.send(b"one more")
        await asyncio.sleep(1)
        assert [reason for _, reason in heard.closings] == ["the peer has not read 4096 messages"]

    run(main())


def test_a_message_over_the_bound_is_the_senders_fault() -> None:
    async def main() -> None:
        link = SimLink(random.Random(0), running_loop(), fixed(0), max_message_bytes=4)
        with pytest.raises(AssertionError, match="must be cut by its sender"):
            link.near.send(b"12345")

    run(main())


# ---------------------------------------------------------------------------------------------------------------
# Closing


def test_closing_delivers_what_is_under_way_and_then_says_so_once() -> None:
    async def main() -> Heard:
        link = SimLink(random.Random(0), running_loop(), fixed(MS))
        heard, closer = Heard(link.far), Heard(link.near)
        for message in numbered(3):
            link.near.send(message)
        link.near.close()
        link.near.close()
        await asyncio.sleep(1)
        assert closer.closings == []
        return heard

    heard = run(main())
    assert heard.texts == numbered(3)
    assert heard.closings == [(MS, CLOSED)]


def test_a_closed_end_hears_and_says_nothing_more() -> None:
    async def main() -> None:
        link = SimLink(random.Random(0), running_loop(), fixed(MS))
        heard = Heard(link.near)
        link.far.send(b"too late")
        link.near.close()
        with pytest.raises(TransportClosed):
            link.near.send(b"x")
        await asyncio.sleep(1)
        assert heard.messages == []

    run(main())


def test_closing_within_on_message_stops_the_messages_behind_it() -> None:
    async def main() -> list[bytes]:
        link = SimLink(random.Random(0), running_loop(), fixed(MS))
        heard = Heard(link.far, lambda message: link.far.close())
        for message in numbered(3):
            link.near.send(message)
        await asyncio.sleep(1)
        return heard.texts

    assert run(main()) == [b"0"]


def test_after_the_streams_end_sending_raises() -> None:
    async def main() -> None:
        link = SimLink(random.Random(0), running_loop(), fixed(MS))
        Heard(link.near)
        link.far.close()
        await asyncio.sleep(1)
        with pytest.raises(TransportClosed):
            link.near.send(b"x")

    run(main())


def test_closing_between_the_loss_and_its_report_keeps_on_close_away() -> None:
    async def main() -> list[tuple[int, str]]:
        link = SimLink(random.Random(0), running_loop(), fixed(MS))
        heard = Heard(link.near)
        for _ in range(MAX_BACKLOG_MESSAGES):
            link.near.send(b"x")
        with pytest.raises(TransportClosed):
            link.near.send(b"one more")
        link.near.close()
        await asyncio.sleep(1)
        return heard.closings

    assert run(main()) == []


# ---------------------------------------------------------------------------------------------------------------
# Deaths


def death(seed: int, far: Faults) -> tuple[Heard, int]:
    """Ten messages from an end that dies while they are under way; also how many it could send."""

    async def main() -> tuple[Heard, int]:
        link = SimLink(random.Random(seed), running_loop(), scattered, far=far)
        heard = Heard(link.near)
        sent = 0
        for message in numbered(10):
            try:
                link.far.send(message)
            except TransportClosed:
                break
            sent += 1
        await asyncio.sleep(1)
        return heard, sent

    return run(main())


def test_a_death_loses_none_some_or_all_of_what_was_under_way_by_seed() -> None:
    async def main(seed: int) -> int:
        link = SimLink(random.Random(seed), running_loop(), fixed(10 * MS), far=Faults(kill_at_ns=5 * MS))
        heard = Heard(link.near)
        for message in numbered(3):
            link.far.send(message)
        await asyncio.sleep(1)
        assert heard.texts == numbered(len(heard.texts))
        return len(heard.texts)

    assert {run(main(seed)) for seed in range(60)} == {0, 1, 2, 3}


def test_a_death_is_told_once_and_after_a_delay() -> None:
    for seed in range(20):
        heard, _ = death(seed, Faults(kill_at_ns=5 * MS))
        [(when_ns, reason)] = heard.closings
        assert when_ns >= 5 * MS
        assert reason == CLOSED


@pytest.mark.parametrize("number", [1, 4, 10])
def test_an_end_dies_at_the_message_it_is_told_to(number: int) -> None:
    heard, sent = death(7, Faults(kill_at_message=number))
    assert sent == number
    assert len(heard.texts) <= number
    assert len(heard.closings) == 1


def test_a_message_that_kills_its_receiver_is_not_handled() -> None:
    async def main() -> list[bytes]:
        link = SimLink(random.Random(0), running_loop(), fixed(MS), far=Faults(kill_at_message=3))
        heard = Heard(link.far)
        for message in numbered(6):
            link.near.send(message)
        await asyncio.sleep(1)
        assert heard.closings == []
        return heard.texts

    assert run(main()) == numbered(2)


def test_sending_to_the_dead_fails_at_once_or_vanishes_by_seed() -> None:
    async def main(seed: int) -> bool:
        link = SimLink(random.Random(seed), running_loop(), fixed(MS))
        heard = Heard(link.near)
        link.far.kill()
        try:
            link.near.send(b"anyone?")
            refused = False
        except TransportClosed:
            refused = True
        await asyncio.sleep(1)
        assert len(heard.closings) == 1
        return refused

    assert {run(main(seed)) for seed in range(20)} == {True, False}


def test_faults_of_a_link_that_was_closed_do_not_keep_the_clock_going() -> None:
    async def main() -> None:
        link = SimLink(random.Random(0), running_loop(), fixed(0), far=Faults(kill_at_ns=10**15, hang_at_ns=10**15))
        link.far.close()
        link.near.close()
        assert all(timer.cancelled() for _, _, timer in running_loop()._timers)

    run(main())


# ---------------------------------------------------------------------------------------------------------------
# Hangs


def test_a_hang_delivers_nothing_and_later_everything_in_order() -> None:
    async def main() -> tuple[Heard, Heard]:
        link = SimLink(random.Random(3), running_loop(), scattered, far=Faults(hang_at_ns=0, hang_for_ns=500 * MS))
        to_far, to_near = Heard(link.far), Heard(link.near)
        await asyncio.sleep(0.001)
        for message in numbered(10):
            link.near.send(message)
            link.far.send(message)
        await asyncio.sleep(2)
        return to_far, to_near

    for heard in run(main()):
        assert heard.texts == numbered(10)
        assert {when_ns for when_ns, _ in heard.messages} == {500 * MS}


def test_a_hang_within_a_callback_holds_the_messages_behind_it() -> None:
    async def main() -> list[tuple[int, bytes]]:
        link = SimLink(random.Random(0), running_loop(), fixed(MS))
        heard = Heard(link.far, lambda message: link.far.hang(10 * MS) if message == b"0" else None)
        for message in numbered(2):
            link.near.send(message)
        await asyncio.sleep(1)
        return heard.messages

    assert run(main()) == [(MS, b"0"), (11 * MS, b"1")]


def test_the_death_of_an_end_that_hangs_is_noticed_without_waiting_for_the_hang() -> None:
    async def main() -> list[tuple[int, str]]:
        link = SimLink(random.Random(0), running_loop(), fixed(MS), far=Faults(hang_at_ns=0, hang_for_ns=10**12))
        heard = Heard(link.near)
        await asyncio.sleep(0.01)
        link.far.kill("killed by its deadline")
        await asyncio.sleep(1)
        return heard.closings

    assert run(main()) == [(11 * MS, "killed by its deadline")]


def test_an_end_that_hangs_hears_of_a_closing_only_afterwards() -> None:
    async def main() -> list[tuple[int, str]]:
        link = SimLink(random.Random(0), running_loop(), fixed(MS), far=Faults(hang_at_ns=0, hang_for_ns=50 * MS))
        heard = Heard(link.far)
        await asyncio.sleep(0.01)
        link.near.close()
        await asyncio.sleep(1)
        return heard.closings

    assert run(main()) == [(50 * MS, CLOSED)]


def test_a_hang_of_an_end_that_is_gone_holds_nothing_up() -> None:
    async def main() -> list[tuple[int, str]]:
        link = SimLink(random.Random(0), running_loop(), fixed(MS))
        heard = Heard(link.near)
        link.far.close()
        link.far.hang(50 * MS)
        await asyncio.sleep(1)
        return heard.closings

    assert run(main()) == [(MS, CLOSED)]

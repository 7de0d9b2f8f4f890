"""The storage agent in virtual time: when a cancellation acts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from sim.heard import MS, Heard, fixed
from storage.pages import MODEL, PAGE_BYTES, PAGE_TOKENS, chain

from headrace.kvcache.storage.memory import MemoryStore
from headrace.kvcache.storage.protocol import (
    Cancel,
    Command,
    OpenStore,
    Read,
    ReadDone,
    Write,
    Written,
    encoder,
    reply_decoder,
)
from headrace.server.sim.storage import SimAgent, StorageTimes
from headrace.server.sim.transport import SimLink
from headrace.server.sim.virtual_loop import run, running_loop

OPENED_MS = 15
"""An agent opens its store in 10 ms, give or take half."""
RUN = chain("a", 2)


def read(id: int, first_page: int) -> Read:
    return Read(id, 0, RUN.namespace, RUN.parents[:16], RUN.keys, RUN.tokens, [first_page, first_page + 1])


def write(id: int) -> Write:
    return Write(id, 0, RUN.namespace, RUN.parents, RUN.keys, RUN.tokens, [0, 1])


def answers(commands: Sequence[tuple[int, Command]]) -> list[tuple[float, ReadDone | Written]]:
    """Ends of transfers, with the ms since the store was opened; the commands, with theirs. One lane, 10 to 30 ms a
    transfer."""

    async def main() -> Heard:
        loop = running_loop()
        link = SimLink(random.Random(1), loop, fixed(0))
        SimAgent(link, MemoryStore(1 << 20), bytearray(8 * PAGE_BYTES), StorageTimes(20_000, 0, lanes=1))
        heard = Heard(link.near)
        opened = OpenStore("memory", 1 << 20, PAGE_TOKENS, [PAGE_BYTES], [0], [8], MODEL)
        link.near.send(encoder.encode(opened))
        for at_ms, command in commands:
            loop.call_at_ns((OPENED_MS + at_ms) * MS, link.near.send, encoder.encode(command))
        await asyncio.sleep(1)
        return heard

    replies = [(at_ns / MS - OPENED_MS, reply_decoder.decode(message)) for at_ns, message in run(main()).messages]
    return [(at_ms, reply) for at_ms, reply in replies if isinstance(reply, ReadDone | Written)]


def test_a_transfer_that_waits_for_a_lane_is_cancelled_at_once() -> None:
    first, cancelled = sorted(answers([(0, write(1)), (1, read(2, 2)), (2, Cancel(2))]), key=lambda end: end[1].id)
    assert first[0] > 9 and isinstance(first[1], Written) and first[1].stored == 2
    assert cancelled[0] == 2 and isinstance(cancelled[1], ReadDone) and cancelled[1].good == 0


def test_a_transfer_that_has_begun_is_not_stopped() -> None:
    (written,) = answers([(0, write(1)), (2, Cancel(1))])
    assert written[0] > 9 and isinstance(written[1], Written) and written[1].stored == 2


def test_what_follows_a_cancelled_transfer_goes_on() -> None:
    ends = answers([(0, write(1)), (1, read(2, 2)), (1, read(3, 4)), (2, Cancel(2))])
    assert [end.id for _, end in ends] == [2, 1, 3]
    assert isinstance(ends[2][1], ReadDone) and ends[2][1].good == 2

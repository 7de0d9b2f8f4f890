"""kill -9 of the storage agent at random points under load, and what is there afterwards.

    python tests/storage/kill_rounds.py --rounds 200

Each round kills the agent in the middle of writes and reads; the next one opens the directory and reads back what was
acknowledged, before it goes on writing. A page that is wrong ends the run; one that is missing is counted.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from storage.agents import Agent
from storage.pages import chain, namespace

from headrace.kvcache.storage.page_store import PageRun
from headrace.kvcache.storage.protocol import Delete, Deleted, Read, ReadDone, Touch, Written

CHAIN_PAGES = 24
SLOTS = 8
"""Transfers at a time, each with host pages of its own."""


class Outcome(NamedTuple):
    """What became of the pages that were acknowledged. A page counts in every round that reads it back."""

    rounds: int
    acknowledged: int
    checked: int
    lost: int
    killed_in_flight: int
    """Transfers that the kills interrupted."""


class _Round:
    """One life of the agent: check, load, kill."""

    def __init__(self, agent: Agent, rng: random.Random, number: int) -> None:
        self.agent = agent
        self.rng = rng
        self.number = number
        self.acknowledged: dict[str, PageRun] = {}

    def check(self, runs: dict[str, PageRun]) -> int:
        """Read everything back, several at a time; pages lost."""
        waiting = list(runs.values())
        under_way: dict[int, PageRun] = {}
        lost = 0
        while waiting or under_way:
            while waiting and len(under_way) < SLOTS:
                slot = next(slot for slot in range(SLOTS) if slot not in under_way)
                run = under_way[slot] = waiting.pop()
                self.agent.begin_read(slot, run, self._pages(slot, run))
            done = self.agent.expect(ReadDone)
            run = under_way.pop(done.id)
            assert self.agent.right(run, self._pages(done.id, run), done.good), "a wrong page counted as good"
            lost += run.count - done.good
        return lost

    def load(self, known: dict[str, PageRun], kill_after: int, wait_s: float) -> int:
        """Write and read until so many replies have come, then a moment more; transfers that are under way then."""
        under_way: dict[int, tuple[str, PageRun] | None] = {}
        sent = 0
        replies = 0
        while replies < kill_after:
            while len(under_way) < SLOTS:
                slot = next(slot for slot in range(SLOTS) if slot not in under_way)
                under_way[slot] = self._begin(slot, f"{self.number}/{sent}", known)
                sent += 1
            match self.agent.receive():
                case Written(id, dropped=dropped):
                    replies += 1
                    begun = under_way.pop(id)
                    assert begun is not None and not dropped, dropped
                    self.acknowledged[begun[0]] = begun[1]
                case ReadDone(id):
                    replies += 1
                    del under_way[id]
                case None:
                    raise AssertionError("the agent ended by itself")
        while (reply := self.agent.receive(wait_s)) is not None:
            wait_s = 0.0
            if isinstance(reply, Written):
                begun = under_way.pop(reply.id)
                assert begun is not None
                self.acknowledged[begun[0]] = begun[1]
            elif isinstance(reply, ReadDone):
                del under_way[reply.id]
        return len(under_way)

    def delete_and_check(self, known: dict[str, PageRun]) -> None:
        """Clear one of the tenants, and let it be empty in all rounds that follow."""
        tenant = f"tenant {self.number}"
        self.agent.send(Delete(99, namespace(tenant)))
        self.agent.expect(Deleted)
        for name in [name for name, run in known.items() if run.namespace == namespace(tenant)]:
            run = known.pop(name)
            self.agent.begin_read(0, run, self._pages(0, run))
            assert self.agent.expect(ReadDone).good == 0, "a page came back after it was cleared"

    def _begin(self, slot: int, name: str, known: dict[str, PageRun]) -> tuple[str, PageRun] | None:
        if known and self.rng.random() < 0.3:
            run = self.rng.choice(list(known.values()))
            self.agent.send(Touch(0, run.keys))
            pages = self._pages(slot, run)
            self.agent.send(Read(slot, 0, run.namespace, run.parents[:16], run.keys, run.tokens, pages))
            return None
        run = chain(name, self.rng.randrange(1, CHAIN_PAGES + 1), f"tenant {self.rng.randrange(self.number + 2)}")
        self.agent.begin_write(slot, run, first_page=slot * CHAIN_PAGES)
        return name, run

    def _pages(self, slot: int, run: PageRun) -> list[int]:
        return list(range(slot * CHAIN_PAGES, slot * CHAIN_PAGES + run.count))


def kill_rounds(directory: Path, rounds: int, seed: int) -> Outcome:
    """So many kills, and one more opening."""
    rng = random.Random(seed)
    known: dict[str, PageRun] = {}
    acknowledged = checked = lost = in_flight = 0
    for number in range(rounds + 1):
        with Agent(host_pages=SLOTS * CHAIN_PAGES) as agent:
            agent.open_disk(directory, capacity_bytes=256 << 20)
            this = _Round(agent, rng, number)
            lost += this.check(known)
            checked += sum(run.count for run in known.values())
            if number == rounds:
                break
            if number % 4 == 3:
                this.delete_and_check(known)
            in_flight += this.load(known, kill_after=rng.randrange(0, 20), wait_s=rng.random() * 0.003)
        acknowledged += sum(run.count for run in this.acknowledged.values())
        known |= this.acknowledged
        # So that long runs fit: the oldest are not looked at any more.
        for name in list(known)[: max(0, len(known) - 150)]:
            del known[name]
    return Outcome(rounds, acknowledged, checked, lost, in_flight)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="kills (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outcome = kill_rounds(Path(directory) / "cache", options.rounds, options.seed)
    for name, value in outcome._asdict().items():
        print(f"{name:20} {value:>10}")
    return int(outcome.lost > outcome.acknowledged / 100)


if __name__ == "__main__":
    sys.exit(main())

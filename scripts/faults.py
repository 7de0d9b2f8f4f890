#!/usr/bin/env python3
"""Kill and stop real processes under load, and compare every answer with a cold one.

    scripts/faults.py --rounds 40 --seed 1

Each round serves the default model over three tiers, lets a few clients ask, and at a random moment kills the server,
the storage agent or the device worker with SIGKILL, or stops the agent for a while. Then: are all processes gone that
should be, do all pages come back, is every page of the directory what was stored, and does what had been acknowledged
come from storage again? A wrong answer, a page that stays away or an orphan ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import aiohttp

from headrace.kvcache.storage.disk.inspect import summary, verify
from headrace.server.models import DEFAULT_MODEL

Fault: TypeAlias = Literal["kill server", "kill agent", "kill worker", "stop agent", "stop agent long"]
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
WEIGHTS: Final = (6, 4, 2, 2, 2)
MODULES: Final = {"agent": "headrace.kvcache.storage.agent", "worker": "headrace.ops.worker"}

PAGE_TOKENS: Final = 16
OUTPUT_TOKENS: Final = 8
CLIENTS: Final = 4
FRESH: Final = 3
"""New prompts a round: one is acknowledged before the fault, the others come under load."""
RECENT: Final = 24
"""Prompts that the load chooses from: together far more than the device and the host hold."""
READ_BACK: Final = 6
"""Acknowledged prompts that the next round reads back."""
LARGEST_LOSS: Final = 0.01
"""Of acknowledged pages."""
DEADLINES: Final = {
    "prefetch_threshold": PAGE_TOKENS,
    "lookup_timeout_s": 0.3,
    "transfer_timeout_s": 2.0,
    "breaker_s": 0.5,
}
STOP_S: Final[dict[Fault, float]] = {"stop agent": 1.5, "stop agent long": 3.5}
"""Under, and over, the time after which pages in the agent's hands are taken back by ending it."""
RESTARTS: Final[dict[Fault, str]] = {"kill agent": "storage_restarts", "kill worker": "device_restarts"}
"""What counts the fault, in the engine's status."""
WORKER_IS_LOST: Final = ("send the request again", "server_restarting")
PATIENCE_S: Final = 60.0

MODEL = DEFAULT_MODEL
MODEL_FLAGS: Final = (
    *("--device", "cpu", "--dtype", "float32", "--cpu-threads", "1"),
    *("--port", "0", "--skip-server-warmup"),
)
TIER_FLAGS: Final = (
    *("--page-size", str(PAGE_TOKENS), "--context-length", "512", "--max-total-tokens", "1024"),
    *("--hicache-size", "0.07", "--disk-cache-size", "8GB"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-storage-backend-extra-config", json.dumps(DEADLINES)),
)

_SUBJECTS: Final = ("The old miller", "A tired courier", "My neighbour's dog", "The night train", "A young engineer")
_VERBS: Final = ("carried", "repaired", "forgot", "painted", "followed", "measured", "borrowed", "described")
_OBJECTS: Final = ("a copper kettle", "the wooden bridge", "three letters", "a map of the valley", "the broken clock")
_PLACES: Final = ("beside the river", "before the storm", "in the market hall", "under the arches", "after midnight")


class Failure(Exception):
    """Something that must never happen did."""


class Prompt(NamedTuple):
    """A text, and what the model says to it when nothing is cached."""

    text: str
    tokens: int
    ids: tuple[int, ...]

    @property
    def pages(self) -> int:
        """Whole pages of it that can be reused: one token is always computed."""
        return (self.tokens - 1) // PAGE_TOKENS


class Answer(NamedTuple):
    """What a server said."""

    prompt_tokens: int
    ids: tuple[int, ...]
    device: int
    """Prompt tokens that were reused, by tier."""
    host: int
    storage: int


class ServerError(Exception):
    """The server answered, and not with 200."""


class Outcome(NamedTuple):
    """One round."""

    fault: Fault
    answers: int
    cut_off: int
    """Requests that the fault ended, as it may."""
    slowest_ms: float
    deadlines: int
    """That storage missed, where the server lived on."""
    device: int
    host: int
    storage: int
    """Prompt tokens of right answers that each tier gave."""
    pages: int
    """In the directory at the end, each read and found good."""
    acknowledged: int
    """Pages that the round read back."""
    lost: int
    undecided: int
    """Pages that were not read back while storage had missed a deadline."""
    lasted_s: float


class Server:
    """A `headrace serve` of its own, and a client's view of it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.url = url
        self._session = session

    async def ask(self, text: str) -> Answer:
        """Continue a text greedily. Raises ServerError, aiohttp.ClientError."""
        body = {
            "text": text,
            "sampling_params": {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True},
            "return_cached_tokens_details": True,
        }
        async with self._session.post(f"{self.url}/generate", json=body) as response:
            if response.status != 200:
                raise ServerError(f"{response.status}: {await response.text()}")
            answer = await response.json()
        meta = answer["meta_info"]
        details = meta["cached_tokens_details"]
        return Answer(
            meta["prompt_tokens"], tuple(answer["output_ids"]), details["device"], details["host"], details["storage"]
        )

    async def flush(self) -> None:
        async with self._session.post(f"{self.url}/flush_cache") as response:
            if response.status != 200:
                raise ServerError(f"{response.status}: {await response.text()}")

    async def state(self) -> dict[str, Any]:
        """The engine's status."""
        async with self._session.get(f"{self.url}/server_info") as response:
            found: dict[str, Any] = (await response.json())["internal_states"][0]
            return found

    async def quiet(self) -> dict[str, Any]:
        """The status when nothing is under way and every page is free or cached. Raises Failure if that never comes."""
        deadline_s, same, stored = time.monotonic() + PATIENCE_S, 0, -1
        while time.monotonic() < deadline_s:
            state = await self.state()
            at_rest = state["phase"] == "ready" and state["storage_state"] == "usable" and not unbalanced(state)
            at_rest = at_rest and not state["put_off_pages"]
            same = same + 1 if at_rest and state["stored_pages"] + state["unstored_pages"] == stored else 0
            stored = state["stored_pages"] + state["unstored_pages"]
            if same >= 6:
                if state["integrity_alarms"]:
                    raise Failure(f"the integrity check found a fault: {state}")
                return state
            await asyncio.sleep(0.05)
        raise Failure(f"after {PATIENCE_S:.0f} s the server is not at rest ({unbalanced(state) or 'state'}): {state}")

    async def end(self) -> None:
        """SIGTERM, and an orderly end."""
        children = self.children()
        self.process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            code = await self.process.wait()
        if code:
            raise Failure(f"the server ended with {code} after SIGTERM")
        await gone(children, "the server's end")

    def children(self) -> dict[str, int]:
        """Pidfds of its processes, by kind; whoever gets them closes them."""
        found = {}
        for pid in map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                for kind, module in MODULES.items():
                    if module in words:
                        found[kind] = os.pidfd_open(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # It has ended since it was listed.
        return found


def unbalanced(state: dict[str, Any]) -> str:
    """What is held though nothing runs; "" if nothing is."""
    held = [
        ("requests run or wait", state["running"] + state["waiting"]),
        ("device pages are held", state["pages_total"] - state["pages_free"] - state["pages_cached"]),
        ("host pages are held", state["host_pages_total"] - state["host_pages_free"] - state["host_pages_cached"]),
    ]
    return ", ".join(f"{count} {what}" for what, count in held if count)


async def gone(pidfds: dict[str, int], cause: str) -> None:
    """Wait until these processes have ended, and close their pidfds. Raises Failure for an orphan."""
    deadline_s = time.monotonic() + 5
    waiting = dict(pidfds)
    while waiting and time.monotonic() < deadline_s:
        ended, _, _ = select.select(list(waiting.values()), [], [], 0)
        waiting = {kind: fd for kind, fd in waiting.items() if fd not in ended}
        await asyncio.sleep(0.01)
    for fd in pidfds.values():
        os.close(fd)
    if waiting:
        raise Failure(f"5 s after {cause} there still is a process: {', '.join(waiting)}")


def _end_of(log: Path) -> str:
    return log.read_text()[-2000:]


@asynccontextmanager
async def serving(log: Path, session: aiohttp.ClientSession, *flags: str) -> AsyncIterator[Server]:
    """A server until the end of the block, whatever becomes of it there."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "headrace.server", "serve", "--model-path", MODEL, *MODEL_FLAGS, *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while line := (await process.stdout.readline()).decode():
                if " at http://" in line:
                    break
            else:
                raise Failure(f"the server did not start; its log says why: {_end_of(log)}")
        yield Server(process, line.split(" at ")[1].split(",")[0], session)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def texts(seed: int, count: int) -> list[str]:
    """Prompts of about 200 tokens; each shares its first half with others."""
    rng = random.Random(seed)

    def sentences(number: int) -> str:
        kinds = (_SUBJECTS, _VERBS, _OBJECTS, _PLACES)
        return " ".join(" ".join(rng.choice(kind) for kind in kinds) + "." for _ in range(number))

    beginnings = [sentences(10) for _ in range(6)]
    return [f"{rng.choice(beginnings)} {sentences(8)}" for _ in range(count)]


async def cold_prompts(wanted: Sequence[str], log: Path, session: aiohttp.ClientSession) -> list[Prompt]:
    """What a server that keeps nothing says to each text."""
    async with serving(log, session, "--disable-radix-cache", "--context-length", "512") as server:
        room = asyncio.Semaphore(CLIENTS)

        async def ask(text: str) -> Prompt:
            async with room:
                answer = await server.ask(text)
            assert not answer.device + answer.host + answer.storage, "the reference must be cold"
            return Prompt(text, answer.prompt_tokens, answer.ids)

        return list(await asyncio.gather(*map(ask, wanted)))


class Rounds:
    """Rounds over one directory; a server lives on until a round kills it."""

    def __init__(self, seed: int, folder: Path, session: aiohttp.ClientSession, prompts: Sequence[Prompt]) -> None:
        self._rng = random.Random(seed)
        self._session = session
        self._directory = folder / "cache"
        self._log = folder / "server.log"
        self._fresh = list(prompts)
        self._known: list[Prompt] = []
        self._acknowledged: list[Prompt] = []
        """Prompts whose pages storage had acknowledged before the last fault."""
        self._pages = 0
        """In the directory, when it was last looked at."""
        self._tally: Counter[str] = Counter()
        self._slowest_s = 0.0

    async def run(self, faults: Sequence[Fault], tell: Callable[[int, Outcome], None]) -> list[Outcome]:
        """A round for each fault. Raises Failure, whose message names the round."""
        outcomes: list[Outcome] = []
        flags = ("--disk-cache-dir", str(self._directory), *TIER_FLAGS)
        while len(outcomes) < len(faults):
            async with serving(self._log, self._session, *flags) as server:
                while server.process.returncode is None and len(outcomes) < len(faults):
                    fault = faults[len(outcomes)]
                    try:
                        outcomes.append(await self._round(server, fault))
                    except Exception as error:
                        raise Failure(f"round {len(outcomes)} ({fault}): {type(error).__name__}: {error}") from error
                    tell(len(outcomes) - 1, outcomes[-1])
                if server.process.returncode is None:
                    await server.end()
        return outcomes

    async def _round(self, server: Server, fault: Fault) -> Outcome:
        began_s = time.monotonic()
        self._tally.clear()
        self._slowest_s = 0.0
        await self._read_back(server)
        fresh = [self._fresh.pop() for _ in range(FRESH)]
        self._acknowledged += await self._acknowledge(server, fresh[:1])
        self._known += fresh
        before = await server.state()
        await self._load_until(server, fault)
        if server.process.returncode is None:
            after = await server.quiet()
            counter = RESTARTS.get(fault)
            if counter is not None and after[counter] != before[counter] + 1:
                raise Failure(f"{counter} went from {before[counter]} to {after[counter]}; one fault is one restart")
            if fault in STOP_S and after["storage_deadlines_missed"] == before["storage_deadlines_missed"]:
                raise Failure("the agent was stopped, and no deadline was missed: nobody asked it")
            self._tally["deadlines"] = after["storage_deadlines_missed"] - before["storage_deadlines_missed"]
        self._check_directory()
        tally = self._tally
        return Outcome(
            fault=fault,
            answers=tally["answers"],
            cut_off=tally["cut off"],
            slowest_ms=self._slowest_s * 1e3,
            deadlines=tally["deadlines"],
            device=tally["device"],
            host=tally["host"],
            storage=tally["storage"],
            pages=self._pages,
            acknowledged=tally["acknowledged"],
            lost=tally["lost"],
            undecided=tally["undecided"],
            lasted_s=time.monotonic() - began_s,
        )

    # ------------------------------------------------------------------------------------------------------------
    # The parts of a round

    async def _read_back(self, server: Server) -> None:
        """Everything that was acknowledged lately comes from storage."""
        await server.quiet()
        await server.flush()
        asked, self._acknowledged = self._acknowledged[-READ_BACK:], self._acknowledged[-READ_BACK:]
        for prompt in asked:
            before = await server.state()
            answer = await self._ask(server, prompt)
            after = await server.state()
            missed = prompt.pages - (answer.device + answer.host + answer.storage) // PAGE_TOKENS
            late = after["storage_deadlines_missed"] - before["storage_deadlines_missed"]
            self._tally["acknowledged"] += prompt.pages
            self._tally["undecided" if late else "lost"] += missed

    async def _acknowledge(self, server: Server, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Ask for these, and wait until storage has taken all there is of them; those that it took whole."""
        before = await server.quiet()
        for prompt in prompts:
            await self._ask(server, prompt)
        after = await server.quiet()
        refused = sum(after[name] - before[name] for name in ("unstored_pages", "skipped_pages"))
        if refused:
            raise Failure(f"{refused} pages were not stored though the server was at rest")
        if after["stored_pages"] == before["stored_pages"]:
            raise Failure("nothing was stored of prompts that are new")
        return list(prompts)

    async def _load_until(self, server: Server, fault: Fault) -> None:
        """Clients ask, the fault comes, and they go on for a moment if they can."""
        ended = asyncio.Event()
        recent = self._known[-RECENT:]
        clients = [
            asyncio.create_task(self._client(server, fault, random.Random(self._rng.random()), recent, ended))
            for _ in range(CLIENTS)
        ]
        children = server.children()
        try:
            await asyncio.sleep(self._rng.uniform(0.05, 1.5))
            if self._rng.random() < 0.3:
                await server.flush()
            self._pages = max(self._pages, summary(str(self._directory)).pages)
            await self._inflict(server, fault, children)
            if fault == "kill server":
                await gone(children, "kill -9 of the server")
                children = {}
            else:
                await asyncio.sleep(0.7)
            ended.set()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
            for fd in children.values():
                os.close(fd)

    async def _inflict(self, server: Server, fault: Fault, children: dict[str, int]) -> None:
        match fault:
            case "kill server":
                server.process.kill()
                await server.process.wait()
            case "kill agent":
                signal.pidfd_send_signal(children["agent"], signal.SIGKILL)
            case "kill worker":
                signal.pidfd_send_signal(children["worker"], signal.SIGKILL)
            case "stop agent" | "stop agent long":
                signal.pidfd_send_signal(children["agent"], signal.SIGSTOP)
                # With nothing above storage, everybody has to ask it.
                await server.flush()
                await asyncio.sleep(STOP_S[fault])
                # If it held pages for too long, it has been ended and another one started.
                if not select.select([children["agent"]], [], [], 0)[0]:
                    signal.pidfd_send_signal(children["agent"], signal.SIGCONT)

    async def _client(
        self, server: Server, fault: Fault, rng: random.Random, prompts: Sequence[Prompt], ended: asyncio.Event
    ) -> None:
        while not ended.is_set():
            # Half of it what is new, so that pages are on their way down all the time.
            prompt = rng.choice(prompts[-FRESH:] if rng.random() < 0.5 else prompts)
            try:
                await self._ask(server, prompt)
            except aiohttp.ClientError:
                if fault != "kill server":
                    raise
                self._tally["cut off"] += 1
                return
            except ServerError as error:
                # What ran is told to come again; what comes before there is a new worker, to wait.
                if fault != "kill worker" or not any(words in str(error) for words in WORKER_IS_LOST):
                    raise
                self._tally["cut off"] += 1
                await asyncio.sleep(0.2)

    async def _ask(self, server: Server, prompt: Prompt) -> Answer:
        began_s = time.monotonic()
        answer = await server.ask(prompt.text)
        self._slowest_s = max(self._slowest_s, time.monotonic() - began_s)
        if answer.ids != prompt.ids:
            raise Failure(f"a wrong answer: {answer}, and cold {prompt}")
        self._tally.update(answers=1, device=answer.device, host=answer.host, storage=answer.storage)
        return answer

    def _check_directory(self) -> None:
        """Every page is what was stored, and none that the journal had before the fault is missing."""
        found = verify(str(self._directory))
        if found.bad or found.faults:
            raise Failure(f"the directory is damaged: {found}")
        self._tally["lost"] += max(0, self._pages - found.good)
        self._pages = found.good


async def run_rounds(faults: Sequence[Fault], seed: int, folder: Path, tell: Callable[[int, Outcome], None]) -> None:
    """Cold answers first, then a round for each fault. Raises Failure."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
        prompts = await cold_prompts(texts(seed, FRESH * len(faults)), folder / "reference.log", session)
        outcomes = await Rounds(seed, folder, session, prompts).run(faults, tell)
    lost, acknowledged = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("lost", "acknowledged"))
    if lost > LARGEST_LOSS * acknowledged:
        raise Failure(f"{lost} of {acknowledged} acknowledged pages are lost")


def faults_of(seed: int, rounds: int) -> list[Fault]:
    """The faults that a seed stands for."""
    return random.Random(seed).choices(FAULTS, WEIGHTS, k=rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="faults (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, faults and moments (default 0)")
    options = parser.parse_args()
    shown = tuple(name for name in Outcome._fields if name != "fault")
    totals: Counter[str] = Counter()

    def tell(number: int, outcome: Outcome) -> None:
        row = outcome._asdict()
        print(f"{number:>5} {outcome.fault:<16}" + "".join(f"{row[name]:>13.0f}" for name in shown), flush=True)
        totals.update({name: row[name] for name in shown if name not in ("slowest_ms", "pages")})

    print(f"{'round':>5} {'fault':<16}" + "".join(f"{name:>13}" for name in shown), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            asyncio.run(run_rounds(faults_of(options.seed, options.rounds), options.seed, Path(folder), tell))
        except Failure as failure:
            print(f"\nseed {options.seed}, {failure}", file=sys.stderr)
            print(f"replay: {sys.argv[0]} --seed {options.seed} --rounds {options.rounds}", file=sys.stderr)
            return 1
    print(f"{'all':>5} {'':<16}" + "".join(f"{totals[name]:>13.0f}" for name in shown))
    print("no wrong answer, no orphan, no page that stayed away")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What `scripts/bench/peers.py` asks of a server, over HTTP, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from bench.sides.completions import Answer, complete

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
"""Of a stream in decode: a context of 192 in the middle."""
IDS: Final = range(1000, 40_000)
"""Of random prompts: ordinary pieces of words."""
CLIENTS, TURNS, TURN_OUTPUT_TOKENS = 16, 3, 64


class Sample(msgspec.Struct):
    """One scenario, once, at one server."""

    side: str
    scenario: str
    repeat: int
    tokens_per_s: float
    client_cpu: float
    """Share of one core that the client took."""
    first_token_ms: float | None = None
    """Median, where the scenario compares it."""
    first_token_ms_by_turn: list[float] | None = None


class Result(NamedTuple):
    """A scenario's rate, and what else it compares."""

    tokens_per_s: float
    first_token_ms: float | None = None
    by_turn: list[float] | None = None


Scenario: TypeAlias = Callable[[int, random.Random], Coroutine[Any, Any, Result]]
"""`(port, source of prompts)`. No prompt comes twice, and all servers get the same ones."""


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    return rng.choices(IDS, k=tokens)


def decode(streams: int) -> Scenario:
    """Tokens a second while all streams decode: from the last one's first token to the first one's last."""

    async def run(port: int, rng: random.Random) -> Result:
        prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(streams)]
        answers = await asyncio.gather(*(complete(port, prompt, OUTPUT_TOKENS) for prompt in prompts))
        return Result(decode_rate(answers))

    return run


def decode_rate(answers: list[Answer]) -> float:
    """Raises ValueError where the streams never ran together."""
    began_s, ended_s = max(answer.first_s for answer in answers), min(answer.last_s for answer in answers)
    if ended_s <= began_s:
        raise ValueError(f"of {len(answers)} streams, one ended before another began: they were not computed together")
    tokens = sum(answer.tokens_until(ended_s) - answer.tokens_until(began_s) for answer in answers)
    return tokens / (ended_s - began_s)


def prefill(tokens: int, prompts: int) -> Scenario:
    """Prompts of so many tokens, one after the other, each with one output."""

    async def run(port: int, rng: random.Random) -> Result:
        spent_s = 0.0
        for _ in range(prompts):
            answer = await complete(port, random_prompt(rng, tokens), 1)
            assert answer.prompt_tokens == tokens
            spent_s += answer.last_s - answer.sent_s
        return Result(tokens * prompts / spent_s)

    return run


async def shared_turns(port: int, rng: random.Random) -> Result:
    """16 clients hold conversations of 3 turns that begin with the same 1000 tokens of text; all begin at once, and
    each goes on when it has its answer. Rate of outputs, and the median time to a first token."""
    shared = _text(rng, 1000)
    began_s = time.perf_counter()
    conversations = await asyncio.gather(*(_converse(port, shared, _texts(rng)) for _ in range(CLIENTS)))
    spent_s = time.perf_counter() - began_s
    firsts = [[answer.first_s - answer.sent_s for answer in answers] for answers in conversations]
    by_turn = [statistics.median(turn) * 1e3 for turn in zip(*firsts)]
    median_ms = statistics.median(first for turns in firsts for first in turns) * 1e3
    return Result(CLIENTS * TURNS * TURN_OUTPUT_TOKENS / spent_s, median_ms, by_turn)


async def _converse(port: int, shared: str, questions: list[str]) -> list[Answer]:
    said, answers = shared, []
    for question in questions:
        said += question
        answers.append(await complete(port, said, TURN_OUTPUT_TOKENS))
        said += answers[-1].text
    return answers


WORDS: Final = (
    "the of and to in is that for it was on are as with they be at one have this from had by word but what some we can "
    "out other were all there when up use your how said each she which do their time if will way about many then them "
    "write would like so these her long make thing see him two has look more day could go come did number sound no "
    "most people my over know than call first who may down side been now find"
)
"""Each is one token after a space."""


def _text(rng: random.Random, tokens: int) -> str:
    return "".join(f" {word}" for word in rng.choices(WORDS.split(), k=tokens))


def _texts(rng: random.Random) -> list[str]:
    return [_text(rng, 32) for _ in range(TURNS)]


SCENARIOS: Final[dict[str, Scenario]] = {
    "decode 1": decode(1),
    "decode 8": decode(8),
    "decode 32": decode(32),
    "prefill 512": prefill(512, 4),
    "prefill 2048": prefill(2048, 2),
    "shared turns": shared_turns,
}


async def measured(side: str, name: str, port: int, repeat: int) -> Sample:
    """Raises BadAnswer, OSError or ValueError."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    result = await SCENARIOS[name](port, random.Random(f"{name} {repeat}"))
    share = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
    return Sample(side, name, repeat, result.tokens_per_s, share, result.first_token_ms, result.by_turn)

"""The real model over real tiers: greedy float32 ids are the cold ones, from whichever tier a prefix comes.

Every test also shows that the tier it speaks of gave the tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import pytest
from e2e.tiered import TieredEngine, tiered_engine, until

from headrace.kvcache.storage.disk.inspect import summary, verify
from headrace.kvcache.storage.disk.record import HEADER_BYTES, read_header
from headrace.kvcache.storage.disk.segments import parse_name
from headrace.sched.messages import Started
from headrace.server.text import TextService

GOLDEN = msgspec.json.decode((Path(__file__).parents[1] / "data" / "smollm2-135m-instruct-q4_1.json").read_bytes())
LONG_TEXT = "The quick brown fox jumps over the lazy dog, and nobody in the village remembers why. " * 14
OUTPUTS = 24
PAGE_BYTES = 16 * 46080
"""Of 16 tokens in float32: 30 layers, keys and values, 3 heads of 64."""


class Case(NamedTuple):
    """A prompt, and its ids when nothing is cached."""

    prompt: list[int]
    ids: list[int]

    def cached(self, page_tokens: int = 4) -> int:
        """Tokens that can be reused: whole pages, and one token is always computed."""
        return (len(self.prompt) - 1) // page_tokens * page_tokens


def golden() -> list[Case]:
    return [Case(case["prompt_ids"], case["greedy_ids"][:OUTPUTS]) for case in GOLDEN["cases"]]


@pytest.fixture(scope="module")
def long_prompt(model_file: Path) -> list[int]:
    prompt: list[int] = TextService.open(model_file, None).tokenizer.encode(LONG_TEXT).tolist()
    assert 200 < len(prompt) < 400
    return prompt


def damage_a_page(directory: Path) -> int:
    """Flip a byte of one of the pages of a chain that is alone in a directory; which page of the chain it was.

    Slots are filled in the order in which writes get to them, so a page's place in the chain is found by its parents.
    """
    (file,) = (file for file in directory.iterdir() if parse_name(file.name) is not None)
    parsed = parse_name(file.name)
    assert parsed is not None
    slot, record_bytes = summary(str(directory)).pages // 2, parsed[1]
    parents: dict[bytes, bytes] = {}
    with file.open("r+b") as segment:
        for other in range(summary(str(directory)).pages):
            segment.seek(other * record_bytes)
            page = read_header(memoryview(segment.read(HEADER_BYTES)))
            parents[page.key] = page.parent
            if other == slot:
                key = page.key
        segment.seek(slot * record_bytes + HEADER_BYTES + 1000)
        (byte,) = segment.read(1)
        segment.seek(-1, 1)
        segment.write(bytes([byte ^ 1]))
    found = verify(str(directory))
    assert [bad.slot for bad in found.bad] == [slot] and found.good == found.pages - 1
    depth = 0
    while parents[key] in parents:
        key, depth = parents[key], depth + 1
    return depth


def by_tier(started: Started) -> tuple[int, int, int]:
    """Tokens from the device, the host, storage."""
    return started.cached_device_tokens, started.cached_host_tokens, started.cached_storage_tokens


async def asked(tiered: TieredEngine, cases: Sequence[Case]) -> list[tuple[list[int], Started]]:
    """All at once."""
    return list(await asyncio.gather(*(tiered.ask(case.prompt, len(case.ids)) for case in cases)))


async def computed(tiered: TieredEngine, long_prompt: list[int]) -> list[Case]:
    """All cases, cold: the golden ones as the reference has them; the long one's ids are the reference from here on."""
    cases = golden()
    for case, (ids, started) in zip(cases, await asked(tiered, cases)):
        assert ids == case.ids and started.cached_tokens == 0
    ids, started = await tiered.ask(long_prompt, OUTPUTS)
    assert started.cached_tokens == 0
    await tiered.settled()
    return [*cases, Case(long_prompt, ids)]


async def all_come_from(
    tier: Literal["device", "host", "storage"], tiered: TieredEngine, cases: Sequence[Case], page_tokens: int = 4
) -> None:
    """Equal ids, and every page that can be reused comes from this tier."""
    for case, (ids, started) in zip(cases, await asked(tiered, cases)):
        assert ids == case.ids
        tiers = dict(zip(("device", "host", "storage"), by_tier(started)))
        assert tiers.pop(tier) == case.cached(page_tokens) and not any(tiers.values()), (tier, by_tier(started))
        assert (started.waited_ms["load"] > 0) == (tier != "device"), "what the worker took for its copies"
    assert sum(case.cached(page_tokens) for case in cases) > 0


async def test_ids_are_the_same_from_the_device_and_from_the_host(
    model_file: Path, tmp_path: Path, long_prompt: list[int]
) -> None:
    async with tiered_engine(model_file, tmp_path / "kv") as tiered:
        cases = await computed(tiered, long_prompt)
        await all_come_from("device", tiered, cases)
        await tiered.push_out()
        await all_come_from("host", tiered, cases[:-1])
        await tiered.push_out()
        await all_come_from("host", tiered, cases[-1:])


async def test_b10_ids_are_the_same_from_disk_and_from_disk_after_a_restart(
    model_file: Path, tmp_path: Path, long_prompt: list[int]
) -> None:
    async with tiered_engine(model_file, tmp_path / "kv") as tiered:
        cases = await computed(tiered, long_prompt)
        assert tiered.flush().pinned_pages == 0
        await all_come_from("storage", tiered, cases)
        before = tiered.pids
    async with tiered_engine(model_file, tmp_path / "kv") as tiered:
        assert not set(before) & set(tiered.pids), "these are new processes"
        await all_come_from("storage", tiered, cases)


async def test_b11_a_damaged_page_on_disk_is_a_miss_and_those_before_it_still_count(
    model_file: Path, tmp_path: Path, long_prompt: list[int]
) -> None:
    directory = tmp_path / "kv"
    async with tiered_engine(model_file, directory) as tiered:
        ids, _ = await tiered.ask(long_prompt, OUTPUTS)
        await tiered.settled()
    damaged = damage_a_page(directory)
    async with tiered_engine(model_file, directory) as tiered:
        again, started = await tiered.ask(long_prompt, OUTPUTS)
        assert again == ids
        assert by_tier(started) == (0, 0, damaged * 4)


async def test_b12_the_directory_keeps_to_its_bound_and_answers_stay_right(
    model_file: Path, tmp_path: Path, long_prompt: list[int]
) -> None:
    directory, bound_bytes = tmp_path / "kv", 24_000_000
    async with tiered_engine(model_file, directory, disk_cache_size="24MB", page_size=16) as tiered:
        ids, _ = await tiered.ask(long_prompt, OUTPUTS)
        for beginning in range(100, 103):
            again, _ = await tiered.ask([beginning, *long_prompt], 1)
        await until(lambda: not tiered.engine.writing)
        assert tiered.engine.status().copied_pages * PAGE_BYTES > 1.5 * bound_bytes, "more was offered than fits"
        held = summary(str(directory))
        assert held.pages > 0 and held.size_bytes <= bound_bytes
        tiered.flush()
        again, _ = await tiered.ask(long_prompt, OUTPUTS)
        assert again == ids


async def test_b15_dtypes_page_sizes_and_kernels_never_share_a_page_in_one_directory(
    model_file: Path, tmp_path: Path, long_prompt: list[int]
) -> None:
    directory = tmp_path / "kv"
    async with tiered_engine(model_file, directory) as tiered:
        first = Case(long_prompt, (await tiered.ask(long_prompt, OUTPUTS))[0])
        await tiered.settled()
    others = (({"dtype": "bfloat16"}, 4), ({"page_size": 16}, 16), ({"cpu_kernels": "torch"}, 4))
    for other, page_tokens in others:
        async with tiered_engine(model_file, directory, **other) as tiered:
            ids, started = await tiered.ask(long_prompt, OUTPUTS)
            assert started.cached_tokens == 0
            await tiered.settled()
            tiered.flush()
            await all_come_from("storage", tiered, [Case(long_prompt, ids)], page_tokens)
    async with tiered_engine(model_file, directory) as tiered:
        await all_come_from("storage", tiered, [first])


async def test_b16_two_salts_share_no_page_in_any_tier_and_each_finds_its_own(
    model_file: Path, tmp_path: Path, long_prompt: list[int]
) -> None:
    async with tiered_engine(model_file, tmp_path / "kv") as tiered:

        async def ask(salt: str) -> Started:
            again, started = await tiered.ask(long_prompt, OUTPUTS, salt)
            assert again == ids
            return started

        ids, _ = await tiered.ask(long_prompt, OUTPUTS, "a")
        await tiered.settled()
        assert (await ask("b")).cached_tokens == 0, "nothing of a's on the device or the host"
        await tiered.settled()
        await tiered.push_out()
        assert by_tier(await ask("a")) == (0, Case(long_prompt, ids).cached(), 0)
        tiered.flush()
        assert (await ask("c")).cached_tokens == 0, "nor in storage"
        assert by_tier(await ask("b")) == (0, 0, Case(long_prompt, ids).cached())

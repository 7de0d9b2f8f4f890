"""A child's socket and the child itself end together, whichever goes first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.ops import child_link
from headrace.ops.child_link import ChildLink

TESTS = Path(__file__).parent.parent
Start = Callable[..., ChildLink]


@pytest.fixture
def start() -> Iterator[Start]:
    links: list[ChildLink] = []

    def start(*arguments: str) -> ChildLink:
        links.append(ChildLink("ops.mute_child", "the child", arguments, (), 1024, {"PYTHONPATH": str(TESTS)}))
        return links[-1]

    yield start
    for link in links:
        link.close()


async def ending(link: ChildLink) -> tuple[list[bytes], str]:
    """What it said, and how it ended."""
    said: list[bytes] = []
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    link.transport.open(said.append, ended.set_result)
    async with asyncio.timeout(30):
        return said, await ended


async def test_a_child_that_lives_on_without_its_socket_is_killed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_link, "EXIT_GRACE_S", 0.01)
    link = start()
    said, how = await ending(link)
    assert said == [b"last words"]
    assert how == (
        f"the child (pid {link.pid}) ended with SIGKILL, which it was sent because its socket had ended: "
        "the other end closed"
    )


async def test_a_child_that_ends_after_its_socket_has_its_own_exit_code(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_link, "EXIT_GRACE_S", 30.0)
    link = start("--exit-code", "3")
    said, how = await ending(link)
    assert said == [b"last words"] and how == f"the child (pid {link.pid}) ended with exit code 3"


async def test_closing_a_link_whose_socket_has_ended_leaves_no_timer_behind(start: Start) -> None:
    link = start()
    said: list[bytes] = []
    ends: list[str] = []
    link.transport.open(said.append, ends.append)
    async with asyncio.timeout(30):
        while link._last_resort is None:  # noqa: ASYNC110 (the loop has no event for it)
            await asyncio.sleep(0)
    link.close()
    assert link._last_resort.cancelled() and ends == []

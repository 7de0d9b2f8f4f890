"""The agent as a process: pages through the shared pool, its end, its refusal, its life beside the server's loop."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from storage.agents import Agent
from storage.pages import MODEL, PAGE_BYTES, PAGE_TOKENS, chain

from headrace.kvcache.storage.agent_process import AgentProcess
from headrace.kvcache.storage.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_PAGES_PER_MESSAGE,
    Cancel,
    Close,
    Delete,
    Deleted,
    Found,
    Lookup,
    Opened,
    OpenStore,
    Read,
    ReadDone,
    Refused,
    Stats,
    StatsReply,
    Write,
    encoder,
    pages_per_message,
    reply_decoder,
)


def test_pages_go_to_disk_and_come_back_in_another_process(tmp_path: Path) -> None:
    run = chain("a", 40)
    with Agent() as agent:
        opened = agent.open_disk(tmp_path)
        assert (opened.stats.pages, opened.stats.capacity_bytes) == (0, 64 << 20)
        written = agent.write(run)
        assert (written.stored, written.dropped, written.size_bytes) == (40, [], 40 * PAGE_BYTES)
        assert written.write_ms > 0
        agent.send(Close())
        assert agent.process.wait(60) == 0
    with Agent() as agent:
        assert agent.open_disk(tmp_path).stats.pages == 40
        agent.send(Lookup(5, 0, run.keys))
        assert agent.expect(Found) == Found(5, 40)
        done = agent.read(run)
        assert (done.good, done.size_bytes) == (40, 40 * PAGE_BYTES)
        assert done.read_ms > 0


def test_many_transfers_at_once_all_end_and_are_right(tmp_path: Path) -> None:
    runs = [chain(str(number), 8) for number in range(30)]
    with Agent(host_pages=512) as agent:
        agent.open_disk(tmp_path)
        for id, run in enumerate(runs):
            agent.begin_write(id, run, first_page=8 * id)
        for _ in runs:
            agent.receive()
        for id, run in enumerate(runs):
            agent.begin_read(100 + id, run, range(8 * id, 8 * id + 8))
            agent.send(Lookup(200 + id, 0, run.keys))
            if id % 5 == 0:
                agent.send(Cancel(100 + id))
        ended: dict[int, ReadDone] = {}
        found: dict[int, int] = {}
        while len(ended) < 30 or len(found) < 30:
            match agent.receive():
                case ReadDone() as done:
                    ended[done.id] = done
                case Found(id, pages):
                    found[id] = pages
        for id, run in enumerate(runs):
            done = ended[100 + id]
            assert found[200 + id] == 8
            assert done.good == 8 or (id % 5 == 0 and done.message == "cancelled")
            assert agent.right(run, range(8 * id, 8 * id + 8), done.good)


def test_it_deletes_and_counts(tmp_path: Path) -> None:
    with Agent() as agent:
        agent.open_disk(tmp_path)
        agent.write(chain("a", 5, "a"))
        agent.write(chain("b", 5, "b"))
        agent.send(Delete(3, chain("a", 1, "a").namespace))
        assert agent.expect(Deleted) == Deleted(3, 5, 5 * PAGE_BYTES)
        agent.send(Stats(4))
        stats = agent.expect(StatsReply).stats
        assert (stats.pages, stats.deleted_pages, stats.written_pages) == (5, 5, 10)


def test_a_refusal_says_why_and_ends_it(tmp_path: Path) -> None:
    with Agent() as first, Agent() as second:
        first.open_disk(tmp_path)
        second.send(second.settings(tmp_path, 64 << 20, 4))
        refused = second.expect(Refused)
        assert f"in use by process {first.process.pid} (of the server with process id {os.getpid()})" in refused.message
        assert second.process.wait(60) == 0


def test_the_memory_store_works_behind_it_too() -> None:
    run = chain("a", 40)
    with Agent() as agent:
        agent.open_store(OpenStore("memory", 1 << 20, PAGE_TOKENS, [PAGE_BYTES], [0], [64], MODEL))
        assert agent.write(run).stored == 40
        assert agent.read(run).good == 40


def test_it_ends_when_the_server_closes_its_end(tmp_path: Path) -> None:
    with Agent() as agent:
        agent.open_disk(tmp_path)
        agent.pipe.shutdown(2)
        assert agent.process.wait(60) == 0


def test_it_dies_with_the_server(tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from storage.agents import Agent
agent = Agent()
agent.open_disk(Path({str(tmp_path)!r}))
print(agent.process.pid, flush=True)
sys.stdin.read()
"""
    server = subprocess.Popen([sys.executable, "-P", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    agent_pid = int(server.stdout.readline())
    pidfd = os.pidfd_open(agent_pid)
    server.kill()
    server.communicate()
    os.set_blocking(pidfd, False)
    import select

    assert select.select([pidfd], [], [], 60)[0], "the agent lives on"
    os.close(pidfd)
    with Agent() as agent:
        agent.open_disk(tmp_path)


def test_an_interrupt_at_the_terminal_is_the_servers_business(tmp_path: Path) -> None:
    with Agent() as agent:
        agent.open_disk(tmp_path)
        agent.process.send_signal(signal.SIGINT)
        assert agent.write(chain("a", 3)).stored == 3


def test_it_starts_without_what_it_does_not_need() -> None:
    script = (
        "import sys, headrace.kvcache.storage.agent;"
        "print([name for name in ('torch', 'aiohttp', 'uvloop', 'asyncio.base_events') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout and "aiohttp" not in done.stdout and "uvloop" not in done.stdout


@pytest.mark.parametrize("page_tokens", [1, 16, 64, 512])
def test_as_many_pages_as_a_message_may_name_fit_into_one(page_tokens: int) -> None:
    pages = pages_per_message(page_tokens)
    run = chain("a", pages, page_tokens=page_tokens)
    numbers = list(range(1 << 31, (1 << 31) + pages))
    write = Write(1 << 60, 0, run.namespace, run.parents, run.keys, run.tokens, numbers)
    read = Read(1 << 60, 0, run.namespace, run.parents[:16], run.keys, run.tokens, numbers)
    assert 0 < len(encoder.encode(read)) < len(encoder.encode(write)) <= MAX_MESSAGE_BYTES
    assert pages <= MAX_PAGES_PER_MESSAGE


async def test_beside_the_servers_loop_its_end_is_noticed_after_it_was_reaped(tmp_path: Path) -> None:
    fd = os.memfd_create("host-pool", os.MFD_CLOEXEC)
    os.ftruncate(fd, 64 * PAGE_BYTES)
    pool = mmap.mmap(fd, 64 * PAGE_BYTES)
    opened: asyncio.Future[Opened] = asyncio.get_running_loop().create_future()
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    agent = AgentProcess(fd)
    os.close(fd)

    def received(message: bytes) -> None:
        reply = reply_decoder.decode(message)
        assert isinstance(reply, Opened)
        opened.set_result(reply)

    agent.transport.open(received, ended.set_result)
    command = OpenStore("disk", 1 << 24, 4, [PAGE_BYTES], [0], [64], MODEL, directory=str(tmp_path))
    agent.transport.send(encoder.encode(command))
    assert (await asyncio.wait_for(opened, 60)).stats.pages == 0
    agent.kill()
    assert f"the storage agent (pid {agent.pid}) ended with SIGKILL" in await asyncio.wait_for(ended, 60)
    with pytest.raises(ProcessLookupError):
        os.kill(agent.pid, 0)
    agent.close()
    assert len(pool) == 64 * PAGE_BYTES

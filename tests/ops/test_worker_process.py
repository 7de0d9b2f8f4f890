"""The worker as a process: over a real socket pair and memfds, and gone when it should be."""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ops.driver import read_config, ring_geometry, start_command
from ops.slot_inits import SlotInit, init_counts, write_inits
from ops.small_llama import VOCAB, SmallLlama

from headrace.ops.transport import socket_pair
from headrace.ops.wire import (
    MAX_MESSAGE_BYTES,
    Backup,
    BackupDone,
    BatchRing,
    Command,
    Counts,
    Forward,
    MakePools,
    Progress,
    Ready,
    Refused,
    Reply,
    Sample,
    StepDone,
    Stop,
    encoder,
    reply_decoder,
)

GEOMETRY = ring_geometry(VOCAB)
HOST_SLOT_BYTES = 16384
DEADLINE_S = 60


class Process:
    """A worker process, its pipe and its mappings; our end is blocking, with a deadline."""

    def __init__(self) -> None:
        self.ring_fd, self.host_fd = (os.memfd_create(name) for name in ("ring", "host"))
        os.ftruncate(self.ring_fd, GEOMETRY.size_bytes)
        os.ftruncate(self.host_fd, 4 * HOST_SLOT_BYTES)
        self.ring = BatchRing(mmap.mmap(self.ring_fd, GEOMETRY.size_bytes), GEOMETRY)
        self.host = mmap.mmap(self.host_fd, 4 * HOST_SLOT_BYTES)
        self.pipe, theirs = socket_pair()
        self.pipe.settimeout(DEADLINE_S)
        self.child = subprocess.Popen(self.command(theirs), pass_fds=(theirs.fileno(), self.ring_fd, self.host_fd))
        theirs.close()

    def command(self, theirs: socket.socket) -> list[str]:
        return [
            *(sys.executable, "-P", "-m", "headrace.ops.worker", "--parent", str(os.getpid())),
            *("--socket", str(theirs.fileno()), "--ring", str(self.ring_fd), "--host-pool", str(self.host_fd)),
        ]

    def send(self, command: Command) -> None:
        self.pipe.send(encoder.encode(command))

    def receive(self) -> Reply:
        """The next reply but for `Progress`."""
        while True:
            reply = reply_decoder.decode(self.pipe.recv(MAX_MESSAGE_BYTES))
            if not isinstance(reply, Progress):
                return reply

    def make_ready(self, model: Path) -> None:
        self.send(start_command(read_config(model), model, GEOMETRY, host_slot_bytes=HOST_SLOT_BYTES))
        self.receive()
        self.send(MakePools([8], 0))
        assert isinstance(self.receive(), Ready)

    def write_step(self, step: int, ids: list[int], start: int, edits: dict[int, int], inits: list[SlotInit]) -> None:
        """One row in slot 0; `edits`: index in its page table → page."""
        counts = Counts(
            **(dict.fromkeys(Counts.__struct_fields__, 0) | init_counts(inits))
            | {"tokens": len(ids), "rows": 1, "samples": 1, "table_edits": len(edits)}
        )
        batch = self.ring.write(step % 3, step, counts)
        batch.input_ids[:] = ids
        batch.positions[:] = np.arange(start, start + len(ids))
        batch.row_slot[:] = batch.sample_row[:] = batch.sample_position[:] = 0
        batch.row_start[:] = [0, len(ids)]
        batch.row_kv_len[:] = start + len(ids)
        batch.edit_group[:] = batch.edit_slot[:] = 0
        batch.edit_index[:], batch.edit_page[:] = list(edits.keys()), list(edits.values())
        write_inits(batch, inits)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self.pipe.close()
        os.close(self.ring_fd)
        os.close(self.host_fd)


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


def test_steps_pass_through_the_ring_and_are_answered_in_order(
    process: Process, small_model: Path, small_llama: SmallLlama
) -> None:
    prompt = list(range(40, 60))
    process.make_ready(small_model)
    # All at once: the second step takes the first one's id on the device.
    process.write_step(1, prompt, 0, {0: 5, 1: 2}, [SlotInit(0, prompt)])
    process.write_step(2, [-1], 20, {}, [])
    for command in (Forward(1, 1), Sample(1, 1), Forward(2, 2), Sample(2, 2), Backup(77, 0, [5], [3])):
        process.send(command)
    answers = [process.receive() for _ in range(3)]
    assert [type(answer) for answer in answers] == [StepDone, StepDone, BackupDone]
    ids = [int(process.ring.results(slot).ids[0]) for slot in (1, 2)]
    assert ids == small_llama.greedy(prompt, 2)
    assert any(process.host[3 * HOST_SLOT_BYTES : 4 * HOST_SLOT_BYTES])
    assert not any(process.host[: 3 * HOST_SLOT_BYTES])


def test_stop_ends_it_with_0_after_what_was_sent_before(process: Process, small_model: Path) -> None:
    process.make_ready(small_model)
    process.write_step(1, [3], 0, {0: 0}, [SlotInit(0)])
    for command in (Forward(1, 1), Sample(1, 1), Backup(7, 0, [0], [1]), Stop()):
        process.send(command)
    assert isinstance(process.receive(), StepDone)
    assert process.receive() == BackupDone(7)
    assert process.child.wait(DEADLINE_S) == 0


def test_a_refusal_is_sent_and_then_it_ends_with_0(process: Process, small_model: Path) -> None:
    process.send(start_command(read_config(small_model), small_model, GEOMETRY, dtype="int3"))
    answer = process.receive()
    assert isinstance(answer, Refused)
    assert "--dtype int3" in answer.message
    assert process.child.wait(DEADLINE_S) == 0


def test_it_ends_when_the_pipe_closes(process: Process, small_model: Path) -> None:
    process.make_ready(small_model)
    process.pipe.close()
    assert process.child.wait(DEADLINE_S) == 0


def test_ctrl_c_is_ignored_and_sigterm_ends_it(process: Process, small_model: Path) -> None:
    process.make_ready(small_model)
    process.child.send_signal(signal.SIGINT)
    process.write_step(1, [3], 0, {0: 0}, [SlotInit(0)])
    process.send(Forward(1, 1))
    process.send(Sample(1, 1))
    assert isinstance(process.receive(), StepDone)
    # Whether or not it is copying.
    for transfer in range(50):
        process.send(Backup(transfer, 0, [0, 1, 2, 3], [0, 1, 2, 3]))
    process.child.send_signal(signal.SIGTERM)
    assert process.child.wait(DEADLINE_S) == -signal.SIGTERM


def test_it_ends_with_a_traceback_when_a_command_makes_no_sense(process: Process) -> None:
    process.send(MakePools([1], 0))
    assert process.child.wait(DEADLINE_S) == 1


def test_it_ends_with_a_traceback_when_a_copy_names_a_page_that_is_not_there(
    process: Process, small_model: Path
) -> None:
    process.make_ready(small_model)
    process.send(Backup(1, 0, [0], [0]))
    process.send(Backup(2, 0, [0], [4]))
    assert process.child.wait(DEADLINE_S) == 1


def test_it_ends_at_once_when_its_parent_is_not_the_one_it_was_told() -> None:
    command = [sys.executable, "-P", "-m", "headrace.ops.worker", "--parent", str(os.getpid() + 1)]
    ended = subprocess.run([*command, "--socket", "9", "--ring", "9"], timeout=DEADLINE_S)
    assert ended.returncode == 0


PARENT = """
import os, subprocess, sys
fds = [int(fd) for fd in sys.argv[1:]]
command = [sys.executable, "-P", "-m", "headrace.ops.worker", "--parent", str(os.getpid())]
worker = subprocess.Popen([*command, "--socket", str(fds[0]), "--ring", str(fds[1])], pass_fds=fds)
print(worker.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_when_its_parent_is_killed_though_the_pipe_stays_open() -> None:
    ours, theirs = socket_pair()
    ring_fd = os.memfd_create("ring")
    os.ftruncate(ring_fd, GEOMETRY.size_bytes)
    fds = [theirs.fileno(), ring_fd]
    with ours, theirs, open(ring_fd, "rb"):
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with parent:
            assert parent.stdout is not None
            worker = os.pidfd_open(int(parent.stdout.readline()))
            parent.kill()
        ended = select.poll()
        ended.register(worker, select.POLLIN)
        assert ended.poll(DEADLINE_S * 1000), "the worker is still there"
        os.close(worker)


def test_the_process_sleeps_while_idle(process: Process, small_model: Path) -> None:
    process.make_ready(small_model)
    process.send(Backup(1, 0, [0], [0]))
    assert process.receive() == BackupDone(1), "though no other command comes"

    def cpu_ticks() -> int:
        fields = Path(f"/proc/{process.child.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    # It is blocked in poll without a timeout once it has nothing left to do; only then the loop below ends.
    while Path(f"/proc/{process.child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        pass
    before = cpu_ticks()
    with pytest.raises(TimeoutError):
        process.pipe.settimeout(0.5)
        process.pipe.recv(16)
    # Ticks are 10 ms: the one collection of garbage may fall into this time, spinning would be 50.
    assert cpu_ticks() - before <= 20

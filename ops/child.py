"""Child processes: started without fork semantics, dying with their parent, their end noticed at once.

in     a module to run, file descriptors to hand over
out    `on_exit(returncode)` once, within a millisecond of the end (pidfd)
state  the process and its pidfd
owner  whoever spawned it, on the main thread (PDEATHSIG fires when the spawning *thread* ends)
ready  when the child says so over its own connection
end    `kill` and `on_exit`; nothing of the child is reused before it has been reaped
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


class Child:
    """A running child process of this one."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        pass_fds: Sequence[int],
        on_exit: Callable[[int], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `python -P -m module --parent PID arguments…` with the descriptors open in it.

        The child has its own session, so that a Ctrl-C at the terminal reaches the parent alone, which then decides.
        """
        assert threading.current_thread() is threading.main_thread(), "children are tied to the thread that starts them"
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, "--parent", str(os.getpid()), *arguments],
            pass_fds=tuple(pass_fds),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._exited)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal; harmless when the process has ended."""
        if self.running:
            self._process.send_signal(signal_number)

    def kill_and_reap(self) -> None:
        """End it now and wait for the kernel to say so (a SIGKILL takes effect within milliseconds)."""
        if self.running:
            self._process.kill()
            self._process.wait()
            self._forget()

    def _exited(self) -> None:
        self._process.wait()
        self._forget()
        self._on_exit(self._process.returncode)

    def _forget(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)


def die_with_parent(parent_pid: int) -> None:
    """In a child, before any slow import: ask the kernel for SIGKILL when the parent ends, and check it is there."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)

"""How the engine reaches a device: a connection, made anew whenever the device is lost.

A device is a state machine behind a `Transport`: it takes the commands of `ops.wire` in order and answers with its
replies. The same client drives a worker process, and the oracle in real or virtual time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from headrace.ops.transport import Transport
from headrace.ops.wire import BatchRing


class Connection(Protocol):
    """One life of a device."""

    @property
    def transport(self) -> Transport:
        """Its command pipe."""

    @property
    def ring(self) -> BatchRing:
        """Its batch slots."""

    @property
    def pid(self) -> int:
        """Of its process; 0 where it has none of its own."""

    def close(self) -> None:
        """End the device and wait until it has ended: from here on it touches nothing. Harmless twice."""


Connect = Callable[[], Awaitable[Connection]]
"""Start a device. Raises `DeviceUnavailable`."""


class DeviceUnavailable(Exception):
    """The device can't be started; the message says what to change."""

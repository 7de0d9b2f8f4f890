"""What the server and the storage agent say to each other. No page travels here.

Pages lie in the host pool, one shared mapping that both sides see; commands name them by number, and the agent reads
and writes them in place. A host page that a `Read` or a `Write` names is the agent's from then on, and the server's
again with the `ReadDone` or `Written` of that id, also after a `Cancel`. Replies of different ids come in any order.

Keys are the 16-byte chain hashes of pages (`kvcache.identity`), parents the hashes before them (a chain's first page
has its namespace as parent), tokens the pages' ids as little-endian int32.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

KEY_BYTES: Final = 16
TOKEN_BYTES: Final = 4

MAX_MESSAGE_BYTES: Final = 256 << 10
"""A packet must fit the socket's send buffer, and Linux grants no more than 416 KiB where nobody has raised it."""
MAX_PAGES_PER_MESSAGE: Final = 2048
MAX_READS: Final = 1024
"""Reads, and as many writes, that the agent has at a time; one more is answered at once, with nothing done."""
MAX_KEYS_PER_MESSAGE: Final = (MAX_MESSAGE_BYTES - 256) // KEY_BYTES
"""Of a `Lookup` or `Touch`."""


def pages_per_message(page_tokens: int) -> int:
    """Pages that one `Read` or `Write` may name; the sender cuts longer ones."""
    each_bytes = 2 * KEY_BYTES + page_tokens * TOKEN_BYTES + 5
    return min(MAX_PAGES_PER_MESSAGE, (MAX_MESSAGE_BYTES - 256) // each_bytes)


# ---------------------------------------------------------------------------------------------------------------
# Commands: server → agent


class OpenStore(msgspec.Struct, tag="open", frozen=True):
    """First command, answered by `Opened` or `Refused`."""

    backend: Literal["disk", "memory"]
    capacity_bytes: int
    """A hard bound of everything the store keeps."""
    page_tokens: int
    slot_bytes: list[int]
    """Per layer group: the stride of a page in the host pool, a multiple of 4096. So much of a page is stored."""
    host_offsets: list[int]
    """Per layer group: where in the host pool its pages begin, a multiple of 4096."""
    host_pages: list[int]
    """Per layer group: how many pages it has in the host pool."""
    model: bytes
    """16 bytes that stand for weights, dtype and layout: whose pages `Delete` deletes."""
    directory: str = ""
    """Of the disk store."""
    fsync: bool = False
    """Acknowledge a page only when it would survive a power cut."""
    threads: int = 4
    """Blocking calls of the store at a time."""
    read_bytes_per_s: float = 0.0
    """A bound on what the disk store reads; 0 for none."""


class Lookup(msgspec.Struct, tag="lookup", frozen=True):
    """How many of `keys` are stored, from the first on; answered by `Found`, never behind a transfer."""

    id: int
    group: int
    keys: bytes
    each: bool = False
    """Say of each key whether it is stored."""


class Read(msgspec.Struct, tag="read", frozen=True):
    """Read pages of one chain into host pages; answered by `ReadProgress` as they come, and `ReadDone`."""

    id: int
    group: int
    namespace: bytes
    parent: bytes
    """Of the first page."""
    keys: bytes
    tokens: bytes
    host_pages: list[int]


class Write(msgspec.Struct, tag="write", frozen=True):
    """Store host pages; answered by `Written`. A page that is stored already counts as stored.

    A `Touch` of the whole chain just before keeps its beginning as recent as what is added to its end.
    """

    id: int
    group: int
    namespace: bytes
    parents: bytes
    keys: bytes
    tokens: bytes
    host_pages: list[int]


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Begin nothing more of a read or write; its reply comes when nothing touches its host pages."""

    id: int


class Touch(msgspec.Struct, tag="touch", frozen=True):
    """These pages were used, perhaps from a higher tier; no reply."""

    group: int
    keys: bytes


class Delete(msgspec.Struct, tag="delete", frozen=True):
    """Delete this model's pages, of one namespace or of all; answered by `Deleted`."""

    id: int
    namespace: bytes | None = None


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """Answered by `StatsReply`."""

    id: int


class Close(msgspec.Struct, tag="close", frozen=True):
    """Cancel what is queued, finish and answer what is under way, close the store, exit 0."""


Command: TypeAlias = OpenStore | Lookup | Read | Write | Cancel | Touch | Delete | Stats | Close


# ---------------------------------------------------------------------------------------------------------------
# Replies: agent → server


class StoreStats(msgspec.Struct, frozen=True):
    """What a store holds, and what it has done since it was opened. Bytes are whole pages', but for the first three."""

    size_bytes: int = 0
    """Taken of the capacity."""
    capacity_bytes: int = 0
    index_bytes: int = 0
    """RAM of the index."""
    pages: int = 0
    read_pages: int = 0
    read_bytes: int = 0
    written_pages: int = 0
    written_bytes: int = 0
    evicted_pages: int = 0
    deleted_pages: int = 0
    corrupt_pages: int = 0
    """Read, and not what was stored."""
    failed_reads: int = 0
    """Pages that the device could not read."""
    failed_writes: int = 0
    """Pages that could not be stored."""
    direct_io: bool = False


class Opened(msgspec.Struct, tag="opened", frozen=True):
    """The store is open."""

    stats: StoreStats
    open_ms: float


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The store can't be opened; `message` says what to change. The agent exits after this."""

    message: str


class Found(msgspec.Struct, tag="found", frozen=True):
    """`pages` of the keys are stored, contiguous from the first. They may still turn out damaged, or be evicted."""

    id: int
    pages: int
    there: bytes = b""
    """Where each key was asked for: a byte a key, 1 if it is stored."""


class ReadProgress(msgspec.Struct, tag="progress", frozen=True):
    """The first `good` pages are in their host pages, verified."""

    id: int
    good: int


class ReadDone(msgspec.Struct, tag="read_done", frozen=True):
    """Nothing touches the host pages any more. The first `good` hold what was asked for, the rest anything."""

    id: int
    good: int
    missing: int = 0
    """Not stored."""
    corrupt: int = 0
    """Stored, and not what was asked for, or unreadable."""
    size_bytes: int = 0
    """Of the good pages."""
    read_ms: float = 0.0
    """From the first call of the store to the end of the last."""
    message: str = ""
    """Why pages are not good, if not because they are missing."""


class Written(msgspec.Struct, tag="written", frozen=True):
    """Nothing reads the host pages any more, and all but `dropped` of the pages are stored."""

    id: int
    stored: int
    dropped: list[int]
    """Which of the request's pages were not stored, counted from 0."""
    size_bytes: int = 0
    """Of the stored pages."""
    write_ms: float = 0.0
    """From the first call of the store to the end of the last."""
    message: str = ""
    """Why pages were dropped."""


class Deleted(msgspec.Struct, tag="deleted", frozen=True):
    """The pages are gone, also after a restart."""

    id: int
    pages: int
    size_bytes: int
    message: str = ""


class StatsReply(msgspec.Struct, tag="stats_reply", frozen=True):
    """Counts of now."""

    id: int
    stats: StoreStats


class StoreFailed(msgspec.Struct, tag="failed", frozen=True):
    """The store can't go on; `message` says why. From now on every lookup, read and write finds and stores nothing."""

    message: str


Reply: TypeAlias = (
    Opened | Refused | Found | ReadProgress | ReadDone | Written | Deleted | StatsReply | StoreFailed
)  # fmt: skip

command_decoder: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
reply_decoder: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)
encoder: Final = msgspec.msgpack.Encoder()

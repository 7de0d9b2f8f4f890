"""Requests of a published trace: when each came, how long it was, and which blocks of its prompt it shares.

Two formats. Mooncake's (FAST'25) is a JSON object a line: `timestamp` in ms, `input_length`, `output_length`, and
`hash_ids`, one for each block of 512 prompt tokens; equal ids stand for equal prefixes. Azure's (2023) is CSV with
`TIMESTAMP,ContextTokens,GeneratedTokens`; nothing is known of its prompts, so no two share anything.

A trace has no text. A block's token ids are made of its id by a hash, so that the same block is the same tokens in
every run, and are made when the request comes: a trace of 145 million tokens is never in memory.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from headrace.ops.wire import I32
from headrace.server.config import BadSetting

MAX_REQUESTS: Final = 1_000_000
"""Of one trace: a request that waits takes half a kilobyte."""
BLOCK_TOKENS: Final = 512
MAX_TOKENS: Final = 1 << 24
"""Of a prompt, and of an output."""
MAX_DAYS: Final = 366
"""From the first request to the last: an idle day takes 0.7 s of CPU, in which the engine looks around every second."""

_Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace."""

    arrival_ns: int
    """Since the first."""
    prompt_tokens: int
    output_tokens: int
    blocks: NDArray[np.int64]
    """Ids of the prompt's blocks; the last block may be cut short."""


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: _Tokens
    output_length: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    hash_ids: list[Annotated[int, Meta(ge=0, le=2**63 - 1)]]


class Workload(msgspec.Struct, frozen=True):
    """A trace, as it is replayed."""

    requests: Sequence[TraceRequest]
    block_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    def shared_tokens(self) -> int:
        """Prompt tokens that a cache without bounds could have given: all but each block's first appearance. No
        schedule reuses more, because somebody has to compute every block once."""
        first: dict[int, int] = {}
        for request in self.requests:
            size = self.block_tokens
            for block in request.blocks[:-1].tolist():
                first[block] = size
            rest = request.prompt_tokens - size * (len(request.blocks) - 1)
            last = int(request.blocks[-1])
            first[last] = max(first.get(last, 0), rest)
        return self.prompt_tokens - sum(first.values())

    def prompt_ids(self, request: TraceRequest, vocab: int) -> I32:
        """int32 [prompt_tokens] in [0, vocab), a function of the blocks alone."""
        # splitmix64's finalizer over (block, offset): 12k tokens take 0.2 ms.
        blocks = request.blocks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = blocks[:, None] + np.arange(1, self.block_tokens + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        ids = (mixed.ravel()[: request.prompt_tokens] >> np.uint64(33)) % np.uint64(vocab)
        return ids.astype(np.int32)


def read_trace(path: Path, limit: int | None = None, speed: float = 1.0, block_tokens: int = BLOCK_TOKENS) -> Workload:
    """The first `limit` requests, arriving `speed` times as fast. Raises BadSetting, naming the line."""
    lines = _azure(path, block_tokens) if path.suffix == ".csv" else _mooncake(path, block_tokens)
    requests: list[TraceRequest] = []
    first_s = last_s = 0.0
    try:
        for number, at_s, prompt, outputs, blocks in lines:
            if not requests:
                first_s = last_s = at_s
            if at_s < last_s:
                raise BadSetting(f"--trace {path}, line {number}: it came before the one above it. Sort it by time.")
            last_s = at_s
            if at_s - first_s > MAX_DAYS * 86_400 * speed:
                raise BadSetting(
                    f"--trace {path}, line {number}: it comes more than {MAX_DAYS} days after the first, which is all "
                    "that is simulated. Timestamps are milliseconds; if these are finer, give --speed, or --limit."
                )
            arrival_ns = round((at_s - first_s) / speed * 1e9)
            requests.append(TraceRequest(arrival_ns, prompt, max(1, outputs), np.array(blocks, np.int64)))
            if len(requests) == (limit or MAX_REQUESTS):
                break
    except OSError as error:
        raise BadSetting(f"--trace {path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise BadSetting(f"--trace {path} is not text: {error}.") from None
    if not requests:
        raise BadSetting(f"--trace {path} has no request in it.")
    return Workload(requests, block_tokens)


_Line: TypeAlias = tuple[int, float, int, int, Sequence[int]]
"""Line number, seconds, prompt tokens, output tokens, blocks."""


def _mooncake(path: Path, block_tokens: int) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
            except msgspec.MsgspecError as error:
                raise BadSetting(
                    f"--trace {path}, line {number}: {error}. A line is a JSON object with timestamp, input_length, "
                    "output_length and hash_ids; a name that ends in .csv is read as Azure's format."
                ) from None
            blocks = -(-line.input_length // block_tokens)
            if len(line.hash_ids) != blocks:
                raise BadSetting(
                    f"--trace {path}, line {number}: {line.input_length} tokens are {blocks} blocks of {block_tokens}, "
                    f"and hash_ids has {len(line.hash_ids)}. If its blocks have another size, give --block-tokens."
                )
            yield number, line.timestamp / 1e3, line.input_length, line.output_length, line.hash_ids


def _azure(path: Path, block_tokens: int) -> Iterator[_Line]:
    block = 0
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        for row in rows:
            try:
                # Their clocks have seven digits, Python's six.
                whole, _, fraction = row["TIMESTAMP"].partition(".")
                at = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
                at_s = at.timestamp() + float(f"0.{fraction or 0}")
                prompt, outputs = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                if not (1 <= prompt <= MAX_TOKENS and 0 <= outputs <= MAX_TOKENS):
                    raise ValueError(f"a request has 1 to {MAX_TOKENS} prompt tokens and at most so many outputs")
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise BadSetting(
                    f"--trace {path}, line {rows.line_num}: {error}. The columns are TIMESTAMP (such as 2023-11-16 "
                    "18:17:03.9), ContextTokens and GeneratedTokens."
                ) from None
            count = -(-prompt // block_tokens)
            yield rows.line_num, at_s, prompt, outputs, range(block, block + count)
            block += count
